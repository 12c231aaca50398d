"""Runs that are killed, and runs that nobody touches: what both leave must be the same bytes.

`train` is one worker's part; `run` starts groups until the run is through, as Ray would, and
returns everything that must be equal. No Ray: real processes, real SIGKILL, a real strategy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import time
from typing import Any

import numpy as np

from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.config import SaveConfig, TrainSpec
from raytf.data import ArraySource
from raytf.faults.drill import parse_drill
from raytf.worker.links import Job, Links, Origin, RunPlace
from tests.worker.group import GroupFailed, run_group

ROWS = 100
BATCH = 16  # 7 steps per epoch, the last one smaller


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Features, of which the last is the row's number, and classes."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, 9)).astype("float32")
    x[:, 8] = np.arange(rows)
    return x, rng.integers(0, 3, rows).astype("int32")


def build(config: dict[str, Any]) -> Any:
    """A model with every kind of state: dropout, moving statistics, sparse gradients, a schedule or
    a settable rate, loss scaling, averaged weights, frozen weights.
    """
    if config.get("kind") == "legacy":
        return build_legacy()
    import keras

    class Ledger(keras.layers.Layer):
        """Counts how often each row has been trained on; gives the other features on."""

        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(
                shape=(ROWS,),
                initializer="zeros",
                dtype="float32",
                trainable=False,
                aggregation="sum",
                name="seen",
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                rows = keras.ops.one_hot(keras.ops.cast(x[:, 8], "int32"), ROWS, dtype="float32")
                self.seen.assign(self.seen + keras.ops.sum(rows, axis=0))
            return keras.ops.cast(x[:, :8], self.compute_dtype)

    kind = config.get("kind", "adam")
    if kind == "mixed":
        keras.config.set_dtype_policy("mixed_float16")
    features = keras.Input((9,), dtype="float32")
    inputs = Ledger(name="ledger", autocast=False)(features)
    frozen = keras.layers.Dense(16, name="frozen", trainable=False)
    x = keras.layers.Dense(config["units"], activation="relu")(frozen(inputs))
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.3)(x)
    ids = keras.layers.Lambda(lambda t: keras.ops.cast(keras.ops.abs(t) * 4, "int32") % 11)(inputs)
    embedded = keras.layers.Flatten()(keras.layers.Embedding(11, 2)(ids))
    x = keras.layers.Concatenate()([x, embedded])
    outputs = keras.layers.Dense(3, dtype="float32")(x)
    model = keras.Model(features, outputs)
    optimizer: Any = keras.optimizers.Adam(config["rate"], use_ema=kind == "ema", ema_momentum=0.9)
    if kind == "schedule":
        schedule = keras.optimizers.schedules.CosineDecay(1e-2, 30, warmup_steps=5, alpha=0.1)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=config.get("per_call", 1),
    )
    keras.config.set_dtype_policy("float32")
    return model


def build_legacy() -> Any:
    """The same kinds of state in tf_keras."""
    import tf_keras

    layers = tf_keras.layers
    model = tf_keras.Sequential(
        [
            layers.Input((9,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=loss, metrics=["accuracy"])
    return model


def callbacks(directory: str, pause_s: float = 0.0, legacy: bool = False) -> Any:
    def make() -> list[Any]:
        keras: Any = importlib.import_module("tf_keras" if legacy else "keras")

        class Counter(keras.callbacks.Callback):
            """An own callback that keeps state in plain attributes."""

            def __init__(self) -> None:
                super().__init__()
                self.batches = 0
                self.seen: dict[int, list[float]] = {}

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.batches += 1
                time.sleep(pause_s)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                rate = self.model.optimizer.learning_rate
                self.seen[epoch] = [float(np.asarray(rate)), logs["loss"]]
                logs["batches"] = self.batches

        return [
            Counter(),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05)
            if not os.environ.get("RAYTF_TEST_SCHEDULE")
            else keras.callbacks.TerminateOnNaN(),
            keras.callbacks.EarlyStopping(
                "val_loss", patience=2, min_delta=0.02, restore_best_weights=True
            ),
            keras.callbacks.CSVLogger(os.path.join(directory, "log.csv")),
            keras.callbacks.ModelCheckpoint(
                os.path.join(directory, "best.weights.h5"),
                monitor="val_loss",
                save_best_only=True,
                save_weights_only=True,
            ),
        ]

    return make


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        storage: the run's directory.
        drill: kills, or "".
        kind: of model, see `build`.
        workers: ranks of each group in turn; the last number stays.
        origin: what a new run starts from.
        rate: learning rate as compiled; `units`: of a layer.
        fingerprint: of the run's data and settings.
        pause_s: after each step, so that every save is through before the next one.
    """

    storage: str
    drill: str = ""
    kind: str = "adam"
    workers: tuple[int, ...] = (2,)
    epochs: int = 5
    per_call: int = 1
    save: SaveConfig = dataclasses.field(default_factory=lambda: SaveConfig(every_steps=3))
    pause_s: float = 0.0
    attempt: int = 1
    origin: Origin | None = None
    rate: float = 1e-2
    units: int = 16
    fingerprint: dict[str, Any] = dataclasses.field(default_factory=dict)


def train(links: Links, strategy: Any, case: Case) -> dict[str, Any]:
    """What one worker does; called by `run_group`."""
    from raytf.worker import session

    x, y = data()
    vx, vy = data(30)
    outputs = os.path.join(case.storage, "outputs")
    os.makedirs(outputs, exist_ok=True)
    if case.kind == "schedule":
        os.environ["RAYTF_TEST_SCHEDULE"] = "1"
    spec = TrainSpec(
        build_model=build,
        config={
            "kind": case.kind,
            "per_call": case.per_call,
            "rate": case.rate,
            "units": case.units,
        },
        train_data=ArraySource(x, y),
        validation_data=ArraySource(vx, vy),
        global_batch_size=BATCH,
        epochs=case.epochs,
        seed=3,
        callbacks=callbacks(outputs, case.pause_s, case.kind == "legacy"),
        legacy_keras=case.kind == "legacy",
        verbose=0,
    )
    storage = resolve(case.storage)
    place = RunPlace(
        storage=storage,
        run="r",
        attempt=case.attempt,
        owner="o",
        save=case.save,
        fingerprint=case.fingerprint,
        origin=case.origin,
        kills=parse_drill(case.drill) if case.drill else (),
    )
    job = Job(spec=spec, output=(storage.fs, storage.join("final").path), place=place)
    said: list[str] = []
    links = dataclasses.replace(
        links, progress=lambda r: said.append(r["text"]) if r["kind"] == "message" else None
    )
    return {**session.run(job, links), "said": said}


def run(case: Case, max_starts: int = 40) -> dict[str, Any]:
    """Runs a case to its end and returns its starts and everything that must be equal."""
    starts = 0
    while True:
        workers = case.workers[min(starts, len(case.workers) - 1)]
        starts += 1
        attempt = dataclasses.replace(case, attempt=starts)
        try:
            results = run_group(
                "tests.worker.broken:train", workers, attempt, bare=True, grace_s=0.5
            )
        except GroupFailed as error:
            echo = ("gave nothing", "Collective ops is aborted", "Socket closed")
            if starts >= max_starts or not any(text in str(error) for text in echo):
                raise
            continue
        said = results[0].pop("said")
        return {"starts": starts, "said": said, "result": results[0], **left_by(case.storage)}


def ledger(store: CheckpointStore, step: int) -> list[float]:
    """How often each row has been trained on; empty for a model that does not count."""
    names = [t.name for t in store.manifest(step).tensors if t.name == "ledger/seen"]
    return store.read(step, names)["ledger/seen"].tolist() if names else []


def left_by(storage: str) -> dict[str, Any]:
    """Everything that a run leaves, as digests and plain data."""
    store = CheckpointStore(storage)
    step = store.latest()
    assert step is not None
    manifest = store.manifest(step)
    tensors = {
        name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        for name, array in store.read(step).items()
    }
    outputs = os.path.join(storage, "outputs")
    files = {}
    for name in sorted(os.listdir(outputs)):
        if name.endswith(".csv"):
            with open(os.path.join(outputs, name), "rb") as f:
                files[name] = f.read().decode()
    return {
        "step": step,
        "position": manifest.position,
        "metrics": manifest.metrics,
        "tensors": tensors,
        "ledger": ledger(store, step),
        # tf_keras's ModelCheckpoint remembers its path
        "state": json.loads(json.dumps(manifest.state).replace(storage, "")),
        "files": files,
    }
