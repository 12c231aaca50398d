"""Ray's controller with raytf's settings. The only place that changes how Ray Train itself runs.

Start-up is mostly processes that each import `ray.train` (over 1 s of CPU); on a small machine they
stand in each other's way. Stock Ray Train starts eight for two workers; here it is five, and
workers import TensorFlow from their first moment on. Everything was read in Ray 2.60,
`ray.train.v2._internal`.
"""

from __future__ import annotations

from typing import Any

import ray._private.worker as ray_worker
from ray.train.v2._internal.constants import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
)
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

from raytf.cluster.backend import start_imports
from raytf.cluster.local import environment

__all__ = ["KerasWorker", "LegacyKerasWorker", "QuietScalingPolicy", "RunController"]

# Ray's default of 2 s is what a failure, and the end of a run, then takes to be seen
_POLL_S = "0.2"


class RunController(TrainController):
    """TrainController that polls its workers more often and starts fewer processes."""

    def __init__(self, **kwargs: Any) -> None:
        # Ray's controller calls `ray.get` in its event loop and sets an environment variable
        # against the warning about it; a variable would go to the workers as a runtime_env, for
        # which Ray starts fresh processes.
        ray_worker.blocking_get_inside_async_warned = True
        legacy = kwargs["train_run_context"].backend_config.legacy_keras
        self.worker_group_cls = _LegacyKerasGroup if legacy else _KerasGroup
        # For the same reason these are set only while `__init__` reads them.
        with environment(
            **{HEALTH_CHECK_INTERVAL_S_ENV_VAR: _POLL_S, ENABLE_PREEMPTION_WATCHER_ENV_VAR: "0"}
        ):
            super().__init__(**kwargs)


class KerasWorker(RayTrainWorker):
    """Worker that imports TensorFlow and Keras 3 while Ray still seats it."""

    def __init__(self) -> None:
        super().__init__()
        start_imports(legacy_keras=False)


class LegacyKerasWorker(RayTrainWorker):
    """Worker that imports TensorFlow and tf_keras while Ray still seats it."""

    def __init__(self) -> None:
        super().__init__()
        start_imports(legacy_keras=True)


class _KerasGroup(WorkerGroup):
    _worker_cls = KerasWorker


class _LegacyKerasGroup(WorkerGroup):
    _worker_cls = LegacyKerasWorker


class QuietScalingPolicy(FixedScalingPolicy):
    """Fixed size, for clusters without autoscaler: no resource requests, so no coordinator actor.

    The placement group alone asks for the resources; the coordinator only tells an autoscaler of
    them.
    """

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Nobody is there to be asked for nodes."""

    def _maybe_send_resource_request(self) -> None:
        """Nobody is there to be asked for nodes."""
