"""What the training thread is doing, for how long, and since when: for the ledger, the watchdog and
the search for slow ranks.

Entering a phase costs a clock read and no lock; whoever wants to know reads from another thread.
What happens within a compiled step comes from `marks`, through a `probe`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PHASES", "Inside", "Phases"]

logger = logging.getLogger("raytf")

# Phase -> category of the goodput ledger. "wait" is for the other ranks, in a step or between two.
PHASES: Mapping[str, str] = {
    "starting": "start",
    "building": "start",
    "compile": "compile",
    "data": "data_wait",
    "step": "step",
    "wait": "step",
    "metrics": "step",
    "save": "save_stall",
    "validate": "validate",
    "callback": "idle",
    "export": "idle",
    "idle": "idle",
}
_BEAT_S = 1.0


@dataclass(frozen=True)
class Inside:
    """What training steps have done so far, seen from within.

    Attributes:
        data_s: seconds in all until their batches had come.
        batches: how many have come.
        own_s: seconds in all from there until their own work was done and they waited for the other
            ranks.
        done: how many have got so far; 0 where that is not measured.
        ended: how many are through.
    """

    data_s: float = 0.0
    batches: int = 0
    own_s: float = 0.0
    done: int = 0
    ended: int = 0

    @property
    def phase(self) -> str:
        """Where the step is that is under way."""
        if self.batches <= self.ended:
            return "data"
        return "wait" if self.done >= self.batches else "step"


class Phases:
    """The record of one training thread.

    Args:
        beat: see `Links.beat`.
        clock: monotonic seconds.

    Attributes:
        step: training steps completed in the run.
        probe: what compiled steps tell of themselves; None: nothing. Called on any thread.
    """

    def __init__(
        self,
        beat: Callable[[dict[str, Any]], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat = beat
        self._clock = clock
        self._totals = dict.fromkeys(PHASES, 0.0)
        self._now = ("idle", clock())  # replaced as a whole: readers never see half of it
        self.step = 0
        self.probe: Callable[[], Inside] | None = None
        self._reported = self._told = _Told(dict(self._totals), Inside(), 0, self._now[1])
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, phase: str) -> None:
        """From now on it is this phase (one of PHASES); entering it again is progress."""
        before, since = self._now
        now = self._clock()
        self._totals[before] += now - since
        self._now = (phase, now)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """This phase while the block runs, then the one before."""
        before = self._now[0]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def split(self) -> dict[str, float]:
        """Seconds since the last call by category of the ledger; they sum to the time between.

        Called on the training thread, between steps.
        """
        self.enter(self._now[0])
        last, inside = self._reported, self.probe() if self.probe is not None else Inside()
        self._reported = _Told(dict(self._totals), inside, self.step, self._now[1])
        seconds: dict[str, float] = {}
        for phase, gone in _divided(last, self._reported).items():
            category = PHASES[phase]
            seconds[category] = seconds.get(category, 0.0) + gone
        return seconds

    def start(self) -> None:
        """Starts the beats."""
        self._thread = threading.Thread(target=self._run, name="raytf-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends them."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_BEAT_S)

    def _run(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self._beat(self.look())

    def look(self) -> dict[str, Any]:
        """The next beat; called on one thread, which is not the training thread."""
        inside, last = self._probed(), self._told
        phase, since, totals = self._read()
        now = self._clock()
        moved = last.moved if inside == last.inside else now
        self._told = _Told(totals, inside, self.step, moved)
        seconds = _divided(last, self._told)
        if phase == "step" and self.probe is not None:
            phase = inside.phase
            since = max(since, moved)  # one call may be many steps: each is progress
        if phase == "data":  # steps tell of a batch only once it has come
            _move(seconds, ("wait", "step"), "data", now - since)
        steps = inside.batches - last.inside.batches
        return {
            "phase": phase,
            "step": self.step,
            "since_s": max(0.0, now - since),
            "seconds": seconds,
            "steps": steps if self.probe is not None else self.step - last.step,
        }

    def _probed(self) -> Inside:
        if self.probe is None:
            return Inside()
        try:
            return self.probe()
        except Exception:  # the strategy is being reset or torn down: a sign of life all the same
            logger.debug("what happens within steps is not known any more", exc_info=True)
            self.probe = None
            return Inside()

    def _read(self) -> tuple[str, float, dict[str, float]]:
        """Phase, its beginning, and totals up to now, alike although the other thread goes on."""
        while True:
            seen = self._now
            totals = dict(self._totals)
            if self._now is seen:
                phase, since = seen
                totals[phase] += self._clock() - since
                return phase, since, totals


@dataclass(frozen=True)
class _Told:
    """What was known when it was told last."""

    totals: dict[str, float]
    inside: Inside
    step: int
    moved: float  # when a step was last seen to get on


def _divided(last: _Told, now: _Told) -> dict[str, float]:
    """Seconds by phase between two looks; those in steps divided by what steps tell: data, own
    work, waiting.
    """
    gone = {p: s for p in PHASES if (s := now.totals[p] - last.totals[p]) > 0.0}
    whole = gone.pop("step", 0.0)
    data = _between(now.inside.data_s - last.inside.data_s, whole)
    own = whole - data
    if now.inside.done:
        own = _between(now.inside.own_s - last.inside.own_s, own)
    for phase, seconds in (("data", data), ("step", own), ("wait", whole - data - own)):
        if seconds > 0.0:
            gone[phase] = gone.get(phase, 0.0) + seconds
    return gone


def _move(seconds: dict[str, float], sources: tuple[str, ...], to: str, most: float) -> None:
    for source in sources:
        part = min(most, seconds.get(source, 0.0))
        if part > 0.0:
            most -= part
            seconds[to] = seconds.get(to, 0.0) + part
            seconds[source] -= part
            if not seconds[source]:
                del seconds[source]


def _between(seconds: float, most: float) -> float:
    return min(max(seconds, 0.0), most)  # the clock of steps may be set back
