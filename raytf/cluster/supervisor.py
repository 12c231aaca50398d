"""What is known about the ranks of a run, and the answer when one fails: the run actor's judgement.

Collects evidence (who a rank is, its last beat, its error, Ray's word on its death), has it
classified (`faults.classify`) and answered (`faults.policy`), and remembers both. Carries nothing
out and waits for nothing; events go out through a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.cluster.hang import Hang, Watchdog
from raytf.faults.classify import Evidence, Fault, FaultKind, RankEvidence, classify
from raytf.faults.events import Kind
from raytf.faults.nodes import NodeBook
from raytf.faults.policy import Decision, History, Limits, decide
from raytf.faults.stragglers import StragglerBook

__all__ = ["KIND_OF", "Supervisor"]

Emit = Callable[..., Any]  # emit(kind, **fields)
# Of each kind of fault the kind of event that tells of it.
KIND_OF = {
    FaultKind.KILLED: Kind.WORKER_KILLED,
    FaultKind.OOM: Kind.WORKER_KILLED,
    FaultKind.SEGFAULT: Kind.WORKER_KILLED,
    FaultKind.PREEMPTED: Kind.WORKER_KILLED,
    FaultKind.EXITED: Kind.WORKER_EXITED,
    FaultKind.NODE_LOST: Kind.NODE_LOST,
    FaultKind.HANG: Kind.HANG_DETECTED,
    FaultKind.NAN: Kind.NAN_DETECTED,
    FaultKind.DIVERGENCE: Kind.DIVERGENCE_DETECTED,
}


@dataclass
class _Rank:
    """What a rank has said of itself."""

    node: str | None = None
    pid: int | None = None
    handle: Any = None
    error: Mapping[str, Any] | None = None
    error_at: float | None = None
    stacks: str | None = None


@dataclass
class Supervisor:
    """See the module.

    Args:
        limits: of the run.
        num_workers: ranks of a group.
        attempt: of the run.
        emit: `emit(kind, **fields)`; takes an event.
        nodes: faults of nodes so far.
        watchdog: judges hangs.
    """

    limits: Limits
    num_workers: int
    attempt: int
    emit: Emit
    nodes: NodeBook
    watchdog: Watchdog
    history: History = field(default_factory=History)
    last: tuple[Fault, Decision] | None = None
    _ranks: dict[int, _Rank] = field(default_factory=dict[int, _Rank])
    _hang: Hang | None = None
    _book: StragglerBook = field(default_factory=StragglerBook)
    _window: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])

    def begin(self) -> None:
        """A new group of worker processes."""
        self._ranks, self._hang = {}, None
        self._book, self._window = StragglerBook(), {}
        self.watchdog.begin()

    def hello(self, rank: int, node: str | None, pid: int | None, handle: Any) -> None:
        """A worker process says who it is."""
        self._ranks[rank] = _Rank(node=node, pid=pid, handle=handle)
        self.emit(Kind.WORKER_STARTED, rank=rank, node=node, pid=pid)

    def heard(self, rank: int, told: Mapping[str, Any], now: float) -> None:
        """A rank's beat."""
        self.watchdog.heard(rank, told, now)
        spent = self._window.setdefault(rank, {})
        for phase, seconds in dict(told.get("seconds") or {}).items():
            spent[phase] = spent.get(phase, 0.0) + float(seconds)

    def look_for_stragglers(self) -> None:
        """Ends a window of time; tells of ranks that were slow in several of them."""
        window, self._window = self._window, {}
        if len(window) < max(2, self.num_workers):
            return
        self._book, found = self._book.observe(window)
        for slow in found:
            known = self._ranks.get(slow.rank, _Rank())
            self.emit(
                Kind.STRAGGLER_DETECTED,
                rank=slow.rank,
                node=known.node,
                pid=known.pid,
                phase=slow.phase,
                summary=slow.summary(),
                factor=slow.factor,
                share=slow.share,
                seconds=slow.seconds,
                others_s=slow.others_s,
            )

    def error(self, rank: int, record: Mapping[str, Any], now: float) -> None:
        """A rank's own word on why it ends; the first counts."""
        known = self._ranks.setdefault(rank, _Rank())
        if known.error is None:
            known.error, known.error_at = record, now

    def stacks(self, rank: int, text: str) -> None:
        """What a rank's threads were doing."""
        self._ranks.setdefault(rank, _Rank()).stacks = text

    def hang(self, now: float) -> Hang | None:
        """A hang that has not been told of yet."""
        if self._hang is None:
            self._hang = self.watchdog.judge(now)
            return self._hang
        return None

    def handles(self, ranks: Sequence[int]) -> list[Any]:
        """Actor handles of ranks, as far as they are known."""
        found = [self._ranks[r].handle for r in ranks if r in self._ranks]
        return [handle for handle in found if handle is not None]

    def decide(
        self,
        *,
        deaths: Mapping[int, str],
        preempted: Sequence[int],
        lost_nodes: Sequence[str],
        startup: str | None,
        reached: int,
        now: float,
        wall: float,
        jitter: float,
        capacity: Mapping[str, int] | None,
    ) -> Decision:
        """The answer to the end of a worker group.

        Args:
            deaths: rank -> Ray's words on its death.
            preempted: ranks that Ray knows to be preempted.
            lost_nodes: ids of nodes that are not alive any more.
            startup: why the group did not come up, if it did not.
            reached: steps completed in the run.
            now: monotonic seconds; `wall`: UTC seconds.
            jitter: in [0, 1).
            capacity: see `NodeBook.settle`.
        """
        evidence = Evidence(
            ranks=tuple(
                self._evidence(rank, deaths, preempted, lost_nodes, reached, now)
                for rank in range(self.num_workers)
            ),
            startup=startup,
        )
        fault = classify(evidence)
        before = self.nodes
        decision = decide(
            fault,
            self.history,
            self.limits,
            wall,
            reached=reached,
            jitter=jitter,
            nodes=before,
            capacity=capacity,
        )
        self._charge_node(fault, wall, capacity)
        self.history = self.history.after(
            fault, decision, reached=reached, time=wall, attempt=self.attempt
        )
        self.last = (fault, decision)
        self._tell(fault, decision, reached, now)
        return decision

    def _evidence(
        self,
        rank: int,
        deaths: Mapping[int, str],
        preempted: Sequence[int],
        lost_nodes: Sequence[str],
        reached: int,
        now: float,
    ) -> RankEvidence:
        known = self._ranks.get(rank, _Rank())
        beat = self.watchdog.beats.get(rank)
        hung = self._hang if self._hang is not None and rank in self._hang.ranks else None
        context: Mapping[str, Any] = (known.error or {}).get("context") or {}
        step = context.get("step") if beat is None else beat.step
        if rank in deaths and hung is None:
            step = reached  # ranks step together: its own last word is up to a second old
        return RankEvidence(
            rank=rank,
            node=known.node,
            pid=known.pid,
            at=known.error_at,
            # Who was killed for a hang has died of the hang.
            death=None if hung is not None else deaths.get(rank),
            error=known.error,
            heartbeat_age_s=None if beat is None else now - beat.at,
            phase=None if beat is None else beat.phase,
            step=step,
            started=rank in self._ranks,
            node_alive=False if known.node in lost_nodes and known.node is not None else None,
            draining=rank in preempted,
            hung=None if hung is None else hung.text,
            nan=context.get("nan"),
            diverged=context.get("diverged"),
        )

    def _charge_node(self, fault: Fault, wall: float, capacity: Mapping[str, int] | None) -> None:
        if not fault.hardware_like or fault.node is None:
            return
        book = self.nodes.record(fault.node, wall)
        self.nodes, decisions = book.settle(wall, self.num_workers, capacity)
        for made in decisions:
            kind = {"exclude": Kind.NODE_EXCLUDED, "readmit": Kind.NODE_READMITTED}.get(made.action)
            self.emit(kind or Kind.MESSAGE, node=made.node, text=made.reason, until=made.until)

    def _tell(self, fault: Fault, decision: Decision, reached: int, now: float) -> None:
        known = self._ranks.get(fault.rank, _Rank()) if fault.rank is not None else _Rank()
        first = [r.error_at for r in self._ranks.values() if r.error_at is not None]
        beat = None if fault.rank is None else self.watchdog.beats.get(fault.rank)
        # Survivors feel a death at once; else the last sign of life bounds it.
        since = min(first) if first else (None if beat is None else beat.at)
        stacks = {str(r): k.stacks for r, k in self._ranks.items() if k.stacks}
        self.emit(
            KIND_OF.get(fault.kind, Kind.WORKER_ERROR),
            rank=fault.rank,
            node=fault.node or known.node,
            pid=fault.pid or known.pid,
            step=fault.step if fault.step is not None else reached,
            phase=fault.phase,
            fault=str(fault.kind),
            summary=fault.summary(),
            evidence=list(fault.evidence),
            victims=list(fault.victims),
            error_type=fault.error_type,
            text=fault.root_text,
            detect_s=None if since is None else max(0.0, now - since),
            **({"stacks": stacks} if stacks else {}),
        )
        self.emit(
            Kind.DECISION,
            rank=fault.rank,
            step=reached,
            action=decision.action,
            reason=decision.reason,
            delay_s=decision.delay_s,
            counts_as=decision.counts_as,
            exclude_node=decision.exclude_node,
        )

    def last_told(self) -> dict[str, Any] | None:
        """The newest fault and its answer as plain data, for the driver."""
        if self.last is None:
            return None
        fault, decision = self.last
        return {
            "number": len(self.history.past),
            "summary": fault.summary(),
            "kind": str(fault.kind),
            "action": decision.action,
            "reason": decision.reason,
        }
