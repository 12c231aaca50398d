"""StepScope: one step on one rank as a function of its state, which changes nothing by itself.

Uses Keras's public StatelessScope only. Which functions of Keras ask for the current scope is
`keras_compat`'s business, what becomes of the collected changes `step`'s.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from raytf.errors import ConfigError

__all__ = ["OptimizerNotBuilt", "ReadAfterApply", "StepScope", "TraceAgain", "current_scope"]

_current = threading.local()  # .scope: the StepScope being traced on this thread


def current_scope() -> StepScope | None:
    """The scope of the step that this thread is tracing, if it is."""
    return getattr(_current, "scope", None)


class TraceAgain(Exception):
    """Tracing a step found that something has to be otherwise; it is to be traced anew after
    `prepare`.
    """

    def prepare(self) -> None:
        """Runs outside the graph and the strategy, before the step is traced again."""


class ReadAfterApply(TraceAgain):
    """A train_step reads a variable after the optimizer was asked to change it: the change cannot
    be put off.
    """


class OptimizerNotBuilt(TraceAgain):
    """A train_step uses an optimizer of its own that has no state yet."""

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        super().__init__(optimizer.name)
        self._build = lambda: optimizer.build(variables)

    def prepare(self) -> None:
        self._build()


class StepScope(keras.StatelessScope):
    """Collects what one step on one rank would change, and answers reads from it.

    Args:
        rank: seat of this worker in the group.
        num_ranks: seats in the group.
        share: this rank's part of the rows of the global batch, a float or a scalar tensor; 0.0 if
            it has none and runs on a stand-in row whose results must not count.
        all_reduce: sums a tensor over ranks.
        apply_now: called for each `optimizer.apply` with (optimizer, apply, gradients, variables),
            where `apply` is Keras's own function; None keeps them for later in `self.applies`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        share: Any,
        all_reduce: Callable[[tf.Tensor], tf.Tensor],
        apply_now: Callable[[Any, Any, list[Any], list[Any]], None] | None = None,
    ) -> None:
        super().__init__(collect_losses=True)
        self.rank = rank
        self.num_ranks = num_ranks
        self.share = share
        self.all_reduce = all_reduce
        self.apply_now = apply_now
        self.graph = tf.compat.v1.get_default_graph()
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.seeds: set[int] = set()
        self.weighted: set[int] = set()  # optimizers whose loss was weighted by share beforehand
        self.applies: list[tuple[Any, Any, list[Any], list[Any]]] = []
        self._applied: set[int] = set()

    def __enter__(self) -> StepScope:
        super().__enter__()
        _current.scope = self
        return self

    def __exit__(self, *args: Any) -> None:
        _current.scope = None
        super().__exit__(*args)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leaves the scope for a moment: assignments are real again."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise ConfigError(
                f"{variable.path} is changed inside a tf.cond or tf.while_loop of the model. On "
                "several workers a step must be able to write all its changes at its end. Compute "
                "the new value inside, and assign it outside (ops.where instead of a branch is the "
                "usual way)."
            )
        self.updates[id(variable)] = (variable, value)
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self._applied:
            raise ReadAfterApply(variable.path)
        value = super().get_current_value(variable)
        # Regularizers ask here directly and need the variable itself when it has not been changed.
        return variable._value if value is None else value

    def apply(self, optimizer: Any, apply: Any, grads: list[Any], variables: list[Any]) -> None:
        """Takes an update of weights that the step asks for.

        Args:
            optimizer: who is to make it.
            apply: Keras's function that makes it, `apply(optimizer, grads, variables)`; not the
                method, whose override in a subclass has run already when this is called.
            grads: one per variable.
            variables: what is to be changed.
        """
        if self.apply_now is not None:
            self.apply_now(optimizer, apply, grads, variables)
            return
        self.applies.append((optimizer, apply, grads, variables))
        self._applied.update(id(v) for v in variables)
        self._applied.update(id(v) for v in optimizer.variables)

    def staged_trainables(self) -> list[str]:
        """Paths of trainable variables that the forward pass itself has assigned."""
        return [v.path for v, _ in self.updates.values() if v.trainable]

    def is_even(self) -> bool:
        """Whether all ranks are known to have the same number of rows."""
        return isinstance(self.share, float) and self.share * self.num_ranks == 1.0

    def has_no_rows(self) -> bool:
        return isinstance(self.share, float) and self.share == 0.0

    def counts_whole(self, value: tf.Tensor) -> tf.Tensor:
        """A quantity that ranks add up, as a local value of which the mean weighted by share is
        taken.
        """
        if self.has_no_rows():
            return tf.zeros_like(value)
        return value / tf.cast(self.share, value.dtype)

    def sum_over_ranks(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of a local quantity over ranks that have rows; no gradient flows through it."""
        value = tf.stop_gradient(value)
        return self.all_reduce(tf.zeros_like(value) if self.has_no_rows() else value)
