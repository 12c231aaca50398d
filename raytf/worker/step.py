"""One step on one rank: forward, one round of reductions, one write. All or nothing.

Owns what a step changes and how it is made equal on all ranks. Does not know where batches come
from (`pipeline`) or what happens between steps (`loop`).

A step is traced in a `StepScope`: Keras's own `train_step` runs and nothing changes. Then
everything that ranks must agree on (gradients, metric increments, moving statistics, logged
numbers) is summed over ranks in one round, and only when all sums have arrived are variables
written, each with the same value everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.errors import ConfigError
from raytf.worker import keras_compat
from raytf.worker.health import Health, Poison, is_loss
from raytf.worker.marks import Marks
from raytf.worker.reduce import Reducer
from raytf.worker.scope import ReadAfterApply, StepScope

__all__ = ["Steps"]

logger = logging.getLogger("raytf")


# TensorFlow 2.21's random operations that count up inside their kernels.
_STATEFUL_RANDOM = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


class Steps:
    """The compiled step functions of one model on one rank.

    Args:
        model: a compiled, built and localized Keras model.
        strategy: the strategy to reduce with.
        rank: this worker's rank.
        bytes_per_pack: bound of one packed collective.

    Attributes:
        counter: int64 variable, training steps completed; written in the same graph as the state it
            counts.
        marks: where the time of a training step goes.
        health: notes steps with bad numbers; None: nobody asks.
        poison: for drills.
    """

    def __init__(self, model: Any, strategy: Any, rank: int, bytes_per_pack: int) -> None:
        self.model = model
        self.strategy = strategy
        self.rank = rank
        self.reducer = Reducer(strategy, bytes_per_pack)
        self.counter = tf.Variable(tf.constant(0, tf.int64), trainable=False, name="raytf_step")
        self.marks = Marks(self.counter, self.reducer.num_ranks == 1)
        self.health: Health | None = None
        self.poison: Poison | None = None
        # What the model's own train_step or test_step returns besides metrics, from the last step;
        # by kind of step.
        self._raw: dict[tuple[str, str], tf.Variable] = {}
        self._log_names: dict[str, list[str]] = {}
        # Keras's own train_step reads nothing after `apply`; a user's may, and tracing finds out.
        self._defer_apply = True
        self._named: set[str] = set()
        self._scope: Any = None  # of the step being traced

    def logs(self, kind: str) -> dict[str, Any]:
        """Metrics over the steps since their reset, and the last step's other numbers: what Keras
        would log.

        Args:
            kind: "train" or "test".
        """
        metrics = {k: _plain(v) for k, v in self.model.get_metrics_result().items()}
        names = self._log_names.get(kind, [])
        # As in Keras: names that are not just the metrics' mean that the step itself chose what to
        # log.
        if not names or set(names) == set(metrics):
            return metrics
        raw = {n: _plain(self._raw[kind, n]) for n in names if (kind, n) in self._raw}
        return {n: raw[n] if n in raw else metrics[n] for n in names}

    peek = logs  # variables are local: one rank can look without the others

    def train(self, data: Any, share: Any) -> None:
        """One training step on this rank's part of a batch; called inside a tf.function."""
        if self.poison is not None:
            data = self.poison.taken(data)
        try:
            self._run("train", data, share)
        except ReadAfterApply as read:
            logger.warning(
                "train_step of %s reads %s after the optimizer's update; updates are therefore "
                "made at once, and a step of this model is not all or nothing.",
                type(self.model).__name__,
                read,
            )
            self._defer_apply = False
            raise  # and trace anew (feeding.Executor): what was traced so far is of no use

    def test(self, data: Any, share: Any) -> None:
        """One evaluation step on this rank's part of a batch; called inside a tf.function."""
        self._run("test", data, share)

    def _run(self, kind: str, data: Any, share: Any) -> None:
        step = self.model.train_step if kind == "train" else self.model.test_step

        @tf.autograph.experimental.do_not_convert
        def replica(batch: Any) -> None:
            scope = StepScope(
                self.rank,
                self.reducer.num_ranks,
                share,
                self.reducer.sum,
                None if self._defer_apply else self._apply_now,
            )
            self._scope = scope
            with scope:
                logs = self._call(step, batch, scope)
                raw = self._not_metrics(kind, logs, scope)
                if kind == "train" and self.poison is not None and not Poison.takes(batch):
                    self._poison_gradient(self.poison, scope)
            self._commit(kind, scope, raw)

        self.strategy.run(replica, args=(data,))

    @staticmethod
    def _poison_gradient(poison: Poison, scope: Any) -> None:
        for _, _, grads, _ in scope.applies[:1]:
            grads[:1] = [poison.gradient(g) for g in grads[:1]]

    @staticmethod
    def _call(step: Callable[[Any], Any], batch: Any, scope: Any) -> Any:
        try:
            return step(batch)
        except AttributeError as error:
            staged = scope.staged_trainables()
            if "handle" not in str(error) or not staged:
                raise
            raise ConfigError(
                f"the forward pass assigns the trainable weight {staged[0]} and then wants its "
                "gradient (as SpectralNormalization does). A step on several workers writes all "
                "its changes at its end, so this cannot be supported. Compute with the changed "
                "value instead of assigning it."
            ) from error

    def _not_metrics(self, kind: str, logs: Any, scope: Any) -> dict[str, tf.Tensor]:
        """What the step returns besides metrics that it has updated."""
        if not isinstance(logs, dict):
            return {}
        logs = _flat(logs)
        self._log_names[kind] = list(logs)
        known: set[str] = set()
        for metric in self.model.metrics:
            if any(id(v) in scope.updates for v in metric.variables):
                result = metric.result()
                known |= set(result) if isinstance(result, dict) else {metric.name}
        return {k: tf.cast(v, tf.float32) for k, v in logs.items() if k not in known}

    def _commit(self, kind: str, scope: Any, raw: dict[str, tf.Tensor]) -> None:
        reduce = _Round(scope, self.reducer)
        grads = [
            reduce.gradients(g, optimizer, v)
            for optimizer, _, gs, vs in scope.applies
            for g, v in zip(gs, vs, strict=True)
        ]
        news = [reduce.update(variable, value) for variable, value in scope.updates.values()]
        logs = {name: reduce.mean(value) for name, value in raw.items()}
        reduce.close()
        if kind == "train":
            self.marks.worked(reduce.sent)
        with tf.control_dependencies(reduce.arrived):
            for (variable, _), new in zip(scope.updates.values(), news, strict=True):
                variable.assign(new())
            reduced, watched = iter(grads), self._losses(kind, scope, news, logs)
            for optimizer, apply, gs, variables in scope.applies:
                ready = [next(reduced)() for _ in gs]
                if not keras_compat.scales_loss(optimizer):  # which leaves bad steps out by itself
                    named = zip(variables, ready, strict=True)
                    watched += [(f"gradient of {v.path}", g) for v, g in named]
                with keras_compat.one_process():
                    apply(optimizer, ready, variables)
            for name, value in logs.items():
                self._raw_log(kind, name, value().shape).assign(value())
            if kind == "train":
                if self.health is not None:
                    self.health.note(self.counter, watched, reduce.packs)
                self._count(scope, reduce)
        self._name_foreign_variables(scope.graph)
        self._name_hidden_randomness(scope.graph)

    def _losses(
        self, kind: str, scope: Any, news: list[Any], logs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """What has to be finite besides gradients."""
        of_losses = {
            id(variable): metric.name
            for metric in self.model.metrics
            if is_loss(metric.name)
            for variable in metric.variables
        }
        changed = zip(scope.updates.values(), news, strict=True)
        found = [(of_losses[id(v)], new()) for (v, _), new in changed if id(v) in of_losses]
        return found + [(name, value()) for name, value in logs.items() if is_loss(name)]

    def _count(self, scope: Any, reduce: Any) -> None:
        # Not before the step's own work is done: the counter says where a step hangs.
        local = [g for _, _, gs, _ in scope.applies for g in gs if g is not None]
        with tf.control_dependencies(local if reduce.alone else []):
            self.counter.assign_add(1)

    def _apply_now(
        self, optimizer: Any, apply: Any, grads: list[Any], variables: list[Any]
    ) -> None:
        scope = self._scope
        reduce = _Round(scope, self.reducer)
        reduced = [reduce.gradients(g, optimizer, v) for g, v in zip(grads, variables, strict=True)]
        reduce.close()
        with scope.suspended(), tf.control_dependencies(reduce.arrived), keras_compat.one_process():
            apply(optimizer, [g() for g in reduced], variables)

    def _raw_log(self, kind: str, name: str, shape: tf.TensorShape) -> tf.Variable:
        if (kind, name) not in self._raw:
            with tf.init_scope():
                self._raw[kind, name] = tf.Variable(
                    tf.zeros(shape), trainable=False, name=f"raytf_log_{name}"
                )
        return self._raw[kind, name]

    def _name_hidden_randomness(self, graph: Any) -> None:
        for operation in graph.get_operations():
            if operation.type in _STATEFUL_RANDOM and operation.type not in self._named:
                self._named.add(operation.type)
                logger.warning(
                    "The step uses %s (%s): the state of tf.random operations lies in TensorFlow's "
                    "kernels and cannot be saved, so a resumed run draws other numbers. Use "
                    "keras.random with a SeedGenerator, or tf.random.stateless_*.",
                    operation.type,
                    operation.name,
                )

    def _name_foreign_variables(self, graph: Any) -> None:
        known = {id(v._value) for v in keras_compat.all_variables(self.model)}
        own = [self.counter, *self.marks.variables, *self._raw.values()]
        for part in (self.health, self.poison):
            own += [] if part is None else part.variables
        known |= {id(v) for v in own}
        for variable in graph.variables:
            if id(variable) not in known and variable.name not in self._named:
                self._named.add(variable.name)
                logger.warning(
                    "%s is a tf.Variable that Keras does not track. raytf neither keeps it equal "
                    "on all ranks nor saves it. Make it with self.add_weight(...).",
                    variable.name,
                )


def _plain(value: Any) -> Any:
    """A number, or lists of numbers for metrics that have one per class."""
    array = np.asarray(tf.convert_to_tensor(value).numpy())
    return float(array) if array.ndim == 0 else array.tolist()


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


class _Round:
    """What one round of reductions carries. Each method takes a local value and returns a thunk of
    the agreed one.
    """

    def __init__(self, scope: Any, reducer: Reducer) -> None:
        self.scope = scope
        self.reducer = reducer
        self.alone = reducer.num_ranks == 1
        self.arrived: list[tf.Tensor] = []
        self.packs: list[tf.Tensor] = []  # all that has arrived, in few tensors
        self.sent: list[tf.Tensor] = []
        self._sums: list[tf.Tensor] = []
        self._slices: list[tf.IndexedSlices] = []

    def _send(self, value: tf.Tensor) -> Callable[[], tf.Tensor]:
        index = len(self.sent)
        self.sent.append(value)
        return lambda: self._sums[index]

    def close(self) -> None:
        self._sums, packs = self.reducer.sum_all(self.sent)
        self._slices = [self.reducer.sum_slices(slices) for slices in self._slices]
        if not self.alone:
            values = [s.values for s in self._slices]
            self.arrived = [*self._sums, *values]
            self.packs = [p for p in [*packs, *values] if p.dtype.is_floating]

    def _weigh(self, value: tf.Tensor) -> tf.Tensor:
        # A stand-in row may have given NaN; 0 * NaN would spread it.
        return self._mask(value) * tf.cast(self.scope.share, value.dtype)

    def gradients(self, grad: Any, optimizer: Any, variable: Any) -> Callable[[], Any]:
        """The sum over ranks of a gradient, dense or IndexedSlices as it came.

        Keras's optimizers square IndexedSlices entry by entry, repeated rows too, so the entries
        must survive: what one process would have is all ranks' entries one after the other.
        """
        if grad is None or self.alone:
            return lambda: grad
        weigh = self._mask if id(optimizer) in self.scope.weighted else self._weigh
        if not isinstance(grad, tf.IndexedSlices):
            return self._send(weigh(tf.ensure_shape(grad, variable.shape)))
        values, indices = weigh(grad.values), grad.indices
        exact_in_float32 = variable.shape[0] < 2**24
        if self.scope.is_even() and values.shape.is_fully_defined() and exact_in_float32:
            # Equal numbers of entries: each rank fills its own place in a sum, which needs no
            # collective of its own.
            sent = self._send(self._place(values))
            named = self._send(self._place(tf.cast(indices, tf.float32)))
            dtype = indices.dtype
            return lambda: tf.IndexedSlices(sent(), tf.cast(named(), dtype), grad.dense_shape)
        index = len(self._slices)
        self._slices.append(tf.IndexedSlices(values, indices, grad.dense_shape))
        return lambda: self._slices[index]

    def _place(self, value: tf.Tensor) -> tf.Tensor:
        size, ranks, rank = value.shape[0], self.reducer.num_ranks, self.scope.rank
        around = [[size * rank, size * (ranks - 1 - rank)]]
        return tf.pad(value, around + [[0, 0]] * (value.shape.rank - 1))

    def _mask(self, value: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(value) if self.scope.has_no_rows() else value

    def mean(self, value: tf.Tensor) -> Callable[[], tf.Tensor]:
        if self.alone:
            return lambda: value
        return self._send(self._weigh(value))

    def update(self, variable: Any, new: tf.Tensor) -> Callable[[], tf.Tensor]:
        """The value of a variable that the step's forward pass changed, by the rule its
        `aggregation` states.

        Seed states count alike everywhere. "sum" (every metric's default): old + the ranks'
        increments. "mean", and floats without a rule (moving statistics): mean over ranks weighted
        by rows. Integers without a rule, and "only_first_replica": rank 0's.
        """
        if self.alone or id(variable) in self.scope.seeds:
            return lambda: new
        dtype = new.dtype
        if variable.aggregation == "sum":
            old = tf.convert_to_tensor(variable._value)
            total = self._send(self._mask(new - old))
            return lambda: old + total()
        if variable.aggregation in ("mean", "none") and dtype.is_floating:
            return self._send(self._weigh(new))
        wide = tf.cast(new, tf.int64) if dtype == tf.bool else new
        first = self._send(wide if self.scope.rank == 0 else tf.zeros_like(wide))
        return lambda: tf.cast(first(), dtype)
