"""What each of the two ranks does in `checkpoint.py`: a training by raytf, and the arms around it.

Uses the pieces that a worker of raytf is made of, without raytf's own Ray trainer, so that Ray's
`report` is stock. Pickled by value: nothing of this folder is there on the workers.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["WORKERS", "work"]

WORKERS, BATCH, ROW = 2, 64, 32
SETTLE, STEPS = 2, 14  # steps of a block before the save, and in all
S3_ROUNDS = 2


def build_model(config: dict[str, Any]) -> Any:
    """A text classifier: an embedding and a few dense layers."""
    import keras

    vocabulary, narrow, wide = config["sizes"]
    layers = keras.layers
    inputs = keras.Input((ROW,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(vocabulary, narrow)(inputs))
    for _ in range(3):
        x = layers.Dense(wide, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(1000)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Exchange:
    """`share` and `post` of raytf's links, over files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def post(self, key: str, value: Any) -> None:
        place = self._folder / key.replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        temporary = place / f".{self._rank}"
        temporary.write_bytes(pickle.dumps(value))
        temporary.rename(place / str(self._rank))

    def share(self, key: str, value: Any) -> list[Any]:
        self.post(key, value)
        return [self._read(self._folder / key.replace("/", "_") / str(r)) for r in range(WORKERS)]

    def _read(self, path: Path) -> Any:
        while not path.exists():
            time.sleep(0.001)
        return pickle.loads(path.read_bytes())


def links_of(folder: Path, rank: int, name: str) -> Any:
    from raytf.worker.links import Formation, Links

    exchange = Exchange(folder / "exchange" / name, rank)

    def join(address: str, attempt: int) -> Formation:
        return Formation(
            generation=attempt, addresses=tuple(exchange.share(f"join/{attempt}", address))
        )

    def agree(what: str) -> Callable[[int, str | None], bool]:
        return lambda generation, error: not any(exchange.share(f"{what}/{generation}", error))

    def nothing(*_: Any) -> None:
        """There is no run actor here."""

    return Links(
        rank=rank,
        num_workers=WORKERS,
        num_cpus=1,
        num_gpus=0,
        host="127.0.0.1",
        join=join,
        hold=agree("hold"),
        ready=agree("ready"),
        share=exchange.share,
        post=exchange.post,
        **dict.fromkeys(("compare", "restored", "progress", "deliver"), nothing),
    )


def watched(saver: Any, record: dict[str, list[Any]]) -> Any:
    """Notes when the saver's writes began and ended, as (step, began, ended, bytes)."""
    began: dict[int, float] = {}
    save_now, done = saver.save_now, saver.done

    def save(place: Any) -> None:
        start = time.monotonic()
        save_now(place)
        began[place.total_step] = time.monotonic()
        record["stall"].append(began[place.total_step] - start)

    def finished(outcome: Any) -> None:
        done(outcome)
        if outcome.kind != "committed":
            record["failed"].append(f"save of step {outcome.step} {outcome.kind}: {outcome.error}")
        elif outcome.step in began:
            record["write"].append(
                (outcome.step, began[outcome.step], time.monotonic(), outcome.written_bytes)
            )

    saver.save_now, saver.done = save, finished
    return saver


def wait_for_writes(record: dict[str, list[Any]], number: int) -> None:
    """Until so many saves are durable.

    Raises:
        RuntimeError: one was not written; the numbers would mean nothing.
    """
    while len(record["write"]) < number:
        if record["failed"]:
            raise RuntimeError(record["failed"][0])
        time.sleep(0.002)


class Bench:
    """One rank's arms. `trainee` and `saver` are there once training begins."""

    trainee: Any
    variables: Any
    saver: Any

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.folder = Path(config["folder"])
        self.config = config
        self.rank = rank
        self.exchange = Exchange(self.folder / "exchange" / "bench", rank)
        self.links = links_of(self.folder, rank, "raytf")
        self.record: dict[str, list[Any]] = defaultdict(list)
        self._turns = 0
        self._buffers: list[Any] = []

    def together(self) -> None:
        """Waits for the other rank."""
        self._turns += 1
        self.exchange.share(f"turn/{self._turns}", None)

    def timed(self, arm: Callable[[], None]) -> float:
        """Both ranks begin together, on a disk that is at rest."""
        self.together()
        if self.rank == 0:
            os.sync()
        self.together()
        began = time.monotonic()
        arm()
        return time.monotonic() - began

    def arms(self) -> dict[str, Callable[[], float]]:
        """For the time between two epochs; each answers with seconds."""
        import ray.train
        import tensorflow as tf

        model, mine = self.trainee.model, self.folder / "others"
        mine.mkdir(exist_ok=True)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        prefix = str(mine / "tf" / "state")

        def keras_save() -> None:
            model.save(mine / "model.keras")  # does nothing on rank 1

        def tf_save() -> None:
            if self.rank == 0:
                checkpoint.write(prefix)

        def tf_restore() -> None:
            checkpoint.read(prefix).assert_existing_objects_matched()

        def report() -> None:
            if self.rank:
                ray.train.report({"loss": 0.0})
                return
            with tempfile.TemporaryDirectory(dir=mine) as folder:
                model.save_weights(os.path.join(folder, "model.weights.h5"))
                found = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": 0.0}, checkpoint=found)

        arms = {"bare_copy": self.bare_copy, "keras_save": keras_save, "report": report}
        # In one: what is restored was written before.
        arms |= {"tf_save": tf_save, "tf_restore": tf_restore, "restore": self.restore}
        return {name: lambda arm=arm: self.timed(arm) for name, arm in arms.items()}

    def bare_copy(self) -> None:
        """The least that a save can block."""
        import numpy as np

        from raytf.checkpoint.layout import divide

        infos = self.variables.tensors()
        slices = divide(infos.values(), WORKERS)[self.rank]
        if not self._buffers:
            self._buffers = [np.zeros(piece.nbytes, np.uint8) for piece in slices]
            return self.bare_copy()
        for piece, buffer in zip(slices, self._buffers, strict=True):
            value = np.asarray(self.variables.cells[piece.tensor.name].variable.read_value())
            rows = value[piece.start : piece.stop] if value.ndim else value
            np.copyto(buffer, rows.reshape(-1).view(np.uint8))
        return None

    def restore(self) -> None:
        """What a rank does to go on from the newest checkpoint, apart from callbacks."""
        self._restore(self.place(self.folder / "run"), self.links, self._turns)

    def _restore(self, place: Any, links: Any, turn: int) -> None:
        import dataclasses

        from raytf.checkpoint.store import CheckpointStore
        from raytf.worker.restoring import Restorer

        share = links.share
        links = dataclasses.replace(links, share=lambda key, value: share(f"{key}/{turn}", value))
        restorer = Restorer(place, CheckpointStore(place.storage), links, print)
        optimizer = type(self.trainee.model.optimizer).__name__
        found = restorer.load(self.variables.tensors(), optimizer, self.trainee.agreement.exchange)
        if found is None:
            raise RuntimeError("there was no checkpoint to restore")
        self.variables.assign(found.arrays)

    def place(self, where: Any) -> Any:
        """A run's, at a path or on a filesystem."""
        from raytf.checkpoint.storage import resolve
        from raytf.config import SaveConfig
        from raytf.worker.links import RunPlace

        path, filesystem = where if isinstance(where, tuple) else (where, None)
        return RunPlace(
            storage=resolve(path, filesystem),
            run="bench",
            attempt=1,
            owner="bench",
            # The bench itself says when.
            save=SaveConfig(every_steps=10**9, keep_last=2),
            fingerprint={},
        )

    def s3(self) -> dict[str, list[float]]:
        """The same on S3, without training beside it."""
        from s3fs import S3FileSystem

        from raytf.worker.attempt import Attempt
        from raytf.worker.callback_state import CallbackStates
        from raytf.worker.saving import Place

        found: dict[str, list[float]] = {"s3_stall": [], "s3_write": [], "s3_restore": []}
        place = self.place(("bench/run", S3FileSystem(**self.config["s3"])))
        links = links_of(self.folder, self.rank, "s3")
        attempt = Attempt(place, self.trainee.spec, links)
        record: dict[str, list[Any]] = defaultdict(list)
        saver = watched(
            attempt.begin(
                model=self.trainee.model,
                engine=self.trainee.engine,
                variables=self.variables,
                callbacks=CallbackStates([], lambda callback: True),
                agreement=self.trainee.agreement,
                health=self.trainee.steps.health,
                rows=self.trainee._rows,
                generation=1,
                threads=1,
            ),
            record,
        )
        for turn in range(S3_ROUNDS):
            # A state that was never written before.
            self.variables.cells["step"].variable.assign_add(1)
            self.shake()
            self.timed(lambda turn=turn: saver.save_now(Place(total_step=turn + 1)))
            wait_for_writes(record, turn + 1)
            found["s3_restore"].append(
                self.timed(lambda turn=turn: self._restore(place, links, turn))
            )
        found["s3_stall"] = record["stall"]
        found["s3_write"] = [ended - began for _, began, ended, _ in record["write"]]
        return found

    def shake(self) -> None:
        """Changes every variable, so that nothing need not be written again."""
        for cell in self.variables.cells.values():
            if cell.variable.dtype.is_floating:
                cell.variable.assign_add(cell.variable * 0 + 1e-3)


def callback_of(bench: Bench, blocks: int) -> Any:
    """Runs the arms between epochs, and saves once in each."""
    import keras

    class Blocks(keras.callbacks.Callback):
        measured: dict[str, list[float]] = defaultdict(list)
        arms: dict[str, Callable[[], float]] = {}

        def get_state(self) -> dict[str, Any]:
            return {}  # no part of the run

        def set_state(self, state: dict[str, Any]) -> None:
            """See `get_state`."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.monotonic()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.monotonic()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch:  # the first one of an epoch waits for data
                bench.record["step"].append((self.began, time.monotonic()))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            wait_for_writes(bench.record, epoch + 1)
            self.arms = self.arms or bench.arms()
            if epoch == 0:
                self.arms["tf_save"]()
                for arm in self.arms.values():  # warms up
                    arm()
                return
            for name in random.Random(epoch).sample(list(self.arms), len(self.arms)):
                self.measured[name].append(self.arms[name]())
            if epoch == blocks and bench.config["s3"]:
                self.measured.update(bench.s3())

    return Blocks()


def work(config: dict[str, Any]) -> None:
    """What each worker runs."""
    import numpy as np
    import ray.train

    from raytf.config import TrainSpec
    from raytf.data import ArraySource
    from raytf.worker.attempt import Attempt
    from raytf.worker.engine import engine_for
    from raytf.worker.session import Trainee
    from raytf.worker.strategy import configure, form_strategy

    bench = Bench(config, ray.train.get_context().get_world_rank())
    rng, rows = np.random.default_rng(0), BATCH * STEPS
    x = rng.integers(0, config["sizes"][0], (rows, ROW), dtype="int32")
    callback: list[Any] = []
    spec = TrainSpec(
        build_model=build_model,
        config={"sizes": config["sizes"]},
        train_data=ArraySource(x, rng.integers(0, 1000, rows)),
        global_batch_size=BATCH,
        epochs=config["blocks"] + 1,
        callbacks=lambda: callback,
        verbose=0,
    )

    class Watched(Attempt):
        def begin(self, **given: Any) -> Any:
            bench.variables = given["variables"]
            saver = watched(super().begin(**given), bench.record)
            before = saver.before_step

            def before_step(place: Any) -> None:
                before(place)
                if place.step == SETTLE:
                    saver.save_now(place)

            saver.before_step = before_step
            return saver

    engine = engine_for(legacy_keras=False)
    attempt = Watched(bench.place(bench.folder / "run"), spec, bench.links)
    threads = configure(1, 0, spec.deterministic, None)
    strategy, formation = form_strategy(bench.links, spec.communication)
    bench.trainee = Trainee(spec, bench.links, strategy, engine)
    blocks = callback_of(bench, config["blocks"])
    callback.append(blocks)
    bench.trainee.train(attempt, {"threads": threads, "generation": formation.generation})
    told = {
        "state_bytes": sum(info.nbytes for info in bench.variables.tensors().values()),
        "arms": blocks.measured,
        "record": bench.record,
    }
    (bench.folder / f"rank-{bench.rank}.json").write_text(json.dumps(told))
