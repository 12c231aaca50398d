"""One small run with real TensorFlow on real workers, for the tests that break it.

Its model has dropout and moving statistics, its steps are slowed down so that saves keep up, and
what must be equal of two runs is in `left_by`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray.cloudpickle import register_pickle_by_value
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore

register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

ROWS = 130
BATCH = 16
STEPS = 9  # of an epoch, the last one smaller
EPOCHS = 3


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int64)


def build_model(config: dict[str, Any]) -> Any:
    import keras

    units = config.get("units", 8)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, "relu", name="hidden")])
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Dropout(0.3))
    model.add(keras.layers.Dense(2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.get(config.get("optimizer", "Adam"))
    optimizer.learning_rate = 0.02
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def callbacks(pause_s: float = 0.03, notes: str | None = None) -> Callable[[], list[Any]]:
    """A factory: steps that take a while, and what Ray says of the checkpoint restored.

    Args:
        notes: a directory; each worker process writes there what `ray.train.get_checkpoint()` gave.
    """

    def make() -> list[Any]:
        import keras
        import ray.train

        class Slow(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                if notes is None:
                    return
                checkpoint = ray.train.get_checkpoint()
                said = "none"
                if checkpoint is not None:
                    with checkpoint.as_directory() as directory:
                        said = "\n".join([checkpoint.path, *sorted(os.listdir(directory))])
                rank = ray.train.get_context().get_world_rank()
                Path(notes, f"rank-{rank}-{os.getpid()}").write_text(said)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                time.sleep(pause_s)

        return [Slow()]

    return make


def arguments(**more: Any) -> dict[str, Any]:
    """What `KerasTrainer` and `raytf.fit` both take."""
    x, y = data()
    given = {
        "train_data": raytf.ArraySource(x, y),
        "validation_data": raytf.ArraySource(x[:33], y[:33]),
        "global_batch_size": BATCH,
        "epochs": EPOCHS,
        "seed": 3,
        "callbacks": callbacks(),
        "save": raytf.SaveConfig(every_steps=3),
        "verbose": 0,
    }
    return given | more


def trainer(
    path: Any,
    *,
    workers: int = 2,
    max_failures: int = 0,
    run: dict[str, Any] | None = None,
    **more: Any,
) -> raytf.KerasTrainer:
    """The run `run` in `path`.

    Args:
        max_failures: of Ray's FailureConfig.
        run: other arguments of RunConfig.
    """
    failures = FailureConfig(max_failures=max_failures)
    given = {"name": "run", "storage_path": str(path), "failure_config": failures}
    return raytf.KerasTrainer(
        build_model,
        **arguments(**more),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(**(given | (run or {}))),
    )


def left_by(result: Any, url: Any = None, filesystem: Any = None) -> dict[str, Any]:
    """What must be equal of two runs of the same training: the result, and all of the state.

    Args:
        result: of `KerasTrainer.fit`, or the dict of `raytf.fit`.
        url: of the run; None: as the result says.
        filesystem: that `url` is a path on.
    """
    said = result if isinstance(result, dict) else result.return_value
    store = CheckpointStore(resolve(url if url is not None else result.url, filesystem))
    step = store.latest()
    assert step is not None
    assert store.verify(step) == []
    manifest = store.manifest(step)
    return {
        **{key: said[key] for key in ("weights_sha256", "history", "metrics", "steps", "epochs")},
        "step": step,
        "position": manifest.position,
        "state": manifest.state,
        "tensors": {
            name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            for name, array in store.read(step).items()
        },
    }


@functools.cache
def unbroken() -> dict[str, Any]:
    """What `trainer` leaves when nobody touches it."""
    with tempfile.TemporaryDirectory() as directory:
        return left_by(trainer(directory).fit())
