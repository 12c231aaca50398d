"""Looks at the state between steps: are its numbers numbers, and is it the same on all ranks?

Owns when to look (for bad numbers before every save and at the end of every epoch, for both about
every five seconds; at the same steps on all ranks) and what is said. What a bad number is, `health`
knows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash

from raytf.config import WatchConfig
from raytf.errors import TrainingError
from raytf.worker.callbacks import Agreement
from raytf.worker.health import Health
from raytf.worker.saving import Place

__all__ = ["Digests", "NoWatch", "Watch", "odd_ranks"]

_LOOK_S = 5.0
_FIRST_STEPS = 8  # until the first look
_GROWTH = 4  # of the steps between looks: what the first ones took says little
_MAX_SHARE = 0.005  # of the time that comparing may take, where it is not asked for more often
_SHOWN_ROWS = 20


class NoWatch:
    """A run that nobody watches."""

    def before_step(self, place: Place) -> None:
        """Nothing to do."""

    def epoch_end(self, place: Place) -> None:
        """Nothing to do."""

    def before_save(self, place: Place) -> None:
        """Nothing to do."""


class Digests:
    """Digests of variables, by the bytes they have now.

    On a CPU they are read where they lie: xxhash is faster than memory, and swapped values, which a
    sum would not see, change it.

    Args:
        variables: by name.
    """

    def __init__(self, variables: Mapping[str, tf.Variable]) -> None:
        self.names = tuple(variables)
        self._variables = tuple(variables.values())

    def read(self) -> np.ndarray:
        """One digest per variable, uint64, in the order of `names`."""
        return np.array([_digest(v.read_value()) for v in self._variables], np.uint64)


def _digest(tensor: tf.Tensor) -> int:
    # `numpy()` copies all of it.
    array = np.ascontiguousarray(np.asarray(tensor))
    return xxhash.xxh3_64_intdigest(array.reshape(-1).view(np.uint8).data)


class Watch:
    """One rank's part in the looks.

    Args:
        config: what to look for.
        agreement: of all ranks.
        rank: this one.
        num_ranks: of the group.
        health: says which step was bad first; None: it is not looked for.
        bits: of the state that all ranks have in common.
        rows: `rows(epoch, step)`, row numbers of a global batch, or None where rows have none.
        clock: monotonic seconds; rank 0's counts.
    """

    def __init__(
        self,
        *,
        config: WatchConfig,
        agreement: Agreement,
        rank: int,
        num_ranks: int,
        health: Health | None,
        bits: Digests,
        rows: Callable[[int, int], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._rank = rank
        self._num_ranks = num_ranks
        self._health = health
        self._bits = bits
        self._rows = rows
        self._clock = clock
        asked = config.agree_every_steps
        self._every = None if asked == "auto" else int(asked)
        self._epoch: Place | None = None  # where the present epoch was entered
        self._next_look = self._next_compare = -1
        self._steps = _FIRST_STEPS
        self._looked: tuple[int, float] | None = None
        self._compared_at: float | None = None
        self._compare_s = 0.0
        self._seen: tuple[int, bool] = (-1, False)  # step of the last look, whether it compared

    def before_step(self, place: Place) -> None:
        """Looks if it is time to; called before every step (or several in one call).

        Raises:
            TrainingError: a number is none, or the ranks do not agree.
        """
        if self._epoch is None or self._epoch.epoch != place.epoch:
            self._enter(place)
        if place.total_step >= self._next_look:
            self._look(place, compare=place.total_step >= self._next_compare)

    def epoch_end(self, place: Place) -> None:
        """Looks for bad numbers, before anybody else sees the epoch's; raises as `before_step`."""
        self._look(place, compare=False)

    def before_save(self, place: Place) -> None:
        """Looks for bad numbers, and compares at the end of an epoch or if that is due: comparing
        reads the whole state, and costs more than the save itself. Raises as `before_step`.
        """
        self._look(place, compare=not place.is_open or place.total_step >= self._next_compare)

    def _enter(self, place: Place) -> None:
        if self._epoch is None:
            step = place.total_step
            self._next_look, self._looked = step + self._steps, (step, self._clock())
            self._next_compare = self._next_look if self._every is None else step + self._every
            self._next_look = min(self._next_look, self._next_compare)
        self._epoch = place

    def _look(self, place: Place, compare: bool) -> None:
        step, ranks = place.total_step, self._num_ranks
        compare = compare and ranks > 1
        if self._seen[0] == step and (self._seen[1] or not compare):
            return
        self._seen = (step, compare)
        digests = self._digests() if compare else np.zeros(0, np.uint64)
        mine = np.zeros((2, ranks))
        mine[:, self._rank] = self._bad_step() + 1, _short(digests)
        plan = self._plan(step, compare)
        everyone = self._agreement.sum([*(plan if self._rank == 0 else (0.0, 0.0)), *mine.ravel()])
        self._follow(step, everyone[:2], compare)
        bad_steps, shorts = everyone[2:].reshape(2, ranks)
        if any(bad_steps):
            raise self._not_finite(int(min(bad_steps[bad_steps > 0])) - 1)
        if len(set(shorts)) > 1:
            raise self._divergence(step, digests)

    def _bad_step(self) -> int:
        return -1 if self._health is None else self._health.read()

    def _digests(self) -> np.ndarray:
        began = self._clock()
        digests = self._bits.read()
        self._compared_at = self._clock()
        self._compare_s = self._compared_at - began
        return digests

    def _plan(self, step: int, compares: bool) -> tuple[float, float]:
        """Rank 0's: steps to the next look, and whether it compares."""
        now = self._clock()
        if self._looked is not None and step > self._looked[0]:
            pace = (now - self._looked[1]) / (step - self._looked[0])
            wanted = int(_LOOK_S / max(pace, 1e-9))
            self._steps = max(1, min(wanted, self._steps * _GROWTH))
        if self._every is not None:
            return self._steps, 0.0
        last = self._compared_at
        due = last is None or now + _LOOK_S - last >= self._compare_s / _MAX_SHARE
        return self._steps, float(due)

    def _follow(self, step: int, plan: Any, compared: bool) -> None:
        steps, compare = int(plan[0]), bool(plan[1])
        self._looked = (step, self._clock())
        self._next_look = step + steps
        if self._every is None:
            self._next_compare = self._next_look if compare else step + steps + 1
        else:
            if compared:
                self._next_compare = step + self._every
            self._next_look = min(self._next_look, self._next_compare)

    def _not_finite(self, step: int) -> TrainingError:
        epoch = self._epoch
        batch = None if epoch is None else epoch.step + step - epoch.total_step
        number = 0 if epoch is None else epoch.epoch
        culprits = [] if self._health is None else self._health.culprits()
        what = culprits[0] if culprits else "a loss or a gradient"
        rows = None if batch is None else self._rows(number, batch)
        rows = None if rows is None else [int(row) for row in rows]
        text = f"{what} is not a finite number at step {step} (epoch {number + 1}, batch {batch})"
        others = f", and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        told = "" if rows is None else f" The batch's rows: {_shown(rows)}."
        return TrainingError(
            f"{text}{others}.{told} Nothing of it was saved. Look at these rows, lower the "
            "learning rate or clip the gradients; WatchConfig(on_nan='rollback') goes back and "
            "leaves the batch out, on_nan='ignore' goes on.",
            nan=text,
            on_nan=self._config.on_nan,
            step=step,
            epoch=number,
            batch_step=batch,
            rows=rows,
            variable=what,
        )

    def _divergence(self, step: int, digests: np.ndarray) -> TrainingError:
        words = np.zeros((self._num_ranks, 2 * len(digests)), np.int32)
        words[self._rank] = digests.view(np.int32)
        everyone = self._agreement.exchange(words.ravel()).reshape(words.shape)
        odd, first = odd_ranks(np.ascontiguousarray(everyone).view(np.uint64))
        variable = self._bits.names[first]
        who = "rank " + ", ".join(map(str, odd))
        text = f"{variable} differs on {who} before step {step}"
        context: dict[str, Any] = {"diverged": text, "rank": self._rank}
        if self._rank not in odd:
            context = {"collateral": True, "rank": odd[0]}
        return TrainingError(
            f"The ranks' states are not the same any more: {text}. Bits changed on a machine, or "
            "code on a rank (a callback, say) changes variables without the others. Nothing of it "
            "was saved: the newest checkpoint is of a state in which all agreed.",
            **context,
            step=step,
            ranks=odd,
            variable=variable,
        )


def odd_ranks(digests: np.ndarray) -> tuple[list[int], int]:
    """Who differs from the others, and in which variable first.

    Args:
        digests: shape (ranks, variables); not all rows alike.

    Returns:
        The ranks outside of the largest group that agrees, or all of them if no group is more than
        half; and the index of the first variable in which not all agree.
    """
    rows = [tuple(row) for row in digests.tolist()]
    most = max(set(rows), key=lambda row: (rows.count(row), -rows.index(row)))
    clear = 2 * rows.count(most) > len(rows)
    odd = [rank for rank, row in enumerate(rows) if not clear or row != most]
    differs = (digests != digests[0]).any(axis=0)
    return odd, int(np.argmax(differs))


def _short(digests: np.ndarray) -> float:
    """One number of all digests that a float64 holds exactly; never 0 for any."""
    if not len(digests):
        return 0.0
    word = hashlib.blake2b(digests.tobytes(), digest_size=6).digest()
    return float(int.from_bytes(word, "little") + 1)


def _shown(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    return ", ".join(map(str, rows[:_SHOWN_ROWS])) + more
