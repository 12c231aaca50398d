"""Baseline: how long Ray Train's own TensorflowTrainer takes from fit() to the first step.

    python jobs/bench/stock_ray_train.py FOLDER

Needs tf-keras: with Keras 3 the same script fails in model.fit. Uses nothing of raytf. The last
line on stdout is a JSON object with `first_step_s`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="3", RAY_AUTH_MODE="disabled")

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

BATCH, STEPS = 64, 50


def loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rng = np.random.default_rng(0)
    x, y = rng.random((BATCH * STEPS, 784), dtype="float32"), rng.integers(0, 10, BATCH * STEPS)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).with_options(options)
    with strategy.scope():
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [layers.Input((784,)), layers.Dense(128, activation="relu"), layers.Dense(10)]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

    class First(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                Path(config["folder"], f"first-{os.getpid()}").write_text(str(time.time()))

    model.fit(data, epochs=1, callbacks=[First()], verbose=0)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    began = time.time()
    TensorflowTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="stock", storage_path=str(folder)),
    ).fit()
    first = min(float(path.read_text()) for path in folder.glob("first-*"))
    print(json.dumps({"first_step_s": first - began}), flush=True)


if __name__ == "__main__":
    main()
