"""The one explicit choice of a Keras, checked on the driver without importing any.

`tf.keras` is decided by `TF_USE_LEGACY_KERAS` at the moment TensorFlow first touches it, which may
be anywhere in a program. raytf sets the variable on its workers from `legacy_keras`; here it makes
sure that nothing in the driver's surroundings says otherwise.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from raytf.config import SUPPORTED_KERAS
from raytf.errors import ConfigError

__all__ = ["check_keras_choice", "check_process"]

_TRUE = ("1", "true")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_keras_choice(
    legacy_keras: bool,
    environ: Mapping[str, str] | None = None,
    version_of: Callable[[str], str | None] = _installed,
) -> None:
    """Checks that the chosen Keras is there and that the environment agrees.

    Args:
        legacy_keras: the choice.
        environ: `os.environ` if None.
        version_of: package name -> installed version or None.

    Raises:
        ConfigError: it is missing, of an unknown version, or contradicted by the environment.
    """
    said = (os.environ if environ is None else environ).get("TF_USE_LEGACY_KERAS")
    if said is not None and (said.lower() in _TRUE) != legacy_keras:
        wanted = "tf_keras" if said.lower() in _TRUE else "Keras 3"
        raise ConfigError(
            f"TF_USE_LEGACY_KERAS={said} in the environment asks for {wanted}, "
            f"legacy_keras={legacy_keras} for {'tf_keras' if legacy_keras else 'Keras 3'}. Unset "
            f"the variable, or pass legacy_keras={not legacy_keras}."
        )
    if legacy_keras:
        if version_of("tf_keras") is None:
            raise ConfigError(
                "legacy_keras=True needs tf_keras, which is not installed: "
                'pip install "raytf[legacy-keras]".'
            )
        return
    found = version_of("keras")
    low, high = SUPPORTED_KERAS
    supported = f">= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    if found is None:
        raise ConfigError(f'Keras is not installed: pip install "keras {supported}".')
    if not low <= _numbers(found) < high:
        raise ConfigError(
            f"Keras {found} is installed; this version of raytf trains with Keras {supported}. "
            "Install one of these, or train with tf_keras: legacy_keras=True."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(
        int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2]
    )


def check_process(legacy_keras: bool, modules: Mapping[str, Any]) -> None:
    """Can this process still be set up for training? For `raytf.fit` in somebody's own loop.

    Args:
        legacy_keras: the choice.
        modules: `sys.modules`; only looked at, so that nothing is imported by asking.

    Raises:
        ConfigError: `tf.keras` has become the other Keras, or TensorFlow's runtime has started.
    """
    decided = _decided(modules)
    if decided is not None and (decided == "tf_keras") != legacy_keras:
        flag = "1" if legacy_keras else "0"
        raise ConfigError(
            f"tf.keras has already been used in this worker process and is {decided}; "
            f"legacy_keras={legacy_keras} wants the other. Ray's own TensorFlow modules use it "
            "when they are loaded, so the choice must be in the workers' environment: RunConfig("
            f'worker_runtime_env={{"env_vars": {{"TF_USE_LEGACY_KERAS": "{flag}"}}}}). '
            f"Or pass legacy_keras={not legacy_keras}."
        )
    # Read in TensorFlow 2.21, `eager.context`: collectives are set up before the runtime or never.
    context = vars(modules.get("tensorflow.python.eager.context", object)).get("_context")
    if getattr(context, "_context_handle", None) is not None:
        raise ConfigError(
            "TensorFlow has already been used in this worker process (a tensor, variable or device "
            "list was made), and its collectives must be set up first. Call raytf.fit before any "
            "other TensorFlow code of the loop, and once per process."
        )


def _decided(modules: Mapping[str, Any]) -> str | None:
    """What `tf.keras` has become in this process; None while it is open."""
    # Read in TensorFlow 2.21: `lazy_loader.KerasLazyLoader` decides at the first use of tf.keras
    # and then puts the package itself in its own place.
    found = vars(modules.get("tensorflow", object)).get("keras")
    if found is None:
        return None
    said = vars(found).get("_tfll_keras_version")
    if said is not None or "_tfll_name" in vars(found):
        return said
    root = str(vars(found).get("__name__", "")).split(".")[0]
    return {"tf_keras": "tf_keras", "keras": "keras_3"}.get(root)
