"""ParquetSource: samples from Parquet files on any fsspec URL, also larger than memory.

Owns which columns become x, y and sample_weight, when a shuffle has to go by blocks, and the
reading of one row group. The footers' checks are `footers.py`, types `columns.py`, memory
`cache.py`. Which rows come when never depends on the machine: what is in memory is decided from the
footers and the arguments alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raytf.data.arrays import Structure, check_values, map_leaves
from raytf.data.cache import GroupCache, Table
from raytf.data.columns import decode
from raytf.data.footers import find_files, open_parquet, read_footers, resolve, survey
from raytf.errors import ConfigError, DataError

__all__ = ["ParquetSource"]

Rows = npt.NDArray[np.int64]
Names = str | Sequence[str]


class ParquetSource:
    """Samples from Parquet files: use it for tables on shared storage, also larger than memory.

    ```python
    raytf.ParquetSource("s3://bucket/train/", columns=["age", "income"], label="clicked")
    raytf.ParquetSource("/data/mnist-*.parquet", columns="image", label="digit")
    ```

    Only the wanted columns are read, a row group at a time, when first needed. If the decoded
    columns fit into `cache_bytes`, everything is kept and an epoch is shuffled as a whole. If not,
    row groups are shuffled, and rows within windows of about half the cache (`blocks()`): write row
    groups of some 10 to 100 MB. Numbers and bools keep their types; strings and binary are `bytes`;
    lists of one length are a further dimension. Nulls, NaN in the label, decimals, times, structs
    and ragged lists are refused, mostly from the footers, on the driver. Directory names (Hive
    partitions) are not read as columns.

    Args:
        url: a file, a directory, or a glob, as any fsspec URL. Files are read in the order of their
            names, with numbers in them compared as numbers.
        columns: names of the features: a list gives x as a dict of arrays, one name gives an array,
            None a dict of all columns but `label` and `sample_weight`.
        label: name of the target, or a list of names (y is then a dict), or None.
        sample_weight: name of the column of weights >= 0, or None.
        cache_bytes: bound of the decoded row groups kept in each worker process, in bytes. The
            order of samples depends on it once the data is larger.
        filesystem: an fsspec filesystem, where the URL alone does not say enough.

    Attributes:
        decoded_bytes: of the wanted columns of all rows; an estimate where there are strings.

    Raises:
        ConfigError: the arguments cannot work, or a package for the URL is missing.
        DataError: there are no files or rows, files differ, or a column cannot be trained on.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        columns: Names | None = None,
        label: Names | None = None,
        sample_weight: str | None = None,
        cache_bytes: int = 1 << 30,
        filesystem: Any = None,
    ) -> None:
        self._url = os.fspath(url)
        _check_names("columns", columns)
        _check_names("label", label)
        _check_rest(sample_weight, cache_bytes)
        self._fs, path = resolve(self._url, filesystem)
        self._files = find_files(self._fs, path, self._url)
        footers = read_footers(self._fs, self._files)
        targets = [*_listed(label), *_listed(sample_weight)]
        if columns is None:
            present = footers[0].schema.to_arrow_schema().names
            columns = [name for name in present if name not in targets]
            _check_names("columns", columns)
            wanted = [*columns, *targets]
            names = None if set(targets) <= set(present) else wanted
        else:
            wanted = names = list(dict.fromkeys([*_listed(columns), *targets]))
        facts = survey(self._files, footers, names)
        self._element = tuple(
            part if part is None or isinstance(part, str) else {name: name for name in part}
            for part in (columns, label, sample_weight)
        )
        self._specs = {name: facts.specs[name] for name in wanted}
        self._groups = facts.groups
        self._cache_bytes = cache_bytes
        self._starts = np.cumsum([0] + [g.num_rows for g in facts.groups], dtype=np.int64)
        self.decoded_bytes = sum(group.num_bytes for group in facts.groups)
        self._check_weight(sample_weight)
        self._check_largest_group()
        self._prepare()

    def _prepare(self) -> None:
        """Sets what belongs to this process and is not pickled."""
        self._footers: dict[int, Any] = {}
        self._rows_kept: Table | GroupCache | None = None
        self._lock = threading.Lock()  # guards the making of _rows_kept

    def __getstate__(self) -> dict[str, Any]:
        unpickled = ("_footers", "_rows_kept", "_lock")
        return {key: value for key, value in self.__dict__.items() if key not in unpickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __repr__(self) -> str:
        return (
            f"ParquetSource({self._url!r}: {len(self)} rows, {len(self._groups)} row groups, "
            f"{len(self._files)} files, {self.spec()})"
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def spec(self) -> Structure:
        return map_leaves(lambda name: self._specs[name], self._element)

    def read(self, rows: Rows) -> Structure:
        columns = self._store().read(rows)
        return self._assemble(columns)

    def in_memory(self) -> Structure | None:
        """Reads everything and returns it, if it fits into `cache_bytes`; else None."""
        store = self._store()
        return self._assemble(store.everything()) if isinstance(store, Table) else None

    def blocks(self) -> tuple[tuple[int, ...], int] | None:
        if self._fits():
            return None
        sizes = tuple(group.num_rows for group in self._groups)
        # A batch between two windows needs both, and a window ends with the block that fills it.
        rows_in_half = self._cache_bytes * len(self) // (2 * self.decoded_bytes)
        return sizes, max(1, rows_in_half - max(sizes))

    def _fits(self) -> bool:
        return self.decoded_bytes <= self._cache_bytes

    def _store(self) -> Table | GroupCache:
        if self._rows_kept is None:
            with self._lock:
                if self._rows_kept is None:
                    self._rows_kept = (
                        Table(self._starts, self._specs, self._load)
                        if self._fits()
                        else GroupCache(self._starts, self._specs, self._load, self._cache_bytes)
                    )
        return self._rows_kept

    def _assemble(self, columns: dict[str, npt.NDArray[Any]]) -> Structure:
        return map_leaves(lambda name: columns[name], self._element)

    def _load(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Reads and decodes the wanted columns of one row group."""
        group = self._groups[number]
        path = self._files[group.file]
        with open_parquet(self._fs, path, self._footers.get(group.file)) as file:
            footer = self._footers.setdefault(group.file, file.metadata)
            there = group.index < footer.num_row_groups
            if not there or footer.row_group(group.index).num_rows != group.num_rows:
                raise DataError(
                    f"{path} has changed since the source was made: row group {group.index} had "
                    f"{group.num_rows} rows. Leave the files of a run as they are."
                )
            table = file.read_row_group(group.index, columns=list(self._specs))
        columns = {
            name: decode(
                table.column(name),
                spec,
                f"Column {name!r} of row group {group.index} of {path}",
            )
            for name, spec in self._specs.items()
        }
        _, y, sample_weight = self._assemble(columns)
        start = int(self._starts[number])
        check_values(y, sample_weight, np.arange(start, start + group.num_rows))
        return columns

    def _check_weight(self, name: str | None) -> None:
        if name is None:
            return
        spec = self._specs[name]
        if spec.shape or spec.dtype == "bytes":
            raise DataError(
                f"sample_weight={name!r} must be a column of numbers. Received: {spec.dtype} of "
                f"shape {spec.shape}."
            )

    def _check_largest_group(self) -> None:
        largest = max(self._groups, key=lambda group: group.num_bytes)
        if largest.num_bytes > self._cache_bytes:
            raise ConfigError(
                f"cache_bytes={self._cache_bytes} is less than one row group: group "
                f"{largest.index} of {self._files[largest.file]} takes {largest.num_bytes} bytes "
                f"when decoded. Use cache_bytes of at least {4 * largest.num_bytes}, so that rows "
                "of several groups can be mixed, or write smaller row groups."
            )


def _listed(names: Names | None) -> list[str]:
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


def _check_rest(sample_weight: Any, cache_bytes: Any) -> None:
    if sample_weight is not None and not isinstance(sample_weight, str):
        raise ConfigError(
            f"sample_weight must be the name of a column. Received: {sample_weight!r}."
        )
    if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 1:
        raise ConfigError(f"cache_bytes must be an integer >= 1. Received: {cache_bytes!r}.")


def _check_names(argument: str, names: Names | None) -> None:
    if names is None or isinstance(names, str):
        return
    given: list[Any] = list(names)
    if not given or len(set(given)) < len(given) or not all(isinstance(n, str) for n in given):
        raise ConfigError(
            f"{argument} must be the name of a column or a list of different names. "
            f"Received: {names!r}."
        )
