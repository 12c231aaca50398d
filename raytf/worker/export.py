"""The trained model on disk: written by rank 0, read by anyone with TensorFlow.

DIR/model-<token>.keras            Keras's own format, if the model can be rebuilt from its config
DIR/weights-<token>.safetensors    every weight by number and path
DIR/final.json                     names the two, and the run's result; written last, so it says the
rest is whole
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from raytf.checkpoint.storage import Storage
from raytf.errors import ConfigError, NotFoundError

__all__ = ["check_format", "export", "is_legacy", "load_model", "publish", "read_weights", "write"]
__all__ += ["write_as"]

logger = logging.getLogger("raytf")

_INDEX = "final.json"
_VERSION = 1


def write(
    model: Any, fs: Any, path: str, result: Mapping[str, Any], inputs: Any = None
) -> dict[str, Any]:
    """Writes a trained model, replacing an older one only when the new one is whole.

    Args:
        model: a built Keras model with local variables.
        fs: fsspec filesystem.
        path: directory.
        result: plain data that goes into the index.
        inputs: a batch of inputs as `tf.TensorSpec`s; with it a model can be built again.

    Returns:
        The index.
    """
    token = secrets.token_hex(4)
    fs.makedirs(path, exist_ok=True)
    fs.invalidate_cache()
    # An object store knows no empty directory: made a line above, and not there.
    before = list(fs.ls(path, detail=False)) if fs.exists(path) else []
    weights = f"weights-{token}.safetensors"
    fs.pipe_file(f"{path}/{weights}", save(_named_weights(model)))
    index = {
        "version": _VERSION,
        "weights": weights,
        "legacy_keras": type(model).__module__.startswith("tf_keras"),
        "result": dict(result),
        "inputs": _described(inputs),
    }
    index |= _write_keras_file(model, fs, path, token)
    fs.pipe_file(f"{path}/{_INDEX}", json.dumps(index, indent=1, default=repr).encode())
    kept = {weights, index.get("model"), _INDEX}
    for entry in before:
        if entry.rstrip("/").rsplit("/", 1)[-1] not in kept:
            try:
                fs.rm(entry, recursive=True)
            except OSError as error:  # the new model is whole; an old file more does no harm
                logger.warning("%s could not be deleted: %s", entry, error)
    return index


def _described(spec: Any) -> Any:
    """A structure of `tf.TensorSpec`s as JSON."""
    if isinstance(spec, dict):
        return {"dict": {key: _described(value) for key, value in spec.items()}}
    if isinstance(spec, tuple | list):
        return {"tuple": [_described(value) for value in spec]}
    if spec is None:
        return None
    return {"shape": spec.shape.as_list(), "dtype": spec.dtype.name}


def _zeros(described: Any) -> Any:
    """A batch of one row of what `_described` says."""
    import tensorflow as tf

    if "dict" in described:
        return {key: _zeros(value) for key, value in described["dict"].items()}
    if "tuple" in described:
        return tuple(_zeros(value) for value in described["tuple"])
    return tf.zeros([1, *described["shape"][1:]], described["dtype"])


def _write_keras_file(model: Any, fs: Any, path: str, token: str) -> dict[str, Any]:
    name = f"model-{token}.keras"
    with tempfile.TemporaryDirectory() as scratch:
        local = os.path.join(scratch, name)
        try:
            model.save(local)
        except (NotImplementedError, TypeError, ValueError) as error:
            # A subclassed model without get_config: weights are enough, with the user's
            # build_model.
            return {"model": None, "model_error": f"{type(error).__name__}: {error}"[:1000]}
        fs.put_file(local, f"{path}/{name}")
    return {"model": name}


def _named_weights(model: Any) -> dict[str, np.ndarray]:
    # The number keeps order and tells equal paths apart.
    named = zip(model.weights, model.get_weights(), strict=True)
    return {
        f"{i:05d}/{getattr(w, 'path', w.name)}": np.ascontiguousarray(value)
        for i, (w, value) in enumerate(named)
    }


def read_index(fs: Any, path: str) -> dict[str, Any]:
    """The index of a trained model.

    Raises:
        NotFoundError: there is none.
    """
    try:
        return json.loads(fs.cat_file(f"{path}/{_INDEX}"))
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{path} holds no trained model ({_INDEX} is missing): the run has not finished.",
            path=path,
        ) from error


def read_weights(model: Any, fs: Any, path: str) -> None:
    """Sets a model's weights to the trained ones.

    Raises:
        ConfigError: the model has other weights; the message names the first difference.
    """
    tensors = load(fs.cat_file(f"{path}/{read_index(fs, path)['weights']}"))
    values = [tensors[name] for name in sorted(tensors)]
    names = [name.split("/", 1)[1] for name in sorted(tensors)]
    mine = model.weights
    for i in range(max(len(mine), len(values))):
        have = (
            f"{getattr(mine[i], 'path', mine[i].name)} {tuple(mine[i].shape)}"
            if i < len(mine)
            else "nothing"
        )
        there = f"{names[i]} {values[i].shape}" if i < len(values) else "nothing"
        if i >= len(mine) or i >= len(values) or tuple(mine[i].shape) != values[i].shape:
            raise ConfigError(
                f"build_model does not give the model that was trained: weight {i} is {have} here "
                f"and {there} in {path}. Use the build_model and config of the run.",
                path=path,
            )
    model.set_weights(values)


def load_model(
    fs: Any,
    path: str,
    build_model: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """The trained model in this process, without a strategy.

    Args:
        fs: fsspec filesystem.
        path: directory that `write` filled.
        build_model: for models that Keras cannot rebuild from their config; built, then filled.
        config: handed to `build_model`.

    Raises:
        NotFoundError: nothing was trained here.
        ConfigError: `build_model` is needed, or gives another model.
    """
    index = read_index(fs, path)
    if build_model is not None:
        from raytf.worker.pipeline import count_parameters

        model = build_model(dict(config or {})) if count_parameters(build_model) else build_model()
        if not model.weights and index.get("inputs"):
            model(_zeros(index["inputs"]))
        if not model.weights:
            raise ConfigError(
                "build_model gives a model without weights yet. Give it an input shape "
                "(keras.Input) or call model.build(...) in it."
            )
        read_weights(model, fs, path)
        return model
    if index["model"] is None:
        raise ConfigError(
            f"Keras cannot rebuild this model from its config ({index['model_error']}). Give "
            "build_model=, the function it was trained with.",
            path=path,
        )
    with tempfile.TemporaryDirectory() as scratch:
        local = os.path.join(scratch, "model.keras")
        fs.get_file(f"{path}/{index['model']}", local)
        if index["legacy_keras"]:
            import tf_keras as keras
        else:
            import keras
        try:
            return keras.models.load_model(local)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Keras cannot rebuild this model: {error}\nGive build_model=, the function it was "
                "trained with, or register its classes (keras.saving.register_keras_serializable).",
                path=path,
            ) from error


def export(
    fs: Any,
    path: str,
    to: str,
    format: str = "keras",
    build_model: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Writes the trained model for use elsewhere.

    Args:
        fs: fsspec filesystem.
        path: directory that `write` filled.
        to: local file (`.keras`, `.weights.h5`) or directory (SavedModel).
        format: "keras", "saved_model" (for `tf.saved_model.load` and serving) or "weights".
        build_model: see `load_model`.
        config: see `load_model`.

    Returns:
        `to`.
    """
    check_format(to, format)
    write_as(load_model(fs, path, build_model, config), to, format)
    return to


_ENDINGS = {"keras": ".keras", "weights": ".weights.h5", "saved_model": ""}


def check_format(to: str, format: str) -> None:
    """Whether a model can be written to a path of this name in this format.

    Raises:
        ConfigError: there is no such format, or its files end otherwise.
    """
    if format not in _ENDINGS:
        raise ConfigError(f"format must be one of {', '.join(_ENDINGS)}. Received: {format!r}.")
    if not to.endswith(_ENDINGS[format]):
        raise ConfigError(
            f'format="{format}" needs a path that ends in {_ENDINGS[format]}. Received: {to!r}.'
        )


def write_as(model: Any, to: str, format: str) -> None:
    """Writes a model to a local file or directory."""
    if format == "keras":
        model.save(to)
    elif format == "weights":
        model.save_weights(to)
    elif is_legacy(model):
        model.export(to)
    else:
        model.export(to, verbose=False)  # its talk would go to standard output


def publish(model: Any, target: Storage, format: str) -> None:
    """Writes a model to any storage. A file is there whole or not at all.

    Args:
        model: of Keras 3 or tf_keras.
        target: file (`keras`, `weights`) or directory (`saved_model`).
        format: see `export`.
    """
    name = posixpath.basename(target.path)
    if target.is_local and format == "saved_model":
        write_as(model, target.path, format)
        return
    parent = os.path.dirname(target.path) if target.is_local else None
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".raytf-") as scratch:
        local = os.path.join(scratch, name)  # TensorFlow writes to local disks
        write_as(model, local, format)
        if parent is not None:
            os.replace(local, target.path)
        elif os.path.isdir(local):
            _put_directory(local, target)
        else:
            _put_file(local, target)


def _put_directory(local: str, target: Storage) -> None:
    for directory, _, names in os.walk(local):
        below = os.path.relpath(directory, local)
        for name in names:
            inner = posixpath.normpath(posixpath.join(below.replace(os.sep, "/"), name))
            _put_file(os.path.join(directory, name), target.join(inner))


def _put_file(local: str, target: Storage) -> None:
    target.fs.makedirs(posixpath.dirname(target.path), exist_ok=True)
    target.fs.put_file(local, target.path)


def is_legacy(model: Any) -> bool:
    """Whether it is a model of tf_keras."""
    legacy = sys.modules.get("tf_keras")  # loaded if it is
    return legacy is not None and isinstance(model, legacy.Model)
