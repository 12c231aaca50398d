"""Clock reads inside the compiled training step: how long it waits for its batch, and for how long
it works by itself before it waits for the other ranks.

The host cannot see either from outside: fetching, computing and reducing are one call. The counts
are read by another thread while a step is stuck, and say where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from raytf.worker.phases import Inside

__all__ = ["Marks"]


class Marks:
    """Of one rank's training steps.

    Args:
        counter: int64 variable, steps completed; written by a step when its own work is done.
        alone: whether there is no other rank to wait for.
    """

    def __init__(self, counter: tf.Variable, alone: bool) -> None:
        self._counter = counter
        self._alone = alone
        with tf.device("CPU:0"):
            # seconds and number, in one variable each: one write per mark
            self._data = tf.Variable(tf.zeros(2, tf.float64), trainable=False, name="raytf_data")
            self._own = tf.Variable(tf.zeros(2, tf.float64), trainable=False, name="raytf_own")
        self._arrived: Any = None  # when the batch of the step being traced had come
        self.before = 0  # steps of the run that were not called here

    @property
    def variables(self) -> list[tf.Variable]:
        return [self._data, self._own]

    def fetch(self, get: Callable[[], Any]) -> Any:
        """A batch, and a mark when it has come; in the graph."""
        with tf.device("CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            batch = get()
        with tf.device("CPU:0"), tf.control_dependencies(_tensors(batch)):
            self._arrived = tf.timestamp()
            self._data.assign_add(tf.stack([self._arrived - began, 1.0]))
        return batch

    def worked(self, results: Sequence[tf.Tensor]) -> None:
        """A mark when `results`, which the other ranks are waiting for, are there; in the graph."""
        if self._alone or self._arrived is None or not results:
            return
        with tf.device("CPU:0"), tf.control_dependencies(results):
            self._own.assign_add(tf.stack([tf.timestamp() - self._arrived, 1.0]))
        self._arrived = None

    def read(self) -> Inside:
        """What they say now; on any thread."""
        ended = int(self._counter.numpy()) - self.before
        own_s, done = self._own.numpy().tolist()
        data_s, batches = self._data.numpy().tolist()
        return Inside(data_s, int(batches), own_s, int(done), ended)


def _tensors(batch: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(batch, expand_composites=True)
