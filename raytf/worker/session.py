"""What one worker process does, from TensorFlow's start to the returned result."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.config import TrainSpec
from raytf.data import as_source, is_factory, share
from raytf.errors import ConfigError, RaytfError
from raytf.worker import callbacks as callback_rules
from raytf.worker import export
from raytf.worker.attempt import Attempt
from raytf.worker.callback_state import CallbackStates
from raytf.worker.callbacks import Agreement
from raytf.worker.engine import Engine, engine_for
from raytf.worker.factory import FactoryExecutions
from raytf.worker.feeding import Executions, Executor, SourceExecutions
from raytf.worker.links import Job, Links
from raytf.worker.loop import Loop
from raytf.worker.phases import Phases
from raytf.worker.pipeline import Feed
from raytf.worker.saving import Place
from raytf.worker.state import Cell, Variables
from raytf.worker.strategy import configure, form_strategy

__all__ = ["FactoryContext", "Trainee", "predict", "run", "weights_sha256"]

logger = logging.getLogger("raytf")


def run(job: Job, links: Links) -> dict[str, Any]:
    """Runs one job on this rank.

    Returns:
        Plain data: for "train" `history`, `metrics`, `steps`, `epochs`, `weights_sha256`,
        `threads`, `generation`; for "evaluate" `metrics`; for "predict" nothing (rows go through
        `links.deliver`).

    Raises:
        RaytfError: see its kinds; TensorFlow's and the user's own errors pass as they are.
    """
    phases = Phases(links.beat)
    phases.start()
    try:
        return _run(job, links, phases)
    finally:
        phases.stop()


def _run(job: Job, links: Links, phases: Phases) -> dict[str, Any]:
    _phase(links, phases, "starting")
    engine = engine_for(job.spec.legacy_keras)
    attempt = None if job.place is None else Attempt(job.place, job.spec, links, phases)
    fixed = None if attempt is None else attempt.threads
    threads = configure(links.num_cpus, links.num_gpus, job.spec.deterministic, fixed)
    strategy, formation = form_strategy(links, job.spec.communication)
    _phase(links, phases, "building")
    if job.mode == "predict":
        predict(job, links, engine)
        return {}
    trainee = Trainee(job.spec, links, strategy, engine, phases)
    if job.mode == "train":
        formed = {"threads": threads, "generation": formation.generation}
        result = trainee.train(attempt, formed) | formed | {"epochs_asked": job.spec.epochs}
        if job.output is not None:
            phases.enter("export")
            model = engine.host_model(trainee.model)
            if links.is_chief:
                _phase(links, phases, "export")
                export.write(model, job.output[0], job.output[1], result, trainee.inputs)
        return result
    export.read_weights(trainee.model, *_weights(job))
    return trainee.evaluate()


def _weights(job: Job) -> tuple[Any, str]:
    if job.weights is None:
        raise RaytfError(f"a {job.mode} job without weights; a raytf bug.")
    return job.weights


def _phase(links: Links, phases: Phases, phase: str) -> None:
    phases.enter(phase)
    if links.is_chief:
        shown = "exporting" if phase == "export" else phase
        links.progress({"kind": "phase", "phase": shown, "time": time.time()})


def weights_sha256(model: Any) -> str:
    """SHA-256 over the bytes of `model.get_weights()` in order."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest()


def make_feed(spec: TrainSpec, links: Links, engine: Engine, data: Any, for_training: bool) -> Feed:
    """This rank's parts of a source; order, transform and class weights are for training only."""
    mine: dict[str, Any] = {}
    if for_training:
        mine = {
            "shuffle": spec.shuffle,
            "drop_remainder": spec.drop_remainder,
            "transform": spec.transform,
            "class_weight": spec.class_weight,
        }
    return Feed(
        data,
        global_batch_size=spec.global_batch_size,
        num_workers=links.num_workers,
        rank=links.rank,
        seed=spec.seed,
        floatx=engine.keras.backend.floatx(),
        **mine,
    )


def predict(job: Job, links: Links, engine: Engine) -> None:
    """Delivers (row numbers, outputs) of this rank's parts of the data; no rank needs another for
    it.

    Raises:
        ConfigError: the data has no row numbers.
    """
    spec = job.spec
    if is_factory(spec.train_data):
        raise ConfigError(
            "predict needs data with row numbers (ArraySource, ParquetSource, a sequence); a "
            "factory has none."
        )
    source = as_source(spec.train_data, "data")
    feed = make_feed(spec, links, engine, source, for_training=False)
    model = engine.build_for_inference(spec, feed.spec())
    export.read_weights(model, *_weights(job))
    function = tf.function(model.predict_step)
    number, size = feed.plan.full_steps, spec.global_batch_size
    pieces = [(feed.full, feed.full_batches().take(number), 0)] if number else []
    if feed.tail is not None:
        pieces.append((feed.tail, feed.tail_batches().take(1), number))
    for part, batches, first in pieces:
        for step, batch in enumerate(batches if part.weight else ()):
            rows = np.arange(part.rows) + (first + step) * size + part.start
            outputs = tf.nest.map_structure(lambda t: t.numpy(), function(batch))
            links.deliver("rows", (rows, outputs))


@dataclass(frozen=True)
class FactoryContext:
    """What a data factory `f(ctx)` is told.

    Attributes:
        rank: this worker, in [0, num_workers - 1].
        num_workers: workers that share a batch.
        batch_size: this worker's share of `global_batch_size`.
        global_batch_size: rows of a batch over all workers.
        seed: the run's seed.
        epoch: epoch that the dataset is for; a new dataset is made for each.
    """

    rank: int
    num_workers: int
    batch_size: int
    global_batch_size: int
    seed: int
    epoch: int


class Trainee:
    """One rank's model, compiled steps and data, within a formed strategy.

    Args:
        spec: the run.
        links: this worker's seat.
        strategy: of the group.
        engine: the Keras in use.
        phases: of this thread.
    """

    def __init__(
        self,
        spec: TrainSpec,
        links: Links,
        strategy: Any,
        engine: Engine,
        phases: Phases | None = None,
    ) -> None:
        self.spec = spec
        self.links = links
        self.strategy = strategy
        self.engine = engine
        self.phases = phases or Phases(links.beat)
        self._training = self._data(spec.train_data, for_training=True)
        element_spec = self._element_spec()
        self.inputs = element_spec[0]
        self.model = engine.build(spec, links, strategy, element_spec)
        self.steps = engine.steps(self.model, strategy, links.rank, spec)
        self.agreement = Agreement(strategy, links.rank, self.steps.reducer.sum, self.phases)

    def _data(self, data: Any, for_training: bool) -> Any:
        """A feed of this rank's parts, or the user's factory as it is."""
        if is_factory(data):
            return data
        return make_feed(self.spec, self.links, self.engine, as_source(data, "data"), for_training)

    def _dataset(self, factory: Any, epoch: int) -> tf.data.Dataset:
        spec, links = self.spec, self.links
        start, stop = share(spec.global_batch_size, links.num_workers, links.rank)
        context = FactoryContext(
            rank=links.rank,
            num_workers=links.num_workers,
            batch_size=stop - start,
            global_batch_size=spec.global_batch_size,
            seed=spec.seed,
            epoch=epoch,
        )
        dataset = factory(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise ConfigError(
                "the data factory must return a tf.data.Dataset. Received: "
                f"{type(dataset).__name__}."
            )
        return dataset

    def _element_spec(self) -> Any:
        if isinstance(self._training, Feed):
            return self._training.spec()
        spec = self._dataset(self._training, 0).element_spec
        return spec if isinstance(spec, tuple) else (spec,)

    def _training_executions(self, left_out: Any) -> Executions:
        fetch = self.steps.marks.fetch
        return self._executions(
            self._training, self.steps.train, endless=True, fetch=fetch, left_out=left_out
        )

    def _executions(
        self,
        data: Any,
        step: Any,
        endless: bool,
        fetch: Callable[[Callable[[], Any]], Any] = lambda get: get(),
        left_out: Any = (),
    ) -> Executions:
        phases = self.phases
        if isinstance(data, Feed):
            executor = Executor(step, fetch, tracing=lambda: phases.enter("compile"))
            per_call = self.engine.steps_per_execution(self.model)
            return SourceExecutions(data, executor, per_call, endless, left_out)
        return FactoryExecutions(
            lambda epoch: self._dataset(data, epoch),
            step,
            self.agreement,
            self.links,
            phases,
            fetch,
            left_out,
        )

    def _loop(
        self, validation: Any, callbacks: Any, given: list[Any], training: Any = None, **more: Any
    ) -> Loop:
        # Summed over ranks: a user's factory may give each rank other callbacks, and whether there
        # is something to agree on must be alike on all.
        mine = [len(given), callback_rules.wants_batches(self.engine.keras, given)]
        any_callbacks, listening = self.agreement.sum([float(n) for n in mine])
        return Loop(
            model=self.model,
            training=training,
            validation=validation,
            callbacks=callbacks,
            read_logs=self.steps.logs,
            peek_logs=self.steps.peek,
            agreement=self.agreement,
            read_decisions=lambda: self.engine.read_learning_rate(self.model),
            take_decisions=lambda values: self.engine.set_learning_rate(self.model, values),
            batch_hooks=bool(listening),
            has_callbacks=bool(any_callbacks),
            finish=lambda: self.engine.finish(self.model),
            progress=self.links.progress if self.links.is_chief else None,
            phases=self.phases,
            **more,
        )

    def _callbacks(self, factory: Any, epochs: int, steps: int | None) -> tuple[Any, list[Any]]:
        params = {"epochs": epochs, "steps": steps, "verbose": 0}
        return callback_rules.make_callbacks(
            self.engine.keras,
            factory,
            self.model,
            self.links.is_chief,
            self.engine.saves_alone,
            params,
        )

    def train(
        self, attempt: Attempt | None = None, formed: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Trains; every rank returns the same.

        Args:
            attempt: restores and saves; None: nothing is kept.
            formed: `threads` and `generation` of this worker group.
        """
        spec = self.spec
        if attempt is not None:
            attempt.prepare(self.steps)
        training = self._training_executions(() if attempt is None else attempt.left_out)
        validation = (
            None
            if spec.validation_data is None
            else self._executions(
                self._data(spec.validation_data, for_training=False), self.steps.test, endless=False
            )
        )
        callback_rules.save_on_chief_only(
            self.engine.models(self.model), self.links.is_chief, self.engine.saves_alone
        )
        callbacks, given = self._callbacks(spec.callbacks, spec.epochs, training.steps_per_epoch)
        keeping, start = self._keeping(attempt, training, callbacks, formed or {})
        loop = self._loop(validation, callbacks, given, training, **keeping)
        loop.announce(spec.epochs, spec.global_batch_size)
        marks = self.steps.marks
        marks.before = start.total_step
        self.phases.probe = marks.read
        metrics = loop.fit(spec.epochs, start, spec.validation_freq)
        history = {k: list(values) for k, values in self.model.history.history.items()}
        return {
            "history": history,
            "metrics": metrics,
            "steps": int(self.steps.counter.numpy()),
            "epochs": len(self.model.history.epoch),
            "weights_sha256": weights_sha256(self.model),
        }

    def _keeping(
        self, attempt: Attempt | None, training: Executions, callbacks: Any, formed: dict[str, int]
    ) -> tuple[dict[str, Any], Place]:
        """Restores this rank, and what the loop needs to save it."""
        if attempt is None:
            return {}, Place(epoch=self.spec.initial_epoch)
        if self.engine.needs_trace(self.model):
            training.trace()
        cells = [*self.engine.cells(self.model), Cell("step", self.steps.counter)]
        variables = Variables(cells, self.links.rank)
        attempt.restore(self.model, self.engine, variables, self.agreement)
        saver = attempt.begin(
            model=self.model,
            engine=self.engine,
            variables=variables,
            callbacks=CallbackStates(callbacks.callbacks, self._runs_everywhere),
            agreement=self.agreement,
            health=self.steps.health,
            rows=self._rows,
            **formed,
        )
        loop = {
            "saver": saver,
            "restored": lambda: attempt.began(self.model, self.engine),
            "at": attempt.at,
            "during": attempt.during,
            "watch": attempt.watch,
            "leave_out": self._leave_out,
        }
        return loop, attempt.start

    def _rows(self, epoch: int, step: int) -> Any:
        feed = self._training
        return feed.rows(epoch, step) if isinstance(feed, Feed) else None

    def _leave_out(self, steps: int) -> None:
        self.steps.counter.assign_add(steps)
        self.steps.marks.before += steps

    def _runs_everywhere(self, callback: Any) -> bool:
        return not callback_rules.is_chief_only(
            self.engine.keras, callback, self.engine.saves_alone
        )

    def evaluate(self) -> dict[str, Any]:
        """Evaluates `spec.train_data`; every rank returns the same."""
        data = self._executions(
            self._data(self.spec.train_data, for_training=False), self.steps.test, endless=False
        )
        callbacks, given = self._callbacks(None, 1, data.steps_per_epoch)
        return {"metrics": self._loop(data, callbacks, given).evaluate(data)}
