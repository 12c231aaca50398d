"""Data factories, `f(ctx) -> tf.data.Dataset`: each rank brings its own batches, of any size and
number.

Nothing about them can be computed, so before each step the ranks agree, in one small reduction, on
whether all have a batch and how many rows it has in all. Ranks that run out at different steps end
together, with the counts in the error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import tensorflow as tf

from raytf.errors import DataError
from raytf.worker.callbacks import Agreement
from raytf.worker.feeding import Compiled, Execution
from raytf.worker.links import Links
from raytf.worker.phases import Phases

__all__ = ["FactoryExecutions"]


class FactoryExecutions:
    """Executions over what each rank's factory gives, one step per call.

    Args:
        dataset: `dataset(epoch)`; a fresh dataset of this rank's batches.
        step: `step(data, share)`.
        agreement: to count over ranks.
        links: this rank's seat.
        phases: told when a batch is waited for.
        fetch: see `feeding.Executor`.
        left_out: (epoch, step) of batches that are read and left out.
    """

    def __init__(
        self,
        dataset: Callable[[int], tf.data.Dataset],
        step: Callable[[Any, Any], Any],
        agreement: Agreement,
        links: Links,
        phases: Phases | None = None,
        fetch: Callable[[Callable[[], Any]], Any] = lambda get: get(),
        left_out: Collection[tuple[int, int]] = (),
    ) -> None:
        self._dataset = dataset
        self._agreement = agreement
        self._links = links
        self.steps_per_epoch: int | None = None
        self._phases = phases or Phases()
        self._left_out = frozenset(left_out)

        def one(batch: Any, share: Any) -> None:
            self._phases.enter("compile")  # which runs while it is traced, and only then
            step(fetch(lambda: batch), share)

        self._step = Compiled(one, reduce_retracing=True)

    def epoch(self, epoch: int, first: int) -> Iterator[Execution]:
        """Executions until every rank's dataset has ended.

        A factory cannot seek: the first batches of a resumed epoch are read and left out, and are
        those of the first time only if the dataset gives the same each time.

        Raises:
            DataError: some ranks ran out while others had batches left; raised on all ranks at the
                same step.
        """
        number = first
        for batch in self._agreed_batches(epoch, first):
            execution = batch(number)
            if (epoch, number) in self._left_out:
                execution = replace(execution, run=lambda: None, is_left_out=True)
            yield execution
            number += 1
        self.steps_per_epoch = number

    def trace(self) -> None:
        for batch in self._dataset(0).take(1):
            packed = batch if isinstance(batch, tuple) else (batch,)
            self._step.trace(packed, tf.constant(1.0, tf.float32))

    def _agreed_batches(self, epoch: int, first: int) -> Iterator[Callable[[int], Execution]]:
        steps = first
        for batch in self._with_end(self._dataset(epoch).skip(first)):
            rows = 0 if batch is None else int(tf.nest.flatten(batch)[0].shape[0])
            have = [0.0] * self._links.num_workers
            have[self._links.rank] = 0.0 if batch is None else 1.0
            empty = float(batch is not None and rows == 0)
            total, empties, *having = self._agreement.sum([float(rows), empty, *have]).tolist()
            if empties:
                raise DataError(
                    f"the data factory gave a batch without rows in epoch {epoch} at step {steps}. "
                    "Filter empty batches out of the dataset.",
                    epoch=epoch,
                    step=steps,
                )
            if not any(having):
                self._check_not_empty(steps, epoch)
                return
            if not all(having):
                raise self._uneven(epoch, steps, having)
            steps += 1
            yield self._execution(batch, rows, int(total))

    def _with_end(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        batches = iter(dataset)
        while True:
            with self._phases.during("data"):
                batch = next(batches, None)
            yield batch
            if batch is None:
                return

    def _execution(self, batch: Any, rows: int, total: int) -> Callable[[int], Execution]:
        share = tf.constant(rows / total, tf.float32)
        packed = batch if isinstance(batch, tuple) else (batch,)
        return lambda number: Execution(number, number, total, lambda: self._step(packed, share))

    def _check_not_empty(self, steps: int, epoch: int) -> None:
        if steps == 0:
            raise DataError(f"the data factory gave no batch for epoch {epoch} on any rank.")

    def _uneven(self, epoch: int, steps: int, having: list[float]) -> DataError:
        ended = [rank for rank, has in enumerate(having) if not has]
        more = [rank for rank, has in enumerate(having) if has]
        return DataError(
            f"the data factory gave ranks different numbers of batches: in epoch {epoch}, rank(s) "
            f"{', '.join(map(str, ended))} had {steps}, rank(s) {', '.join(map(str, more))} at "
            f"least {steps + 1}. All ranks stopped after step {steps}. Cut all to the same number "
            "(`dataset.take(n)`), or use a source, whose batches raytf divides itself.",
            epoch=epoch,
            step=steps,
            ranks=ended,
        )
