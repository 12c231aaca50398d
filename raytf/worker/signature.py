"""What must be equal in the models of all ranks, as plain data; for either Keras."""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

__all__ = ["signature"]


def signature(model: Any, keras_version: str) -> dict[str, Any]:
    """Describes a compiled model: variables, optimizer, versions.

    Args:
        model: of Keras 3 or tf_keras.
        keras_version: of the Keras that made it.
    """
    optimizer = model.optimizer
    return {
        "model": type(model).__name__,
        "variables": [
            {
                "path": getattr(v, "path", v.name),
                "shape": list(v.shape),
                "dtype": getattr(v.dtype, "name", str(v.dtype)),
                "trainable": bool(v.trainable),
            }
            for v in model.variables
        ],
        "optimizer": type(optimizer).__name__,
        "optimizer_config": _config(optimizer),
        "keras": keras_version,
        "tensorflow": tf.__version__,
    }


def _config(optimizer: Any) -> Any:
    try:
        config = optimizer.get_config()
    except (NotImplementedError, TypeError):
        # An own schedule need not have a get_config; its numbers are then not compared.
        return None
    # Of an object without a JSON form only its type: a repr would carry an address.
    return json.loads(json.dumps(config, default=lambda value: type(value).__name__))
