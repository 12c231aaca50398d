"""Ray's two questions about failures, put to the run actor: retry or not, and which nodes to avoid.

Everything was read in Ray 2.60, `ray.train.v2._internal`. If the run actor cannot be asked, Ray's
own counting answers.
"""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.failure_handling.failure_policy import FailureDecision
from ray.train.v2._internal.execution.worker_group.poll import _is_preempted_actor
from ray.train.v2.api.config import FailureConfig, ScalingConfig
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from raytf.cluster.run_actor import NAMESPACE

__all__ = ["AskingFailurePolicy", "NodeExclusion", "described"]

NODE_LABEL = "ray.io/node-id"
_TIMEOUT_S = 60.0
_log = logging.getLogger("raytf")


def described(error: TrainingFailedError) -> tuple[dict[int, str], list[int], str | None]:
    """Ray's error as plain data: words on each death, preempted ranks, why the start failed."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", None) or {}
    deaths: dict[int, str] = {}
    for rank, failure in failures.items():
        health = getattr(failure, "health_check_failure", None)
        if health is not None:
            deaths[rank] = str(health).strip()
    preempted = [rank for rank, failure in failures.items() if _is_preempted_actor(failure)]
    is_group = isinstance(error, WorkerGroupError)
    cause = getattr(error, "controller_failure", None)
    startup = None if is_group else str(cause if cause is not None else error)
    return deaths, preempted, startup


class AskingFailurePolicy(DefaultFailurePolicy):
    """Asks the run actor.

    Args:
        failure_config: the user's; counts only if the run actor is gone.
        run_actor: its name.
    """

    def __init__(self, failure_config: FailureConfig, run_actor: str) -> None:
        super().__init__(failure_config)
        self._run_actor = run_actor

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        try:
            actor = ray.get_actor(self._run_actor, namespace=NAMESPACE)
            question = actor.decide.remote(*described(training_failed_error))
            answer = cast("dict[str, Any]", ray.get(question, timeout=_TIMEOUT_S))
        except (RayError, ValueError, TimeoutError):
            _log.warning("the run actor does not answer; Ray's own policy decides", exc_info=True)
            return super().make_decision(training_failed_error)
        if answer["action"] == "stop":
            return FailureDecision.RAISE
        time.sleep(answer["delay_s"])  # nothing else is to be done meanwhile
        return FailureDecision.RETRY


class NodeExclusion(ControllerCallback):
    """Keeps new worker groups off nodes that the run actor has excluded.

    Args:
        run_actor: its name.
    """

    def __init__(self, run_actor: str) -> None:
        self._run_actor = run_actor

    def on_controller_start_worker_group(
        self, *, scaling_config: ScalingConfig, num_workers: int
    ) -> dict[str, str] | None:
        """The user's selector with the excluded nodes added; None if there are none."""
        try:
            actor = ray.get_actor(self._run_actor, namespace=NAMESPACE)
            asked = ray.get(actor.excluded_nodes.remote(), timeout=_TIMEOUT_S)
            excluded = cast("list[str]", asked)
        except (RayError, ValueError, TimeoutError):
            _log.warning("the run actor does not answer; no node is excluded", exc_info=True)
            return None
        if not excluded:
            return None
        mine = scaling_config.label_selector
        if isinstance(mine, list) or NODE_LABEL in (mine or {}):
            _log.warning(
                "nodes %s ought to be avoided, but ScalingConfig(label_selector=...) places the "
                "workers itself",
                ", ".join(excluded),
            )
            return None
        return {**(mine or {}), NODE_LABEL: f"!in({','.join(excluded)})"}
