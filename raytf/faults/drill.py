"""Drills: faults that this very process brings upon itself at a given step, once per run.

Owns the grammar of `drill=` and when a strike is due. Where it is remembered that one has struck is
the caller's: a drill must strike once per run, so the marker outlives the process.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from raytf.errors import ConfigError, RaytfError

__all__ = ["PHASES", "VERBS", "Injector", "Strike", "parse_drill"]

PHASES = ("data", "step", "copy", "write", "commit", "validate", "callback")
VERBS = ("kill", "stop", "raise", "nan", "slow", "exit", "segfault")
# What comes over a process from outside, at any moment of its work. The others are things that the
# working thread itself does.
_SUDDEN = frozenset({"kill", "stop", "segfault"})
_EXAMPLE = (
    'drill="kill rank=1 step=30; kill rank=0 step=50 phase=copy; stop rank=1 step=60 for_s=10; '
    'kill every=50 steps"'
)
_WORDS = {
    "stop": ("for_s",),
    "slow": ("for_s", "times"),
    "exit": ("code",),
}


@dataclass(frozen=True)
class Strike:
    """One fault to be injected.

    Attributes:
        rank: whose process it strikes; None: any, drawn for each of a series.
        step: completed steps of the run from which on it is due.
        phase: one of PHASES: what the process is doing when it strikes.
        place: its place in the drill, from 0: two equal kills are two kills.
        verb: one of VERBS. "stop" freezes the process (SIGSTOP), "raise" raises as user code would,
            "nan" makes the next batch not a number, "slow" sleeps.
        for_s: seconds that "stop" and "slow" last; None: for ever.
        times: how many calls in a row "slow" slows down.
        code: that "exit" ends with.
        every: of a series: steps from one strike to the next, on average; 0: a single strike.
        seed: of a series.
    """

    rank: int | None
    step: int
    phase: str = "step"
    place: int = 0
    verb: str = "kill"
    for_s: float | None = None
    times: int = 1
    code: int = 1
    every: int = 0
    seed: int = 0

    @property
    def id(self) -> str:
        """A stable name, for the marker that it has struck."""
        return f"{self.verb}-{self.place}-rank{self.rank}-step{self.step}-{self.phase}"

    @property
    def is_sudden(self) -> bool:
        """Whether it may strike in the middle of the phase, from any thread."""
        return self.verb in _SUDDEN


def parse_drill(text: str, num_workers: int | None = None) -> tuple[Strike, ...]:
    """Reads `"kill rank=1 step=30 [phase=copy]; slow rank=0 step=50 for_s=2; kill every=50 steps"`.

    Args:
        text: strikes, separated by semicolons.
        num_workers: if given, ranks must be below it: a strike at nobody would never come.

    Raises:
        ConfigError: it cannot be read; says which part, and what was expected.
    """
    parts = [part.strip() for part in text.split(";")]
    strikes = [_parse(part, place) for place, part in enumerate(filter(None, parts))]
    if not strikes:
        raise ConfigError(f"drill={text!r} holds no kill or other fault. Write {_EXAMPLE}.")
    for strike in strikes:
        if num_workers is not None and strike.rank is not None and strike.rank >= num_workers:
            raise ConfigError(
                f"drill: rank={strike.rank} is no rank of {num_workers} workers (0 to "
                f"{num_workers - 1}), so this {strike.verb} would never come."
            )
    return tuple(strikes)


def _parse(part: str, place: int) -> Strike:
    verb, *words = part.split()
    if verb not in VERBS:
        raise _wrong(part, f"{verb!r} is no fault; faults are {', '.join(VERBS)}")
    given = _words(part, verb, words)
    is_series = "every" in given
    for name in ("every",) if is_series else ("rank", "step"):
        if name not in given:
            raise _wrong(part, f"{name}= is missing")
    if is_series and "step" in given:
        raise _wrong(part, "step= and every= are at odds")
    phase = given.get("phase", "data" if verb == "nan" else "step")
    if phase not in PHASES:
        raise _wrong(part, f"phase must be one of {', '.join(PHASES)}, received {phase!r}")
    if verb == "nan" and phase != "data":
        raise _wrong(part, f"nan strikes a batch: phase must be data, received {phase!r}")
    if verb == "slow" and "for_s" not in given:
        raise _wrong(part, "for_s= is missing")
    return Strike(
        rank=_integer(part, given, "rank", 0, 0) if "rank" in given else None,
        step=_integer(part, given, "step", 0, 0),
        phase=phase,
        place=place,
        verb=verb,
        for_s=_seconds(part, given),
        times=_integer(part, given, "times", 1, 1),
        code=_integer(part, given, "code", 1, 0),
        every=_integer(part, given, "every", 0, 1),
        seed=_integer(part, given, "seed", 0, 0),
    )


def _words(part: str, verb: str, words: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    series = any(word.startswith("every=") for word in words)
    known = ("rank", "step", "phase", *_WORDS.get(verb, ()), "every", *(("seed",) * series))
    for word in words:
        if word == "steps" and series:
            continue
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise _wrong(part, f"{word!r} is none of {', '.join(f'{k}=' for k in known)}")
        if name in given:
            raise _wrong(part, f"{name} is given twice")
        given[name] = value
    return given


def _integer(part: str, given: Mapping[str, str], name: str, default: int, low: int) -> int:
    if name not in given:
        return default
    if not re.fullmatch(r"[0-9]+", given[name]) or int(given[name]) < low:
        raise _wrong(part, f"{name} must be an integer >= {low}, received {given[name]!r}")
    return int(given[name])


def _seconds(part: str, given: Mapping[str, str]) -> float | None:
    if "for_s" not in given:
        return None
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given["for_s"]) or float(given["for_s"]) <= 0:
        raise _wrong(part, f"for_s is seconds > 0, received {given['for_s']!r}")
    return float(given["for_s"])


def _wrong(part: str, why: str) -> ConfigError:
    return ConfigError(f"drill: {part!r}: {why}. Write {_EXAMPLE}.")


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(strike: Strike) -> None:
    pid, waker = os.getpid(), None
    if strike.for_s is not None:  # who is stopped cannot wake itself
        command = f"sleep {strike.for_s}; kill -CONT {pid}"
        waker = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def _raise(strike: Strike) -> None:
    raise RuntimeError(f"drill: raised at step {strike.step} in phase {strike.phase}")


def _slow(strike: Strike) -> None:
    time.sleep(strike.for_s or 0.0)


def _exit(strike: Strike) -> None:
    sys.exit(strike.code)


def _segfault(strike: Strike) -> None:
    ctypes.string_at(0)


_ACTIONS: Mapping[str, Callable[[Strike], None]] = {
    "stop": _stop,
    "raise": _raise,
    "slow": _slow,
    "exit": _exit,
    "segfault": _segfault,
}


class Injector:
    """Carries out this rank's strikes.

    Args:
        strikes: the whole drill.
        rank: of this process.
        has_fired: `(id) -> bool`, over all attempts of the run; asked once for each strike of this
            rank now, and once more before it comes.
        mark_fired: `(id) -> None`, returns once the mark is durable. What it raises comes out of
            `at`, and nothing is struck: an unmarked kill would come in every attempt.
        kill: ends this process without any clean-up.
        num_workers: ranks that a series without a rank draws from.
    """

    def __init__(
        self,
        strikes: Iterable[Strike],
        rank: int,
        has_fired: Callable[[str], bool],
        mark_fired: Callable[[str], None],
        kill: Callable[[], None] = _kill_this_process,
        num_workers: int = 1,
    ) -> None:
        self._rank = rank
        self._has_fired = has_fired
        self._mark_fired = mark_fired
        self._actions: dict[str, Callable[[Strike], None]] = {**_ACTIONS}
        self._actions["kill"] = lambda strike: kill()
        self._lock = threading.Lock()  # saves are written by a thread of their own
        drill = tuple(strikes)
        drawn = range(num_workers)
        series = [s for s in drill if s.every and rank in (drawn if s.rank is None else [s.rank])]
        self._series = {s.place: _Series(s, num_workers) for s in series}
        single = [s for s in drill if not s.every and s.rank == rank and not has_fired(s.id)]
        upcoming = [self._upcoming(place) for place in self._series]
        self._left = _in_order([*single, *upcoming])
        self._times: dict[str, int] = {}  # calls that a "slow" has slowed down

    def teach(self, verb: str, action: Callable[[Strike], None]) -> None:
        """Says how a fault is brought about that needs more than this process ("nan")."""
        self._actions[verb] = action

    def wants(self, verb: str) -> bool:
        """Whether a strike of this kind is still to come on this rank."""
        return any(strike.verb == verb for strike in self._left)

    def pending(self, phase: str, step: int | None = None) -> bool:
        """Whether a strike at this rank waits for this phase (and is due at this step)."""
        return any(s.phase == phase and (step is None or step >= s.step) for s in self._left)

    def at(self, phase: str, step: int, sudden: bool | None = None) -> None:
        """Strikes if a strike is due: one for this phase, at this step or earlier.

        Saves and validations come at few steps, hence "or earlier".

        Args:
            phase: one of PHASES.
            step: completed steps of the run.
            sudden: only those that are (True) or are not (False) `Strike.is_sudden`; None: all.
        """
        if self._left:
            strike = self._due(phase, step, sudden)
            if strike is not None:
                self._act(strike)

    def _due(self, phase: str, step: int, sudden: bool | None) -> Strike | None:
        with self._lock:
            for strike in [s for s in self._left if s.phase == phase and step >= s.step]:
                if sudden is not None and strike.is_sudden != sudden:
                    continue
                struck = self._times.get(strike.id, 0)
                fired = struck == 0 and self._has_fired(strike.id)
                if not fired and struck == 0:
                    self._mark_fired(strike.id)
                self._times[strike.id] = struck + 1
                if fired or struck + 1 >= strike.times:
                    self._drop(strike)
                if not fired:
                    return strike
        return None

    def _drop(self, strike: Strike) -> None:
        left = [s for s in self._left if s is not strike]
        if strike.place in self._series:
            left.append(self._upcoming(strike.place))
        self._left = _in_order(left)

    def _upcoming(self, place: int) -> Strike:
        series = self._series[place]
        while True:
            strike = series.next()
            if strike.rank == self._rank and not self._has_fired(strike.id):
                return strike

    def _act(self, strike: Strike) -> None:
        action = self._actions.get(strike.verb)
        if action is None:
            raise RaytfError(f"drill: nobody here can do {strike.verb!r}; a raytf bug.")
        action(strike)


class _Series:
    """Strikes at random steps, the same in every process: gaps of half to one and a half times
    `every`.
    """

    def __init__(self, of: Strike, num_workers: int) -> None:
        self._of = of
        self._num_workers = num_workers
        self._random = random.Random(f"raytf drill {of.seed} {of.place}")
        self._step = 0

    def next(self) -> Strike:
        every = self._of.every
        self._step += self._random.randint((every + 1) // 2, every + every // 2)
        drawn = self._random.randrange(self._num_workers)
        rank = drawn if self._of.rank is None else self._of.rank
        return replace(self._of, step=self._step, rank=rank)


def _in_order(strikes: Iterable[Strike]) -> tuple[Strike, ...]:
    return tuple(sorted(strikes, key=lambda s: (s.step, s.place)))
