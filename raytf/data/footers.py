"""What Parquet files say about themselves: which files, their columns, their row groups.

Owns finding the files of a URL and every check that needs only their footers, so that a bad column
or a bad file is refused on the driver in seconds, however large the data is.
"""

# pyarrow and fsspec have no type stubs, so their objects are Any here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raytf.data.arrays import ArraySpec
from raytf.data.columns import column_spec, estimate_bytes, is_variable_list, ragged_text
from raytf.errors import ConfigError, DataError

__all__ = [
    "RowGroup",
    "Survey",
    "find_files",
    "open_parquet",
    "read_footers",
    "resolve",
    "survey",
]

_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
_SUFFIXES = (".parquet", ".parq", ".pq")
_NUM_READERS = 8


@dataclass(frozen=True)
class RowGroup:
    """One row group that has rows.

    Attributes:
        file: index of its file.
        index: of the group in its file.
        num_rows: > 0.
        num_bytes: of the wanted columns when decoded; an estimate where there are strings.
    """

    file: int
    index: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class Survey:
    """Everything the footers say about the wanted columns."""

    specs: dict[str, ArraySpec]
    groups: tuple[RowGroup, ...]


def resolve(url: str, filesystem: Any) -> tuple[Any, str]:
    """Returns the fsspec filesystem of a URL, and the path in it.

    Raises:
        ConfigError: there is no such protocol, or its package is not installed.
    """
    if filesystem is not None:
        if not (hasattr(filesystem, "_strip_protocol") and hasattr(filesystem, "find")):
            raise ConfigError(
                "filesystem must be an fsspec filesystem, for example fsspec.filesystem('s3'). "
                f"Received: {type(filesystem).__name__}."
            )
        return filesystem, str(filesystem._strip_protocol(url))
    import fsspec.core

    try:
        found, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = url.partition("://")[0]
        extra = _EXTRAS.get(protocol)
        fix = f"pip install 'raytf[{extra}]'" if extra else f"see fsspec's {protocol!r} protocol"
        raise ConfigError(f"{url} needs a package that is not installed: {fix}. {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL that fsspec knows: {error}") from error
    return found, str(path)


def find_files(fs: Any, path: str, url: str) -> tuple[str, ...]:
    """Returns the Parquet files of a file, directory or glob, numbers in names sorted as numbers.

    In a directory (searched to any depth) these are *.parquet, *.parq and *.pq, without names that
    start with "." or "_".

    Raises:
        DataError: there are none.
    """
    if fs.isfile(path):  # first, so that a file with "[" in its name is no glob
        return (path,)
    if fs.isdir(path):
        root = len(path.rstrip("/")) + 1
        files = [name for name in fs.find(path) if _is_data(name[root:])]
        wanted = f"no files {', '.join('*' + suffix for suffix in _SUFFIXES)}"
    else:
        files = [name for name in fs.glob(path) if fs.isfile(name)] if _is_glob(path) else []
        wanted = "no file or directory" if not _is_glob(path) else "no files that match"
    if not files:
        raise DataError(f"{url}: {wanted} there. Check the URL, and that every node can reach it.")
    return tuple(sorted(files, key=_natural))


def _is_glob(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _is_data(relative: str) -> bool:
    parts = relative.split("/")
    return not any(part[:1] in (".", "_") for part in parts) and parts[-1].endswith(_SUFFIXES)


def _natural(path: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts part-2 before part-10; the path itself decides between 1 and 01."""
    parts = re.split(r"([0-9]+)", path)
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)], path


@contextmanager
def open_parquet(fs: Any, path: str, metadata: Any = None) -> Generator[Any]:
    """Gives a pyarrow ParquetFile, open within the `with` block.

    Args:
        fs: the fsspec filesystem.
        path: of the file.
        metadata: its pyarrow FileMetaData if known; saves reading the footer.

    Raises:
        DataError: the file is no Parquet file.
        OSError: the storage failed; trying again may help.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    is_local = "file" in protocols  # pyarrow's own reader needs no Python lock
    # ParquetFile does not close a handle that it was given.
    with pa.OSFile(path) if is_local else fs.open(path, "rb") as handle:
        try:
            file = pq.ParquetFile(handle, metadata=metadata, pre_buffer=not is_local)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path} is no Parquet file, or is damaged: {error}") from error
        yield file


def read_footers(fs: Any, files: Sequence[str]) -> list[Any]:
    """Returns pyarrow's FileMetaData of each file."""

    def read(path: str) -> Any:
        with open_parquet(fs, path) as file:
            return file.metadata

    with ThreadPoolExecutor(min(_NUM_READERS, len(files))) as pool:
        return list(pool.map(read, files))


def survey(files: Sequence[str], footers: Sequence[Any], names: Sequence[str] | None) -> Survey:
    """Checks the wanted columns of all files and measures their row groups.

    Args:
        files: paths, for messages.
        footers: pyarrow FileMetaData of each file.
        names: of the wanted columns; None for all.

    Raises:
        DataError: a column is missing, has nulls, ragged lists or a type that is not taken; files
            disagree; there are no rows.
    """
    schemas = [footer.schema.to_arrow_schema() for footer in footers]
    wanted = tuple(schemas[0].names if names is None else names)
    for name in wanted:
        if name not in schemas[0].names:
            raise DataError(
                f"There is no column {name!r} in {files[0]}. It has: "
                f"{', '.join(schemas[0].names)}." + _partition_hint(name, files[0])
            )
    for path, schema in zip(files[1:], schemas[1:], strict=True):
        _check_same(files[0], schemas[0], path, schema, wanted, exact=names is None)
    if not any(footer.num_rows for footer in footers):
        raise DataError(f"{files[0]}: the data has 0 rows: there is nothing to train on.")
    specs = {name: _spec(name, schemas[0].field(name).type, footers) for name in wanted}
    nulls = dict.fromkeys(wanted, 0)
    groups: list[RowGroup] = []
    for file, (footer, schema) in enumerate(zip(footers, schemas, strict=True)):
        chunks = _chunk_indices(schema, wanted)
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows == 0:
                continue
            num_bytes = 0
            for name, chunk in ((name, group.column(chunks[name])) for name in wanted):
                where = f"Column {name!r} of row group {index} of {files[file]}"
                _check_list(where, specs[name], chunk.num_values, group.num_rows)
                statistics = chunk.statistics
                if statistics is not None and statistics.has_null_count:
                    nulls[name] += statistics.null_count
                num_bytes += estimate_bytes(
                    specs[name], group.num_rows, chunk.total_uncompressed_size
                )
            groups.append(RowGroup(file, index, group.num_rows, num_bytes))
    for name, count in nulls.items():
        if count:
            raise DataError(
                f"Column {name!r} has {count} nulls, which are no numbers. Fill them first, or "
                "drop those rows."
            )
    return Survey(specs, tuple(groups))


def _partition_hint(name: str, path: str) -> str:
    if f"/{name}=" in path:
        return " Columns that are only in the names of directories (Hive partitions) are not read."
    return ""


def _check_same(
    first: str, expected: Any, path: str, found: Any, wanted: Sequence[str], exact: bool
) -> None:
    differences = [
        f"column {name!r} is {found.field(name).type}, not {expected.field(name).type}"
        if name in found.names
        else f"column {name!r} is missing"
        for name in wanted
        if name not in found.names or found.field(name).type != expected.field(name).type
    ]
    if exact:
        more = [name for name in found.names if name not in expected.names]
        differences += [f"column {name!r} is only there" for name in more]
    if differences:
        raise DataError(
            f"{path} does not agree with {first}: {'; '.join(differences)}. All files need the "
            "same columns and types."
        )


def _spec(name: str, arrow_type: Any, footers: Sequence[Any]) -> ArraySpec:
    """The column's spec; a list's length is what the first row group has on average."""
    if not is_variable_list(arrow_type):
        return column_spec(name, arrow_type)
    inner = column_spec(name, arrow_type.value_type)
    for footer in footers:
        chunk = _chunk_indices(footer.schema.to_arrow_schema(), [name])[name]
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows:
                per_row = group.column(chunk).num_values // group.num_rows
                return column_spec(name, arrow_type, max(1, per_row // math.prod(inner.shape)))
    return column_spec(name, arrow_type, 1)


def _check_list(where: str, spec: ArraySpec, num_values: int, num_rows: int) -> None:
    """Refuses lists whose total length cannot be right; equal sums are found when decoding."""
    expected = num_rows * math.prod(spec.shape)
    if spec.shape and num_values != expected:
        found = f"{num_values} values in {num_rows} rows, not {math.prod(spec.shape)} in each"
        raise DataError(ragged_text(where, found))


def _chunk_indices(schema: Any, names: Sequence[str]) -> dict[str, int]:
    """The index of each column's chunk in a row group; of the first one if it has several.

    Found by counting, because paths do not tell a list "a" from a column named "a.list.element".
    """
    ends = list(itertools.accumulate(_num_chunks(field.type) for field in schema))
    index = {name: i for i, name in enumerate(schema.names)}
    return {name: ends[index[name] - 1] if index[name] else 0 for name in names}


def _num_chunks(arrow_type: Any) -> int:
    import pyarrow as pa

    if isinstance(arrow_type, pa.BaseExtensionType):
        arrow_type = arrow_type.storage_type
    children = [arrow_type.field(i).type for i in range(arrow_type.num_fields)]
    return sum(_num_chunks(child) for child in children) if children else 1
