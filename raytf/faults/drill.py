"""Drills: killing this very process at a given step, once per run.

Owns the grammar of `drill=` and when a kill fires. Where it is remembered that one has fired is the
caller's: a drill must fire once per run, so the marker outlives the process.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from raytf.errors import ConfigError

__all__ = ["PHASES", "Injector", "Kill", "parse_drill"]

PHASES = ("data", "step", "copy", "write", "commit", "validate", "callback")
_EXAMPLE = 'drill="kill rank=1 step=30; kill rank=0 step=50 phase=copy"'


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        rank: whose process dies.
        step: completed steps of the run from which on it is due.
        phase: one of PHASES: what the process is doing when it dies.
        place: its place in the drill, from 0: two equal kills are two kills.
    """

    rank: int
    step: int
    phase: str = "step"
    place: int = 0

    @property
    def id(self) -> str:
        """A stable name, for the marker that it has fired."""
        return f"kill-{self.place}-rank{self.rank}-step{self.step}-{self.phase}"


def parse_drill(text: str, num_workers: int | None = None) -> tuple[Kill, ...]:
    """Reads `"kill rank=1 step=30 [phase=copy]; kill rank=0 step=50"`.

    Args:
        text: kills, separated by semicolons.
        num_workers: if given, ranks must be below it: a kill of nobody would never fire.

    Raises:
        ConfigError: it cannot be read; says which part, and what was expected.
    """
    parts = [part.strip() for part in text.split(";")]
    kills = [_parse_kill(part, place) for place, part in enumerate(filter(None, parts))]
    if not kills:
        raise ConfigError(f"drill={text!r} holds no kill. Write {_EXAMPLE}.")
    for kill in kills:
        if num_workers is not None and kill.rank >= num_workers:
            raise ConfigError(
                f"drill: rank={kill.rank} is no rank of {num_workers} workers (0 to "
                f"{num_workers - 1}), so this kill would never fire."
            )
    return tuple(kills)


def _parse_kill(part: str, place: int) -> Kill:
    verb, *words = part.split()
    if verb != "kill":
        raise _wrong(part, f"{verb!r} is no fault; only kill is")
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("rank", "step", "phase"):
            raise _wrong(part, f"{word!r} is none of rank=, step=, phase=")
        if name in given:
            raise _wrong(part, f"{name} is given twice")
        given[name] = value
    numbers: dict[str, int] = {}
    for name in ("rank", "step"):
        if name not in given:
            raise _wrong(part, f"{name}= is missing")
        if not re.fullmatch(r"[0-9]+", given[name]):
            raise _wrong(part, f"{name} must be an integer >= 0, received {given[name]!r}")
        numbers[name] = int(given[name])
    phase = given.get("phase", "step")
    if phase not in PHASES:
        raise _wrong(part, f"phase must be one of {', '.join(PHASES)}, received {phase!r}")
    return Kill(numbers["rank"], numbers["step"], phase, place)


def _wrong(part: str, why: str) -> ConfigError:
    return ConfigError(f"drill: {part!r}: {why}. Write {_EXAMPLE}.")


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Injector:
    """Carries out this rank's kills.

    Args:
        kills: the whole drill.
        rank: of this process.
        has_fired: `(id) -> bool`, over all attempts of the run; asked once for each kill of this
            rank now, and once more before it fires.
        mark_fired: `(id) -> None`, returns once the mark is durable. What it raises comes out of
            `at`, and nothing is killed: an unmarked kill would fire in every attempt.
        kill: ends this process without any clean-up.
    """

    def __init__(
        self,
        kills: Iterable[Kill],
        rank: int,
        has_fired: Callable[[str], bool],
        mark_fired: Callable[[str], None],
        kill: Callable[[], None] = _kill_this_process,
    ) -> None:
        self._has_fired = has_fired
        self._mark_fired = mark_fired
        self._kill = kill
        self._lock = threading.Lock()  # saves are written by a thread of their own
        mine = [k for k in kills if k.rank == rank and not has_fired(k.id)]
        self._left = tuple(sorted(mine, key=lambda k: (k.step, k.place)))

    def at(self, phase: str, step: int) -> None:
        """Kills this process if a kill is due: one for this phase, at this step or earlier.

        Saves and validations come at few steps, hence "or earlier".

        Args:
            phase: one of PHASES.
            step: completed steps of the run.
        """
        if self._left:
            self._fire(phase, step)

    def pending(self, phase: str) -> bool:
        """Whether a kill of this rank waits for this phase."""
        return any(kill.phase == phase for kill in self._left)

    def _fire(self, phase: str, step: int) -> None:
        with self._lock:
            due = [k for k in self._left if k.phase == phase and step >= k.step]
            for kill in due:
                fired = self._has_fired(kill.id)
                if not fired:
                    self._mark_fired(kill.id)
                self._left = tuple(k for k in self._left if k is not kill)
                if not fired:
                    self._kill()
                    return
