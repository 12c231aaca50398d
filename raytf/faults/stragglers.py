"""Who is slow, and in which phase: from each rank's own seconds per phase. Pure.

Owns the verdict "slower than the others, again and again". A rank that is slow once, or a delay
that wanders from rank to rank (a busy switch, garbage collection), is nobody's fault. In
synchronous training all ranks wait for the slowest, so phases in which a rank waits for others must
come under their own name and are never compared: the rank that waits least is the slow one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Straggler", "StragglerBook"]

Window = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: which.
        phase: in what.
        factor: its seconds over the median of the others', in the last window; at most 1000.
        share: what it takes more than that median, as a share of its window.
        seconds: its seconds in the last window.
        others_s: the median of the others'.
        windows: in how many windows in a row.
    """

    rank: int
    phase: str
    factor: float
    share: float
    seconds: float
    others_s: float
    windows: int

    def summary(self) -> str:
        """A sentence for people."""
        return (
            f"rank {self.rank} is slow in {self.phase}: {self.factor:.1f} x the median of the "
            f"other ranks for {self.windows} windows in a row, {self.share:.0%} of its time"
        )


@dataclass(frozen=True, kw_only=True)
class StragglerBook:
    """How often in a row each rank was slow. A value: `observe` gives a new one.

    Attributes:
        factor: times the median of the others from which on a rank counts as slow.
        windows: how many windows in a row make a straggler.
        min_share: of the window's time that the excess must amount to: twice as long in a phase of
            a millisecond bothers nobody.
        waiting: phases in which ranks wait for each other.
        in_a_row: (rank, phase) -> windows in a row.
    """

    factor: float = 1.5
    windows: int = 3
    min_share: float = 0.1
    waiting: frozenset[str] = frozenset({"wait", "idle"})
    in_a_row: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])

    def observe(self, window: Window) -> tuple[StragglerBook, tuple[Straggler, ...]]:
        """Takes one window; the book after it and the ranks that have just become stragglers.

        Each is told of once, and again only after it was as fast as the others for a window.

        Args:
            window: rank -> phase -> seconds of this rank in this phase during the window.
        """
        slow = [s for s in self._slow(window) if s is not None]
        counts = {(s.rank, s.phase): self.in_a_row.get((s.rank, s.phase), 0) + 1 for s in slow}
        told = tuple(
            replace(s, windows=self.windows)
            for s in slow
            if counts[s.rank, s.phase] == self.windows
        )
        return replace(self, in_a_row=counts), told

    def _slow(self, window: Window) -> list[Straggler | None]:
        phases = {phase for seconds in window.values() for phase in seconds} - self.waiting
        return [self._judged(window, r, p) for p in sorted(phases) for r in sorted(window)]

    def _judged(self, window: Window, rank: int, phase: str) -> Straggler | None:
        others = [seconds.get(phase, 0.0) for r, seconds in window.items() if r != rank]
        if not others:
            return None
        mine, median = window[rank].get(phase, 0.0), statistics.median(others)
        whole = sum(window[rank].values())
        share = (mine - median) / whole if whole > 0 else 0.0
        if mine <= self.factor * median or share < self.min_share:
            return None
        return Straggler(
            rank=rank,
            phase=phase,
            factor=min(mine / median, 1000.0) if median > 0 else 1000.0,
            share=share,
            seconds=mine,
            others_s=median,
            windows=1,
        )
