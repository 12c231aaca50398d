"""The user's model: built twice, checked, compared between ranks, and made local.

First without a strategy, to see what it is and compare it with the other ranks' (inside the
strategy each new variable is a broadcast, and ranks with different models would wait for each other
for ever), then inside `strategy.scope()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from raytf.errors import ConfigError
from raytf.worker import keras_compat
from raytf.worker.pipeline import count_parameters
from raytf.worker.signature import signature

__all__ = ["build", "build_for_inference", "check_model"]


def build(
    build_model: Callable[..., Any],
    config: Mapping[str, Any],
    *,
    seed: int,
    rank: int,
    strategy: Any,
    element_spec: Any,
    compare: Callable[[dict[str, Any]], None],
) -> Any:
    """Builds the model on this rank, inside the strategy, with all state that a step needs,
    localized.

    Args:
        build_model: the user's function.
        config: handed to it.
        seed: of initial weights and of everything Keras draws.
        rank: seat; operations of `tf.random` draw differently on each rank.
        strategy: to build in.
        element_spec: one batch of this rank, as `tf.TensorSpec`s packed for Keras.
        compare: raises if other ranks' signatures differ.

    Raises:
        ConfigError: what `build_model` returns cannot be trained.
    """
    batch = tf.nest.map_structure(_symbolic, element_spec)
    trial = _call(build_model, config, seed)
    check_model(trial)
    _build_state(trial, batch)
    compare(signature(trial, keras.__version__))
    del trial
    with strategy.scope():
        model = _call(build_model, config, seed)
        keras_compat.build_layers(model, batch[0])
    keras_compat.adopt_global_seed_generator()
    keep = keras_compat.localize(model, strategy)
    _build_state(model, batch)
    keep += keras_compat.localize(model, strategy)  # metrics, which a model lists only once built
    object.__setattr__(model, "_raytf_containers", keep)
    # Same initial weights everywhere, but tf.random must not draw the same noise on every rank.
    tf.random.set_seed(seed + rank)
    return model


def build_for_inference(
    build_model: Callable[..., Any], config: Mapping[str, Any], *, seed: int, x: Any
) -> Any:
    """The model on this rank alone, with its weights and nothing else; it need not be compiled.

    Args:
        build_model: the user's function.
        config: handed to it.
        seed: of the weights, which are then replaced.
        x: one batch of inputs, as `tf.TensorSpec`s.
    """
    model = _call(build_model, config, seed)
    if not isinstance(model, keras.Model):
        check_model(model)
    keras_compat.build_layers(model, tf.nest.map_structure(_symbolic, x))
    return model


def _symbolic(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def _call(build_model: Callable[..., Any], config: Mapping[str, Any], seed: int) -> Any:
    keras_compat.reset_names()
    keras.utils.set_random_seed(seed)
    return build_model(dict(config)) if count_parameters(build_model) else build_model()


def _build_state(model: Any, batch: Any) -> None:
    if model.optimizer is not None and not model.optimizer.built:
        keras_compat.build_layers(model, batch[0])
    keras_compat.build_step_state(model, batch)


def check_model(model: Any) -> None:
    """Refuses, by name, what cannot be trained on several workers.

    Raises:
        ConfigError: see the message.
    """
    if model is None:
        raise ConfigError("build_model returned None. It must return a compiled keras.Model.")
    if not isinstance(model, keras.Model):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        hint = "It must return a compiled keras.Model."
        if kind.startswith("tf_keras"):
            hint = "That is a model of tf_keras; build it with `keras`, or set legacy_keras=True."
        raise ConfigError(f"build_model returned {kind}. {hint}")
    if not model.compiled or model.optimizer is None:
        raise ConfigError(
            f"build_model returned {type(model).__name__} {model.name!r} uncompiled. Call "
            "model.compile(optimizer, loss=..., metrics=[...]) in it."
        )
    if model.run_eagerly:
        raise ConfigError("compile(run_eagerly=True) cannot be used: raytf compiles its steps.")
    for layer in keras_compat.layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigError(
                f"layer {layer.name!r} is a stateful RNN: its state belongs to the rows of one "
                "rank and cannot be kept equal on all ranks. Use stateful=False."
            )
