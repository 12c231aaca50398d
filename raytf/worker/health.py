"""Whether a step's numbers are numbers: noted in the step's own graph, read at agreed points only.

Owns what counts (the gradients as all ranks apply them, and losses) and the first step that was
bad. What follows from it is `watch`'s. Also owns the opposite: a batch poisoned on purpose, for
drills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Health", "Poison", "is_loss"]

Named = Sequence[tuple[str, Any]]


def is_loss(name: str) -> bool:
    """Whether a logged number has to be finite. Other metrics may be undefined now and then."""
    return name == "loss" or name.endswith("_loss")


class Health:
    """The first bad step of this rank, in two variables.

    Attributes:
        bad_step: int64, steps completed when the first bad step began; -1: none so far.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.bad_step = tf.Variable(
                tf.constant(-1, tf.int64), trainable=False, name="raytf_bad"
            )
        self._names: list[str] = []
        self._finite: tf.Variable | None = None

    @property
    def variables(self) -> list[tf.Variable]:
        return [self.bad_step, *([] if self._finite is None else [self._finite])]

    def note(self, counter: tf.Variable, values: Named, packs: Sequence[tf.Tensor] = ()) -> None:
        """Notes the step that `counter` names if one of `values` is not finite; in the graph.

        Args:
            counter: steps completed, before this one counts.
            values: what has to be finite, losses first; IndexedSlices too.
            packs: tensors that hold all of `values`, if there are fewer of them.
        """
        found = [(name, tensor) for name, value in values for tensor in _floats(value)]
        if not found:
            return
        finite = self._prepare([name for name, _ in found])
        step = tf.identity(counter)
        # A sum is the cheapest look at a tensor. It can overflow without anything being wrong, so
        # that only the exact look, which hardly ever happens, decides.
        sums = [tf.reduce_sum(_wide(t)) for t in packs or [tensor for _, tensor in found]]
        total = tf.add_n([tf.cast(s, tf.float32) for s in sums])

        def exact() -> tf.Tensor:
            flags = tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for _, tensor in found])
            first = (self.bad_step < 0) & ~tf.reduce_all(flags)
            finite.assign(tf.where(first, flags, finite))
            return tf.where(first, step, self.bad_step)

        @tf.autograph.experimental.do_not_convert
        def look() -> tf.Tensor:
            self.bad_step.assign(exact())
            return tf.constant(False)

        tf.cond(tf.math.is_finite(total), lambda: tf.constant(True), look)

    def _prepare(self, names: list[str]) -> tf.Variable:
        if self._finite is None:
            self._names = names
            with tf.init_scope(), tf.device("CPU:0"):
                self._finite = tf.Variable(tf.ones(len(names), tf.bool), trainable=False)
        return self._finite

    def read(self) -> int:
        """`bad_step`."""
        return int(self.bad_step.numpy())

    def culprits(self) -> list[str]:
        """What was not finite in that step, losses first."""
        flags = [] if self._finite is None else self._finite.numpy().tolist()
        return [name for name, fine in zip(self._names, flags, strict=True) if not fine]


class Poison:
    """Makes the batch of one step not a number.

    Args:
        counter: steps completed.
    """

    def __init__(self, counter: tf.Variable) -> None:
        self._counter = counter
        with tf.device("CPU:0"):
            self._step = tf.Variable(tf.constant(-1, tf.int64), trainable=False)

    @property
    def variables(self) -> list[tf.Variable]:
        return [self._step]

    def next_step(self) -> None:
        """The step that comes next gets it."""
        self._step.assign(self._counter)

    def taken(self, batch: Any) -> Any:
        """The batch, or its poisoned twin; one without any floats stays as it is. In the graph."""
        due = tf.equal(self._counter, self._step)

        def poisoned(tensor: Any) -> Any:
            if not tf.is_tensor(tensor) or not tensor.dtype.is_floating:
                return tensor
            return tf.where(due, tf.constant(float("nan"), tensor.dtype), tensor)

        return tf.nest.map_structure(poisoned, batch)

    @staticmethod
    def takes(batch: Any) -> bool:
        """Whether the batch has floats."""
        return any(t.dtype.is_floating for t in tf.nest.flatten(batch) if tf.is_tensor(t))

    def gradient(self, gradient: Any) -> Any:
        """The same for a gradient, where a batch cannot take it."""
        if isinstance(gradient, tf.IndexedSlices):
            values = self.gradient(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        due = tf.equal(self._counter, self._step)
        return gradient * tf.where(due, tf.constant(float("nan"), gradient.dtype), 1.0)


def _floats(value: Any) -> list[tf.Tensor]:
    if value is None:
        return []
    tensor = value.values if isinstance(value, tf.IndexedSlices) else value
    return [tensor] if tensor.dtype.is_floating else []


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
