"""raytf trains TensorFlow/Keras models on a Ray cluster.

Public names are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytf.checkpoint.store import CheckpointStore
    from raytf.config import CommunicationConfig, RecoveryConfig, SaveConfig, WatchConfig
    from raytf.data import ArraySource, ParquetSource, SequenceSource
    from raytf.errors import (
        CheckpointDamagedError,
        ConfigError,
        DataError,
        ModelMismatchError,
        NotFoundError,
        RaytfError,
        ResourceError,
        RunInUseError,
        StartupError,
        StorageError,
        SupersededError,
        TrainingError,
    )
    from raytf.result import RunResult
    from raytf.run import Run, open_run
    from raytf.trainer import KerasTrainer, export, fit

__version__ = "0.1.0"

__all__ = [
    "ArraySource",
    "CheckpointDamagedError",
    "CheckpointStore",
    "CommunicationConfig",
    "ConfigError",
    "DataError",
    "KerasTrainer",
    "ModelMismatchError",
    "NotFoundError",
    "ParquetSource",
    "RaytfError",
    "RecoveryConfig",
    "ResourceError",
    "Run",
    "RunInUseError",
    "RunResult",
    "SaveConfig",
    "SequenceSource",
    "StartupError",
    "StorageError",
    "SupersededError",
    "TrainingError",
    "WatchConfig",
    "__version__",
    "export",
    "fit",
    "open_run",
]

# Where each name lives. Lazy, so that `import raytf` costs milliseconds and loads neither Ray nor
# TensorFlow.
_HOMES = {
    "raytf.checkpoint.store": ("CheckpointStore",),
    "raytf.config": ("CommunicationConfig", "RecoveryConfig", "SaveConfig", "WatchConfig"),
    "raytf.data": ("ArraySource", "ParquetSource", "SequenceSource"),
    "raytf.errors": (
        "CheckpointDamagedError",
        "ConfigError",
        "DataError",
        "ModelMismatchError",
        "NotFoundError",
        "RaytfError",
        "ResourceError",
        "RunInUseError",
        "StartupError",
        "StorageError",
        "SupersededError",
        "TrainingError",
    ),
    "raytf.result": ("RunResult",),
    "raytf.run": ("Run", "open_run"),
    "raytf.trainer": ("KerasTrainer", "export", "fit"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'raytf' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
