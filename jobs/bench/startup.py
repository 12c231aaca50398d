"""How long it takes from fit() to the first step: raytf against stock Ray Train, in turn.

    python jobs/bench/startup.py [--blocks 3]

Both train the same small model on 2 workers of a local Ray that runs already; imports come before
the clock starts. What is timed ends when a callback on a worker hears of the first finished step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

AIM = 0.7  # of the time that stock Ray Train takes
LIMIT_S = 300.0
HERE = Path(__file__).resolve().parent


def build_model(config: dict[str, Any]) -> Any:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((784,)), layers.Dense(128, activation="relu"), layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def run_raytf(folder: Path) -> float:
    """One run of raytf in this process; seconds from fit() to the first step."""
    import numpy as np
    import ray
    from ray.train import RunConfig, ScalingConfig

    import raytf

    place = str(folder)

    def callbacks() -> list[Any]:
        import keras

        class First(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 0:
                    Path(place, f"first-{os.getpid()}").write_text(str(time.time()))

        return [First()]

    rng = np.random.default_rng(0)
    x, y = rng.random((3200, 784), dtype="float32"), rng.integers(0, 10, 3200)
    _ = raytf.KerasTrainer  # imported before the clock starts, as the other one's trainer is
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    began = time.time()
    raytf.KerasTrainer(
        build_model,
        train_data=raytf.ArraySource(x, y),
        global_batch_size=64,
        callbacks=callbacks,
        verbose=0,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="raytf", storage_path=place),
    ).fit()
    return min(float(path.read_text()) for path in folder.glob("first-*")) - began


def measure(command: list[str]) -> float:
    """Runs one of the two in a process of its own and a new folder."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, *command, folder], env=env, stdout=subprocess.PIPE, timeout=LIMIT_S
        )
        if ran.returncode:
            raise RuntimeError(f"{command[0]} ended with exit code {ran.returncode}")
        return json.loads(ran.stdout.splitlines()[-1])["first_step_s"]


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--blocks", type=int, default=3, help="runs of each, in turn")
    flags.add_argument(
        "--only", choices=("raytf", "stock"), help="measure one of them, judge nothing"
    )
    flags.add_argument("--raytf-run", metavar="FOLDER", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.raytf_run:
        print(json.dumps({"first_step_s": run_raytf(Path(args.raytf_run))}), flush=True)
        return 0
    arms = {
        "stock": lambda: measure([str(HERE / "stock_ray_train.py")]),
        "raytf": lambda: measure([str(HERE / "startup.py"), "--raytf-run"]),
    }
    if args.only:
        arms = {args.only: arms[args.only]}
    measured = common.interleave(arms, args.blocks)
    medians = common.medians(measured)
    for name, value in medians.items():
        common.say(f"{name:>6}: {value:6.1f} s from fit() to the first step")
    aims, missing = [], []
    if args.only:
        missing.append("only one of the two was run")
    else:
        aims.append(("stock / raytf", medians["stock"] / medians["raytf"], 1 / AIM))
    return common.finish(
        "startup", {"unit": "s", "median": medians, "blocks": measured}, aims, missing
    )


if __name__ == "__main__":
    sys.exit(main())
