"""Executions: how the steps of an epoch are called, one or several steps per call, full batches and
the smaller last.

A *feed* gives `executions(epoch)`: (first step, last step, run) in order, where `run()` does those
steps on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from raytf.worker.pipeline import Feed
from raytf.worker.scope import TraceAgain

__all__ = ["Execution", "Executor", "Executions", "SourceExecutions", "Compiled"]


_MAX_TRACES = 10  # optimizers that an own train_step may still have to build, and one more


@dataclass(frozen=True)
class Execution:
    """Steps `first` to `last` of an epoch in one call; `rows` of the global batches in it.

    One that is left out only counts them.
    """

    first: int
    last: int
    rows: int
    run: Callable[[], Any]
    is_left_out: bool = False


class Executions(Protocol):
    """The steps of one kind (training, evaluation) over one data set."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None if that is not known beforehand."""
        ...

    def epoch(self, epoch: int, first: int) -> Iterator[Execution]:
        """The executions of an epoch, in order, from step `first` on."""
        ...

    def trace(self) -> None:
        """Traces a step without running it: what it needs exists afterwards (optimizers that an own
        train_step builds).
        """
        ...


class Executor:
    """Compiles a step and runs it n times per call.

    Args:
        step: `step(data, share)`, traced once per shape.
        fetch: calls its argument, which takes a batch; in the graph.
        tracing: called whenever a step is traced.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        fetch: Callable[[Callable[[], Any]], Any] = lambda get: get(),
        tracing: Callable[[], None] = lambda: None,
    ) -> None:
        def one(iterator: Any, share: float) -> None:
            tracing()
            step(fetch(lambda: next(iterator)), share)

        def several(iterator: Any, share: float, number: tf.Tensor) -> None:
            tracing()

            def body(i: tf.Tensor) -> tf.Tensor:
                step(fetch(lambda: next(iterator)), share)
                return i + 1

            # parallel_iterations=1: a step reads what the one before wrote.
            tf.while_loop(lambda i: i < number, body, [tf.constant(0)], parallel_iterations=1)

        self._one = Compiled(one)
        self._several = Compiled(several)

    def trace(self, iterator: Any, share: float) -> None:
        """Traces one step and runs nothing."""
        self._one.trace(iterator, share)

    def __call__(self, iterator: Any, share: float, number: int) -> None:
        if number == 1:
            self._one(iterator, share)
        else:
            self._several(iterator, share, tf.constant(number))


class Compiled:
    """A tf.function that is traced anew when tracing finds that it has to (`TraceAgain`).

    Args:
        function: to compile; autograph leaves it alone, as in Keras.
        **options: of `tf.function`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function = tf.autograph.experimental.do_not_convert(function)
        self._options = options
        self._compiled = tf.function(self._function, **options)

    def __call__(self, *args: Any) -> Any:
        return self._until_traced(lambda compiled: compiled(*args))

    def trace(self, *args: Any) -> None:
        """Traces for these arguments and runs nothing."""
        self._until_traced(lambda compiled: compiled.get_concrete_function(*args))

    def _until_traced(self, use: Callable[[Any], Any]) -> Any:
        for _ in range(_MAX_TRACES):
            try:
                return use(self._compiled)
            except TraceAgain as found:
                # Nothing has run: tracing failed, and a tf.function does not get over that.
                found.prepare()
                self._compiled = tf.function(self._function, **self._options)
        return use(self._compiled)


class SourceExecutions:
    """Executions over a random-access source: where a batch is, is arithmetic; no rank asks another
    for data.

    Args:
        feed: this rank's parts of the batches.
        executor: the compiled step.
        steps_per_execution: steps in one call at most.
        endless: True for training: reading goes on into the next epoch while this one ends. False:
            each epoch starts reading anew (evaluation, where epochs are far apart).
        left_out: (epoch, step) of batches that are never read.
    """

    def __init__(
        self,
        feed: Feed,
        executor: Executor,
        steps_per_execution: int,
        endless: bool,
        left_out: Collection[tuple[int, int]] = (),
    ) -> None:
        self._feed = feed
        self._executor = executor
        self._per_call = steps_per_execution
        self._endless = endless
        self._left_out = frozenset(left_out)
        self._full: Any = None
        self._tail: Any = None
        self._next: tuple[int, int] | None = None  # where the open iterators are: epoch, step
        self.steps_per_epoch: int = feed.plan.steps_per_epoch

    def epoch(self, epoch: int, first: int) -> Iterator[Execution]:
        plan = self._feed.plan
        self._open(epoch, first)
        step = first
        while step < plan.full_steps:
            number = self._number(epoch, step)
            yield self._execution(
                epoch, self._full, self._feed.full.weight, step, number, plan.global_batch_size
            )
            step += number
        if self._feed.tail is not None and step == plan.full_steps:
            tail = self._feed.tail
            yield self._execution(epoch, self._tail, tail.weight, step, 1, plan.tail_rows)
        self._next = (epoch + 1, 0)

    def trace(self) -> None:
        feed = self._feed
        part = feed.full if feed.plan.full_steps else feed.tail
        batches = feed.full_batches() if feed.plan.full_steps else feed.tail_batches()
        if part is not None:
            self._executor.trace(iter(batches), part.weight)

    def _number(self, epoch: int, step: int) -> int:
        """Steps of the next call: a batch that is left out has one of its own."""
        if (epoch, step) in self._left_out:
            return 1
        end = min(step + self._per_call, self._feed.plan.full_steps)
        others = [s for e, s in self._left_out if e == epoch and step < s < end]
        return min([end, *others]) - step

    def _execution(
        self, epoch: int, iterator: Any, share: float, step: int, number: int, batch_rows: int
    ) -> Execution:
        if (epoch, step) in self._left_out:
            return Execution(step, step, batch_rows, lambda: None, is_left_out=True)

        def run() -> None:
            self._executor(iterator, share, number)

        return Execution(step, step + number - 1, batch_rows * number, run)

    def _open(self, epoch: int, first: int) -> None:
        if self._endless and self._next == (epoch, first):
            return
        plan, data_epoch = self._feed.plan, epoch if self._endless else 0
        self._next = None  # until the epoch is through
        self._full = self._tail = None
        if plan.full_steps:
            at = min(first, plan.full_steps)
            self._full = iter(self._feed.full_batches(data_epoch, at, self._left_out))
        if self._feed.tail:
            tail_epoch = data_epoch + (first > plan.full_steps)
            self._tail = iter(self._feed.tail_batches(tail_epoch, self._left_out))
