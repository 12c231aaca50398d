"""The run actor: one light process per run where ranks meet, compare models and report.

Decides nothing itself: `rendezvous.Rendezvous` answers, the actor waits and wakes. Imports `ray`
only (never `ray.train`: 1 s of start-up), holds no TensorFlow, and depends on nothing that Ray's
controller does. All verbs take and return plain data; errors travel as records (`failures`), never
as exceptions.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
import time
from collections.abc import Callable
from typing import Any

import ray

from raytf.cluster.failures import root_of
from raytf.cluster.rendezvous import Rendezvous, Verdict, mismatch_text

__all__ = ["NAMESPACE", "RunActor", "create_run_actor", "new_run_actor_name"]

NAMESPACE = "raytf"
_QUEUE = 2000  # progress records kept for a driver that looks away
_DRIVER_GRACE_S = 5.0
_SLICE_S = 1.0  # longest sleep of a waiting verb: limits are checked at least this often


class RunActor:
    """State of one run; every verb is safe to call from many ranks at once."""

    def __init__(self, num_workers: int, startup_timeout_s: float, max_port_attempts: int) -> None:
        self._meeting = Rendezvous(
            num_workers=num_workers,
            startup_timeout_s=startup_timeout_s,
            max_port_attempts=max_port_attempts,
        )
        self._num_workers = num_workers
        self._changed = asyncio.Event()
        self._errors: list[dict[str, Any]] = []
        # n-th comparison of the group -> rank -> signature
        self._signatures: dict[int, dict[int, Any]] = {}
        # key -> rank -> value, of exchanges that are not complete
        self._shared: dict[str, dict[int, Any]] = {}
        self._records = collections.deque[tuple[int, dict[str, Any]]](maxlen=_QUEUE)
        self._cursor = 0
        self._results: dict[str, dict[int, list[Any]]] = {}
        self._groups = 0
        self._reached = 0  # steps completed, as far as it is known here
        self._replayed = 0
        self._last_error: str | None = None  # of the group before
        self._placement: list[str] = []

    async def begin(self, group: str, placement_group: str | None = None) -> None:
        """A new set of worker processes starts: all of the old one is forgotten, errors too."""
        if group == self._meeting.group:
            return
        self._begin(group)
        if placement_group is not None:
            self._placement.append(placement_group)

    def _begin(self, group: str) -> None:
        self._meeting.begin(group, time.monotonic())
        self._groups += 1
        root = root_of(self._errors)
        self._last_error = _echo(root)["message"] if root is not None else None
        self._errors, self._signatures, self._results, self._shared = [], {}, {}, {}
        self._wake()

    async def join(self, rank: int, group: str, attempt: int, address: str) -> dict[str, Any]:
        """Waits until every rank of this attempt has joined; returns the verdict as a dict."""
        if group != self._meeting.group and self._meeting.is_new(group):
            self._begin(group)
        verdict = self._meeting.join(rank, group, attempt, address, time.monotonic())
        self._wake()
        if verdict.kind == "wait":
            verdict = await self._until(lambda now: self._meeting.joined(rank, group, attempt, now))
        return self._answer(verdict)

    async def hold(
        self, rank: int, group: str, generation: int, error: str | None
    ) -> dict[str, Any]:
        """Waits until every rank has reported its port, or one has lost it; the verdict."""
        verdict = self._meeting.hold(rank, group, generation, error, time.monotonic())
        self._wake()
        if verdict.kind == "wait":
            verdict = await self._until(
                lambda now: self._meeting.held(rank, group, generation, now)
            )
        return self._answer(verdict)

    async def ready(
        self, rank: int, group: str, generation: int, error: str | None
    ) -> dict[str, Any]:
        """Waits until every rank has reported its server, or one has failed; the verdict."""
        verdict = self._meeting.report(rank, group, generation, error, time.monotonic())
        self._wake()
        if verdict.kind == "wait":
            verdict = await self._until(
                lambda now: self._meeting.reported(rank, group, generation, now)
            )
        return self._answer(verdict)

    async def compare(self, rank: int, group: str, number: int, signature: Any) -> dict[str, Any]:
        """Waits for the `number`-th signature of every rank; fails on all if they differ."""
        if group != self._meeting.group and self._meeting.is_new(group):
            self._begin(group)
        seen = self._signatures.setdefault(number, {})
        seen[rank] = signature
        self._wake()
        verdict = await self._until(lambda now: self._compared(group, seen))
        return self._answer(verdict)

    def _compared(self, group: str, seen: dict[int, Any]) -> Verdict:
        if group != self._meeting.group:
            return Verdict(kind="again")
        if len(seen) < self._num_workers:
            return Verdict(kind="wait")
        text = mismatch_text(seen)
        if text is None:
            return Verdict(kind="ready")
        return Verdict(
            kind="failed", error={"type": "ModelMismatchError", "message": text, "context": {}}
        )

    async def share(
        self, rank: int, group: str, key: str, value: Any, wait: bool = True
    ) -> dict[str, Any]:
        """Takes a rank's value; waits for every rank's and gives them all under "values"."""
        if group != self._meeting.group and self._meeting.is_new(group):
            self._begin(group)
        if group != self._meeting.group:
            return self._answer(Verdict(kind="again")) | {"values": None}
        seen = self._shared.setdefault(key, {})
        seen[rank] = value
        if len(seen) == self._num_workers:
            self._shared.pop(key)  # those who wait hold the values themselves
        self._wake()
        if not wait:
            return self._answer(Verdict(kind="ready")) | {"values": None}
        verdict = await self._until(
            lambda now: self._complete(group, seen, all_of=self._num_workers)
        )
        values = [seen[r] for r in sorted(seen)] if verdict.kind == "ready" else None
        return self._answer(verdict) | {"values": values}

    def _complete(self, group: str, seen: dict[int, Any], all_of: int) -> Verdict:
        if len(seen) == all_of:
            return Verdict(kind="ready")
        return Verdict(kind="wait" if group == self._meeting.group else "again")

    async def _until(self, ask: Callable[[float], Verdict]) -> Verdict:
        while True:
            verdict = ask(time.monotonic())
            if verdict.kind != "wait":
                return verdict
            root = root_of(self._errors)
            if root is not None:  # nobody is waited for in vain once a rank has failed
                return Verdict(kind="failed", error=_echo(root))
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), timeout=_SLICE_S)
            except TimeoutError:
                continue

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @staticmethod
    def _answer(verdict: Verdict) -> dict[str, Any]:
        return {
            "kind": verdict.kind,
            "generation": verdict.generation,
            "addresses": list(verdict.addresses),
            "error": verdict.error,
        }

    async def progress(self, record: dict[str, Any], after: Any = None) -> None:
        """Takes a record; `after` is the call before it of the same worker, for their order."""
        self._cursor += 1
        self._records.append((self._cursor, record))
        if record.get("kind") == "step":
            self._reached = max(self._reached, record["total_step"])
        elif record.get("kind") == "restored":
            self._replayed += max(0, self._reached - record["step"])
            self._reached = record["step"]
        self._wake()

    async def failed(self, rank: int, group: str, record: dict[str, Any]) -> None:
        """Records a rank's error; one of a group that has been replaced is dropped."""
        if group == self._meeting.group or self._meeting.group is None:
            self._errors.append(record)
            # Survivors know best how far the group came: step records are sent now and then.
            self._reached = max(self._reached, record["context"].get("step") or 0)
            self._wake()

    async def deliver(self, rank: int, group: str, key: str, value: Any) -> None:
        if group == self._meeting.group or self._meeting.group is None:
            self._results.setdefault(key, {}).setdefault(rank, []).append(value)

    async def collect(self, key: str) -> dict[int, list[Any]]:
        """What the ranks delivered under a key, in each rank's order; forgotten afterwards."""
        return self._results.pop(key, {})

    async def poll(self, cursor: int, wait_s: float) -> dict[str, Any]:
        """For the driver: records after `cursor` and whether start-up is overdue.

        Waits up to `wait_s` for a record.
        """
        deadline = time.monotonic() + wait_s
        while self._cursor <= cursor and (left := deadline - time.monotonic()) > 0:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), timeout=left)
            except TimeoutError:
                break
        # Ranks that wait here raise at the limit themselves, and Ray ends or restarts the group as
        # it was told to. Only if none of them can is the driver told, a little later.
        overdue = self._meeting.overdue(time.monotonic() - _DRIVER_GRACE_S)
        return {
            "cursor": self._cursor,
            "records": [record for number, record in self._records if number > cursor],
            "overdue": None if overdue is None else overdue.error,
            "begun": self._meeting.group is not None,
            "groups": self._groups,
            "last_error": self._last_error,
            "generations": self._meeting.generation,
            "replayed_steps": self._replayed,
        }

    async def errors(self) -> list[dict[str, Any]]:
        """Error records of the present group, in order of arrival."""
        return list(self._errors)

    async def placement_groups(self) -> list[str]:
        return list(self._placement)


def _echo(root: dict[str, Any]) -> dict[str, Any]:
    first = root["headline"].splitlines()[0] if root["headline"] else root["error_type"]
    return {
        "type": "TrainingError",
        "message": f"rank {root['rank']} failed first: {first}",
        "context": {"collateral": True, "rank": root["rank"]},
    }


def new_run_actor_name(run: str) -> str:
    """A name that no other attempt at the same run has."""
    return f"raytf-{run}-{secrets.token_hex(4)}"


def create_run_actor(
    name: str,
    num_workers: int,
    *,
    startup_timeout_s: float,
    max_port_attempts: int,
) -> Any:
    """Starts the run actor and returns its handle at once; the process comes up meanwhile.

    It has no `runtime_env` (Ray would start a fresh process for it) and no CPU share, and it dies
    with its creator.
    """
    cls: Any = ray.remote(RunActor)
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_concurrency": 1000,
    }
    return cls.options(**options).remote(num_workers, startup_timeout_s, max_port_attempts)
