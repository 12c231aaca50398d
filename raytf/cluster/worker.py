"""The train function that Ray Train runs on each worker.

Owns the bridge between Ray and `raytf.worker`: whatever the session needs of Ray is handed to it as
plain callables (`Links`), and whatever it raises leaves this process as one of raytf's own errors.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train.v2._internal.execution.context import get_train_context

from raytf.checkpoint.storage import Storage
from raytf.cluster.backend import GROUP_ENV, wait_for_imports
from raytf.cluster.failures import describe, plain, to_error
from raytf.cluster.run_actor import NAMESPACE
from raytf.errors import RaytfError, SupersededError
from raytf.worker.links import Formation, Job, Links

__all__ = ["RunLine", "Session", "run_session", "run_worker", "set_ray_checkpoint"]

Session = Callable[[Job, Links], dict[str, Any]]
_BEAT_S = 10.0
_PROGRESS_EVERY_S = 0.2  # step records of one worker; the driver draws 10 a second at most


def run_worker(config: dict[str, Any]) -> dict[str, Any] | None:
    """Ray's train function of every raytf run.

    Args:
        config: `run_actor` (name), `job` (a list with the ObjectRef of a Job, so that the data
            travels once and not in this config) and `session` (None: `raytf.worker.session.run`).

    Returns:
        The session's dict on rank 0, None elsewhere.
    """
    context = ray.train.get_context()
    actor = ray.get_actor(config["run_actor"], namespace=NAMESPACE)
    line = RunLine(actor, context.get_world_rank(), os.environ[GROUP_ENV])
    line.hello()
    outcome = run_session(
        lambda: ray.get(config["job"][0]),
        lambda: make_links(line, context.get_world_size()),
        line,
        config.get("session"),
    )
    return outcome if line.rank == 0 else None


def make_links(line: RunLine, num_workers: int) -> Links:
    """This worker's seat: what Ray assigned to it, and its line to the run actor."""
    assigned = ray.get_runtime_context().get_assigned_resources()
    return Links(
        rank=line.rank,
        num_workers=num_workers,
        num_cpus=float(assigned.get("CPU", 0.0)),
        num_gpus=float(assigned.get("GPU", 0.0)),
        host=ray.util.get_node_ip_address().strip("[]"),
        join=line.join,
        hold=line.hold,
        ready=line.ready,
        compare=line.compare,
        share=line.share,
        post=line.post,
        restored=set_ray_checkpoint,
        beat=line.beat,
        progress=line.progress,
        deliver=line.deliver,
    )


def set_ray_checkpoint(storage: Storage) -> None:
    """Makes `ray.train.get_checkpoint()` of this worker give the step directory `storage`."""
    path, filesystem = storage.for_ray()
    # Read in Ray 2.60: `get_checkpoint` returns this field, which Ray itself fills from what was
    # reported to it; raytf reports no directories (Ray's manager would own and delete them).
    get_train_context().checkpoint = ray.train.Checkpoint(path, filesystem)


def run_session(
    get_job: Callable[[], Job],
    get_links: Callable[[], Links],
    line: RunLine,
    session: Session | None = None,
) -> dict[str, Any]:
    """Runs the session; any error is told to the run actor and raised as raytf's own.

    The error is raised `from None`: what caused it may be a TensorFlow error, and Ray pickles
    causes too.
    """
    try:
        wait_for_imports()
        if session is None:
            from raytf.worker.session import run as session  # loads TensorFlow
        outcome = session(get_job(), get_links())
    except BaseException as error:  # SystemExit of user code too: told below, never swallowed
        record = describe(error, line.rank, line.last_step)
        line.failed(record)
        converted = to_error(_with_text(record))
    else:
        return plain(outcome)
    raise converted from None


def _with_text(record: dict[str, Any]) -> dict[str, Any]:
    if not record["traceback"]:
        return record
    message = f"rank {record['rank']} failed: {record['headline']}\n\n{record['traceback']}"
    return {**record, "message": message}


class RunLine:
    """One worker's line to the run actor: the blocking verbs of `Links`, on any thread.

    Args:
        actor: handle of the run actor.
        rank: this worker's rank.
        group: the set of worker processes it belongs to.
        send: takes progress records; None: the run actor does.
    """

    def __init__(
        self,
        actor: Any,
        rank: int,
        group: str,
        send: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self._actor = actor
        self._send = send if send is not None else self._send_to_actor
        self._last_sent: Any = None
        self.rank = rank
        self.group = group
        self.last_step: int | None = None
        self._comparisons = 0
        self._sent_at = float("-inf")

    def _send_to_actor(self, record: dict[str, Any]) -> None:
        # An async actor may run calls of one caller out of order; each waits for the one before.
        self._last_sent = self._actor.progress.remote(record, self._last_sent)

    def hello(self) -> None:
        """Says which process this rank is; sent and forgotten."""
        context = ray.get_runtime_context()
        try:
            handle = context.current_actor
        except RuntimeError:
            handle = None  # no actor: then nobody can end it from outside
        self._actor.hello.remote(self.rank, self.group, context.get_node_id(), os.getpid(), handle)

    def beat(self, told: dict[str, Any]) -> None:
        """A sign of life from a thread that is not the training's; sends the stacks if asked to.

        Never raises: without the run actor, the training thread finds out by itself.
        """
        try:
            wants_stacks = ray.get(
                self._actor.beat.remote(self.rank, self.group, plain(told)), timeout=_BEAT_S
            )
            if wants_stacks:
                from raytf.worker.stacks import stacks  # loads nothing that is not loaded

                self._actor.stacks.remote(self.rank, self.group, stacks())
        except Exception:
            logging.getLogger(__name__).debug("beat lost", exc_info=True)

    def join(self, address: str, attempt: int) -> Formation:
        answer = self._ask(self._actor.join.remote(self.rank, self.group, attempt, address))
        return Formation(generation=answer["generation"], addresses=tuple(answer["addresses"]))

    def hold(self, generation: int, error: str | None) -> bool:
        answer = self._ask(self._actor.hold.remote(self.rank, self.group, generation, error))
        return answer["kind"] == "ready"

    def ready(self, generation: int, error: str | None) -> bool:
        answer = self._ask(self._actor.ready.remote(self.rank, self.group, generation, error))
        return answer["kind"] == "ready"

    def compare(self, signature: dict[str, Any]) -> None:
        self._comparisons += 1
        self._ask(self._actor.compare.remote(self.rank, self.group, self._comparisons, signature))

    def share(self, key: str, value: Any) -> list[Any]:
        answer = self._ask(self._actor.share.remote(self.rank, self.group, key, plain(value)))
        if answer["values"] is None:
            raise SupersededError(
                f"rank {self.rank} belongs to a worker group that has been replaced.",
                rank=self.rank,
                superseded=True,
            )
        return answer["values"]

    def post(self, key: str, value: Any) -> None:
        self._actor.share.remote(self.rank, self.group, key, plain(value), wait=False)

    def progress(self, record: dict[str, Any]) -> None:
        """Sends and forgets. Step records come every few milliseconds: most of them stay here."""
        if record.get("kind") == "step":
            self.last_step = record.get("total_step", self.last_step)
            now = time.monotonic()
            # What accounts for time is sent in any case: the ledger must sum up.
            if not record.get("seconds") and now - self._sent_at < _PROGRESS_EVERY_S:
                return
            self._sent_at = now
        try:
            self._send(plain(record))
        except Exception:  # the contract: progress never fails a step
            logging.getLogger(__name__).debug("progress record lost", exc_info=True)

    def deliver(self, key: str, value: Any) -> None:
        self._get(self._actor.deliver.remote(self.rank, self.group, key, value))

    def failed(self, record: dict[str, Any]) -> None:
        """Tells the run actor of this rank's error; without it, Ray still carries the error."""
        try:
            ray.get(self._actor.failed.remote(self.rank, self.group, record), timeout=10)
        except Exception:
            logging.getLogger(__name__).warning(
                "the run actor did not take the error", exc_info=True
            )

    def _ask(self, ref: Any) -> dict[str, Any]:
        answer = self._get(ref)
        if answer["error"] is not None:
            raise to_error({**answer["error"]})
        return answer

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise RaytfError(
                f"rank {self.rank} lost the run actor ({error}). The driver that started this run "
                "has ended, or its node is gone; this worker ends too.",
                rank=self.rank,
                collateral=True,
            ) from error
