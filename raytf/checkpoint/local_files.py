"""Local files: read into given memory, written in pieces, durable with their names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["make_directories", "read_local", "sync_directory", "write_local"]

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_CHUNK_BYTES = 4 * 1024 * 1024
_SYNC_BYTES = 64 * 1024 * 1024  # so that the last fsync does not find everything still to be done


def write_local(
    fs: Any,
    path: str,
    pieces: Sequence[memoryview],
    pace: Callable[[float], None] | None = None,
) -> None:
    """Writes a file and makes it and its name durable.

    Args:
        fs: fsspec's local filesystem.
        path: absolute.
        pieces: the file's bytes, in order.
        pace: called after each 4 MiB with the seconds that these took; it may wait.
    """
    unsynced = 0
    with fs.open(path, "wb") as file:
        for piece in pieces:
            for start in range(0, piece.nbytes, _CHUNK_BYTES):
                began = time.perf_counter()
                chunk = piece[start : start + _CHUNK_BYTES]
                file.write(chunk)
                unsynced += chunk.nbytes
                if pace is not None and chunk.nbytes == _CHUNK_BYTES:
                    pace(time.perf_counter() - began)
                if unsynced >= _SYNC_BYTES:
                    os.fdatasync(file.fileno())
                    unsynced = 0
        file.flush()
        os.fsync(file.fileno())
    sync_directory(os.path.dirname(path))


def read_local(fs: Any, path: str, start: int, stop: int, into: _Bytes | None) -> _Bytes:
    """Straight into the array: `cat_file` would copy all bytes once more."""
    with fs.open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        size = max(0, min(stop, size) - start)
        data = np.empty(size, np.uint8) if into is None else into[:size]
        file.seek(start)
        view, done = data.data, 0
        while done < data.size:
            count = file.readinto(view[done:])
            if not count:
                break
            done += count
    return data[:done]


def make_directories(path: str) -> None:
    """Makes a directory with its parents, and makes their names durable."""
    made: list[str] = []
    missing = path
    while missing and not os.path.isdir(missing):
        made.append(missing)
        missing = os.path.dirname(missing)
    os.makedirs(path, exist_ok=True)
    for directory in made:
        sync_directory(os.path.dirname(directory))


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
