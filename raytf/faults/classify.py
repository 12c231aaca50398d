"""From evidence to one fault: what happened, who started it, who merely suffered. Pure.

Owns the order of belief. A rank's own word about itself beats a guess; a death
beats an error, because survivors of a death report errors of many kinds before anybody has noticed
the death; a rank that says nothing while all others report aborted collectives is the culprit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raytf.faults import texts
from raytf.faults.fault import SAID, Fault, FaultKind

__all__ = ["Evidence", "Fault", "FaultKind", "RankEvidence", "classify"]

_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
)
# An abort is a check that failed in native code: more often a bug than a machine.
_SOFT_SIGNALS = frozenset({signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_MEMORY_ERRORS = ("MemoryError", "ResourceExhaustedError", "OutOfMemoryError")
_STORAGE_TYPES = ("StorageError", "CheckpointDamagedError")
_STARTUP_TYPES = ("StartupError", "ResourceError")
# Errors that arrive this much before a death was noticed are no echo of it. Echoes come within the
# time Ray needs to notice (0.3 s at raytf's poll), or TensorFlow's heartbeat (8.5 s at most).
_ECHO_S = 15.0


_BELIEF = {kind: place for place, kind in enumerate(FaultKind)}
# What makes other ranks report errors of any kind.
_LOUD = frozenset(
    {
        FaultKind.NODE_LOST,
        FaultKind.OOM,
        FaultKind.SEGFAULT,
        FaultKind.KILLED,
        FaultKind.EXITED,
        FaultKind.HANG,
    }
)
_ERRORS = frozenset(
    {FaultKind.USER_ERROR, FaultKind.TENSORFLOW_ERROR, FaultKind.STORAGE, FaultKind.STARTUP}
)


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known about one rank; None: not known.

    Attributes:
        rank: of whom.
        node: id of the node it ran on.
        pid: of its process.
        at: when the first of this became known, in seconds; one clock for all ranks.
        alive: whether its process lives.
        signal, exit_code: how its process ended, if somebody saw it.
        death: Ray's words about its end.
        error: its error record, as in `cluster/failures.py`.
        heartbeat_age_s: seconds since its last sign of life.
        phase, step: where it was.
        started: whether it had come up.
        node_alive: whether its node lives.
        draining: whether its node was told to go.
        hung: what the watchdog says about it.
        nan: what was not a number on it.
        diverged: how its state differs from the others', first variable first.
    """

    rank: int
    node: str | None = None
    pid: int | None = None
    at: float | None = None
    alive: bool | None = None
    signal: int | None = None
    exit_code: int | None = None
    death: str | None = None
    error: Mapping[str, Any] | None = None
    heartbeat_age_s: float | None = None
    phase: str | None = None
    step: int | None = None
    started: bool | None = None
    node_alive: bool | None = None
    draining: bool = False
    hung: str | None = None
    nan: str | None = None
    diverged: str | None = None

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to have ended."""
        ended = self.signal is not None or self.exit_code is not None or self.death is not None
        return ended or self.alive is False or self.node_alive is False

    @property
    def is_victim(self) -> bool:
        """Whether all it says is that another rank failed."""
        return self.error is not None and bool(self.error.get("collateral")) and not self.is_dead


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known at the moment of judgement.

    Attributes:
        ranks: one entry for each rank of the group, those included of which nothing is known.
        texts: words that belong to no rank: of the raylet, the kernel, the controller.
        startup: why the group did not come up, if it did not.
        storage: what the store said, if that ended the run.
        silent_s: age of a last sign of life above which a rank counts as silent.
    """

    ranks: tuple[RankEvidence, ...] = ()
    texts: tuple[str, ...] = ()
    startup: str | None = None
    storage: str | None = None
    silent_s: float = 10.0


@dataclass(frozen=True)
class _Verdict:
    """What one rank's evidence says about that rank alone."""

    kind: FaultKind
    hardware_like: bool = False
    error_type: str | None = None
    text: str = ""
    why: tuple[str, ...] = field(default=())
    step: int | None = None


def classify(evidence: Evidence) -> Fault:
    """The fault behind the evidence; of kind unknown, never an exception, if it says nothing."""
    ranks = sorted(evidence.ranks, key=lambda r: r.rank)
    verdicts = {r.rank: v for r in ranks if (v := _judged(r, evidence)) is not None}
    suffering = [r.rank for r in ranks if r.is_victim]
    if not any(v.kind is not FaultKind.STARTUP for v in verdicts.values()) and suffering:
        verdicts |= _silent(ranks, suffering, evidence)
    if verdicts:
        return _chosen({r.rank: r for r in ranks}, verdicts)
    return _of_nobody(evidence, ranks, suffering)


def _chosen(ranks: Mapping[int, RankEvidence], verdicts: Mapping[int, _Verdict]) -> Fault:
    def belief(rank: int) -> tuple[float, float, int]:
        verdict, at = verdicts[rank], ranks[rank].at
        place: float = _BELIEF[verdict.kind]
        if verdict.kind in _ERRORS and _long_before(rank, ranks, verdicts):
            place = _BELIEF[FaultKind.NODE_LOST] - 0.5  # before all deaths
        return place, float("inf") if at is None else at, rank

    culprit = min(verdicts, key=belief)
    verdict, known = verdicts[culprit], ranks[culprit]
    same = [r for r, v in verdicts.items() if v.kind is verdict.kind]
    if verdict.kind is FaultKind.NODE_LOST:  # another node's loss is another fault
        same = [r for r in same if ranks[r].node == known.node]
    why = [*verdict.why]
    for rank in sorted(set(verdicts) - {culprit}):
        why += [f"rank {rank} {SAID[verdicts[rank].kind]}" + _first_line(verdicts[rank].text)]
    return Fault(
        kind=verdict.kind,
        rank=culprit,
        ranks=tuple(sorted(same)),
        node=known.node,
        pid=known.pid,
        step=verdict.step if verdict.step is not None else known.step,
        phase=known.phase,
        hardware_like=verdict.hardware_like,
        error_type=verdict.error_type,
        root_text=verdict.text,
        evidence=tuple(why),
        victims=tuple(sorted(r for r in ranks if r not in same and _suffers(ranks[r], verdicts))),
    )


def _suffers(rank: RankEvidence, verdicts: Mapping[int, _Verdict]) -> bool:
    return rank.is_victim or (rank.rank in verdicts and rank.error is not None)


def _long_before(
    rank: int, ranks: Mapping[int, RankEvidence], verdicts: Mapping[int, _Verdict]
) -> bool:
    at = ranks[rank].at
    deaths = [ranks[r].at for r, v in verdicts.items() if v.kind in _LOUD]
    return at is not None and all(d is not None and d - at > _ECHO_S for d in deaths)


def _judged(rank: RankEvidence, evidence: Evidence) -> _Verdict | None:
    """What this rank did by itself; None for victims and for those who did nothing."""
    death = rank.death or ""
    where = f"rank {rank.rank}"
    error = rank.error
    if error is not None and error.get("type") == "SupersededError" and not error.get("collateral"):
        return _Verdict(FaultKind.SUPERSEDED, text=_text(error), why=(_text(error),))
    if rank.is_dead:
        if texts.is_preemption_text(death) or rank.draining:
            why = f"{where}: its node was told to go before its process ended"
            return _Verdict(FaultKind.PREEMPTED, text=death, why=(why, *_lines(death)))
        if rank.node_alive is False or texts.is_node_text(death):
            why = f"{where}: its node is gone"
            return _Verdict(FaultKind.NODE_LOST, True, text=death, why=(why, *_lines(death)))
    if rank.diverged is not None:
        why = f"{where}: {rank.diverged}"
        return _Verdict(FaultKind.DIVERGENCE, True, text=rank.diverged, why=(why,))
    if rank.nan is not None:
        return _Verdict(FaultKind.NAN, text=rank.nan, why=(f"{where}: {rank.nan}",))
    if rank.hung is not None:
        return _Verdict(FaultKind.HANG, True, text=rank.hung, why=(f"{where}: {rank.hung}",))
    if rank.is_dead:
        return _died(rank, evidence)
    if error is not None and not error.get("collateral"):
        return _raised(rank, error)
    if evidence.startup is not None and rank.started is False:
        return _Verdict(
            FaultKind.STARTUP,
            # One that does not come up may be on a bad machine; all of them are not.
            hardware_like=any(r.started for r in evidence.ranks),
            text=evidence.startup,
            why=(f"{where} has not come up", evidence.startup),
        )
    return None


def _died(rank: RankEvidence, evidence: Evidence) -> _Verdict:
    death, number, code = rank.death or "", rank.signal, rank.exit_code
    if code is None:
        code = texts.exit_code_in(death)
    if number is None and code is not None and code < 0:  # as subprocess tells signals
        number, code = -code, None
    if number is None and code is not None and code > 128:  # as shells do
        number, code = code - 128, None
    where = f"rank {rank.rank}"
    own = [text for text in evidence.texts if texts.is_memory_text(text) and _about(text, rank)]
    if texts.is_memory_text(death) or own:
        text = death if texts.is_memory_text(death) else own[0]
        why = (f"{where}: its node ran low on memory and it was killed", *_lines(text))
        return _Verdict(FaultKind.OOM, text=texts.spoken_of(text).strip(), why=why)
    said = rank.error if rank.error is not None and not rank.error.get("collateral") else None
    if number in _CRASH_SIGNALS or texts.is_crash_text(death):
        hard = number not in _SOFT_SIGNALS
        why = (f"{where}: its process crashed ({_signal_name(number or signal.SIGSEGV)})",)
        return _Verdict(FaultKind.SEGFAULT, hard, text=death, why=(*why, *_lines(death)))
    if number is None and said is not None:  # it said why, then its process ended
        return _raised(rank, said)
    if code is not None:
        why = f"{where}: its process ended by itself with exit code {code}"
        return _Verdict(
            FaultKind.EXITED,
            error_type=f"exit {code}",
            text=death or why,
            why=(why, *_lines(death)),
        )
    name = "a signal nobody saw" if number is None else _signal_name(number)
    why = f"{where}: its process ended by {name}"
    hard = number not in _SOFT_SIGNALS and not texts.is_ordered_text(death)
    return _Verdict(FaultKind.KILLED, hard, text=death or why, why=(why, *_lines(death)))


def _about(text: str, rank: RankEvidence) -> bool:
    """Whether a text that belongs to nobody speaks of this rank's process or node."""
    if rank.pid is not None and re.search(rf"\b{rank.pid}\b", text):
        return True
    return rank.node is not None and rank.node in text


def _raised(rank: RankEvidence, error: Mapping[str, Any]) -> _Verdict:
    kind_name, original = str(error.get("type", "")), str(error.get("error_type", ""))
    short = original.rsplit(".", 1)[-1]
    text, why = _text(error), (f"rank {rank.rank}: {_headline(error)}",)
    context: Mapping[str, Any] = error.get("context") or {}
    step = context.get("step")
    hard = False
    if short in _MEMORY_ERRORS:
        kind = FaultKind.OOM
    elif kind_name in _STORAGE_TYPES:
        kind = FaultKind.STORAGE
    elif kind_name in _STARTUP_TYPES:
        kind = FaultKind.STARTUP
    elif original.startswith("tensorflow."):
        kind, hard = FaultKind.TENSORFLOW_ERROR, texts.is_device_text(text)
    else:
        kind = FaultKind.USER_ERROR
    told = kind_name if kind_name not in ("", "TrainingError") else short
    return _Verdict(kind, hard, told or None, text, why, step)


def _silent(
    ranks: Sequence[RankEvidence], suffering: Sequence[int], evidence: Evidence
) -> dict[int, _Verdict]:
    """Who says nothing while others report aborted collectives; nobody if all of them report."""
    mute = [r for r in ranks if r.error is None and not r.is_dead]
    aged = [r for r in mute if (r.heartbeat_age_s or 0.0) > evidence.silent_s]
    candidates = aged or mute
    said = [_text(r.error) for r in ranks if r.rank in suffering and r.error is not None]
    named = {task for text in said for task in texts.named_tasks(text)}
    if len(candidates) > 1 and (pointed := [r for r in candidates if r.rank in named]):
        candidates = pointed
    gone = any(texts.is_peer_gone_text(text) for text in said)
    found: dict[int, _Verdict] = {}
    for rank in candidates:
        alive = rank.alive is True
        why = [
            f"rank {rank.rank} says nothing while ranks {_listed(suffering)} report that a peer "
        ]
        why[0] += "is gone" if gone else "failed"
        if rank.heartbeat_age_s is not None:
            why.append(f"rank {rank.rank}: last sign of life {rank.heartbeat_age_s:.1f} s ago")
        kind = FaultKind.KILLED if gone and not alive else FaultKind.UNKNOWN
        found[rank.rank] = _Verdict(kind, kind is FaultKind.KILLED, text=why[0], why=tuple(why))
    return found


def _of_nobody(
    evidence: Evidence, ranks: Sequence[RankEvidence], suffering: Sequence[int]
) -> Fault:
    """A fault without a culprit."""
    where = Fault(
        kind=FaultKind.UNKNOWN,
        step=max((r.step for r in ranks if r.step is not None), default=None),
        victims=tuple(suffering),
        evidence=tuple(spoken for t in evidence.texts if (spoken := texts.spoken_of(t).strip())),
    )
    if evidence.storage is not None:
        return replace(where, kind=FaultKind.STORAGE, root_text=evidence.storage)
    if evidence.startup is not None:
        return replace(where, kind=FaultKind.STARTUP, root_text=evidence.startup)
    if any(texts.is_preemption_text(text) for text in evidence.texts):
        return replace(where, kind=FaultKind.PREEMPTED, root_text=evidence.texts[0])
    if suffering:
        said = next(_text(r.error) for r in ranks if r.is_victim and r.error is not None)
        return replace(where, kind=FaultKind.COLLECTIVE, root_text=said)
    return replace(where, root_text="\n".join(where.evidence))


def _text(error: Mapping[str, Any]) -> str:
    return str(error.get("traceback") or error.get("message") or error.get("headline") or "")


def _headline(error: Mapping[str, Any]) -> str:
    text = str(error.get("headline") or error.get("message") or error.get("error_type") or "")
    return text.strip().splitlines()[0] if text.strip() else "an error without words"


def _lines(text: str) -> tuple[str, ...]:
    said = texts.spoken_of(text).strip()
    return (f"Ray says: {said}",) if said else ()


def _first_line(text: str) -> str:
    said = texts.spoken_of(text).strip().splitlines()
    return f": {said[0][:200]}" if said else ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
