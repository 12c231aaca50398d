"""The training loop: epochs, executions, callbacks, validation, in `model.fit`'s order with
`model.fit`'s arguments.

Every rank runs this loop with the same logs. What a step is belongs to `step`, which batches come
to `feeding`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raytf.worker.callbacks import Agreement
from raytf.worker.feeding import Execution, Executions

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
    progress: Callable[[dict[str, Any]], None] | None = None
    clock: Callable[[], float] = time.monotonic
    total_step: int = 0
    _shown: float = float("-inf")

    def announce(self, epochs: int, global_batch_size: int) -> None:
        """Tells the driver what is coming."""
        self._tell(
            kind="start",
            epochs=epochs,
            steps_per_epoch=self.training.steps_per_epoch,
            global_batch_size=global_batch_size,
        )

    def fit(self, epochs: int, initial_epoch: int, validation_freq: int) -> dict[str, Any]:
        """Trains from `initial_epoch` to `epochs` (exclusive); returns the last epoch's logs."""
        logs: dict[str, Any] = {}
        self.model.stop_training = False
        self.callbacks.on_train_begin()
        for epoch in range(initial_epoch, epochs):
            began = self.clock()
            self.model.reset_metrics()
            self.callbacks.on_epoch_begin(epoch)
            self._agree()
            steps, rows = 0, 0
            for execution in self.training.epoch(epoch):
                if self.batch_hooks:
                    self.callbacks.on_train_batch_begin(execution.first)
                self._run(execution)
                steps, rows = execution.last + 1, rows + execution.rows
                self.total_step += execution.last - execution.first + 1
                if self.batch_hooks:
                    self.callbacks.on_train_batch_end(execution.last, self.read_logs("train"))
                    self._agree()
                self._show(epoch, steps, rows, began)
                if self.model.stop_training:
                    break
            logs = self.read_logs("train")
            seconds = self.clock() - began
            if self.validation is not None and (epoch + 1) % validation_freq == 0:
                logs.update({f"val_{k}": v for k, v in self.evaluate(self.validation).items()})
                self._tell(kind="phase", phase="training")
            self.callbacks.on_epoch_end(epoch, dict(logs))
            self._agree()
            self._tell(kind="epoch", epoch=epoch, logs=logs, seconds=seconds, rows=rows)
            if self.model.stop_training:
                break
        self.finish()
        self.callbacks.on_train_end(dict(logs))
        return logs

    def evaluate(self, data: Executions) -> dict[str, Any]:
        """Metrics over a whole data set, each row counted once."""
        self._tell(kind="phase", phase="validating")
        self.model.stop_evaluating = False
        self.callbacks.on_test_begin()
        self.model.reset_metrics()
        for execution in data.epoch(0):
            if self.batch_hooks:
                self.callbacks.on_test_batch_begin(execution.first)
            self._run(execution)
            if self.batch_hooks:
                self.callbacks.on_test_batch_end(execution.last, self.read_logs("test"))
                if self.agreement.chief([float(bool(self.model.stop_evaluating))])[0]:
                    break
        logs = self.read_logs("test")
        self.callbacks.on_test_end(dict(logs))
        return logs

    def _run(self, execution: Execution) -> None:
        try:
            execution.run()
        except Exception as error:
            error.raytf_step = self.total_step  # type: ignore[attr-defined]  # for the report of it
            raise

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

    def _show(self, epoch: int, steps: int, rows: int, began: float) -> None:
        now = self.clock()
        if self.progress is None or now - self._shown < _PROGRESS_S:
            return
        self._shown = now
        rate = rows / max(now - began, 1e-9)
        self._tell(
            kind="step",
            epoch=epoch,
            step=steps - 1,
            total_step=self.total_step,
            logs=self.peek_logs("train"),
            examples_per_s=rate,
        )

    def _tell(self, **record: Any) -> None:
        if self.progress is not None:
            self.progress({**record, "time": time.time()})
