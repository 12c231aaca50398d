"""Decoded row groups in memory: all of them in one table, or the ones used last.

Owns when a group is loaded, by which thread, and how long it stays. Both classes answer
`read(rows)` in the order asked, from any number of threads; a group that several threads want at
once is loaded by one of them. They know no file format: `load(group)` gives a group's columns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from raytf.data.arrays import ArraySpec

__all__ = ["GroupCache", "Table", "count_bytes", "storage_dtype"]

Rows = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

# Groups loaded at once by one read: hides the latency of remote storage, and bounds what is in
# memory on top of the cache.
_NUM_READERS = 8
_BYTES_OBJECT = 33  # what CPython needs for an empty bytes object


def storage_dtype(spec: ArraySpec) -> np.dtype[Any]:
    """Returns the dtype a column is kept in: "bytes" as objects, since lengths differ."""
    return np.dtype(object) if spec.dtype == "bytes" else np.dtype(spec.dtype)


def count_bytes(columns: Columns) -> int:
    """Returns the memory that decoded columns take, shared byte strings counted once."""
    total = 0
    for array in columns.values():
        total += array.nbytes
        if array.dtype == object:
            sizes = {id(value): len(value) + _BYTES_OBJECT for value in array.flat}
            total += sum(sizes.values())
    return total


def _load_all(load: Callable[[int], object], groups: list[int]) -> None:
    if len(groups) <= 1:
        for group in groups:
            load(group)
        return
    with ThreadPoolExecutor(min(_NUM_READERS, len(groups))) as pool:
        for _ in pool.map(load, groups):  # raises what a load raised
            pass


class Table:
    """Every row group, loaded when first needed and then kept: one array per column.

    Args:
        starts: first row of each group, then the number of rows: shape (groups + 1,).
        specs: of the columns.
        load: gives the decoded columns of a group.
    """

    def __init__(
        self, starts: Rows, specs: Mapping[str, ArraySpec], load: Callable[[int], Columns]
    ) -> None:
        num_rows = int(starts[-1])
        self._starts = starts
        self._load = load
        # Pages of np.empty are taken from the system when written, so this costs nothing yet.
        self._columns: Columns = {
            name: np.empty((num_rows, *spec.shape), storage_dtype(spec))
            for name, spec in specs.items()
        }
        self._loaded = np.zeros(len(starts) - 1, np.bool_)
        self._locks = [threading.Lock() for _ in range(len(starts) - 1)]
        self._complete = False

    def read(self, rows: Rows) -> Columns:
        """Returns the columns' values in `rows`."""
        if not self._complete:
            groups = np.unique(np.searchsorted(self._starts, rows, side="right") - 1)
            self._ensure(groups)
        return {name: array.take(rows, axis=0) for name, array in self._columns.items()}

    def everything(self) -> Columns:
        """Loads what is missing and returns the whole columns, which must not be written to."""
        self._ensure(np.arange(len(self._loaded)))
        return dict(self._columns)

    def _ensure(self, groups: npt.NDArray[np.intp]) -> None:
        _load_all(self._load_group, [int(g) for g in groups[~self._loaded[groups]]])
        self._complete = bool(self._loaded.all())

    def _load_group(self, group: int) -> None:
        with self._locks[group]:
            if self._loaded[group]:
                return
            start, stop = int(self._starts[group]), int(self._starts[group + 1])
            for name, values in self._load(group).items():
                self._columns[name][start:stop] = values
            self._loaded[group] = True


class GroupCache:
    """The row groups used last, at most `limit_bytes` of them.

    On top of the limit come the groups a read has in its hands: at most 8 per thread.

    Args:
        starts: first row of each group, then the number of rows: shape (groups + 1,).
        specs: of the columns.
        load: gives the decoded columns of a group.
        limit_bytes: of decoded columns. A group larger than this is not kept.
    """

    def __init__(
        self,
        starts: Rows,
        specs: Mapping[str, ArraySpec],
        load: Callable[[int], Columns],
        limit_bytes: int,
    ) -> None:
        self._starts = starts
        self._specs = dict(specs)
        self._load = load
        self._limit_bytes = limit_bytes
        self._locks = [threading.Lock() for _ in range(len(starts) - 1)]
        self._cache_lock = threading.Lock()  # guards the two below; taken after a group's lock
        self._groups: OrderedDict[int, tuple[Columns, int]] = OrderedDict()
        self.used_bytes = 0

    def read(self, rows: Rows) -> Columns:
        """Returns the columns' values in `rows`."""
        result: Columns = {
            name: np.empty((len(rows), *spec.shape), storage_dtype(spec))
            for name, spec in self._specs.items()
        }
        group_of_row = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(group_of_row, kind="stable")
        groups, firsts = np.unique(group_of_row[order], return_index=True)
        places = np.split(order, firsts[1:])
        for i in range(0, len(groups), _NUM_READERS):
            part = slice(i, i + _NUM_READERS)
            self._gather(groups[part], places[part], rows, result)
        return result

    def _gather(
        self, groups: npt.NDArray[np.intp], places: list[Any], rows: Rows, result: Columns
    ) -> None:
        """Copies the rows of some groups to their places; its end frees groups not kept."""
        numbers = [int(group) for group in groups]
        for group, columns, place in zip(numbers, self._get_all(numbers), places, strict=True):
            local = rows[place] - self._starts[group]
            for name, values in columns.items():
                result[name][place] = values[local]

    def _get_all(self, groups: list[int]) -> list[Columns]:
        found: dict[int, Columns] = {}
        missing: list[int] = []
        for group in groups:
            columns = self._cached(group)
            if columns is None:
                missing.append(group)
            else:
                found[group] = columns

        def load(group: int) -> None:
            found[group] = self._get(group)

        _load_all(load, missing)
        return [found[group] for group in groups]

    def _cached(self, group: int) -> Columns | None:
        with self._cache_lock:
            entry = self._groups.get(group)
            if entry is None:
                return None
            self._groups.move_to_end(group)
            return entry[0]

    def _get(self, group: int) -> Columns:
        with self._locks[group]:
            columns = self._cached(group)  # another thread may have loaded it meanwhile
            if columns is None:
                columns = self._load(group)
                self._keep(group, columns)
            return columns

    def _keep(self, group: int, columns: Columns) -> None:
        num_bytes = count_bytes(columns)
        if num_bytes > self._limit_bytes:
            return
        with self._cache_lock:
            while self.used_bytes + num_bytes > self._limit_bytes:
                _, (_, freed) = self._groups.popitem(last=False)
                self.used_bytes -= freed
            self._groups[group] = (columns, num_bytes)
            self.used_bytes += num_bytes
