"""Where the wall time of a run went, from its events alone. Pure.

Owns the ledger's categories and the rules that put each second into exactly one of them:

- Rank 0's `step_reached` carries `fields["seconds"]`, its own split of the time since its last
  report. That split is believed. What it leaves over goes to the phases that events tell of in
  that time, and else to what the run was doing: start, restart, or idle. A report without a split
  counts as step.
- Steps that had been completed before are replay, in their share of the report's step time.
- From the last report to a fault is detect, unless the fault says how long its discovery took
  (`fields["detect_s"]`): what comes before that is step. From the fault to the next report's
  beginning is restart, waits and the new group's start-up included.
- A gap that nobody saw begin (the driver died: an attempt follows one that never ended) is idle
  until the next attempt starts, and restart from there. So is the time after a run finished, until
  somebody continues it; its start-up then is start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from raytf.faults.record import FAULT_KINDS, Event, Kind

__all__ = ["CATEGORIES", "Fold", "Ledger"]

CATEGORIES: tuple[str, ...] = (
    "start",
    "compile",
    "data_wait",
    "step",
    "save_stall",
    "detect",
    "restart",
    "replay",
    "validate",
    "idle",
)
# What a `phase` event means for the time behind it.
_PHASES = {
    "data": "data_wait",
    "data_wait": "data_wait",
    "step": "step",
    "training": "step",
    "compile": "compile",
    "save": "save_stall",
    "save_stall": "save_stall",
    "copy": "save_stall",
    "validate": "validate",
    "validating": "validate",
    "idle": "idle",
}
_OVERHEAD = ("start", "compile", "detect", "restart", "replay")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The account of a run.

    Attributes:
        seconds: by category, all of CATEGORIES; they sum to `wall_s`.
        wall_s: from the first event to the end of the run, or to now.
        steps: most steps completed.
        lost_steps: completed steps whose result was gone when the run went on.
        replayed_steps: steps that were trained again.
        restarts: times that the run went on after a fault, in place or anew.
        faults: faults seen.
        recoveries_s: for each restart, seconds from the failure to the first report after it.
    """

    seconds: Mapping[str, float]
    wall_s: float = 0.0
    steps: int = 0
    lost_steps: int = 0
    replayed_steps: int = 0
    restarts: int = 0
    faults: int = 0
    recoveries_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event], now: float | None = None) -> Ledger:
        """The ledger of a run's events, in order of time; `now` extends a run that goes on."""
        fold = Fold()
        for event in events:
            fold.add(event)
        return fold.ledger(now)

    @property
    def goodput(self) -> float:
        """Share of the wall time in which new steps were trained, in [0, 1]."""
        return self.seconds["step"] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of the time in which the run ran at all that was
        not spent on starting, compiling, noticing faults, restarting and replaying; in [0, 1].
        """
        ran = self.wall_s - self.seconds["idle"]
        lost = sum(self.seconds[name] for name in _OVERHEAD)
        return max(0.0, (ran - lost) / ran) if ran > 1e-9 else 0.0

    @property
    def mttr_s(self) -> float | None:
        """Mean seconds from a failure to the first report after it; None without any."""
        times = self.recoveries_s
        return sum(times) / len(times) if times else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "wall_s": self.wall_s,
            "seconds": dict(self.seconds),
            "goodput": self.goodput,
            "ettr": self.ettr,
            "steps": self.steps,
            "lost_steps": self.lost_steps,
            "replayed_steps": self.replayed_steps,
            "restarts": self.restarts,
            "faults": self.faults,
            "mttr_s": self.mttr_s,
        }

    def line(self) -> str:
        """One line for people, largest costs first."""
        costs = {k: v for k, v in self.seconds.items() if k != "step" and v >= 0.005 * self.wall_s}
        parts = [f"goodput {self.goodput:.1%} of {self.wall_s:.1f} s"]
        parts += [f"{k} {v:.1f} s" for k, v in sorted(costs.items(), key=lambda c: -c[1]) if v > 0]
        if self.restarts:
            parts.append(f"{self.restarts} restarts, {self.mttr_s or 0.0:.1f} s each")
        if self.lost_steps:
            parts.append(f"{self.lost_steps} steps lost")
        return " | ".join(parts)


class Fold:
    """Builds a ledger event by event. Holds sums only: a long run costs no more than a short one.

    Times that go backwards count as standing still.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(CATEGORIES, 0.0)
        self._window = dict.fromkeys(CATEGORIES, 0.0)  # since the last report, not settled yet
        self._begin: float | None = None
        self._now = 0.0
        self._settled = 0.0  # the end of what is in the sums
        self._state = "idle"  # what time is spent on if nothing else is known
        self._attempt: int | None = None
        self._ended = True  # whether the attempt is known to have ended
        self._finished = False
        self._failed_at: float | None = None
        self._step = 0  # steps completed by the present group
        self._best = 0
        self._lost = self._replayed = self._restarts = self._faults = 0
        self._recoveries: list[float] = []

    def add(self, event: Event) -> None:
        """Takes the next event; they come in order of time."""
        if self._begin is None:
            self._begin = self._now = self._settled = event.time
        if event.kind in (Kind.ATTEMPT_STARTED, Kind.RUN_STARTED):
            self._started(event)
            return
        if self._finished:  # late words of workers: the run is over
            return
        self._advance(event.time)
        if event.kind is Kind.STEP_REACHED:
            if event.rank in (None, 0) and event.step is not None:
                self._reported(event)
        elif event.kind in FAULT_KINDS:
            self._failed(event)
        elif event.kind is Kind.RESTORED:
            self._restored(event)
        elif event.kind is Kind.DECISION and event.fields.get("action") == "continue":
            self._failed_at, self._state = None, "step"
        elif event.kind is Kind.PHASE:
            if event.rank in (None, 0) and self._state not in ("start", "restart"):
                self._state = _PHASES.get(event.phase or "", "step")
        elif event.kind is Kind.ATTEMPT_ENDED:
            self._keep()
            self._ended = True
            if self._failed_at is None:
                self._state = "idle"
        elif event.kind is Kind.RUN_FINISHED:
            self._split(event)
            self._keep()
            self._finished = self._ended = True
            self._failed_at, self._state = None, "idle"

    def ledger(self, now: float | None = None) -> Ledger:
        """The account so far; `now`, UTC seconds, extends a run that is not finished."""
        seconds = {name: self._sums[name] + self._window[name] for name in CATEGORIES}
        end = self._now
        if now is not None and now > end and self._begin is not None and not self._finished:
            seconds[self._state] += now - end
            end = now
        return Ledger(
            seconds=seconds,
            wall_s=end - self._begin if self._begin is not None else 0.0,
            steps=self._best,
            lost_steps=self._lost,
            replayed_steps=self._replayed,
            restarts=self._restarts,
            faults=self._faults,
            recoveries_s=tuple(self._recoveries),
        )

    def _advance(self, time: float) -> None:
        """Charges the time up to `time` to what the run is doing, for the time being."""
        passed = max(0.0, time - self._now)
        self._window[self._state] += passed
        self._now += passed

    def _keep(self) -> None:
        """Makes the unsettled time final as it is."""
        for name, value in self._window.items():
            self._sums[name] += value
            self._window[name] = 0.0
        self._settled = self._now

    def _started(self, event: Event) -> None:
        is_attempt = event.kind is Kind.ATTEMPT_STARTED
        if is_attempt and self._attempt == event.attempt and not self._finished:
            self._advance(event.time)  # told by two writers
            return
        went_silent = not self._ended and self._failed_at is None
        if went_silent:
            self._failed_at = self._now  # its last sign of life
            self._faults += 1
        if went_silent or self._finished:
            self._keep()
            self._state = "idle"
        self._advance(event.time)
        self._keep()
        self._finished, self._ended = False, not is_attempt
        if is_attempt:
            self._attempt = event.attempt
        self._state = "restart" if self._failed_at is not None else "start"

    def _failed(self, event: Event) -> None:
        if event.step is not None:
            self._step = max(self._step, event.step)
            self._best = max(self._best, event.step)
        if self._failed_at is not None:  # another one, or the same seen by another
            return
        self._faults += 1
        unsettled = self._now - self._settled
        told = _number(event.fields.get("detect_s"))
        if self._state in ("start", "restart"):
            noticed = min(told or 0.0, unsettled)
        else:
            noticed = unsettled if told is None else min(told, unsettled)
        working = {k: v for k, v in self._window.items() if v > 0}
        self._window = dict.fromkeys(CATEGORIES, 0.0)
        _shrink(working, unsettled - noticed)
        for name, value in working.items():
            self._window[name] += value
        self._window["detect"] += noticed
        self._keep()
        self._failed_at = self._now - noticed
        self._state = "restart"

    def _restored(self, event: Event) -> None:
        if event.step is None:
            return
        self._lost += max(0, self._step - event.step)
        self._step = event.step
        self._best = max(self._best, event.step)

    def _reported(self, event: Event) -> None:
        step = event.step or 0
        done = step - self._step
        again = max(0, min(step, self._best) - self._step) if done > 0 else 0
        self._split(event, again / done if done > 0 else 0.0)
        self._keep()
        self._replayed += again
        self._lost += max(0, -done)  # nobody told of the restore
        self._step, self._best = step, max(self._best, step)
        if self._failed_at is not None:
            self._restarts += 1
            self._recoveries.append(self._now - self._failed_at)
            self._failed_at = None
        self._state = "step"

    def _split(self, event: Event, replay_share: float = 0.0) -> None:
        """Splits the time since the last report as rank 0 says."""
        whole = self._now - self._settled
        told = _told(event.fields.get("seconds"))
        seen = self._window
        self._window = dict.fromkeys(CATEGORIES, 0.0)
        if told is None:
            self._window.update(seen)
        else:
            _shrink(told, whole)
            for name, value in told.items():
                self._window[name] += value
            self._rest(whole - sum(told.values()), seen, told)
        again = self._window["step"] * replay_share
        self._window["step"] -= again
        self._window["replay"] += again

    def _rest(self, left: float, seen: Mapping[str, float], told: Mapping[str, float]) -> None:
        for name, value in seen.items():
            if name not in told and name != "step":
                part = min(value, max(left, 0.0))
                self._window[name] += part
                left -= part
        name = self._state if self._state in ("start", "restart") else "idle"
        self._window[name] += max(left, 0.0)


def _shrink(parts: dict[str, float], whole: float) -> None:
    """Scales parts down to a whole that is smaller than their sum (clocks differ a little)."""
    total = sum(parts.values())
    if total > whole:
        for name in parts:
            parts[name] *= whole / total if total > 0 else 0.0


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < float("inf") else None


def _told(seconds: Any) -> dict[str, float] | None:
    """Rank 0's split; names that are no category are left to the rest."""
    if not isinstance(seconds, Mapping):
        return None
    named = cast(Mapping[str, Any], seconds)
    numbers = {name: _number(named[name]) for name in CATEGORIES if name in named}
    return {name: value for name, value in numbers.items() if value is not None}
