"""Which Keras trains: one explicit choice, behind one small contract with two implementations."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from raytf.config import TrainSpec
from raytf.errors import ConfigError
from raytf.worker.links import Links
from raytf.worker.state import Cell

__all__ = ["Engine", "KerasEngine", "engine_for"]


class Engine(Protocol):
    """What the session needs of a Keras."""

    keras: Any
    saves_alone: bool  # whether one rank can save the model without the others

    def build(self, spec: TrainSpec, links: Links, strategy: Any, element_spec: Any) -> Any:
        """The compiled model with all its state, on this rank."""
        ...

    def build_for_inference(self, spec: TrainSpec, element_spec: Any) -> Any:
        """The model with its weights alone, outside any strategy."""
        ...

    def steps(self, model: Any, strategy: Any, rank: int, spec: TrainSpec) -> Any:
        """The model's training and evaluation steps (`train`, `test`, `logs`, `peek`, `counter`,
        `reducer`).
        """
        ...

    def needs_trace(self, model: Any) -> bool:
        """Whether part of the model's state exists only once a step has been traced."""
        ...

    def cells(self, model: Any) -> list[Cell]:
        """Every variable of the model as a checkpoint names it."""
        ...

    def described(self, model: Any) -> dict[str, Any]:
        """What a checkpoint says of the model besides its variables, as JSON: `config` or
        `config_error`.
        """
        ...

    def read_learning_rate(self, model: Any) -> list[float]:
        """The learning rate if a callback could set it, else nothing."""
        ...

    def set_learning_rate(self, model: Any, values: list[float]) -> None:
        """Sets what `read_learning_rate` gave on rank 0."""
        ...

    def steps_per_execution(self, model: Any) -> int:
        """As compiled."""
        ...

    def finish(self, model: Any) -> None:
        """What `model.fit` does at its very end (averaged weights)."""
        ...

    def models(self, model: Any) -> list[Any]:
        """The model and the models in it."""
        ...

    def host_model(self, model: Any) -> Any:
        """The model for rank 0 to save alone; called on all ranks."""
        ...


class KerasEngine:
    """Keras 3, mended for several workers."""

    saves_alone = True

    def __init__(self) -> None:
        import keras

        from raytf.worker import keras_compat

        keras_compat.mend()
        self.keras = keras
        self._compat = keras_compat

    def build(self, spec: TrainSpec, links: Links, strategy: Any, element_spec: Any) -> Any:
        from raytf.worker.model import build

        return build(
            spec.build_model,
            spec.config,
            seed=spec.seed,
            rank=links.rank,
            strategy=strategy,
            element_spec=element_spec,
            compare=links.compare,
        )

    def build_for_inference(self, spec: TrainSpec, element_spec: Any) -> Any:
        from raytf.worker.model import build_for_inference

        return build_for_inference(spec.build_model, spec.config, seed=spec.seed, x=element_spec[0])

    def steps(self, model: Any, strategy: Any, rank: int, spec: TrainSpec) -> Any:
        from raytf.worker.step import Steps

        return Steps(model, strategy, rank, spec.communication.bytes_per_pack)

    def needs_trace(self, model: Any) -> bool:
        return self._compat.has_unbuilt_optimizers(model)

    def cells(self, model: Any) -> list[Cell]:
        frozen = {id(v) for v in model.weights if not v.trainable}
        return [
            Cell(name, variable._value, stable=id(variable) in frozen)
            for name, variable in self._compat.named_variables(model).items()
        ]

    def described(self, model: Any) -> dict[str, Any]:
        return self._compat.serialized(model)

    def read_learning_rate(self, model: Any) -> list[float]:
        rate = self._compat.settable_learning_rate(model.optimizer)
        return [] if rate is None else [float(rate.numpy())]

    def set_learning_rate(self, model: Any, values: list[float]) -> None:
        self._compat.settable_learning_rate(model.optimizer).assign(values[0])

    def steps_per_execution(self, model: Any) -> int:
        return int(model.steps_per_execution)

    def finish(self, model: Any) -> None:
        model.optimizer.finalize_variable_values(model.trainable_weights)

    def models(self, model: Any) -> list[Any]:
        return self._compat.models(model)

    def host_model(self, model: Any) -> Any:
        return model  # its variables are local


def engine_for(legacy_keras: bool) -> Engine:
    """Makes the choice for this process, in `tf.keras` too.

    Raises:
        ConfigError: `tf.keras` already stands for the other Keras here.
    """
    wanted = "1" if legacy_keras else "0"
    set_before = os.environ.get("TF_USE_LEGACY_KERAS")
    os.environ["TF_USE_LEGACY_KERAS"] = wanted
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        # tf.keras decides when it is first looked at; look now, while the environment says what is
        # wanted.
        is_legacy = tensorflow.keras.__name__.startswith("tf_keras") or (
            getattr(tensorflow.keras, "__version__", "3").startswith("2.")
        )
        if is_legacy != legacy_keras:
            raise ConfigError(
                f"legacy_keras={legacy_keras}, but tf.keras is already "
                f"{'tf_keras' if is_legacy else 'Keras 3'} in this process (TF_USE_LEGACY_KERAS "
                f"was {set_before!r}). Use tf.keras only after raytf.fit has begun, or set "
                f"legacy_keras={is_legacy}."
            )
    if legacy_keras:
        from raytf.worker.legacy import LegacyEngine

        return LegacyEngine()
    return KerasEngine()
