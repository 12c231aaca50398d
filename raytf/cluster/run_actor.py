"""The run actor: one light process per run where ranks meet, report, and are watched over.

Decides nothing itself: `rendezvous.Rendezvous` says who forms a group, `supervisor.Supervisor` what
a fault is and what is done about it; the actor waits, wakes, and carries out. Imports `ray`
only (never `ray.train`: 1 s of start-up), holds no TensorFlow, and depends on nothing that Ray's
controller does. All verbs take and return plain data; errors travel as records (`failures`), never
as exceptions.
"""

from __future__ import annotations

import asyncio
import collections
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import ray

from raytf.cluster.event_log import QUIET, event_of
from raytf.cluster.failures import root_of
from raytf.cluster.hang import Watchdog
from raytf.cluster.metrics import RunMetrics
from raytf.cluster.ranks import listed_ranks
from raytf.cluster.rendezvous import Rendezvous, Verdict, mismatch_text
from raytf.cluster.run_watch import RunWatch
from raytf.cluster.supervisor import Supervisor
from raytf.faults.events import Kind, event_line
from raytf.faults.nodes import NodeBook
from raytf.faults.policy import Limits

__all__ = ["NAMESPACE", "RunActor", "create_run_actor", "new_run_actor_name"]

NAMESPACE = "raytf"
_QUEUE = 2000  # progress records kept for a driver that looks away
_DRIVER_GRACE_S = 5.0
_WATCH_S = 1.0
_WINDOW_S = 10.0  # of the search for slow ranks
_STACKS_S = 5.0  # given to the ranks to send their stacks
_SLICE_S = 1.0  # longest sleep of a waiting verb: limits are checked at least this often


class RunActor:
    """State of one run; every verb is safe to call from many ranks at once."""

    def __init__(
        self,
        num_workers: int,
        startup_timeout_s: float,
        max_port_attempts: int,
        watch: RunWatch | None = None,
    ) -> None:
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
        self._watch = watch
        self._log = None if watch is None else watch.open_log()
        self._board = None if watch is None else watch.open_board()
        self._metrics = None if watch is None else RunMetrics(watch.run)
        self._steps_per_epoch: int | None = None
        self._supervisor = Supervisor(
            limits=Limits(num_workers=num_workers) if watch is None else watch.limits,
            num_workers=num_workers,
            attempt=0 if watch is None else watch.attempt,
            emit=self._emit,
            nodes=NodeBook() if watch is None else watch.read_nodes(),
            watchdog=Watchdog(
                timeout_s="auto" if watch is None else watch.hang_timeout_s, num_workers=num_workers
            ),
        )
        self._asked_for_stacks: set[int] = set()
        self._watching: asyncio.Task[None] | None = None

    def _emit(self, kind: Kind, **fields: Any) -> None:
        if self._log is None:
            return
        generation = self._meeting.generation or None
        event = self._log.emit(kind, time.time(), **{"generation": generation, **fields})
        if self._board is not None:
            self._board.add(event)
        if self._metrics is not None:
            self._metrics.add(event)
        line = {"kind": "log", "line": event_line(event), "quiet": event.kind in QUIET}
        self._records.append((self._cursor + 1, line))
        self._cursor += 1
        self._wake()

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
        self._supervisor.begin()
        self._asked_for_stacks = set()
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

    async def hello(self, rank: int, group: str, node: str, pid: int, handle: Any = None) -> None:
        """A worker process says who it is; from then on it is watched."""
        if group != self._meeting.group and self._meeting.is_new(group):
            self._begin(group)
        if group == self._meeting.group:
            self._supervisor.hello(rank, node, pid, handle)
            if self._watching is None and self._watch is not None:
                self._watching = asyncio.ensure_future(self._watch_over())

    async def beat(self, rank: int, group: str, told: dict[str, Any]) -> bool:
        """A sign of life; the answer is whether the rank is to send its stacks."""
        if group != self._meeting.group:
            return False
        self._supervisor.heard(rank, told, time.monotonic())
        self._reached = max(self._reached, int(told.get("step") or 0))
        return rank in self._asked_for_stacks

    async def stacks(self, rank: int, group: str, text: str) -> None:
        """What a rank's threads are doing."""
        if group == self._meeting.group:
            self._asked_for_stacks.discard(rank)
            self._supervisor.stacks(rank, text)
            self._wake()

    async def _watch_over(self) -> None:
        """Looks for hangs and slow ranks, as long as the run lives."""
        window_ends = time.monotonic() + _WINDOW_S
        while True:
            await asyncio.sleep(_WATCH_S)
            if time.monotonic() >= window_ends:
                window_ends += _WINDOW_S
                self._supervisor.look_for_stragglers()
            hang = self._supervisor.hang(time.monotonic())
            if hang is None:
                continue
            group = self._meeting.group
            self._emit(
                Kind.MESSAGE,
                rank=hang.ranks[0],
                step=hang.step,
                phase=hang.phase,
                text=f"{listed_ranks(hang.ranks)} hang: {hang.text}; stacks are taken",
            )
            self._asked_for_stacks = set(range(self._num_workers))
            deadline = time.monotonic() + _STACKS_S
            while self._asked_for_stacks - set(hang.ranks) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if group == self._meeting.group:
                for handle in self._supervisor.handles(hang.ranks):
                    ray.kill(handle)  # SIGKILL ends a stopped process, too

    async def decide(
        self, deaths: dict[int, str], preempted: list[int], startup: str | None
    ) -> dict[str, Any]:
        """For Ray's controller: what to do now that the group has ended; the decision as a dict."""
        lost, capacity = await asyncio.to_thread(_cluster, self._num_workers)
        decision = self._supervisor.decide(
            deaths=deaths,
            preempted=preempted,
            lost_nodes=lost,
            startup=startup,
            reached=self._reached,
            now=time.monotonic(),
            wall=time.time(),
            jitter=random.random(),
            capacity=capacity,
        )
        if self._watch is not None:
            await asyncio.to_thread(self._watch.write_nodes, self._supervisor.nodes)
            if decision.skip_step is not None:
                await asyncio.to_thread(self._leave_out, self._watch, decision.skip_step)
        return {"action": decision.action, "delay_s": decision.delay_s, "reason": decision.reason}

    def _leave_out(self, watch: RunWatch, step: int) -> None:
        if self._steps_per_epoch is None:
            self._emit(Kind.MESSAGE, step=step, text="a factory's batches cannot be left out")
            return
        skips = watch.read_skips()
        batch = list(divmod(step, self._steps_per_epoch))
        if batch not in skips:
            watch.write_skips([*skips, batch])

    async def excluded_nodes(self) -> list[str]:
        """Nodes that the next group has to avoid."""
        return sorted(self._supervisor.nodes.excluded())

    async def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Takes an event of the driver's."""
        self._emit(Kind(kind), **fields)

    async def close(self) -> None:
        """Writes what is left of the log."""
        for part in (self._log, self._board):
            if part is not None:
                await asyncio.to_thread(part.close)

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
        told = event_of(record)
        if told is not None:
            self._emit(told[0], **told[1])
        if record.get("kind") == "start":
            self._steps_per_epoch = record.get("steps_per_epoch")
        elif record.get("kind") == "step":
            self._reached = max(self._reached, record["total_step"])
        elif record.get("kind") == "restored":
            self._replayed += max(0, self._reached - record["step"])
            self._reached = record["step"]
        self._wake()

    async def failed(self, rank: int, group: str, record: dict[str, Any]) -> None:
        """Records a rank's error; one of a group that has been replaced is dropped."""
        if group == self._meeting.group or self._meeting.group is None:
            self._errors.append(record)
            self._supervisor.error(rank, record, time.monotonic())
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
            "fault": self._supervisor.last_told(),
        }

    async def errors(self) -> list[dict[str, Any]]:
        """Error records of the present group, in order of arrival."""
        return list(self._errors)

    async def placement_groups(self) -> list[str]:
        return list(self._placement)


def _cluster(num_workers: int) -> tuple[list[str], dict[str, int] | None]:
    """Ids of nodes that are gone, and how many workers each living node could hold at most."""
    nodes = ray.nodes()
    lost = [node["NodeID"] for node in nodes if not node["Alive"]]
    alive = {node["NodeID"]: num_workers for node in nodes if node["Alive"]}
    return lost, alive or None


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
    watch: RunWatch | None = None,
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
    return cls.options(**options).remote(num_workers, startup_timeout_s, max_port_attempts, watch)
