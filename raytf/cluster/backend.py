"""What Ray Train does for raytf on each worker before the train function runs.

Owns the one moment before TensorFlow is imported, and that import. Does not pick ports or write
TF_CONFIG: a port is found by the worker itself, late, and agreed on through the run actor
(`rendezvous`), because a port that was free when the group started may be taken when TensorFlow
wants it. Imports `ray.train.backend` only, which loads no TensorFlow: this module is unpickled on
the driver, the controller and every worker.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

# Read in Ray 2.60: `framework` of a BackendConfig is this enum; its module is loaded by `ray.train`
# anyway.
from ray.train.v2._internal.util import TrainingFramework

from raytf.cluster.run_actor import NAMESPACE

__all__ = [
    "GROUP_ENV",
    "RaytfBackend",
    "RaytfBackendConfig",
    "seat",
    "start_imports",
    "wait_for_imports",
    "set_worker_env",
]

# Which set of worker processes this one belongs to; read by `cluster.worker`.
GROUP_ENV = "RAYTF_GROUP"
_import_thread: threading.Thread | None = None


def set_worker_env(*, legacy_keras: bool) -> None:
    """Sets what TensorFlow reads at import or at its first use."""
    # Decides what `tf.keras` means; left alone, that depends on when TensorFlow first looks.
    os.environ["TF_USE_LEGACY_KERAS"] = "1" if legacy_keras else "0"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # A worker holds its port until the server binds it (worker.strategy), and a restarted group
    # need not wait for the kernel to free the old one's ports.
    os.environ.setdefault("TF_GRPC_REUSE_PORT", "true")
    # Its Python logger tells of every strategy and collective; a level the user has set stays.
    tensorflow_log = logging.getLogger("tensorflow")
    if tensorflow_log.level == logging.NOTSET:
        tensorflow_log.setLevel(logging.WARNING)
    # Of another job, or written by Ray's TensorflowTrainer: raytf's workers write their own.
    os.environ.pop("TF_CONFIG", None)


def start_imports(*, legacy_keras: bool) -> None:
    """Runs first of all on each worker: sets the environment, starts TensorFlow's import.

    The import goes on in a thread while Ray does what it still has to do; `wait_for_imports` is the
    other end. A second call does nothing.
    """
    global _import_thread
    if _import_thread is not None:
        return
    set_worker_env(legacy_keras=legacy_keras)
    names = ("tensorflow", "tf_keras" if legacy_keras else "keras")
    _import_thread = threading.Thread(
        target=_import_all, args=(names,), name="raytf-import", daemon=True
    )
    _import_thread.start()


def seat(group: str) -> None:
    """Runs on each worker before the train function: tells the process its group."""
    os.environ[GROUP_ENV] = group


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            # Not lost: the train function imports the same module next and raises this in its own
            # thread, where it is reported. Here it would only kill a helper thread.
            logging.getLogger(__name__).warning("early import of %s failed", name, exc_info=True)
            return


def wait_for_imports() -> None:
    """Returns when the early import is through.

    Two threads must not import TensorFlow's circular modules at once.
    """
    if _import_thread is not None:
        _import_thread.join()


@dataclass
class RaytfBackendConfig(BackendConfig):
    """Backend of raytf's own trainers.

    Args:
        legacy_keras: the one explicit choice of a Keras.
        run_actor: name of the run actor, which is told that a new group begins.
    """

    legacy_keras: bool = False
    run_actor: str | None = None

    @property
    def backend_cls(self) -> type[Backend]:
        return RaytfBackend

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TENSORFLOW

    def to_dict(self) -> dict[str, Any]:
        return {"legacy_keras": self.legacy_keras}


def _placement_group_id(worker_group: Any) -> str:
    # Read in Ray 2.60, `WorkerGroup.get_worker_group_state`.
    state = worker_group.get_worker_group_state()
    return state.placement_group_handle.placement_group.id.hex()


class RaytfBackend(Backend):
    """Runs in Ray's controller. See the module docstring."""

    share_cuda_visible_devices = False  # a worker sees its own GPUs only

    def on_start(self, worker_group: Any, backend_config: RaytfBackendConfig) -> None:
        group = uuid.uuid4().hex
        if backend_config.run_actor is not None:
            actor = ray.get_actor(backend_config.run_actor, namespace=NAMESPACE)
            # Not awaited: the first rank to join an unknown group begins it too, and a second
            # `begin` does nothing.
            actor.begin.remote(group, _placement_group_id(worker_group))
        worker_group.execute(seat, group)
