"""When this rank saves, and what: every rank at the same step, rank 0's clock deciding.

A save is taken *before* a step, never after one: what falls due at an epoch's last step is taken
when the epoch is closed, with its metrics and its callbacks' words in it, and nothing is ever saved
between the two. Writing is `checkpoint.writer`'s, in a thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raytf.checkpoint.cadence import Cadence
from raytf.checkpoint.writer import Outcome, Snapshot, Writer
from raytf.config import SaveConfig
from raytf.data import Position
from raytf.errors import StorageError, SupersededError
from raytf.worker.callbacks import Agreement
from raytf.worker.phases import Phases
from raytf.worker.state import RankState

__all__ = ["NoSaver", "Pace", "Place", "Saver"]

logger = logging.getLogger("raytf")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the loop is.

    Attributes:
        epoch: the present one.
        step: within the epoch, the one that comes next.
        total_step: steps completed in the run.
        is_open: whether the epoch has begun: metrics were reset, `on_epoch_begin` was called.
        stopped: whether a callback has ended the training.
        logs: of the last epoch that was closed.
    """

    epoch: int = 0
    step: int = 0
    total_step: int = 0
    is_open: bool = False
    stopped: bool = False
    logs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def position(self, seed: int) -> Position:
        """Where the data goes on."""
        return Position(seed=seed, epoch=self.epoch, next_step=self.step)

    def to_json(self) -> dict[str, Any]:
        """What `Position` does not say."""
        return {
            "total_step": self.total_step,
            "is_open": self.is_open,
            "stopped": self.stopped,
            "logs": dict(self.logs),
        }

    @classmethod
    def of(cls, position: Mapping[str, Any], loop: Mapping[str, Any]) -> Place:
        """The place that a checkpoint was taken at."""
        where = Position.from_json(position)
        return cls(epoch=where.epoch, step=where.next_step, **loop)


class Pace:
    """How much slower steps are while a save is being written."""

    def __init__(self) -> None:
        self._last: tuple[int, float, bool] | None = None
        # seconds and steps: without, with a save in flight
        self._spent = {False: [0.0, 0], True: [0.0, 0]}

    def step(self, step: int, now: float, busy: bool) -> None:
        """Takes the time before a step; what began with a save in flight counts as such."""
        if self._last is not None and step > self._last[0]:
            spent = self._spent[self._last[2]]
            spent[0] += now - self._last[1]
            spent[1] += step - self._last[0]
        self._last = (step, now, busy)

    def slowdown(self) -> float:
        """Extra time of a step while writing, relative to others; 0.0 as long as it is unknown."""
        (idle_s, idle), (busy_s, busy) = self._spent[False], self._spent[True]
        if not idle or not busy or not idle_s:
            return 0.0
        return max(0.0, (busy_s / busy) / (idle_s / idle) - 1.0)


class NoSaver:
    """A run without a store."""

    def begin(self, place: Place) -> None:
        """Nothing to do."""

    def before_step(self, place: Place) -> None:
        """Nothing to do."""

    def epoch_end(self, place: Place) -> None:
        """Nothing to do."""

    def finish(self, place: Place) -> None:
        """Nothing to do."""


class Saver:
    """Saves one rank's part of the run's state.

    Args:
        config: when to save.
        state: of this rank.
        writer: of this rank.
        agreement: spreads rank 0's decisions, where they depend on a clock.
        is_chief: whether this is rank 0.
        head: fields of every manifest of this attempt.
        seed: of the data's order.
        at: `at(phase, step)`, for fault drills.
        tell: takes records of what happened, on rank 0.
        check: raises if the state is not worth saving; called on all ranks before each save.
        phases: told when training waits for a save.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        config: SaveConfig,
        state: RankState,
        writer: Writer,
        agreement: Agreement,
        is_chief: bool,
        head: Mapping[str, Any],
        seed: int,
        at: Callable[[str, int], None],
        tell: Callable[[dict[str, Any]], None],
        check: Callable[[Place], None] = lambda place: None,
        phases: Phases | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._state = state
        self._writer = writer
        self._agreement = agreement
        self._is_chief = is_chief
        self._head = head
        self._seed = seed
        self._at = at
        self._tell = tell
        self._check = check
        self._phases = phases or Phases(clock=clock)
        self._clock = clock
        self._by_clock = config.is_auto or config.every_s is not None
        self._cadence = Cadence(
            every_steps=config.every_steps,
            every_s=config.every_s,
            auto=config.is_auto,
            max_overhead=config.max_overhead,
        )
        self._next_look = 0
        self._number = 0
        self._saved_step = -1
        self._durable_at = clock()
        self._durable_step = -1
        self._failed_in_row = 0
        self._superseded: str | None = None
        self._pace = Pace()
        self.counts = {"committed": 0, "failed": 0, "skipped": 0, "superseded": 0}

    def begin(self, place: Place) -> None:
        """Plans the first save; called once, with the place that training starts or goes on at."""
        self._saved_step = self._durable_step = place.total_step
        self._next_look = self._look(place.total_step)[1]

    def save_now(self, place: Place) -> None:
        """Saves whatever the plan says."""
        self._save(place)

    def before_step(self, place: Place) -> None:
        """Saves if one is due; called before every step (or several in one call)."""
        if self._superseded is not None:
            raise SupersededError(self._superseded)
        if self._config.is_auto:
            self._pace.step(place.total_step, self._clock(), self._writer.busy)
        if place.total_step < self._next_look:
            return
        due, self._next_look = self._look(place.total_step)
        if due:
            self._save(place)

    def epoch_end(self, place: Place) -> None:
        """Saves if one is due; `place` is the start of the next epoch, with the logs of this."""
        config, due = self._config, False
        if place.total_step >= self._next_look:
            due, self._next_look = self._look(place.total_step)
        if config.every_epochs is not None:
            due = due or place.epoch % config.every_epochs == 0
        if due or place.stopped or config.keep_best in place.logs:
            self._save(place)

    def finish(self, place: Place) -> None:
        """Makes the last state durable and ends the writing."""
        if self._saved_step != place.total_step:
            self._save(place)
        self._drain()
        if self._durable_step != place.total_step and self._superseded is None:
            self._save(place)  # once more: nothing comes after it that could
            self._drain()
        self._writer.close()
        if self._superseded is not None:
            raise SupersededError(self._superseded)

    def _drain(self) -> None:
        limit = self._config.max_stale_s
        with self._phases.during("save"):
            drained = self._writer.drain(limit)
        if not drained:
            raise StorageError(
                f"the last state was not durable after {limit:g} s (max_stale_s). The storage does "
                "not answer; mend it and run the same command again."
            )

    def _look(self, step: int) -> tuple[bool, int]:
        if not self._by_clock:
            plan = self._cadence.look(step, 0.0)  # arithmetic: alike on all ranks
            return plan.save, plan.next_look
        plan = self._cadence.look(step, self._clock())
        save, next_look = self._agreement.chief([float(plan.save), float(plan.next_look)]).tolist()
        return bool(save), int(next_look)

    def _save(self, place: Place) -> None:
        with self._phases.during("save"):
            self._check(place)
            self._capture(place)

    def _capture(self, place: Place) -> None:
        self._check_not_stale()
        began = self._clock()
        images, own = self._state.capture(self._writer.images)
        self._at("copy", place.total_step)
        self._number += 1
        self._saved_step = place.total_step
        self._writer.submit(
            Snapshot(
                number=self._number,
                step=place.total_step,
                images=images,
                own=own,
                head=self._manifest_head(place) if self._is_chief else {},
            )
        )
        now = self._clock()
        self._cadence.saved(place.total_step, now, now - began)

    def _manifest_head(self, place: Place) -> dict[str, Any]:
        return {
            **self._head,
            "step": place.total_step,
            "epoch": place.epoch,
            "position": place.position(self._seed).to_json(),
            "time": time.time(),
            "metrics": {} if place.is_open else dict(place.logs),
            "state": {"loop": place.to_json()},
        }

    def done(self, outcome: Outcome) -> None:
        """Takes a save's outcome, in the writer's thread."""
        self.counts[outcome.kind] += 1
        if outcome.kind == "committed":
            self._failed_in_row, self._durable_at = 0, self._clock()
            self._durable_step = outcome.step
            self._cadence.wrote(outcome.seconds, self._pace.slowdown())
        elif outcome.kind == "superseded":
            self._superseded = outcome.error
        elif outcome.kind == "failed":
            self._failed_in_row += 1
        if not self._is_chief:
            return
        if outcome.kind == "failed":
            text = f"checkpoint of step {outcome.step} failed: {outcome.error}"
            self._tell({"kind": "message", "text": text, "event": "checkpoint_failed"})
        elif outcome.kind == "skipped":
            logger.info("checkpoint of step %d skipped: the one before is still being written")
        self._tell(
            {
                "kind": "checkpoint",
                "outcome": outcome.kind,
                "step": outcome.step,
                "seconds": outcome.seconds,
                "deleted": list(outcome.deleted),
            }
        )

    def _check_not_stale(self) -> None:
        """Only failed saves make a state stale: long intervals are the user's choice."""
        age, config = self._clock() - self._durable_at, self._config
        if not self._is_chief or self._failed_in_row == 0:
            return
        if self._failed_in_row < config.max_stale_saves and age < config.max_stale_s:
            return
        raise StorageError(
            f"{self._failed_in_row} saves in a row have failed, and the newest durable state is "
            f"{age:.0f} s old (limits: max_stale_saves={config.max_stale_saves}, "
            f"max_stale_s={config.max_stale_s:g}). Training stops instead of going on without a "
            "state to come back to. Mend the storage and run the same command again.",
            failed_in_row=self._failed_in_row,
            age_s=age,
        )
