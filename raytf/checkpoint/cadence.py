"""When to save.

All ranks save at the same step, but only rank 0's clock counts. So rank 0 plans ahead: each `Plan`
says whether to save now and at which step all ranks look, and agree, again. Between these steps
nobody asks anybody. Pure: time is an argument, and equal inputs give equal plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["FIRST_S", "MAX_INTERVAL_S", "MIN_INTERVAL_S", "NEVER", "Cadence", "Plan"]

NEVER = 2**53  # no run gets there; the last integer that survives an agreement in float64
MIN_INTERVAL_S = 10.0  # cadence="auto": no use in losing less than that
MAX_INTERVAL_S = 600.0  # cadence="auto": nobody wants to lose more than that
FIRST_S = 20.0  # cadence="auto": the first save, which measures
_WRITE_MARGIN = 1.5  # a write is over before the next save comes
_LOOKS = 20  # per interval, about
_AIM = 0.03  # of the interval: a look aims that far behind the due time, to not come just before
_NEAR = 0.1  # of the interval: nearer to the due time than that, a look aims at it


@dataclass(frozen=True)
class Plan:
    """What all ranks do.

    Attributes:
        save: save the state of the present step.
        next_look: completed steps at which all ranks look again (the first step at or after it,
            where several steps run per call); greater than the present step.
    """

    save: bool
    next_look: int


class Cadence:
    """Rank 0's memory of when it saved and what that cost.

    What is given adds up: a save is due as soon as one of the rules says so.

    Args:
        every_steps: save at multiples of it, in completed steps of the run, so that a resumed run
            saves at the same steps.
        every_s: save that many seconds after the last save, or after the start.
        auto: choose the interval from what saving costs.
        max_overhead: share of wall time (0 to 1) that `auto` may spend on saving.
    """

    def __init__(
        self, *, every_steps: int | None, every_s: float | None, auto: bool, max_overhead: float
    ) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._auto = auto
        self._max_overhead = max_overhead
        self._looked: list[tuple[int, float]] = []  # (step, now) of late, oldest first
        self._began: tuple[int, float] | None = None
        self._last_save_s = 0.0
        self._saved_step: int | None = None
        self._stall_s: float | None = None
        self._write_s: float | None = None
        self._slowdown = 0.0

    @property
    def timed(self) -> bool:
        """Whether a clock takes part. If not, every rank can plan alone: told of the same looks and
        saves, all get the same plans.
        """
        return self._auto or self._every_s is not None

    @property
    def interval_s(self) -> float:
        """Seconds from one save to the next by `auto`, as far as its costs are known by now."""
        stall, write = self._stall_s or 0.0, self._write_s or 0.0
        cost = (stall + write * self._slowdown) / self._max_overhead
        low = MIN_INTERVAL_S if self._write_s is not None else FIRST_S
        return min(max(low, write * _WRITE_MARGIN, cost), MAX_INTERVAL_S)

    def look(self, step: int, now: float) -> Plan:
        """Plans from the present step on.

        The first look, or one at an earlier step than the last, is a start: nothing is due then.

        Args:
            step: completed steps of the run.
            now: seconds on rank 0's monotonic clock.
        """
        if self._began is None or step < self._looked[-1][0]:
            self._began = (step, now)
            self._looked = [(step, now)]
            self._last_save_s, self._saved_step = now, step
            return Plan(False, self._next_look(step, now))
        last = self._looked[-1][0]
        save = step != self._saved_step and (self._passed(last, step) or self._is_due(now))
        self._remember(step, now)
        if save:
            # A save that is then skipped, because the one before is still being written, counts
            # as well: else a store that cannot keep up would be asked at every step.
            self._last_save_s, self._saved_step = now, step
        return Plan(save, self._next_look(step, now))

    def saved(self, step: int, now: float, stall_s: float) -> None:
        """A save was made, for whatever reason (at the end of an epoch, say).

        Args:
            step: its completed steps.
            now: when the training thread went on.
            stall_s: seconds it had stood still.
        """
        self._last_save_s, self._saved_step = now, step
        self._stall_s = _smooth(self._stall_s, stall_s)

    def wrote(self, write_s: float, slowdown: float) -> None:
        """A save has become durable; may be called from the thread that wrote it.

        Args:
            write_s: seconds of writing in the background.
            slowdown: extra time of a step meanwhile, relative to a step without; >= 0.
        """
        first = self._write_s is None
        self._write_s = _smooth(self._write_s, write_s)
        self._slowdown = max(slowdown, 0.0) if first else _smooth(self._slowdown, max(slowdown, 0))

    def _due_in_s(self) -> float:
        intervals = [] if self._every_s is None else [self._every_s]
        return min([*intervals, self.interval_s] if self._auto else intervals, default=math.inf)

    def _is_due(self, now: float) -> bool:
        return now - self._last_save_s >= self._due_in_s()

    def _passed(self, last: int, step: int) -> bool:
        every = self._every_steps
        return every is not None and step // every > last // every

    def _remember(self, step: int, now: float) -> None:
        if step == self._looked[-1][0]:
            return
        self._looked.append((step, now))
        if not self.timed:
            del self._looked[0]
            return
        if len(self._looked) == 3 and self._looked[0] == self._began:
            del self._looked[0]  # the first step traces and compiles: no measure of the others
        window = self._due_in_s() / 4
        while len(self._looked) > 2 and now - self._looked[1][1] >= window:
            del self._looked[0]

    def _seconds_per_step(self) -> float:
        """The slower of the last stretch and of the last quarter of an interval: an estimate that
        is too slow costs looks, one that is too fast makes a save late.
        """
        (first, began), (step, now) = self._looked[0], self._looked[-1]
        before, then = self._looked[-2]
        rate = (now - began) / (step - first)
        if now - then >= self._due_in_s() / _LOOKS:  # a shorter one says little
            rate = max(rate, (now - then) / (step - before))
        return rate

    def _next_look(self, step: int, now: float) -> int:
        every = self._every_steps
        multiple = NEVER if every is None else (step // every + 1) * every
        return min(multiple, step + self._ahead(step, now)) if self.timed else multiple

    def _ahead(self, step: int, now: float) -> int:
        if self._began is None or len(self._looked) < 2:
            return 1
        known = step - self._began[0]  # so many steps are measured: look no further ahead
        rate = self._seconds_per_step()
        if rate <= 0:
            return known
        interval = self._due_in_s()
        left = interval - (now - self._last_save_s)
        # Half the way, as steps may become slower; aimed at the due time only from near by.
        aim = left / 2 if left > _NEAR * interval else left + _AIM * interval
        steps = max(aim, interval / _LOOKS) / rate
        return max(1, min(known, math.ceil(steps)))


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else (before + value) / 2
