"""The error tree. Every error says what happened, what was expected and what to do.

All errors survive pickling between processes and need neither TensorFlow nor Ray to be unpickled: a
worker turns whatever TensorFlow raised into one of these before it leaves the process (unpickling a
TensorFlow error would import TensorFlow wherever it lands).
"""

from __future__ import annotations

from typing import Any

__all__ = [
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
]


def _rebuild(cls: type[RaytfError], message: str, context: dict[str, Any]) -> RaytfError:
    return cls(message, **context)


class RaytfError(Exception):
    """Base of all raytf errors; raised itself only for a broken invariant, which is a bug in raytf.

    Args:
        message: what happened, what was expected, what to do.
        **context: plain values for programs (`rank`, `step`, `path`, ...), kept in `self.context`.
    """

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context = context

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.context)


class ConfigError(RaytfError, ValueError):
    """An argument, or a pair of arguments, cannot work.

    Raised on the driver before anything starts where it can be known there; what only the built
    model shows, on the workers before the first step.
    """


class DataError(RaytfError, ValueError):
    """The data cannot be used as given: empty, ragged, of unequal lengths, or ranks ran out at
    different steps.
    """


class ResourceError(RaytfError):
    """The cluster can never meet what was asked for; the message names the missing shape."""


class StartupError(RaytfError):
    """The worker group did not come up within its limit; `context` names the missing ranks and
    addresses.
    """


class ModelMismatchError(RaytfError):
    """`build_model` gave different models on different ranks; the message names the first
    difference.
    """


class TrainingError(RaytfError):
    """User code or TensorFlow raised on a worker.

    `context` holds `rank`, `step`, `error_type` and `traceback` (text) of the first worker that
    failed.
    """


class NotFoundError(RaytfError, LookupError):
    """A run, a model or a checkpoint is not where it was looked for."""


class RunInUseError(ConfigError):
    """Another driver, which is alive, trains under the same name in the same storage."""


class SupersededError(RaytfError):
    """Another attempt has taken the run over; this one must not write to its store any more."""


class StorageError(RaytfError):
    """The store cannot be written, listed or read; `context` names the path, and the rank where
    there is one.
    """


class CheckpointDamagedError(RaytfError):
    """Bytes of a checkpoint are missing, too few or not those that were written; `context` names
    the path.
    """
