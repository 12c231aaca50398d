"""Which sample comes when: the order of an epoch, its batches, and a position in it.

Owns the arithmetic that makes a batch a pure function of (seed, epoch, step): a seeded permutation
that can be read at any position, the split of an epoch into steps and of a batch into shares, and
the few integers that say where a run is. Knows no files, no clock, no workers and no global random
state. The values are frozen (`tests/data/test_order.py`): a change to them would silently retrain
every resumed run on other batches, so it needs a new `Position` version.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raytf.data.permutation import CHUNK_ROWS, MASK64, MAX_ROWS, fold, mix64, permute
from raytf.errors import DataError

__all__ = ["Order", "Plan", "Position", "sample_keys", "share"]

Rows = npt.NDArray[np.int64]

# What a key is for; part of every key, so that no two uses share random bits.
_STREAM_ROWS, _STREAM_BLOCKS, _STREAM_WINDOW, _STREAM_SAMPLE = range(4)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= 0


@dataclass(frozen=True)
class _Layout:
    """The order of the blocks in one epoch. Offsets count positions of the epoch."""

    block_ends: Rows  # of each block, in this epoch's order
    shifts: Rows  # what to add to a position in the concatenated blocks to have its row number
    window_ends: Rows


@dataclass(frozen=True)
class Order:
    """The order of rows in every epoch: a pure function of (seed, epoch, position).

    Without `blocks` a shuffled epoch is one permutation of all rows. With them (data larger than
    memory, for example the row groups of Parquet files) the blocks are permuted, neighbours are
    joined to windows of at least `window_rows` rows, and rows are permuted within a window: a
    reader needs one window at a time in memory. Either way each row comes once per epoch.

    Memory is O(1), or O(number of blocks); the last chunk of 16,384 positions is kept, so reading
    an epoch batch by batch costs what reading it at once costs. Safe to call from several threads.

    Args:
        num_rows: number of rows, in [0, 2**62).
        seed: in [0, 2**64).
        shuffle: False gives the rows as they are stored, in every epoch.
        blocks: numbers of rows of consecutive blocks; their sum is `num_rows`.
        window_rows: least number of rows in a window; the last window of an epoch may be smaller.
            Goes with `blocks`.

    Raises:
        DataError: a number is out of range, or `blocks` do not sum to `num_rows`.
    """

    num_rows: int
    seed: int
    shuffle: bool
    blocks: tuple[int, ...] | None = None
    window_rows: int | None = None
    # Results of pure functions, kept for the next call: "layout" and "chunk" last used.
    _memo: dict[str, Any] = field(
        default_factory=dict[str, Any], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not _is_count(self.num_rows) or self.num_rows >= MAX_ROWS:
            raise DataError(f"num_rows must be in [0, 2**62). Received: {self.num_rows!r}.")
        if not _is_count(self.seed) or self.seed > MASK64:
            raise DataError(f"seed must be in [0, 2**64). Received: {self.seed!r}.")
        if (self.blocks is None) != (self.window_rows is None):
            raise DataError(
                "blocks and window_rows go together: give both, or neither. Received: "
                f"blocks={'None' if self.blocks is None else f'({len(self.blocks)} blocks)'}, "
                f"window_rows={self.window_rows!r}."
            )
        if self.blocks is None:
            return
        if not all(_is_count(rows) for rows in self.blocks) or sum(self.blocks) != self.num_rows:
            raise DataError(
                f"blocks must be counts >= 0 that sum to num_rows={self.num_rows}. "
                f"Received: {len(self.blocks)} blocks with the sum {sum(self.blocks)}."
            )
        if not _is_count(self.window_rows) or self.window_rows == 0:
            raise DataError(f"window_rows must be an integer >= 1. Received: {self.window_rows!r}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memo": {}}

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Returns the rows at positions [start, stop) of `epoch`: shape (stop - start,), int64.

        Raises:
            DataError: the range is not within [0, num_rows], or `epoch` is negative.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise DataError(
                f"Positions [{start}, {stop}) are not within an epoch of {self.num_rows} rows."
            )
        if not _is_count(epoch) or epoch > MASK64:
            raise DataError(f"epoch must be in [0, 2**64). Received: {epoch!r}.")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first, last = start // CHUNK_ROWS, (stop - 1) // CHUNK_ROWS
        if first != last:  # also an empty range at a chunk's start
            return self._shuffled(epoch, start, stop)
        origin = first * CHUNK_ROWS
        return self._chunk(epoch, first)[start - origin : stop - origin].copy()

    def _chunk(self, epoch: int, index: int) -> Rows:
        known = self._memo.get("chunk")
        if known is not None and known[0] == (epoch, index):
            return known[1]
        start = index * CHUNK_ROWS
        rows = self._shuffled(epoch, start, min(start + CHUNK_ROWS, self.num_rows))
        self._memo["chunk"] = ((epoch, index), rows)
        return rows

    def _shuffled(self, epoch: int, start: int, stop: int) -> Rows:
        if self.blocks is not None:
            return self._block_shuffled(epoch, start, stop)
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, fold(self.seed, _STREAM_ROWS, epoch), self.num_rows)

    def _block_shuffled(self, epoch: int, start: int, stop: int) -> Rows:
        layout = self._layout(epoch)
        result = np.empty(stop - start, np.int64)
        window = int(np.searchsorted(layout.window_ends, start, side="right"))
        position = start
        while position < stop:
            begin = int(layout.window_ends[window - 1]) if window else 0
            end = int(layout.window_ends[window])
            until = min(stop, end)
            local = np.arange(position - begin, until - begin, dtype=np.int64)
            key = fold(self.seed, _STREAM_WINDOW, epoch, window)
            places = permute(local, key, end - begin) + begin
            block = np.searchsorted(layout.block_ends, places, side="right")
            result[position - start : until - start] = places + layout.shifts[block]
            position, window = until, window + 1
        return result

    def _layout(self, epoch: int) -> _Layout:
        known = self._memo.get("layout")
        if known is not None and known[0] == epoch:
            return known[1]
        sizes = np.array(self.blocks, dtype=np.int64)
        first_rows = np.cumsum(sizes) - sizes
        numbers_ = np.arange(len(sizes), dtype=np.int64)
        order = permute(numbers_, fold(self.seed, _STREAM_BLOCKS, epoch), len(sizes))
        ends = np.cumsum(sizes[order])
        window_ends: list[int] = []
        position = 0
        while position < self.num_rows:
            block = int(np.searchsorted(ends, position + (self.window_rows or 1)))
            position = int(ends[min(block, len(ends) - 1)])
            window_ends.append(position)
        shifts = first_rows[order] - (ends - sizes[order])
        layout = _Layout(ends, shifts, np.array(window_ends, dtype=np.int64))
        self._memo["layout"] = (epoch, layout)
        return layout


@dataclass(frozen=True)
class Plan:
    """How an epoch is cut into global batches: `full_steps` of equal size, then the smaller rest.

    Args:
        num_rows: rows in an epoch.
        global_batch_size: rows in a batch of all workers together.
        drop_remainder: leave out the last, smaller batch.

    Raises:
        DataError: there is nothing to train on.
    """

    num_rows: int
    global_batch_size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise DataError(f"global_batch_size must be >= 1. Received: {self.global_batch_size}.")
        if self.num_rows < 1:
            raise DataError("The data has 0 rows: there is nothing to train on.")
        if self.steps_per_epoch == 0:
            raise DataError(
                f"drop_remainder=True leaves nothing to train on: {self.num_rows} rows are less "
                f"than one batch of {self.global_batch_size}. Use drop_remainder=False or a "
                f"global_batch_size of at most {self.num_rows}."
            )

    @property
    def full_steps(self) -> int:
        """Number of batches with `global_batch_size` rows in an epoch."""
        return self.num_rows // self.global_batch_size

    @property
    def tail_rows(self) -> int:
        """Number of rows in the last, smaller batch; 0 if there is none."""
        return 0 if self.drop_remainder else self.num_rows % self.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch, the smaller one included."""
        return self.full_steps + (1 if self.tail_rows else 0)

    def batch(self, step: int) -> tuple[int, int]:
        """Returns the positions [start, stop) of batch `step`, in [0, steps_per_epoch)."""
        if not 0 <= step < self.steps_per_epoch:
            raise DataError(f"step must be in [0, {self.steps_per_epoch}). Received: {step}.")
        start = step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.num_rows)


_POSITION_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is in its data: the batch that comes next, for any number of workers.

    Attributes:
        seed: seed of the order.
        epoch: >= 0.
        next_step: step within the epoch that comes next, in [0, steps_per_epoch).
        version: of the order's arithmetic and of this record.

    Raises:
        DataError: a field is no integer >= 0, or the version is one this raytf cannot continue.
    """

    seed: int
    epoch: int = 0
    next_step: int = 0
    version: int = _POSITION_VERSION

    def __post_init__(self) -> None:
        for name in ("version", "seed", "epoch", "next_step"):
            value = getattr(self, name)
            if not _is_count(value):
                raise DataError(f"Position.{name} must be an integer >= 0. Received: {value!r}.")
        if self.version != _POSITION_VERSION:
            raise DataError(
                f"The position has version {self.version}, but this raytf reads version "
                f"{_POSITION_VERSION}: its order of samples may differ. Resume with the raytf "
                "version that wrote the checkpoint."
            )

    def to_json(self) -> dict[str, int]:
        """Returns the fields as plain integers."""
        return {
            "version": int(self.version),
            "seed": int(self.seed),
            "epoch": int(self.epoch),
            "next_step": int(self.next_step),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Position:
        """Makes a position from what `to_json` returned; DataError if its fields are others."""
        expected = {"version", "seed", "epoch", "next_step"}
        # The version first: a record of another version may well have other fields.
        if "version" in record and record["version"] != _POSITION_VERSION:
            cls(seed=0, version=record["version"])
        if set(record) != expected:
            raise DataError(
                f"A position has the fields {sorted(expected)}. Received: {sorted(record)}. "
                "The record is damaged or was not written by raytf."
            )
        return cls(**record)

    def advance(self, plan: Plan, num_steps: int = 1) -> Position:
        """Returns the position `num_steps` >= 0 batches later; epochs follow each other."""
        if num_steps < 0:
            raise DataError(f"num_steps must be >= 0. Received: {num_steps}.")
        epochs, step = divmod(self.next_step + num_steps, plan.steps_per_epoch)
        return Position(
            seed=self.seed, epoch=self.epoch + epochs, next_step=step, version=self.version
        )


def share(batch_rows: int, num_workers: int, rank: int) -> tuple[int, int]:
    """Returns the part [start, stop) of a batch that a worker takes.

    Shares are contiguous, in the order of ranks, cover the batch and differ by at most one row; the
    first ranks take the extra rows. The last ranks' shares are empty when the batch has fewer rows
    than there are workers.

    Args:
        batch_rows: rows of the global batch, >= 0.
        num_workers: >= 1.
        rank: in [0, num_workers - 1].
    """
    if batch_rows < 0 or num_workers < 1 or not 0 <= rank < num_workers:
        raise DataError(
            "share() needs batch_rows >= 0, num_workers >= 1 and rank in [0, num_workers - 1]. "
            f"Received: batch_rows={batch_rows}, num_workers={num_workers}, rank={rank}."
        )
    base, extra = divmod(batch_rows, num_workers)
    start = rank * base + min(rank, extra)
    return start, start + base + (1 if rank < extra else 0)


def sample_keys(seed: int, epoch: int, rows: Rows) -> Rows:
    """Returns a random key per sample, for reproducible augmentation.

    A key is a function of (seed, epoch, row) only; within an epoch no two rows have the same.

    Args:
        seed: in [0, 2**64).
        epoch: >= 0.
        rows: row numbers, shape (n,), int64.

    Returns:
        Shape (n, 2), int64, values in [0, 2**32): fits TensorFlow's stateless seeds as it is,
        Keras's as uint32.
    """
    if not _is_count(seed) or seed > MASK64 or not _is_count(epoch) or epoch > MASK64:
        raise DataError(
            f"seed and epoch must be in [0, 2**64). Received: seed={seed!r}, epoch={epoch!r}."
        )
    z = mix64(rows, fold(seed, _STREAM_SAMPLE, epoch))
    keys = np.empty((len(rows), 2), np.int64)
    keys[:, 0] = (z >> np.uint64(32)).view(np.int64)
    keys[:, 1] = (z & np.uint64(0xFFFFFFFF)).view(np.int64)
    return keys
