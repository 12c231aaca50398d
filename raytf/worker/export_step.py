"""A checkpoint as a model that Keras, TensorFlow Serving or anyone else reads.

Owns the way from a step of a store to a compiled model in this process: built from the Keras config
in the manifest, or by the user's `build_model`, then filled by name, the optimizer too. Only
verified bytes are used. No strategy and none of raytf's own changes to Keras are involved.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raytf.checkpoint.manifest import Manifest, TensorEntry
from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import ConfigError
from raytf.worker.export import check_format, is_legacy, publish

__all__ = ["export_step", "load_step"]

logger = logging.getLogger("raytf")

_BUILD = "build_config"
_MAX_LINES = 20  # of a difference that is shown
_WAY_OUT = (
    "Give build_model=, the function the run was trained with (and config=, what it was given)"
)


def export_step(
    store: CheckpointStore,
    step: int,
    path: str,
    format: str = "keras",
    build_model: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Writes one checkpoint as a model.

    Args:
        store: of the run.
        step: a committed one.
        path: local path or fsspec URL: a file (`keras`, `weights`) or a directory (`saved_model`).
        format: "keras" (a `.keras` file, with the optimizer's state), "saved_model" (for
            `tf.saved_model.load` and serving) or "weights" (a `.weights.h5` file).
        build_model: for models that Keras cannot rebuild from their config.
        config: handed to `build_model`.

    Returns:
        Where it was written: `path`, made absolute.

    Raises:
        NotFoundError: the step is not committed.
        CheckpointDamagedError: its bytes are bad and there is no other copy.
        ConfigError: `format` and `path` do not fit, `build_model` is needed, or it gives another
            model; the message shows the difference.
        StorageError: the store cannot be read.
    """
    target = resolve(path)
    check_format(target.path, format)
    publish(load_step(store, step, build_model, config), target, format)
    return target.url


def load_step(
    store: CheckpointStore,
    step: int,
    build_model: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """One checkpoint as a compiled model in this process; arguments and errors of `export_step`."""
    with store.reading(step):
        manifest = store.manifest(step)
        where = store.step_url(step)
        model = _built(manifest, where, build_model, config)
        there = {tensor.name: tensor for tensor in manifest.tensors}
        named = _of_model(model, _named(model))
        if build_model is None:
            named = _renamed(named, manifest.model.get("names") or [], there)
        _check(model, named, there, manifest, where)
        names = _wanted(named, there, manifest)
        arrays = store.read(step, {name for sources in names.values() for name in sources})
    for name, sources in names.items():
        named[name].assign(_joined([arrays[source] for source in sources]))
    return model


def _built(
    manifest: Manifest,
    where: str,
    build_model: Callable[..., Any] | None,
    config: Mapping[str, Any] | None,
) -> Any:
    """A built and compiled model with any weights, named as when it was trained."""
    described = manifest.model
    legacy = bool(described.get("legacy_keras"))
    keras = _keras(legacy, where)
    if build_model is None and not described.get("config"):
        reason = described.get("config_error") or "the checkpoint does not hold it"
        raise ConfigError(
            f"Keras cannot rebuild the model of {where} from its own config ({reason}). "
            f"{_WAY_OUT}.",
            path=where,
        )
    _reset_names(keras, legacy)
    if build_model is None:
        model = _from_config(keras, legacy, described["config"], where)
    else:
        model = _from_function(keras, build_model, config)
    shape = (described.get("config") or {}).get(_BUILD, {}).get("input_shape")
    if not legacy and not model.weights and _is_shape(shape):
        from raytf.worker import keras_compat

        keras_compat.build_layers(model, keras.KerasTensor(shape))
    if not model.weights:
        raise ConfigError(
            f"The model of {where} has no weights before it sees a batch. Use a build_model that "
            "gives it an input shape (keras.Input) or calls model.build(...).",
            path=where,
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)
    return model


def _keras(legacy: bool, where: str) -> Any:
    if not legacy:
        import keras

        return keras
    try:
        import tf_keras
    except ImportError as error:
        raise ConfigError(
            f"{where} was trained with tf_keras, which is not installed here: install "
            "raytf[legacy-keras].",
            path=where,
        ) from error
    return tf_keras


def _reset_names(keras: Any, legacy: bool) -> None:
    """Variables are looked up by name, and automatic names count what this process has built."""
    if legacy:
        keras.backend.reset_uids()
        return
    from raytf.worker import keras_compat

    keras_compat.reset_names()


def _from_config(keras: Any, legacy: bool, config: Any, where: str) -> Any:
    try:
        if legacy:
            model = keras.models.model_from_json(json.dumps(config))
            logger.warning(
                "%s holds tf_keras's config of the layers only: the model is not compiled, and "
                "the optimizer's state is left out. build_model= brings it along.",
                where,
            )
            return model
        return keras.saving.deserialize_keras_object(_built_from_outside(config))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        # Own classes that are not registered here, or lambdas, which Keras does not run unasked.
        raise ConfigError(
            f"Keras cannot rebuild the model of {where} from its own config: {error}\n{_WAY_OUT}, "
            "or register its classes (keras.saving.register_keras_serializable).",
            path=where,
        ) from error


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(size is None or isinstance(size, int) for size in value)


def _built_from_outside(config: Any) -> Any:
    """A Keras config without the shapes of inner layers: Keras would build each of these on its
    own, and their variables would not be named after the model that they are in.
    """

    def stripped(value: Any, is_outer: bool) -> Any:
        if isinstance(value, list):
            return [stripped(item, False) for item in value]
        if not isinstance(value, dict):
            return value
        inner = "class_name" in value and not is_outer
        return {k: stripped(v, False) for k, v in value.items() if not (inner and k == _BUILD)}

    return stripped(config, True)


def _from_function(
    keras: Any, build_model: Callable[..., Any], config: Mapping[str, Any] | None
) -> Any:
    from raytf.worker.pipeline import count_parameters

    model = build_model(dict(config or {})) if count_parameters(build_model) else build_model()
    if not isinstance(model, keras.Model):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise ConfigError(f"build_model returned {kind}. It must return a {keras.__name__}.Model.")
    return model


def _named(model: Any) -> dict[str, Any]:
    """The model's variables by the names they have in a checkpoint."""
    if not is_legacy(model):
        from raytf.worker import keras_compat

        return keras_compat.named_variables(model)
    # As `LegacyEngine.cells` names them, in its order; metrics, which come last, are not exported.
    optimizer = getattr(model, "optimizer", None)
    groups = [model.variables, [] if optimizer is None else optimizer.variables]
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for variable in (v for group in groups for v in group):
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        base, number = variable.name.removesuffix(":0"), 1
        name = base
        while name in named:
            number += 1
            name = f"{base}#{number}"
        named[name] = variable
    return named


def _of_model(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Without metrics, and without Keras's global seed generator, which is this process's."""
    optimizer = getattr(model, "optimizer", None)
    ids = {id(v) for v in (*model.variables, *(() if optimizer is None else optimizer.variables))}
    return {name: variable for name, variable in named.items() if id(variable) in ids}


def _renamed(
    named: Mapping[str, Any], names: Sequence[str], there: Mapping[str, TensorEntry]
) -> Mapping[str, Any]:
    """The variables by the names that the checkpoint has for them, told by their order: what Keras
    rebuilds from a config has its variables in the same order, but inner layers are made in
    another, and their automatic names count that.

    Args:
        named: of the rebuilt model.
        names: of the trained one, in the order of `keras_compat.named_variables`.
        there: tensors of the checkpoint.
    """
    old = names[: len(named)]
    fits = len(old) == len(named) and all(
        name in there and there[name].shape == tuple(variable.shape)
        for name, variable in zip(old, named.values(), strict=True)
    )
    return dict(zip(old, named.values(), strict=True)) if fits else named


def _check(
    model: Any,
    named: Mapping[str, Any],
    there: Mapping[str, TensorEntry],
    manifest: Manifest,
    where: str,
) -> None:
    """Refuses a model that is not the one of the checkpoint.

    Raises:
        ConfigError: names the tensors that differ.
    """
    lines: list[str] = []
    for name in _needed(model, named):
        shape, entry = tuple(named[name].shape), _entry(there, name)
        if entry is None:
            lines.append(f"+ {name} {list(shape)} is in the model only")
        elif entry.shape != shape:
            lines.append(f"~ {name}: model {list(shape)}, checkpoint {list(entry.shape)}")
    # Metrics that a step has not built yet are no difference; they stand below neither name.
    optimizer = getattr(model, "optimizer", None)
    parts = [model.name] if optimizer is None else [model.name, optimizer.name]
    for name in there:
        bare = name.rpartition("@")[0] or name
        if name not in named and bare not in named and bare.split("/")[0] in parts:
            lines.append(f"- {name} {list(there[name].shape)} is in the checkpoint only")
    if not lines:
        return
    more = len(lines) - _MAX_LINES
    shown = [*lines[:_MAX_LINES], f"and {more} more"] if more > 0 else lines
    raise ConfigError(
        f"The model that was built is not the one of {where} ({manifest.model.get('class')}, "
        f"optimizer {manifest.model.get('optimizer')}):\n  "
        + "\n  ".join(shown)
        + f"\n{_WAY_OUT}.",
        path=where,
    )


def _needed(model: Any, named: Mapping[str, Any]) -> list[str]:
    """Names of what must be in the checkpoint: weights and the optimizer's variables."""
    optimizer = getattr(model, "optimizer", None)
    needed: Iterable[Any] = [*model.weights, *([] if optimizer is None else optimizer.variables)]
    ids = {id(variable) for variable in needed}
    return [name for name, variable in named.items() if id(variable) in ids]


def _entry(there: Mapping[str, TensorEntry], name: str) -> TensorEntry | None:
    """A tensor, or rank 0's of one that each rank has for itself."""
    return there.get(name) or there.get(f"{name}@0")


def _wanted(
    named: Mapping[str, Any], there: Mapping[str, TensorEntry], manifest: Manifest
) -> dict[str, list[str]]:
    """For each of the model's variables the tensors it is made of."""
    wanted: dict[str, list[str]] = {}
    for name, variable in named.items():
        own = [f"{name}@{rank}" for rank in range(manifest.world_size)]
        sources = [name] if name in there else [other for other in own if other in there]
        if sources and all(there[s].shape == tuple(variable.shape) for s in sources):
            wanted[name] = sources
    return wanted


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """One value of what ranks had for themselves: tf_keras averages moving statistics over ranks
    when it reads them.
    """
    if len(arrays) == 1 or not np.issubdtype(arrays[0].dtype, np.floating):
        return arrays[0]
    return np.mean(arrays, axis=0, dtype=arrays[0].dtype)
