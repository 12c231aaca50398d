"""The only module of the store that calls a filesystem: few verbs, each durable, bounded, retried.

Owns durability (fsync of files and directories on local disks), atomic replacement of small files,
retries with growing pauses on errors that pass, new credentials when the old ones ran out, and the
mapping of what remains to `StorageError`. What is stored where, and why, is the store's business.
No verb ever interprets a path as a pattern.
"""

# fsspec does not ship complete types: what comes out of it is unknown, nothing else.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import tenacity

from raytf.checkpoint.local_files import (
    make_directories,
    read_local,
    sync_directory,
    write_local,
)
from raytf.checkpoint.storage import Storage
from raytf.checkpoint.transient import is_expired, is_transient
from raytf.errors import RaytfError, StorageError

__all__ = ["TEMPORARY", "Entry", "Files", "RetryConfig", "is_expired", "is_transient"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

TEMPORARY = ".tmp"  # how the names of files end that are not complete yet
NUM_THREADS = 8  # transfers at once; each large one is itself sent in parallel parts by s3fs
# Stores that show an object only when it is complete, so that a plain write is atomic there.
_OBJECT_STORES = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "hf"}


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """How often and how long a call that failed in passing is tried again.

    Attributes:
        num_attempts: calls in all.
        first_s: pause before the second call; doubled each time, with as much jitter.
        max_s: longest pause.
        total_s: no new call after so long.
        sleep: how to pause; tests do not.
    """

    num_attempts: int = 6
    first_s: float = 0.2
    max_s: float = 10.0
    total_s: float = 120.0
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Entry:
    """One name in a directory. `nbytes` is 0 for a directory."""

    name: str
    nbytes: int
    is_dir: bool


class Files:
    """Verbs on the files below one directory.

    All paths are relative to it, with "/" between parts. Verbs raise `FileNotFoundError` where a
    file is missing and `StorageError` for whatever else remains after the retries. Safe for use by
    several threads.

    Args:
        storage: the directory.
        retry: bounds of the retries.
    """

    def __init__(self, storage: Storage, retry: RetryConfig | None = None) -> None:
        self._storage = storage
        self._retry = retry or RetryConfig()
        self._lock = threading.Lock()
        protocol = storage.fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_local = storage.is_local
        self._is_object_store = bool(protocols & _OBJECT_STORES)
        self._is_arrow = type(storage.fs).__module__ == "fsspec.implementations.arrow"
        # Called between the pieces of a large local file with the seconds that the last one took.
        self.pace: Callable[[float], None] | None = None
        # Threads win nothing on one disk, and make the order of writes hard to reason about.
        self._num_threads = 1 if self._is_local or storage.is_process_local else NUM_THREADS

    @property
    def storage(self) -> Storage:
        """The directory, with the filesystem in use now."""
        return self._storage

    def absolute(self, path: str) -> str:
        """The path on the filesystem."""
        return posixpath.join(self._storage.path, path) if path else self._storage.path

    def read(self, path: str) -> bytes:
        """The whole file."""
        return self._call("read", path, lambda fs, full: bytes(fs.cat_file(full)))

    def read_range(self, path: str, start: int, stop: int, into: _Bytes | None = None) -> _Bytes:
        """Bytes [start, stop) of a file, fewer where it ends before; writable memory, `into` if it
        is given and the file is local.
        """
        if start >= stop:
            return np.empty(0, np.uint8)

        def read(fs: Any, full: str) -> _Bytes:
            if self._is_local:
                return read_local(fs, full, start, stop, into)
            # The Arrow bridge cannot read a range with `cat_file`, of an object store either.
            if self._is_arrow or not self._is_object_store:
                with fs.open(full, "rb") as file:
                    file.seek(start)
                    return np.frombuffer(bytearray(file.read(stop - start)), np.uint8)
            try:
                data = fs.cat_file(full, start=start, end=stop)
            except (OSError, ValueError) as error:
                # Object stores refuse a range that begins behind the end of a file that is cut off.
                if is_transient(error) or is_expired(error) or isinstance(error, FileNotFoundError):
                    raise
                fs.invalidate_cache()
                if int(fs.info(full)["size"]) > start:
                    raise
                data = b""
            return np.frombuffer(bytearray(data), np.uint8)

        return self._call("read", path, read)

    def write(self, path: str, pieces: Sequence[memoryview]) -> None:
        """Writes a file whose name nobody else uses, and makes it durable.

        A crash can leave part of it: whoever names the file afterwards must know that it is whole.
        """

        def write(fs: Any, full: str) -> None:
            if self._is_local:
                write_local(fs, full, pieces, self.pace)
            elif self._is_object_store:
                # s3fs sends large bodies in parallel parts, but wants them as bytes.
                fs.pipe_file(full, b"".join(pieces))
            else:
                with fs.open(full, "wb") as file:
                    for piece in pieces:
                        file.write(piece)

        self._put(path, write)

    def write_small_atomic(self, path: str, data: bytes) -> None:
        """Writes or replaces a small file: a reader, or a crash, sees the old one or the new one,
        never a part.
        """
        if self._is_object_store:
            self._put(path, lambda fs, full: fs.pipe_file(full, data))
            return
        temporary = f"{path}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
        self.write(temporary, [memoryview(data)])
        try:
            self.rename(temporary, path)
        except FileNotFoundError as error:
            full = self.absolute(path)
            raise StorageError(
                f"Cannot write {full}: its temporary file has vanished. Another attempt of this "
                "run is probably tidying up.",
                path=full,
            ) from error
        except Exception:
            self._discard(temporary)
            raise

    def list(self, path: str = "") -> dict[str, Entry]:
        """What is in a directory now, by name; empty if it is not there."""

        def entries(fs: Any, full: str) -> dict[str, Entry]:
            fs.invalidate_cache()  # object stores remember listings; other processes write too
            try:
                found = fs.ls(full, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            result: dict[str, Entry] = {}
            for entry in found:
                name = posixpath.basename(str(entry["name"]).rstrip("/"))
                is_dir = entry["type"] == "directory"
                if str(entry["name"]).strip("/") != full.strip("/"):  # a marker of the directory
                    result[name] = Entry(name, 0 if is_dir else int(entry["size"] or 0), is_dir)
            return result

        return self._call("list", path, entries)

    def tree(self) -> dict[str, int]:
        """All files in the directory and in those directly below it now: path to bytes. One
        request per thousand files on object stores, which give deeper ones, too.
        """

        if not self._is_object_store:  # fsspec's own walk leaves out what it cannot list
            result: dict[str, int] = {}
            for name, entry in self.list().items():
                if not entry.is_dir:
                    result[name] = entry.nbytes
                    continue
                below = self.list(name).items()
                result |= {f"{name}/{n}": e.nbytes for n, e in below if not e.is_dir}
            return result

        def find(fs: Any, full: str) -> dict[str, int]:
            fs.invalidate_cache()
            try:
                found = fs.find(full, detail=True)
            except FileNotFoundError:
                return {}
            prefix = full.strip("/") + "/"
            names = {str(name).lstrip("/"): info for name, info in found.items()}
            return {
                name[len(prefix) :]: int(info["size"] or 0)
                for name, info in names.items()
                if name.startswith(prefix) and info["type"] != "directory"
            }

        return self._call("list", "", find)

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is no such file."""

        def size(fs: Any, full: str) -> int | None:
            fs.invalidate_cache()
            try:
                info = fs.info(full)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if info["type"] == "directory" else int(info["size"])

        return self._call("look up", path, size)

    def exists(self, path: str) -> bool:
        """Whether there is a file of this name."""
        return self.size(path) is not None

    def rename(self, source: str, target: str) -> None:
        """Gives a small file another name in the same store, replacing what has it.

        Atomic where the filesystem can: object stores copy, then delete.
        """

        def rename(fs: Any, full: str) -> None:
            goal = self.absolute(target)
            if self._is_local:
                os.replace(full, goal)
                sync_directory(os.path.dirname(goal))
            elif self._is_object_store:
                fs.pipe_file(goal, fs.cat_file(full))
                fs.rm_file(full)
            else:
                fs.mv(full, goal)

        def once_more(fs: Any, full: str) -> None:
            try:
                rename(fs, full)
            except FileNotFoundError:
                # The answer to an earlier call may have been lost on the way.
                if self.exists(target) and not self.exists(source):
                    return
                raise

        self._call("rename", source, once_more)

    def delete(self, path: str) -> None:
        """Deletes a file; nothing happens if it is not there."""

        def delete(fs: Any, full: str) -> None:
            try:
                fs.rm_file(full)
            except FileNotFoundError:
                return
            if self._is_local:
                sync_directory(os.path.dirname(full))

        self._call("delete", path, delete)

    def delete_directory(self, path: str) -> None:
        """Deletes an empty directory, where the filesystem knows directories at all."""
        if not self._is_object_store:

            def delete(fs: Any, full: str) -> None:
                try:
                    if not fs.ls(full, detail=False):
                        fs.rmdir(full)
                except FileNotFoundError:
                    return

            self._call("delete", path, delete)

    def free_bytes(self) -> int | None:
        """Bytes a user may still write; None where the filesystem does not say."""
        if not self._is_local:
            return None

        def free(_: Any, full: str) -> int:
            while not os.path.exists(full) and os.path.dirname(full) != full:
                full = os.path.dirname(full)
            found = os.statvfs(full)
            return found.f_bavail * found.f_frsize

        return self._call("look up", "", free)

    def map(self, function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
        """`function` of each item, in order; several at once where transfers gain by it."""
        everything = list(items)
        if self._num_threads == 1 or len(everything) < 2:
            return [function(item) for item in everything]
        with ThreadPoolExecutor(min(self._num_threads, len(everything))) as pool:
            return list(pool.map(function, everything))

    def _put(self, path: str, write: Callable[[Any, str], None]) -> None:
        """`write`s a file, which makes the file's directory when that turns out to be missing; what
        was written when it fails is deleted.
        """

        def attempt(fs: Any, full: str) -> None:
            try:
                write(fs, full)
            except FileNotFoundError as error:
                if self._is_object_store:  # no directories there: the bucket is missing
                    raise StorageError(f"Cannot write {full}: {error}.", path=full) from error
                once_more(fs, full)

        def once_more(fs: Any, full: str) -> None:
            parent = posixpath.dirname(full)
            if self._is_local:
                make_directories(parent)
            else:
                fs.makedirs(parent, exist_ok=True)
            try:
                write(fs, full)
            except FileNotFoundError as error:
                raise StorageError(
                    f"Cannot write {full}: its directory is deleted meanwhile.", path=full
                ) from error

        try:
            self._call("write", path, attempt)
        except Exception:
            if not self._is_object_store:
                self._discard(path)
            raise

    def _discard(self, path: str) -> None:
        try:
            self.delete(path)
        except Exception as error:
            _log.warning("%s is left behind: %s", self.absolute(path), error)

    def _call(self, verb: str, path: str, function: Callable[[Any, str], _R]) -> _R:
        full = self.absolute(path)
        renewed = False

        def worth_another(error: BaseException) -> bool:
            nonlocal renewed
            if is_expired(error) and not renewed:
                renewed = True
                self._renew(error)
                return True
            return is_transient(error)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(worth_another),
            stop=tenacity.stop_after_attempt(self._retry.num_attempts)
            | tenacity.stop_after_delay(self._retry.total_s),
            wait=tenacity.wait_exponential(multiplier=self._retry.first_s, max=self._retry.max_s)
            + tenacity.wait_random(0, self._retry.first_s),
            sleep=self._retry.sleep,
            before_sleep=lambda state: _log.info(
                "Cannot %s %s, trying again: %s",
                verb,
                full,
                state.outcome.exception() if state.outcome else "",
            ),
            reraise=True,
        )
        try:
            return retrying(lambda: function(self._storage.fs, full))
        except (FileNotFoundError, RaytfError):
            raise
        except Exception as error:
            raise StorageError(
                f"Cannot {verb} {full}: {type(error).__name__}: {error}. Check that the store is "
                "reachable, has space, and that this process may write there.",
                path=full,
            ) from error

    def _renew(self, error: BaseException) -> None:
        """A new filesystem of the same kind, which looks for credentials again."""
        with self._lock:
            old = self._storage.fs
            _log.warning("Credentials for %s ran out (%s): renewing.", self._storage.url, error)
            args, options = old.storage_args, dict(old.storage_options)
            new = type(old)(*args, **{**options, "skip_instance_cache": True})
            self._storage = replace(self._storage, fs=new)
