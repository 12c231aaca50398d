"""Runs that are watched: one worker's part, with something wrong in it."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raytf.checkpoint.storage import SKIPS, resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.config import SaveConfig, TrainSpec, WatchConfig
from raytf.data import ArraySource
from raytf.errors import RaytfError
from raytf.faults.drill import parse_drill
from raytf.worker.links import Job, Links, RunPlace
from tests.worker import broken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """One run.

    Attributes:
        storage: the run's directory.
        poke: (rank, after which step of the run) at which a callback changes a weight.
        slow_data_s: that a transform takes for each row on rank 1.
        integers: the data has no floats.
    """

    storage: str
    drill: str = ""
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    skip: tuple[tuple[int, int], ...] = ()
    save: SaveConfig = dataclasses.field(default_factory=lambda: SaveConfig(every_steps=3))
    epochs: int = 2
    per_call: int = 1
    kind: str = "adam"
    poke: tuple[int, int] | None = None
    slow_data_s: float = 0.0
    integers: bool = False
    attempt: int = 1


def build_for_integers(config: dict[str, Any]) -> Any:
    import keras

    keras.config.set_dtype_policy("mixed_float16" if config["kind"] == "mixed" else "float32")
    layers: list[Any] = [keras.layers.Input((4,), dtype="int32"), keras.layers.Embedding(50, 3)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=loss, steps_per_execution=config["per_call"])
    return model


def build_linear(config: dict[str, Any]) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((9,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(links: Links, strategy: Any, case: Watched) -> dict[str, Any]:
    """What one worker does; called by `run_group`. Gives the error's context, if one was raised."""
    from raytf.worker import session

    x, y = broken.data()
    if case.integers:
        x = np.abs(x[:, :4] * 10).astype("int32") % 50
    spec = TrainSpec(
        build_model=build_for_integers
        if case.integers
        else build_linear
        if case.kind == "loss"
        else broken.build,
        config={"kind": case.kind, "per_call": case.per_call, "rate": 1e-2, "units": 16},
        train_data=ArraySource(x, y),
        global_batch_size=broken.BATCH,
        epochs=case.epochs,
        seed=3,
        transform=slow(case.slow_data_s, links.rank) if case.slow_data_s else None,
        callbacks=poker(*case.poke, links.rank) if case.poke else None,
        legacy_keras=case.kind == "legacy",
        verbose=0,
    )
    place = RunPlace(
        storage=resolve(case.storage),
        run="r",
        attempt=case.attempt,
        owner="o",
        save=case.save,
        fingerprint={},
        kills=parse_drill(case.drill) if case.drill else (),
        watch=case.watch,
    )
    if case.skip and links.is_chief:
        place.storage.write_bytes(json.dumps(case.skip).encode(), SKIPS)
    records: list[dict[str, Any]] = []
    beats: list[dict[str, Any]] = []
    links = dataclasses.replace(links, progress=records.append, beat=beats.append)
    began = time.monotonic()
    found: dict[str, Any] = {"error": None, "text": None, "result": None}
    try:
        found["result"] = session.run(Job(spec=spec, place=place), links)
    except RaytfError as error:
        found |= {"error": error.context, "text": f"{type(error).__name__}: {error.message}"}
    except (RuntimeError, SystemExit) as error:
        found |= {"text": f"{type(error).__name__}: {error}"}
    return {
        **found,
        "seconds": time.monotonic() - began,
        "beats": beats,
        "shown": [r for r in records if r["kind"] == "step"],
        "threads": [t.name for t in threading.enumerate()],
        "saved": CheckpointStore(case.storage).steps() if os.path.isdir(case.storage) else [],
    }


def slow(seconds: float, rank: int) -> Callable[[Any, Any], Any]:
    def transform(x: Any, y: Any) -> Any:
        import tensorflow as tf

        def wait(value: Any) -> Any:
            time.sleep(seconds)
            return value

        if rank == 1:
            shape = x.shape
            x = tf.numpy_function(wait, [x], tf.float32)
            x.set_shape(shape)
        return x, y

    return transform


def poker(at: int, step: int, rank: int) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        import keras

        class Poker(keras.callbacks.Callback):
            steps = 0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.steps += 1
                if self.steps == step and rank == at:
                    kernel = self.model.get_layer("frozen").kernel
                    changed = kernel.numpy()
                    changed[[0, 1]] = changed[[1, 0]]  # no sum over the variable would see this
                    kernel.assign(changed)

        return [Poker()]

    return make
