"""The training loop: epochs, executions, callbacks, validation, in `model.fit`'s order with
`model.fit`'s arguments.

Every rank runs this loop with the same logs. What a step is belongs to `step`, which batches come
to `feeding`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from raytf.worker.callbacks import Agreement
from raytf.worker.feeding import Execution, Executions
from raytf.worker.phases import Phases
from raytf.worker.saving import NoSaver, Place, Saver
from raytf.worker.watch import NoWatch, Watch

__all__ = ["Loop"]

_PROGRESS_S = 0.5  # at most this often a record is made for the driver


@dataclass
class Loop:
    """Everything one rank needs to train.

    Attributes:
        model: the Keras model; `stop_training` is Keras's own flag.
        training: executions of the training data.
        validation: executions of the validation data, or None.
        callbacks: a Keras CallbackList.
        read_logs: `("train" | "test") -> dict[str, Any]`; current metrics, read from the device.
        peek_logs: the same as far as one rank can know it alone.
        agreement: settles decisions.
        decisions: `() -> list[float]` and `(list) -> None`: what callbacks decide besides stopping
            (learning rate).
        batch_hooks: whether a callback wants to hear of each execution; if none does, nothing is
            read for it.
        has_callbacks: whether anybody could decide anything, on any rank.
        finish: what fit does to the weights at the end, before `on_train_end` (averaged weights).
        saver: takes the checkpoints.
        watch: raises when the state is not what it should be.
        phases: told what this thread does.
        leave_out: `leave_out(n)` counts n steps whose batch is left out.
        restored: puts back, after `on_train_begin`, what that may have changed.
        at: `at(phase, step)`; a fault drill may strike there.
        during: the same for a while, as a context.
        progress: takes records for the driver; given on rank 0 only.
    """

    model: Any
    training: Executions
    validation: Executions | None
    callbacks: Any
    read_logs: Callable[[str], dict[str, Any]]
    peek_logs: Callable[[str], dict[str, Any]]
    agreement: Agreement
    read_decisions: Callable[[], list[float]]
    take_decisions: Callable[[list[float]], None]
    batch_hooks: bool
    has_callbacks: bool
    finish: Callable[[], None] = lambda: None
    saver: Saver | NoSaver = field(default_factory=NoSaver)
    watch: Watch | NoWatch = field(default_factory=NoWatch)
    phases: Phases = field(default_factory=Phases)
    leave_out: Callable[[int], None] = lambda steps: None
    restored: Callable[[], None] = lambda: None
    at: Callable[[str, int], None] = lambda phase, step: None
    during: Callable[[str, int], AbstractContextManager[None]] = lambda phase, step: nullcontext()
    progress: Callable[[dict[str, Any]], None] | None = None
    clock: Callable[[], float] = time.monotonic
    total_step: int = 0
    _shown: float = float("-inf")
    _last: tuple[int, int] = (0, 0)

    def announce(self, epochs: int, global_batch_size: int) -> None:
        """Tells the driver what is coming."""
        self._tell(
            kind="start",
            epochs=epochs,
            steps_per_epoch=self.training.steps_per_epoch,
            global_batch_size=global_batch_size,
        )

    def fit(self, epochs: int, start: Place, validation_freq: int) -> dict[str, Any]:
        """Trains from `start` to `epochs` (exclusive); returns the last epoch's logs."""
        self.model.stop_training = False
        self._count(start.total_step)
        self._call(self.callbacks.on_train_begin)
        self.restored()
        self.model.stop_training = self.model.stop_training or start.stopped
        self.saver.begin(start)
        place = start
        while place.epoch < epochs and not self.model.stop_training:
            logs = self._epoch(place, validation_freq)
            place = Place(
                epoch=place.epoch + 1,
                total_step=self.total_step,
                stopped=bool(self.model.stop_training),
                logs=logs,
            )
            self.saver.epoch_end(place)
        self.saver.finish(place)
        self.finish()
        self._call(self.callbacks.on_train_end, dict(place.logs))
        self._show(*self._last, 0.0)  # the time since the last epoch's end is told too
        return dict(place.logs)

    def _epoch(self, place: Place, validation_freq: int) -> dict[str, Any]:
        began, epoch = self.clock(), place.epoch
        if not place.is_open:
            self.model.reset_metrics()
            self._call(self.callbacks.on_epoch_begin, epoch)
            self._agree()
        rows, next_step = 0, place.step
        for execution in self.training.epoch(epoch, place.step):
            here = self._place(epoch, execution.first, place.logs)
            self.watch.before_step(here)
            self.saver.before_step(here)
            self._train(execution)
            rows, next_step = rows + execution.rows, execution.last + 1
            if self._is_due(_PROGRESS_S):
                self._show(epoch, next_step, rows / max(self.clock() - began, 1e-9))
            if self.model.stop_training:
                break
        self.watch.epoch_end(self._place(epoch, next_step, place.logs))
        logs = self._logs("train")
        seconds = self.clock() - began
        if self.validation is not None and (epoch + 1) % validation_freq == 0:
            logs.update({f"val_{k}": v for k, v in self.evaluate(self.validation).items()})
            self._tell(kind="phase", phase="training")
        self._call(self.callbacks.on_epoch_end, epoch, dict(logs))
        self._agree()
        self._strike("callback")
        if self._is_due(_PROGRESS_S / 2):  # short epochs need none of their own
            self._show(epoch, next_step, rows / max(seconds, 1e-9))
        told = {"logs": logs, "seconds": seconds, "rows": rows, "total_step": self.total_step}
        self._tell(kind="epoch", epoch=epoch, **told)
        return logs

    def _train(self, execution: Execution) -> None:
        steps = execution.last - execution.first + 1
        if execution.is_left_out:
            self.leave_out(steps)
            self._count(self.total_step + steps)
            return
        self._strike("data")
        if self.batch_hooks:
            self._call(self.callbacks.on_train_batch_begin, execution.first)
        self._run(execution, "step")
        self._count(self.total_step + steps)
        if self.batch_hooks:
            logs = self._logs("train")
            self._call(self.callbacks.on_train_batch_end, execution.last, logs)
            self._agree()
            self._strike("callback")

    def evaluate(self, data: Executions) -> dict[str, Any]:
        """Metrics over a whole data set, each row counted once."""
        self._tell(kind="phase", phase="validating")
        self.model.stop_evaluating = False
        with self.phases.during("validate"):
            self._call(self.callbacks.on_test_begin)
            self.model.reset_metrics()
            for execution in data.epoch(0, 0):
                if self.batch_hooks:
                    self._call(self.callbacks.on_test_batch_begin, execution.first)
                self._run(execution, "validate")
                if self.batch_hooks:
                    self._call(self.callbacks.on_test_batch_end, execution.last, self._logs("test"))
                    if self.agreement.chief([float(bool(self.model.stop_evaluating))])[0]:
                        break
            logs = self._logs("test")
            self._call(self.callbacks.on_test_end, dict(logs))
        return logs

    def _run(self, execution: Execution, phase: str) -> None:
        self.phases.enter(phase)
        try:
            with self.during(phase, self.total_step):
                execution.run()
        except Exception as error:
            error.raytf_step = self.total_step  # type: ignore[attr-defined]  # for the report of it
            raise

    def _call(self, hook: Callable[..., None], *args: Any) -> None:
        with self.phases.during("callback"):
            hook(*args)

    def _logs(self, kind: str) -> dict[str, Any]:
        with self.phases.during("metrics"):
            return self.read_logs(kind)

    def _strike(self, phase: str) -> None:
        with self.phases.during(phase):
            self.at(phase, self.total_step)

    def _count(self, total_step: int) -> None:
        self.total_step = self.phases.step = total_step

    def _place(self, epoch: int, step: int, logs: Mapping[str, Any]) -> Place:
        total = self.total_step
        return Place(epoch=epoch, step=step, total_step=total, is_open=True, logs=logs)

    def _agree(self) -> None:
        """Makes rank 0's decisions everyone's. Without callbacks there is nobody to decide
        anything.
        """
        if not self.has_callbacks:
            return
        mine = [float(bool(self.model.stop_training)), *self.read_decisions()]
        stop, *rest = self.agreement.chief(mine).tolist()
        self.model.stop_training = bool(stop)
        if rest:
            self.take_decisions(rest)

    def _is_due(self, after_s: float) -> bool:
        return self.clock() - self._shown >= after_s

    def _show(self, epoch: int, steps: int, examples_per_s: float) -> None:
        """A record of the step before `steps`, and of where the time since the last one went."""
        if self.progress is None:
            return
        self._shown, self._last = self.clock(), (epoch, steps)
        self._tell(
            kind="step",
            epoch=epoch,
            step=steps - 1,
            total_step=self.total_step,
            logs=self.peek_logs("train"),
            examples_per_s=examples_per_s,
            seconds=self.phases.split(),
        )

    def _tell(self, **record: Any) -> None:
        if self.progress is not None:
            self.progress({**record, "time": time.time()})
