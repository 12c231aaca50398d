"""A Ray trainer that runs one Job on one worker group: the Ray half of KerasTrainer.

Owns one run from the first process to the last: run actor, controller, mapping of Ray's errors,
clean-up. An instance of `ray.train.tensorflow.TensorflowTrainer` that loads TensorFlow neither on
the driver nor on the controller: Ray's own constructor would (`ray.train.tensorflow` imports
TensorFlow), so it is passed over.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

# Read in Ray 2.60: this module imports no TensorFlow, its class's constructor does.
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.tensorflow.tensorflow_trainer import TensorflowTrainer

from raytf.cluster import capacity, driver, local
from raytf.cluster.backend import RaytfBackendConfig
from raytf.cluster.controller import QuietScalingPolicy
from raytf.cluster.failure_policy import AskingFailurePolicy, NodeExclusion
from raytf.cluster.failures import from_ray, plain, said, with_decision
from raytf.cluster.run_actor import create_run_actor, new_run_actor_name
from raytf.cluster.run_watch import RunWatch
from raytf.cluster.worker import Session, run_worker
from raytf.config import CommunicationConfig
from raytf.errors import DataError
from raytf.faults.events import Kind
from raytf.worker.links import Job

__all__ = ["GroupRun", "GroupTrainer", "bundle_of"]

_SAY_WAITING_AFTER_S = 15.0
_log = logging.getLogger("raytf")


def bundle_of(scaling_config: ScalingConfig) -> dict[str, float]:
    """Resources of one worker, as Ray Train asks for them."""
    # Read in Ray 2.60: fills in the CPU that a worker gets by default, and the GPU of `use_gpu`.
    resources: Any = scaling_config._resources_per_worker_not_none
    return dict(resources)


@dataclass
class GroupRun:
    """What came out of one run of a worker group.

    Attributes:
        result: Ray's own result.
        outcome: the dict that rank 0's session returned.
        delivered: rank -> values it delivered under the key that was asked for, in order.
        generations: groups of addresses that formed; 1 when nothing failed.
        replayed_steps: steps that were done again after failures.
    """

    result: Any
    outcome: dict[str, Any]
    delivered: dict[int, list[Any]] = field(default_factory=dict)
    generations: int = 0
    replayed_steps: int = 0


class GroupTrainer(TensorflowTrainer):
    """Runs Jobs on `scaling_config.num_workers` workers.

    Args:
        legacy_keras: which Keras the workers load.
        communication: limits of the start-up.
        session: what the workers run; None: `raytf.worker.session.run`. Must be picklable.
    """

    def __init__(
        self,
        *,
        legacy_keras: bool,
        communication: CommunicationConfig,
        scaling_config: ScalingConfig,
        run_config: RunConfig,
        session: Session | None = None,
    ) -> None:
        self.communication = communication
        self._run_actor: Any = None
        self._run_actor_name = ""
        self._asks = False  # whether the run actor decides on retries
        self._has_autoscaler = True
        self._on_poll: Callable[[dict[str, Any]], None] = lambda answer: None
        self._worker_config: dict[str, Any] = {"session": session}
        self._backend_config = RaytfBackendConfig(legacy_keras=legacy_keras)
        DataParallelTrainer.__init__(
            self,
            run_worker,
            train_loop_config=self._worker_config,
            backend_config=self._backend_config,
            scaling_config=scaling_config,
            run_config=run_config,
        )

    def run_job(
        self,
        job: Job,
        on_records: Callable[[list[dict[str, Any]]], None],
        collect: str | None = None,
        watch: RunWatch | None = None,
    ) -> GroupRun:
        """Runs one job to its end.

        Args:
            on_records: gets the workers' progress records as they come.
            collect: key of `deliver` to fetch before the run is closed.
            watch: events, retries and isolation of the run; None: Ray's own retries, and no log.

        Raises:
            RaytfError: the first root error of any worker, or why the group could not start.
        """
        bundle = bundle_of(self.scaling_config)
        num_workers = self.scaling_config.max_workers  # elastic tuples have been refused
        local.ensure_ray(num_workers, bundle)
        self._has_autoscaler = capacity.check_cluster(
            num_workers, bundle, str(self.scaling_config.placement_strategy)
        )
        name = new_run_actor_name(re.sub(r"[^\w.-]", "-", str(self.run_config.name)))
        self._run_actor_name = name
        self._run_actor = create_run_actor(
            name,
            num_workers,
            startup_timeout_s=self.communication.startup_timeout_s,
            max_port_attempts=self.communication.max_port_attempts,
            watch=watch,
        )
        self._asks = watch is not None
        progress = _Watch(num_workers, bundle, on_records)
        self._on_poll = progress
        self._event(Kind.ATTEMPT_STARTED, workers=num_workers, resources=bundle)
        try:
            run = self._run(job, name, progress, collect)
            result = _brief(run.outcome)
            self._event(Kind.RUN_FINISHED, step=run.outcome.get("steps"), result=result)
            return run
        except BaseException as error:
            self._event(Kind.ATTEMPT_ENDED, error=type(error).__name__, text=str(error)[:2000])
            raise
        finally:
            driver.close_run(self._run_actor)
            self._run_actor = None

    def _event(self, kind: Kind, **fields: Any) -> None:
        """An event of the driver's, which the run actor writes; sent and forgotten."""
        if self._asks:
            self._run_actor.event.remote(str(kind), plain(fields))

    def _run(self, job: Job, name: str, watch: _Watch, collect: str | None) -> GroupRun:
        # Ray's context holds these two objects already, so that they go to the controller with it.
        self._worker_config.update(run_actor=name, job=[_put(job)])
        self._backend_config.run_actor = name
        try:
            result = DataParallelTrainer.fit(self)
        except (TrainingFailedError, RayError) as error:
            raise with_decision(from_ray(error, self._recorded_errors()), watch.fault) from error
        finally:
            self._worker_config.pop("job", None)  # frees the data in the object store
        delivered: dict[int, list[Any]] = {}
        if collect:
            delivered = cast("Any", ray.get(self._run_actor.collect.remote(collect)))
        outcome = result.return_value or {}
        return GroupRun(result, outcome, delivered, watch.generations, watch.replayed_steps)

    def _recorded_errors(self) -> list[dict[str, Any]]:
        try:
            return ray.get(self._run_actor.errors.remote(), timeout=10)
        except RayError:
            return []  # the run actor's node is gone too; Ray's own error is all there is

    def _create_default_callbacks(self) -> list[Any]:
        # Each of the two starts a process of its own. The cleaner frees the placement group of a
        # controller that died: the run actor knows the group and `close_run` frees it. The other
        # serves Ray Data, which is not used.
        callbacks = super()._create_default_callbacks()
        unused = (PlacementGroupCleanerCallback, DatasetsCallback)
        kept = [c for c in callbacks if not isinstance(c, unused)]
        return [*kept, NodeExclusion(self._run_actor_name)] if self._asks else kept

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        if not self._has_autoscaler:
            kwargs["scaling_policy"] = QuietScalingPolicy(self.scaling_config)
        if self._asks:
            kwargs["failure_policy"] = AskingFailurePolicy(
                self.run_config.failure_config or FailureConfig(), self._run_actor_name
            )
        return driver.run_controller(kwargs, self._run_actor, self._on_poll)


class _Watch:
    """Reads the run actor's answers: hands on progress, says once if the group waits for room."""

    def __init__(
        self,
        num_workers: int,
        bundle: dict[str, float],
        on_records: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self._asked = f"{num_workers} x {bundle}"
        self._on_records = on_records
        self._began = time.monotonic()
        self._said = False
        self._groups = 0
        self.generations = 0
        self.replayed_steps = 0
        self.fault: dict[str, Any] | None = None

    def __call__(self, answer: dict[str, Any]) -> None:
        self.generations = answer["generations"]
        self.replayed_steps = answer["replayed_steps"]
        self._say_faults(answer)
        self._groups = answer["groups"]
        if not answer["begun"] and not self._said:
            if time.monotonic() - self._began > _SAY_WAITING_AFTER_S:
                self._said = True
                free = {k: v for k, v in ray.available_resources().items() if ":" not in k}
                _log.warning("waiting for room for %s; free in the cluster: %s", self._asked, free)
        for record in answer["records"]:
            if record.get("kind") == "log":
                _log.log(logging.DEBUG if record["quiet"] else logging.INFO, "%s", record["line"])
        self._on_records(answer["records"])

    def _say_faults(self, answer: dict[str, Any]) -> None:
        fault = answer["fault"]
        if fault is not None and fault != self.fault:
            self.fault = fault
            _log.warning("%s", said(fault))
        elif fault is None and answer["groups"] > max(self._groups, 1):
            why = answer["last_error"] or "a worker process died"
            _log.warning("Ray restarts the workers (start %d): %s", answer["groups"], why)


def _brief(outcome: dict[str, Any]) -> dict[str, Any]:
    """A result without its history, which the events of its epochs tell."""
    return {k: v for k, v in outcome.items() if k in ("metrics", "steps", "epochs", "threads")}


def _put(job: Job) -> ray.ObjectRef:
    try:
        return ray.put(job)
    except Exception as error:  # pickling raises whatever the object's own code raises
        raise DataError(
            f"train_data or validation_data cannot be sent to the workers: {error}. Sources "
            "travel by pickle; open files and connections inside the source's methods, not in its "
            "constructor."
        ) from error
