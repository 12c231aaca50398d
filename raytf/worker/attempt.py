"""One rank's part in one attempt at a run: finds the old state, puts it back, and saves new ones.

Joins `restoring` (what to go on from), `state` (what a rank is), `saving` and `checkpoint.writer`
(when and how it becomes durable) for the session; none of them knows the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.checkpoint.lease import check_attempt
from raytf.checkpoint.manifest import step_name
from raytf.checkpoint.retention import Rule
from raytf.checkpoint.storage import read_skips
from raytf.checkpoint.store import CheckpointStore
from raytf.checkpoint.writer import Outcome, Writer
from raytf.config import TrainSpec
from raytf.faults.drill import Injector
from raytf.worker.callback_state import CallbackStates
from raytf.worker.callbacks import Agreement
from raytf.worker.engine import Engine
from raytf.worker.foreign import load_foreign
from raytf.worker.health import Health, Poison
from raytf.worker.links import Links, RunPlace
from raytf.worker.phases import Phases
from raytf.worker.preflight import check_space, check_store
from raytf.worker.restoring import Restored, Restorer
from raytf.worker.saving import Place, Saver
from raytf.worker.state import RankState, Variables
from raytf.worker.watch import Digests, NoWatch, Watch

__all__ = ["Attempt"]

logger = logging.getLogger("raytf")
_STRIKE_S = 0.002  # into a step, that a drill strikes


class Attempt:
    """See the module.

    Made before TensorFlow is set up, because an old run's threads decide how that is done.

    Args:
        place: of the run.
        spec: the run.
        links: of this rank.
        phases: of this rank's training thread.

    Attributes:
        left_out: (epoch, step of the epoch) of batches that are not trained on. Steps are counted
            over them, so all other batches are what they would have been.

    Raises:
        StorageError: the store is not one place that all ranks can use.
    """

    def __init__(
        self, place: RunPlace, spec: TrainSpec, links: Links, phases: Phases | None = None
    ) -> None:
        self._place = place
        self._phases = phases or Phases()
        self._spec = spec
        self._links = links
        check_store(place.storage, links)
        self._store = CheckpointStore(place.storage)
        drills = place.storage.join("drills")
        self._injector = Injector(
            place.kills,
            links.rank,
            has_fired=lambda kill: drills.exists(kill),
            mark_fired=lambda kill: drills.write_bytes(b"", kill),
            num_workers=links.num_workers,
        )
        # Decided after faults, in the store, so that every later group leaves the same ones out.
        mine = read_skips(place.storage) if links.is_chief else None
        decided = links.share("skips", mine)[0]
        self.left_out = tuple((epoch, step) for epoch, step in decided)
        self._restorer = Restorer(place, self._store, links, self._say)
        self._restored: Restored | None = None
        self._state: RankState | None = None
        self._saver: Saver | None = None
        self._rate: list[float] = []  # as build_model compiled it
        self._new_rate: list[float] = []  # to be set instead of the old state's
        self.start = Place(epoch=spec.initial_epoch)
        self.watch: Watch | NoWatch = NoWatch()

    @property
    def threads(self) -> int | None:
        """TensorFlow's threads that the run began with; None: this is its beginning."""
        return self._restorer.threads

    def prepare(self, steps: Any) -> None:
        """Puts into the steps, before they are traced, what the watch and the drill need there."""
        if self._place.watch.on_nan != "ignore":
            steps.health = Health()
        if self._injector.wants("nan"):
            poison = steps.poison = Poison(steps.counter)
            self._injector.teach("nan", lambda strike: poison.next_step())

    def _say(self, text: str) -> None:
        if self._links.is_chief:
            self._links.progress({"kind": "message", "text": text})

    def restore(
        self, model: Any, engine: Engine, variables: Variables, agreement: Agreement
    ) -> None:
        """Puts the variables of the newest good state, if there is one, into the model."""
        self._rate = engine.read_learning_rate(model)
        self._restore(model, engine, variables, agreement)
        if self._links.is_chief:
            self._links.progress({"kind": "restored", "step": self.start.total_step})

    def _restore(
        self, model: Any, engine: Engine, variables: Variables, agreement: Agreement
    ) -> None:
        self._check_space(sum(info.nbytes for info in variables.tensors().values()))
        restored = self._restorer.load(
            variables.tensors(), type(model.optimizer).__name__, agreement.exchange
        )
        if restored is None:
            self._restored = None
            self._take_foreign(model, engine)
            return
        then, now = restored.manifest.world_size, self._links.num_workers
        arrays = variables.for_ranks(restored.arrays, then, now)
        self._restored = restored = dataclasses.replace(restored, arrays=arrays)
        variables.assign(arrays)
        self._settle_rate(restored, model, engine)
        manifest = restored.manifest
        place = Place.of(manifest.position, manifest.state["loop"])
        self.start = self._from_elsewhere(place, manifest) if not restored.is_own else place
        if self._place.go_on:
            self.start = _without_stop(self.start)
        if restored.is_own:
            self._rate = manifest.model["learning_rate"]  # of the run's beginning, for later ones
        if self.start.epoch >= self._spec.epochs:
            self._say(
                f"epochs={self._spec.epochs}: the state to go on from has {self.start.epoch} "
                "epochs already, and nothing is left to train"
            )
        self._links.restored(restored.store.root.join(step_name(manifest.step)))
        self._say(
            f"{'resumed' if restored.is_own else 'starting'} at step {self.start.total_step} "
            f"(epoch {self.start.epoch + 1}, step {self.start.step} of it) from "
            f"{restored.store.step_url(manifest.step)}"
        )

    def _take_foreign(self, model: Any, engine: Engine) -> None:
        """Weights, and perhaps an optimizer, from a file that is no raytf checkpoint."""
        origin = self._place.origin
        if origin is not None and origin.kind != "step":
            for text in load_foreign(origin, model, self._spec, engine.keras):
                self._say(text)

    def _settle_rate(self, restored: Restored, model: Any, engine: Engine) -> None:
        """Which learning rate counts: the state's, unless a *new* run's build_model says another
        than the old run's did.
        """
        kept, then = engine.read_learning_rate(model), restored.manifest.model["learning_rate"]
        if self._rate == then or not kept or not self._rate:
            return
        if restored.is_own:
            self._say(
                f"learning rate: {kept[0]:g}, as in the checkpoint; build_model now says "
                f"{self._rate[0]:g} (the run began with {_shown(then)}). To change it, start a new "
                "run with resume_from."
            )
            return
        self._say(
            f"learning rate: {self._rate[0]:g}, as build_model says; the checkpoint has "
            f"{kept[0]:g}, and its run began with {_shown(then)}"
        )
        self._new_rate = self._rate

    def _check_space(self, state_bytes: int) -> None:
        free = self._store.files.free_bytes()
        check_space(free, state_bytes, self._place.storage.url, self._links)

    def _from_elsewhere(self, place: Place, manifest: Any) -> Place:
        """Where a new run begins that starts from another run's state."""
        if manifest.fingerprint == self._place.fingerprint:
            return place
        names = sorted({*manifest.fingerprint, *self._place.fingerprint})
        others = [n for n in names if manifest.fingerprint.get(n) != self._place.fingerprint.get(n)]
        self._say(
            f"the old state is of other data ({', '.join(others)}): epoch {place.epoch + 1} begins "
            "anew"
        )
        return Place(epoch=place.epoch, total_step=place.total_step, logs=place.logs)

    def begin(
        self,
        *,
        model: Any,
        engine: Engine,
        variables: Variables,
        callbacks: CallbackStates,
        agreement: Agreement,
        health: Health | None,
        rows: Callable[[int, int], Any],
        generation: int,
        threads: int,
    ) -> Saver:
        """Makes the saver and the watch; called when the callbacks are there and before
        `on_train_begin`.
        """
        links, place = self._links, self._place
        state = RankState(variables, callbacks, links.rank, links.num_workers)
        common = {name: c.variable for name, c in variables.cells.items() if not c.alone}
        self.watch = Watch(
            config=place.watch,
            agreement=agreement,
            rank=links.rank,
            num_ranks=links.num_workers,
            health=health,
            bits=Digests(common),
            rows=rows,
        )
        writer = self._writer(generation, lambda outcome: saver.done(outcome))
        saver = Saver(
            config=place.save,
            state=state,
            writer=writer,
            agreement=agreement,
            is_chief=links.is_chief,
            head=self._head(model, engine, generation, threads) if links.is_chief else {},
            seed=self._spec.seed,
            at=self._injector.at,
            tell=links.progress,
            check=self.watch.before_save,
            phases=self._phases,
        )
        self._state, self._saver = state, saver
        restored = self._restored
        if restored is not None and restored.is_own:
            if not restored.repaired:
                writer.knows(restored.manifest)
            callbacks.before_train_begin(restored.own(links.rank)["callbacks"])
        else:
            callbacks.before_train_begin(None)
        return saver

    def _writer(self, generation: int, done: Callable[[Outcome], None]) -> Writer:
        links, place, save = self._links, self._place, self._place.save
        return Writer(
            self._store,
            rank=links.rank,
            num_workers=links.num_workers,
            attempt=place.attempt,
            generation=generation,
            peers=links,
            rule=Rule(
                keep_last=save.keep_last,
                keep_best=save.keep_best,
                best_mode=save.best_mode,
                num_best=place.num_best,
                keep_every=save.keep_every,
            ),
            may_commit=lambda: check_attempt(place.storage, place.attempt, place.owner),
            at=self._injector.at,
            done=done,
        )

    def began(self, model: Any, engine: Engine) -> None:
        """After `on_train_begin`: what callbacks may have changed there is put back."""
        if self._state is None or self._saver is None:
            return
        self._state.callbacks.began()
        restored = self._restored
        if restored is None:
            return
        own = restored.own(self._links.rank)
        self._state.variables.assign(restored.arrays)
        if self._new_rate:
            engine.set_learning_rate(model, self._new_rate)
        if restored.is_own:
            for text in self._state.callbacks.restore(own["callbacks"], restored.arrays):
                self._say(text)
        self._state.set_random(own["random"])
        if restored.is_own and restored.repaired:
            self._saver.save_now(self.start)
        self._restored = None  # frees its arrays

    def _head(self, model: Any, engine: Engine, generation: int, threads: int) -> dict[str, Any]:
        place, save = self._place, self._place.save
        return {
            "run": place.run,
            "attempt": place.attempt,
            "generation": generation,
            "world_size": self._links.num_workers,
            "best": {"metric": save.keep_best, "mode": save.best_mode} if save.keep_best else None,
            "versions": {
                "raytf": importlib.metadata.version("raytf"),
                "tensorflow": tf.__version__,
                "keras": engine.keras.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
            "fingerprint": place.fingerprint,
            "threads": threads,
            "model": {
                "class": type(model).__name__,
                "optimizer": type(model.optimizer).__name__,
                "legacy_keras": self._spec.legacy_keras,
                "learning_rate": self._rate,
                **engine.described(model),
            },
        }

    @property
    def at(self) -> Callable[[str, int], None]:
        """For fault drills: `at(phase, step)`."""
        return self._injector.at

    @contextlib.contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """A drill for this phase strikes while the block runs."""
        if self._injector.pending(phase, step):
            self._injector.at(phase, step, sudden=False)
            timer = threading.Timer(_STRIKE_S, self._injector.at, (phase, step, True))
            timer.daemon = True
            timer.start()
        yield


def _shown(rate: list[float]) -> str:
    return f"{rate[0]:g}" if rate else "a schedule"


def _without_stop(place: Place) -> Place:
    return Place(epoch=place.epoch, step=place.step, total_step=place.total_step, logs=place.logs)
