"""tf_keras (Keras 2) under MultiWorkerMirroredStrategy, as tf.distribute supports it.

tf_keras reduces gradients and metrics itself; reading a metric is a collective of all ranks, so
nothing is read between agreed points. Read in tf_keras 2.21.0. Not equal to one process as Keras 3
under raytf is: `global_clipnorm` clips before the reduction, dropout masks repeat on every rank,
and a step is not all or nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from raytf.config import TrainSpec
from raytf.errors import ConfigError
from raytf.worker.health import Health, Poison, is_loss
from raytf.worker.links import Links
from raytf.worker.marks import Marks
from raytf.worker.pipeline import count_parameters
from raytf.worker.reduce import Reducer
from raytf.worker.signature import signature
from raytf.worker.state import Cell

__all__ = ["LegacyEngine"]

logger = logging.getLogger("raytf")


class LegacyEngine:
    """The `Engine` of tf_keras."""

    saves_alone = False

    def __init__(self) -> None:
        if importlib.util.find_spec("tf_keras") is None:
            raise ConfigError(
                "legacy_keras=True needs the package tf-keras on the workers: install "
                "raytf[legacy-keras]."
            )
        import tf_keras

        self.keras = tf_keras
        # Dropout and its kind then draw from a variable, which a checkpoint can hold; from the
        # kernels of TensorFlow's random operations a state cannot be had.
        tf_keras.backend.experimental.enable_tf_random_generator()

    def build(self, spec: TrainSpec, links: Links, strategy: Any, element_spec: Any) -> Any:
        """The model in the strategy's scope, after its signature was compared."""
        self._spec, self._element_spec, self._strategy = spec, element_spec, strategy
        self._reset()
        trial = self._call(element_spec)
        links.compare(signature(trial, self.keras.__version__))
        self._reset()  # not in the scope: it drops the graph that the scope is entered on
        with strategy.scope():
            model = self._call(element_spec)
            model.optimizer.build(model.trainable_variables)
        return model

    def build_for_inference(self, spec: TrainSpec, element_spec: Any) -> Any:
        """The model outside any strategy."""
        self._spec = spec
        self._reset()
        return self._call(element_spec, compiled=False)

    def _reset(self) -> None:
        self.keras.backend.clear_session()
        self.keras.utils.set_random_seed(self._spec.seed)

    def _call(self, element_spec: Any, compiled: bool = True) -> Any:
        spec = self._spec
        build_model = spec.build_model
        model = build_model(dict(spec.config)) if count_parameters(build_model) else build_model()
        if not isinstance(model, self.keras.Model):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            hint = "It must return a compiled tf_keras.Model."
            if kind.startswith("keras."):
                hint = (
                    "That is a model of Keras 3; build it with `tf.keras` or `tf_keras`, or set "
                    "legacy_keras=False."
                )
            raise ConfigError(f"build_model returned {kind}. {hint}")
        if getattr(model, "run_eagerly", False):
            raise ConfigError("compile(run_eagerly=True) cannot be used: raytf compiles its steps.")
        if compiled and getattr(model, "optimizer", None) is None:
            raise ConfigError(
                "build_model returned an uncompiled model. Call model.compile(...) in it."
            )
        if not model.built or not model.weights:
            model(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), element_spec[0]))
        return model

    def steps(self, model: Any, strategy: Any, rank: int, spec: TrainSpec) -> Any:
        return _Steps(model, strategy, spec.communication.bytes_per_pack)

    def needs_trace(self, model: Any) -> bool:
        return True  # compiled metrics make their variables in the first step

    def cells(self, model: Any) -> list[Cell]:
        """Every variable of the model, this rank's own copy of it.

        Metrics, and BatchNormalization's statistics, differ per rank.
        """
        optimizer, found = model.optimizer, dict[str, Cell]()
        groups = [model.variables, optimizer.variables, *(m.variables for m in model.metrics)]
        frozen = {id(v) for v in model.non_trainable_variables}
        seen: set[int] = set()
        for variable in (v for group in groups for v in group):
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            base, number = variable.name.removesuffix(":0"), 1
            name = base
            while name in found:
                number += 1
                name = f"{base}#{number}"
            mine = self._strategy.experimental_local_results(variable)[0]
            alone = variable.synchronization == tf.VariableSynchronization.ON_READ
            is_sum = variable.aggregation == tf.VariableAggregation.SUM
            found[name] = Cell(
                name,
                mine,
                stable=id(variable) in frozen,
                alone=alone,
                merge="sum" if is_sum else "mean",
            )
        for layer in model._flatten_layers():
            source = getattr(getattr(layer, "_random_generator", None), "_generator", None)
            if source is not None:
                name = f"{layer.name}/random_generator"
                mine = self._strategy.experimental_local_results(source.state)[0]
                found[name] = Cell(name, mine, alone=True)
        return list(found.values())

    def described(self, model: Any) -> dict[str, Any]:
        try:
            return {"config": json.loads(model.to_json())}
        except (NotImplementedError, TypeError, ValueError) as error:
            return {"config": None, "config_error": f"{type(error).__name__}: {error}"[:1000]}

    def read_learning_rate(self, model: Any) -> list[float]:
        rate = model.optimizer.learning_rate
        return [float(rate.numpy())] if isinstance(rate, tf.Variable) else []

    def set_learning_rate(self, model: Any, values: list[float]) -> None:
        model.optimizer.learning_rate = values[0]

    def steps_per_execution(self, model: Any) -> int:
        steps = model._steps_per_execution
        return 1 if steps is None else int(steps.numpy() if hasattr(steps, "numpy") else steps)

    def finish(self, model: Any) -> None:
        model.optimizer.finalize_variable_values(model.trainable_variables)

    def models(self, model: Any) -> list[Any]:
        """The model; parts of it are not looked for."""
        return [model]

    def host_model(self, model: Any) -> Any:
        """A copy without a strategy, which one rank can save; made by all ranks together."""
        weights = model.get_weights()
        copy = self._call(self._element_spec)
        copy.set_weights(weights)
        return copy


class _Steps:
    """Training and evaluation steps by tf_keras's own `train_step` and `test_step`."""

    def __init__(self, model: Any, strategy: Any, bytes_per_pack: int) -> None:
        self.model = model
        self.strategy = strategy
        self.reducer = Reducer(strategy, bytes_per_pack)
        self.counter = tf.Variable(tf.constant(0, tf.int64), trainable=False, name="raytf_step")
        # tf_keras reduces by itself, so where a step begins to wait cannot be marked.
        self.marks = Marks(self.counter, alone=True)
        self.health: Health | None = None  # of this rank's own losses and weights
        self.poison: Poison | None = None

    def train(self, data: Any, share: Any) -> None:
        if self.poison is not None:
            data = self.poison.taken(data)
        logs = self._run(self._watched_step, data, share)
        with tf.control_dependencies([value for value in logs.values() if tf.is_tensor(value)]):
            self.counter.assign_add(1)

    def _watched_step(self, batch: Any) -> Any:
        logs = self.model.train_step(batch)
        if self.health is not None:
            # Gradients cannot be had here; what they were shows in what they changed.
            values = [(f"weight {v.name}", v) for v in self.model.trainable_variables]
            losses = [(n, v) for n, v in logs.items() if is_loss(n)] if logs else []
            read = [(name, tf.convert_to_tensor(value)) for name, value in [*losses, *values]]
            self.health.note(self.counter, read)
        return logs

    def test(self, data: Any, share: Any) -> None:
        self._run(self.model.test_step, data, share)

    def _run(self, step: Any, data: Any, share: Any) -> dict[str, Any]:
        if isinstance(share, float) and share == 0.0:
            raise ConfigError(
                "the last batch has fewer rows than there are workers, which tf_keras cannot "
                "count. Use drop_remainder=True, another global_batch_size, or Keras 3 "
                "(legacy_keras=False)."
            )

        @tf.autograph.experimental.do_not_convert
        def replica(batch: Any) -> Any:
            with _loss_scale(share):
                return step(batch)

        logs = self.strategy.run(replica, args=(data,))
        return logs if isinstance(logs, dict) else {}

    def logs(self, kind: str) -> dict[str, float]:
        """Metrics over all ranks; every rank must ask at the same time."""
        with self.strategy.scope():
            return {k: float(v) for k, v in self.model.get_metrics_result().items()}

    def peek(self, kind: str) -> dict[str, float]:
        """What one rank can say without the others: nothing."""
        return {}


@contextlib.contextmanager
def _loss_scale(share: Any) -> Iterator[None]:
    """While a step is traced, a rank's mean loss counts by its rows instead of by 1 / number of
    ranks.
    """
    from tf_keras.src.utils import losses_utils

    original = losses_utils.scale_loss_for_distribution
    losses_utils.scale_loss_for_distribution = lambda loss: loss * tf.cast(share, loss.dtype)
    try:
        yield
    finally:
        losses_utils.scale_loss_for_distribution = original
