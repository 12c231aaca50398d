"""What went wrong in a run, one row for each, from its events alone. Pure.

Owns how fault, decision and recovery events become one row that a person reads: what died, where,
why, what was decided, what it cost. TensorBoard's table, the report and `raytf status` show these
rows; nobody else puts them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from raytf.faults.fault import SAID, FaultKind
from raytf.faults.record import FAULT_KINDS, Event, Kind

__all__ = ["Incident", "Incidents", "markdown_table", "short_node"]

DRIVER_LOST = "driver_lost"
# Worth a row, but training goes on.
_NOTICES = frozenset(
    {
        Kind.STRAGGLER_DETECTED,
        Kind.CHECKPOINT_FAILED,
        Kind.CHECKPOINT_DAMAGED,
        Kind.DRAIN_NOTICED,
    }
)
_KIND_OF = {
    Kind.WORKER_KILLED: FaultKind.KILLED,
    Kind.WORKER_EXITED: FaultKind.EXITED,
    Kind.WORKER_ERROR: FaultKind.USER_ERROR,
    Kind.NODE_LOST: FaultKind.NODE_LOST,
    Kind.HANG_DETECTED: FaultKind.HANG,
    Kind.NAN_DETECTED: FaultKind.NAN,
    Kind.DIVERGENCE_DETECTED: FaultKind.DIVERGENCE,
}
_NOTICED = {
    str(Kind.STRAGGLER_DETECTED): "is slower than the others",
    str(Kind.CHECKPOINT_FAILED): "could not save",
    str(Kind.CHECKPOINT_DAMAGED): "found a damaged checkpoint",
    str(Kind.DRAIN_NOTICED): "got notice that its node will go",
    DRIVER_LOST: "went silent: the driver, or all of the run, was gone",
}
_SPOKEN = ("summary", "error", "text", "reason")  # fields that hold a sentence
_TRACES = ("root_text", "traceback", "text")  # fields that hold a long text


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One thing that went wrong.

    Attributes:
        time: UTC, seconds since the epoch, of when it was noticed; `began` of when it happened, as
            far as that is known.
        attempt: in which it happened.
        kind: a FaultKind's text; else the event's kind, or "driver_lost".
        rank, node, pid, step, phase: of the culprit, at that moment.
        evidence: what the verdict rests on, a short text each.
        stacks: title and text of tracebacks and stacks.
        decision: what was done about it, and why; "" if nothing was (yet).
        stopped: whether training stood still for it.
        cost_s: seconds from the fault to the first step after it; None while it stands.
        lost_steps: completed steps whose result was gone.
        count: how often in a row it was seen.
        ended: whether the attempt ended with it.
    """

    time: float
    began: float
    attempt: int
    kind: str
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    evidence: tuple[str, ...] = ()
    stacks: tuple[tuple[str, str], ...] = ()
    decision: str = ""
    stopped: bool = True
    cost_s: float | None = None
    lost_steps: int = 0
    count: int = 1
    ended: bool = False

    @property
    def where(self) -> str:
        """`rank 1 on node ab12`; long ids are cut."""
        who = "the run" if self.rank is None else f"rank {self.rank}"
        return f"{who} on node {short_node(self.node)}" if self.node else who

    @property
    def said(self) -> str:
        """`was killed`, in the words of `fault.SAID`."""
        if self.kind in _FAULT_KINDS:
            return SAID[FaultKind(self.kind)]
        return _NOTICED.get(self.kind, self.kind.replace("_", " "))

    @property
    def cost(self) -> str:
        """`12.3 s, 5 steps lost`, or what there is to say instead."""
        if not self.stopped:
            return "none"
        if self.ended:
            return "the attempt ended"
        if self.cost_s is None:
            return "stands still since"
        lost = f", {self.lost_steps} steps lost" if self.lost_steps else ""
        return f"{self.cost_s:.1f} s{lost}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; stacks are left out (`raytf events` has them)."""
        names = ("time", "attempt", "kind", "rank", "node", "pid", "step", "phase", "decision")
        told: dict[str, Any] = {name: getattr(self, name) for name in names}
        rest = ("stopped", "cost_s", "lost_steps", "count", "ended")
        return told | {"evidence": list(self.evidence)} | {n: getattr(self, n) for n in rest}


_FAULT_KINDS = frozenset(map(str, FaultKind))


class Incidents:
    """Builds the rows event by event; they come in order of time."""

    def __init__(self) -> None:
        self._rows: list[Incident] = []
        self._open: list[int] = []  # indices of those that training stands still for
        self._reached = 0
        self._latest = 0.0
        self._attempt: int | None = None
        self._ended = True

    @classmethod
    def of(cls, events: Iterable[Event]) -> list[Incident]:
        """The rows of a whole log."""
        fold = cls()
        for event in events:
            fold.add(event)
        return fold.rows

    @property
    def rows(self) -> list[Incident]:
        """All so far, oldest first."""
        return list(self._rows)

    @property
    def open(self) -> list[Incident]:
        """Those that training stands still for."""
        return [self._rows[i] for i in self._open]

    def add(self, event: Event) -> bool:
        """Takes the next event; whether a row was added or changed."""
        before = len(self._rows), tuple(self._open), self._rows[-1:]
        kind = event.kind
        if kind in (Kind.ATTEMPT_STARTED, Kind.RUN_STARTED):
            self._started(event)
        elif kind in FAULT_KINDS:
            self._failed(event)
        elif kind in _NOTICES:
            self._noticed(event)
        elif kind is Kind.DECISION:
            self._decided(event)
        elif kind is Kind.RESTORED and event.step is not None:
            self._went_back(event.step)
        elif kind is Kind.STEP_REACHED and event.rank in (None, 0) and event.step is not None:
            self._went_back(event.step)  # nobody told of the restore
            self._reached = event.step
            self._close(event.time)
        elif kind in (Kind.ATTEMPT_ENDED, Kind.RUN_FINISHED):
            self._ended = True
            for index in self._open:
                self._rows[index] = replace(self._rows[index], ended=True)
            self._close(event.time)
        self._latest = max(self._latest, event.time)
        return before != (len(self._rows), tuple(self._open), self._rows[-1:])

    def _started(self, event: Event) -> None:
        if event.kind is Kind.RUN_STARTED or event.attempt == self._attempt:
            return
        if not self._ended and not self._open:
            self._append(
                Incident(
                    time=self._latest,
                    began=self._latest,
                    attempt=self._attempt or 0,
                    kind=DRIVER_LOST,
                    step=self._reached,
                    evidence=("the next attempt began, and this one had not ended",),
                    decision="the run was started again",
                )
            )
        self._attempt, self._ended = event.attempt, False

    def _failed(self, event: Event) -> None:
        fault = _mapping(event.fields.get("fault"))
        told = fault.get("kind", event.fields.get("fault"))
        kind = told if isinstance(told, str) else str(_KIND_OF[Kind(event.kind)])
        row = Incident(
            time=event.time,
            began=event.time - _seconds(event.fields.get("detect_s")),
            attempt=event.attempt,
            kind=kind,
            rank=_either(event.rank, fault.get("rank")),
            node=_either(event.node, fault.get("node")),
            pid=_either(event.pid, fault.get("pid")),
            step=_either(event.step, fault.get("step")),
            phase=_either(event.phase, fault.get("phase")),
            evidence=_evidence(event.fields, fault),
            stacks=_stacks(event.fields, fault),
        )
        for index in self._open:
            old = self._rows[index]
            if (old.rank, old.node, old.kind) == (row.rank, row.node, row.kind):
                self._rows[index] = _merged(old, row)
                return
        self._append(row)

    def _noticed(self, event: Event) -> None:
        row = Incident(
            time=event.time,
            began=event.time,
            attempt=event.attempt,
            kind=str(event.kind),
            rank=event.rank,
            node=event.node,
            pid=event.pid,
            step=event.step,
            phase=event.phase,
            evidence=_evidence(event.fields, {}),
            stacks=_stacks(event.fields, {}),
            stopped=False,
            cost_s=0.0,
        )
        last = self._rows[-1] if self._rows else None
        same = last and (last.kind, last.rank, last.node) == (row.kind, row.rank, row.node)
        if last and same and last.evidence == row.evidence:
            self._rows[-1] = replace(last, count=last.count + 1)
        else:
            self._rows.append(row)

    def _append(self, row: Incident) -> None:
        self._open.append(len(self._rows))
        self._rows.append(row)

    def _decided(self, event: Event) -> None:
        action = str(event.fields.get("action") or "")
        reason = str(event.fields.get("reason") or "")
        text = ": ".join(part for part in (action.replace("_", " "), reason) if part)
        for index in self._open:
            if not self._rows[index].decision:
                self._rows[index] = replace(self._rows[index], decision=text)
        if not self._open and self._rows and not self._rows[-1].decision:
            self._rows[-1] = replace(self._rows[-1], decision=text)
        if action == "continue":
            self._close(event.time)

    def _went_back(self, step: int) -> None:
        lost = max(0, self._reached - step)
        if lost:
            ended = [i for i, row in enumerate(self._rows) if row.ended]
            for index in self._open[:1] or ended[-1:]:
                row = self._rows[index]
                self._rows[index] = replace(row, lost_steps=row.lost_steps + lost)
        self._reached = step

    def _close(self, time: float) -> None:
        for place, index in enumerate(self._open):
            # What several ranks failed in together cost its time once.
            cost = max(0.0, time - self._rows[index].began) if place == 0 else 0.0
            self._rows[index] = replace(self._rows[index], cost_s=cost)
        self._open = []


def markdown_table(rows: Sequence[Incident], when: Any) -> str:
    """The rows as a Markdown table, newest first; text in it can be neither markup nor HTML.

    Args:
        when: seconds since the epoch -> text.
    """
    if not rows:
        return "Nothing has gone wrong so far."
    head = ("when", "kind", "rank", "node", "phase", "evidence", "decision", "cost")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in reversed(rows):
        times = f" ({row.count} times)" if row.count > 1 else ""
        phase = [row.phase] if row.phase else []
        phase += [f"step {row.step}"] if row.step is not None else []
        cells = (
            when(row.time),
            row.kind.replace("_", " ") + times,
            row.rank,
            short_node(row.node) if row.node else None,
            ", ".join(phase),
            "; ".join(row.evidence),
            row.decision,
            row.cost,
        )
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines)


_HARMLESS = {ord(mark): f"&#{ord(mark)};" for mark in "&<>\\`*_[]|!#"}


def _cell(value: Any, most: int = 300) -> str:
    if value is None:
        return "-"
    text = " ".join(str(value).split())
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.translate(_HARMLESS) or "-"


def short_node(node: str) -> str:
    """Ray's ids have 56 digits: the first 12 of them tell nodes apart."""
    return node[:12] if re.fullmatch(r"[0-9a-f]{20,}", node) else node


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _merged(old: Incident, new: Incident) -> Incident:
    return replace(
        old,
        step=_either(old.step, new.step),
        phase=_either(old.phase, new.phase),
        pid=_either(old.pid, new.pid),
        evidence=tuple(dict.fromkeys((*old.evidence, *new.evidence))),
        stacks=tuple(dict.fromkeys((*old.stacks, *new.stacks))),
    )


def _evidence(fields: Mapping[str, Any], fault: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for value in (fault.get("evidence"), fields.get("evidence")):
        if isinstance(value, list | tuple):
            found += [str(each) for each in cast(Sequence[Any], value)]
        elif value:
            found.append(str(value))
    if not found:
        spoken = [fields[name] for name in _SPOKEN if fields.get(name)]
        found = [str(text).strip().splitlines()[0] for text in spoken[:1] if str(text).strip()]
    return tuple(dict.fromkeys(found))


def _stacks(fields: Mapping[str, Any], fault: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for given in (fault, fields):
        for name in _TRACES:
            text = given.get(name)
            if isinstance(text, str) and (name != "text" or "\n" in text.strip()):
                found.append(("what it said", text))
    stacks = fields.get("stacks")
    for rank, text in _mapping(stacks).items():
        found.append((f"rank {rank}" if str(rank).isdigit() else str(rank), str(text)))
    if isinstance(stacks, str) and stacks.strip():
        found.append(("stacks", stacks))
    return tuple(dict.fromkeys(found))


def _seconds(value: Any) -> float:
    is_one = isinstance(value, int | float) and 0 < value < float("inf")
    return float(value) if is_one else 0.0


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
