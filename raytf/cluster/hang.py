"""Whether a group of ranks stands still, and who holds it up. Pure: time is an argument.

Ranks that wait in a collective all look stuck, whoever holds them up; the culprit is the one that
is *not* in the collective, or is behind. A rank that gives no sign of life at all (a stopped or
frozen process) needs no such thought.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Beat", "Hang", "Watchdog"]

FACTOR = 20.0  # times the slowest seen of a phase
LEAST_S, MOST_S = 30.0, 300.0
_FIRST_S = 300.0  # of a phase that has not been seen yet: a first step traces and compiles
_WAITING = "wait"  # where a rank is known to wait for the others
# Where it may be waiting for them.
_COLLECTIVE = (_WAITING, "step", "compile", "metrics", "validate", "save")
_PATIENT = {"starting", "building", "export", "idle"}  # bounded elsewhere, or by nothing


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's word on itself.

    Attributes:
        at: when it came, in seconds.
        phase: what its training thread does.
        step: steps completed.
        since_s: seconds in this phase, or since the last step in it, when it spoke.
    """

    at: float
    phase: str
    step: int
    since_s: float


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A verdict.

    Attributes:
        ranks: who holds the others up.
        phase: they are in.
        step: they have completed.
        text: why it is they.
    """

    ranks: tuple[int, ...]
    phase: str
    step: int
    text: str


@dataclass
class Watchdog:
    """Remembers how long phases take, and judges.

    Args:
        timeout_s: WatchConfig.hang_timeout_s.
        num_workers: ranks of the group.
    """

    timeout_s: float | Literal["auto"]
    num_workers: int
    slowest: dict[str, float] = field(default_factory=dict[str, float])
    beats: dict[int, Beat] = field(default_factory=dict[int, Beat])

    def begin(self) -> None:
        """A new group: its first step is a first step again."""
        self.beats = {}
        self.slowest = {}

    def heard(self, rank: int, told: Mapping[str, Any], now: float) -> None:
        """Takes a rank's beat."""
        beat = Beat(
            at=now,
            phase=str(told.get("phase") or "idle"),
            step=int(told.get("step") or 0),
            since_s=float(told.get("since_s") or 0.0),
        )
        before = self.beats.get(rank)
        if before is not None and (before.phase, before.step) != (beat.phase, beat.step):
            # What it did before has come to an end, and took about that long.
            took = before.since_s + max(0.0, (now - before.at) - beat.since_s)
            self.slowest[before.phase] = max(self.slowest.get(before.phase, 0.0), took)
        self.beats[rank] = beat

    def limit_s(self, phase: str) -> float:
        """Seconds that a phase may take."""
        if self.timeout_s != "auto":
            return float(self.timeout_s)
        seen = self.slowest.get(phase)
        return _FIRST_S if seen is None else min(max(FACTOR * seen, LEAST_S), MOST_S)

    def judge(self, now: float) -> Hang | None:
        """The hang, if there is one at this time."""
        if len(self.beats) < self.num_workers:
            return None  # the start-up has a limit of its own
        frozen = [r for r, b in self.beats.items() if now - b.at > self._silence_s()]
        if frozen:
            beat = self.beats[frozen[0]]
            silent = max(now - self.beats[r].at for r in frozen)
            text = f"no sign of life for {silent:.0f} s; its process is stopped or starved"
            return Hang(ranks=tuple(frozen), phase=beat.phase, step=beat.step, text=text)
        stuck = {r: b.since_s + (now - b.at) for r, b in self.beats.items()}
        known = any(b.phase == _WAITING for b in self.beats.values())
        where = (_WAITING,) if known else _COLLECTIVE
        waiting = [r for r, b in self.beats.items() if b.phase in where]
        others = [r for r in self.beats if r not in waiting]
        behind = min(b.step for b in self.beats.values())
        slow = [r for r in waiting if self.beats[r].step == behind]
        suspects = others or (slow if len(slow) < len(waiting) else waiting)
        suspects = [
            r
            for r in suspects
            if self.beats[r].phase not in _PATIENT and stuck[r] > self.limit_s(self.beats[r].phase)
        ]
        if not suspects:
            return None
        beat = self.beats[suspects[0]]
        if others:
            why = f"in phase {beat.phase} for {stuck[suspects[0]]:.0f} s while the others wait"
        elif len(suspects) < len(self.beats):
            why = f"at step {beat.step}, behind the others, for {stuck[suspects[0]]:.0f} s"
        else:
            why = f"all ranks in phase {beat.phase} for {stuck[suspects[0]]:.0f} s: nobody is ahead"
        return Hang(ranks=tuple(suspects), phase=beat.phase, step=beat.step, text=why)

    def _silence_s(self) -> float:
        return LEAST_S if self.timeout_s == "auto" else max(float(self.timeout_s), 3.0)
