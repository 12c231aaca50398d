"""What files of Keras and TensorFlow hold, as names and arrays: `.keras`, SavedModel, TensorFlow
checkpoint.

Owns the reading, in models of its own outside any strategy. What becomes of it is `foreign`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zipfile import BadZipFile

import numpy as np
import tensorflow as tf

from raytf.config import TrainSpec
from raytf.errors import ConfigError
from raytf.worker.links import Origin
from raytf.worker.pipeline import count_parameters

__all__ = ["SEEDS", "Found", "Named", "name_of", "rate_variable", "read_checkpoint", "read_keras"]
__all__ += ["read_saved_model", "without_rate"]

logger = logging.getLogger("raytf")

Named = list[tuple[str, np.ndarray]]
SEEDS = "seed_generator_state"  # how the names of Keras's seed states end; they are not taken
_MODEL_NAMES = ("model", "net", "network")  # of the model in a tf.train.Checkpoint
_OPTIMIZER_NAMES = ("optimizer", "opt")
# What the two Keras raise when a file, or a class in it, is not what they can load.
_CANNOT = (AttributeError, BadZipFile, ImportError, KeyError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class Found:
    """What a file holds.

    Attributes:
        weights: path and value, in the order of `model.weights`.
        optimizer: class, variables but the learning rate in their order; None: it holds none.
        learning_rate: the file's, where it is a number.
    """

    weights: Named
    optimizer: tuple[str, Named] | None = None
    learning_rate: float | None = None


def read_keras(path: str, origin: Origin, model: Any, spec: TrainSpec, keras: Any) -> Found:
    """A `.keras` file; arguments and errors of `foreign.load_foreign`, `path` is local."""
    try:
        loaded = keras.models.load_model(path)
    except _CANNOT as error:
        # Own classes need not be registered here: build_model knows them.
        logger.debug("%s is read by way of build_model", origin.url, exc_info=True)
        loaded = _fresh(model, spec, keras)
        try:
            loaded.load_weights(path)
        except _CANNOT as second:
            raise ConfigError(
                f"{origin.url} can neither be loaded as a model ({error}) nor into the one of "
                f"build_model ({second}).",
                path=origin.url,
            ) from second
    return _of_model(loaded)


def read_saved_model(path: str, origin: Origin, model: Any, spec: TrainSpec, keras: Any) -> Found:
    """A SavedModel directory: its variables, and of tf_keras's own for tf_keras the optimizer."""
    # tf_keras reads its own SavedModels whole; Keras 3 none, so that only variables are left.
    if _is_legacy(keras) and os.path.exists(os.path.join(path, "keras_metadata.pb")):
        return _read_legacy(path, origin, keras)
    try:
        loaded = tf.saved_model.load(path)
    except (OSError, ValueError, KeyError, tf.errors.OpError) as error:
        raise ConfigError(
            f"TensorFlow cannot load the SavedModel {origin.url}: {error}", path=origin.url
        ) from error
    variables = getattr(loaded, "variables", None)
    if not variables:
        raise ConfigError(
            f"The SavedModel {origin.url} does not list its variables, so their order is unknown. "
            "Export it with keras (model.export) or save a .keras file.",
            path=origin.url,
        )
    return Found(
        [(name_of(v), np.asarray(v.numpy())) for v in variables if not name_of(v).endswith(SEEDS)]
    )


def _read_legacy(path: str, origin: Origin, keras: Any) -> Found:
    try:
        loaded = keras.models.load_model(path)
    except _CANNOT as error:
        raise ConfigError(
            f"tf_keras cannot load the SavedModel {origin.url}: {error}", path=origin.url
        ) from error
    optimizer = getattr(loaded, "optimizer", None)
    if optimizer is not None:
        # tf_keras brings back the optimizer's steps and leaves its slots in the file.
        optimizer.build(loaded.trainable_variables)
        slots = without_rate(optimizer)
        prefix = os.path.join(path, "variables", "variables")
        there = _restored(slots, tf.train.Checkpoint(optimizer=optimizer), prefix)
        if len(there) < len(slots):
            return Found(_of_model(loaded).weights)
    return _of_model(loaded)


def read_checkpoint(prefix: str, origin: Origin, model: Any, spec: TrainSpec, keras: Any) -> Found:
    """A `tf.train.Checkpoint`, restored into another model of `build_model`; `prefix` is local."""
    keys = [name for name, _ in tf.train.list_variables(prefix)]
    roots = {key.split("/")[0] for key in keys}
    at = next((name for name in _MODEL_NAMES if name in roots), None)
    at_optimizer = next((name for name in _OPTIMIZER_NAMES if name in roots), None)
    fresh = _fresh(model, spec, keras)
    objects: dict[str, Any] = {"root": fresh} if at is None else {at: fresh}
    if at is not None and at_optimizer is not None:
        objects[at_optimizer] = fresh.optimizer
    weights = [w for w in fresh.weights if not name_of(w).endswith(SEEDS)]
    slots = without_rate(fresh.optimizer)
    rate = rate_variable(fresh.optimizer)
    every = [*weights, *slots, *([] if rate is None else [rate])]
    try:
        there = _restored(every, tf.train.Checkpoint(**objects), prefix)
    except (ValueError, tf.errors.OpError) as error:
        raise ConfigError(
            f"{origin.url} does not fit build_model's model: {error}", path=origin.url
        ) from error

    def values(variables: Sequence[Any]) -> Named:
        return [(name_of(v), there[id(v)]) for v in variables if id(v) in there]

    state = values(slots)
    return Found(
        values(weights),
        (type(fresh.optimizer).__name__, state) if state else None,
        None if rate is None or id(rate) not in there else float(there[id(rate)]),
    )


def _restored(variables: Sequence[Any], checkpoint: Any, prefix: str) -> dict[int, np.ndarray]:
    """The values that a TensorFlow checkpoint has for these variables, by `id`.

    TensorFlow does not say which it has, and skips the others in silence. What comes out the same
    over zeros and over ones was in it.
    """
    results: list[list[np.ndarray]] = []
    for fill in (np.zeros, np.ones):
        for variable in variables:
            variable.assign(fill(tuple(variable.shape), variable.numpy().dtype))
        checkpoint.restore(prefix).expect_partial()
        results.append([np.array(v.numpy()) for v in variables])
    return {
        id(variable): zeros
        for variable, zeros, ones in zip(variables, *results, strict=True)
        if zeros.tobytes() == ones.tobytes()
    }


def _of_model(loaded: Any) -> Found:
    weights = [
        (name_of(w), np.array(w.numpy())) for w in loaded.weights if not name_of(w).endswith(SEEDS)
    ]
    optimizer = getattr(loaded, "optimizer", None)
    if optimizer is None or not getattr(optimizer, "built", True):
        return Found(weights)
    state = [(name_of(v), np.array(v.numpy())) for v in without_rate(optimizer)]
    rate = rate_variable(optimizer)
    return Found(
        weights,
        (type(optimizer).__name__, state),
        None if rate is None else float(rate.numpy()),
    )


def _fresh(model: Any, spec: TrainSpec, keras: Any) -> Any:
    """Another model of `build_model`, with weights and slots, named as the first."""
    if _is_legacy(keras):
        keras.backend.reset_uids()
    else:
        from raytf.worker import keras_compat

        keras_compat.reset_names()
    build = spec.build_model
    fresh = build(dict(spec.config)) if count_parameters(build) else build()
    if not fresh.built and not _is_legacy(keras):
        fresh.build_from_config(model.get_build_config() or {})
        fresh.built = bool(fresh.weights)  # a model without build() of its own does not say so
    if not fresh.weights:
        raise ConfigError(
            "The file can only be read into a model that has its weights when build_model returns "
            "it. Give it an input shape (keras.Input) or call model.build(...) in build_model."
        )
    if not getattr(fresh.optimizer, "built", False):
        fresh.optimizer.build(fresh.trainable_variables)
    return fresh


def _is_legacy(keras: Any) -> bool:
    return keras.__name__.startswith("tf_keras")


def name_of(variable: Any) -> str:
    """Keras 3's path, or the name without TensorFlow's number."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def rate_variable(optimizer: Any) -> Any:
    """The variable behind the learning rate, None if a schedule decides; of either Keras."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    rate = getattr(inner, "_learning_rate", None)
    return rate if hasattr(rate, "assign") else None


def without_rate(optimizer: Any) -> list[Any]:
    """An optimizer's variables but the learning rate, in their order."""
    rate = rate_variable(optimizer)
    return [variable for variable in optimizer.variables if variable is not rate]
