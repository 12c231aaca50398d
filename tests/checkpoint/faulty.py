"""Filesystems that fail at the n-th operation: local files, and an object store in memory.

An operation is one call that could fail on its own: making a file, each write to it, fsync, rename,
a listing, a look-up, a read, a deletion. After a kill every further operation is refused, so that
no clean-up can run that a dead process would not have done.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from raytf.checkpoint import files
from raytf.checkpoint.files import RetryConfig

AT_ONCE = RetryConfig(num_attempts=3, sleep=lambda seconds: None)

# kind of fault -> whether it stays from the n-th operation on
KINDS = {
    "kill before": True,
    "kill after": True,
    "kill tearing": True,
    "503": False,
    "503 after": False,  # done, but the answer is lost
    "503 for good": True,
    "ENOSPC": True,
    "EACCES": True,
}
WRITES = {"create", "write", "put", "fsync", "mkdir"}


class Killed(BaseException):
    """The process is gone. Nothing may catch this."""


class ServerError(Exception):
    status = 503


@dataclass
class Faults:
    """When to fail, and how.

    Attributes:
        kind: of `KINDS`; None: never.
        at: number of the operation, from 0.
        strike: what a kill does.
        count: operations so far.
        done: names of the operations so far.
    """

    kind: str | None = None
    at: int = -1
    strike: Callable[[], None] | None = None
    count: int = 0
    dead: bool = False
    done: list[str] = field(default_factory=list)

    def run(self, name: str, act: Callable[[], Any], tear: Callable[[], Any] | None = None) -> Any:
        if self.dead:
            raise Killed
        now, self.count = self.count, self.count + 1
        self.done.append(name)
        if self.kind is None or now < self.at or (now > self.at and not KINDS[self.kind]):
            return act()
        if self.kind == "ENOSPC":
            if name not in WRITES:
                return act()
            if tear is not None:
                tear()
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.kind == "EACCES":
            raise PermissionError(errno.EACCES, "Permission denied")
        if self.kind.startswith("503"):
            if self.kind == "503 after":
                _let_go(act())
            raise ServerError("Slow down")
        if self.kind == "kill after":
            _let_go(act())
        if self.kind == "kill tearing" and tear is not None:
            tear()
        self.dead = True
        if self.strike is not None:
            self.strike()
        raise Killed

    @property
    def struck(self) -> bool:
        return self.count > self.at


def _let_go(result: Any) -> None:
    if isinstance(result, _File):
        result.__exit__()


class _File:
    """A local file without buffer, so that what a killed process had written is on the disk."""

    def __init__(self, faults: Faults, path: str, mode: str) -> None:
        self._faults = faults
        self._file = open(path, mode, buffering=0)  # noqa: SIM115

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: memoryview) -> None:
        half = len(data) // 2
        self._faults.run(
            "write", lambda: self._file.write(data), lambda: self._file.write(data[:half])
        )

    def readinto(self, view: memoryview) -> int:
        return self._faults.run("read", lambda: self._file.readinto(view))

    def read(self, size: int = -1) -> bytes:
        return self._faults.run("read", lambda: self._file.read(size))

    def seek(self, *where: int) -> int:
        return self._file.seek(*where)

    def flush(self) -> None:
        """There is no buffer."""

    def fileno(self) -> int:
        return self._file.fileno()


class FaultyLocal(LocalFileSystem):
    """Local files. `os.replace`, `os.fsync` and `os.makedirs` are failed by `faulty_os`."""

    cachable = False

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def ls(self, path: str, detail: bool = False, **_: Any) -> Any:
        return self.faults.run("list", lambda: LocalFileSystem.ls(self, path, detail=detail))

    def info(self, path: Any, **_: Any) -> Any:
        if isinstance(path, os.DirEntry):
            return super().info(path)
        return self.faults.run("info", lambda: LocalFileSystem.info(self, path))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        name = "create" if "w" in mode else "open"
        return self.faults.run(name, lambda: _File(self.faults, path, mode))

    def rm_file(self, path: str) -> None:
        self.faults.run("delete", lambda: os.remove(path))

    def rmdir(self, path: str) -> None:
        self.faults.run("rmdir", lambda: os.rmdir(path))


@contextlib.contextmanager
def faulty_os(faults: Faults) -> Iterator[None]:
    """Fails the calls of `files` that go past fsspec. Syncs are counted, not done: no power fails
    here.
    """
    with pytest.MonkeyPatch.context() as patch:
        replace, makedirs = os.replace, os.makedirs
        patch.setattr(files.os, "replace", lambda a, b: faults.run("rename", lambda: replace(a, b)))
        patch.setattr(files.os, "fsync", lambda handle: faults.run("fsync", lambda: None))
        patch.setattr(
            files.os,
            "makedirs",
            lambda path, exist_ok: faults.run("mkdir", lambda: makedirs(path, exist_ok=exist_ok)),
        )
        yield


class FaultyObjects(MemoryFileSystem):
    """An object store in the memory all `memory://` share; listings may lag behind.

    Attributes:
        old_listing: what listings show of the files, or None: what is there.
    """

    cachable = False

    def __init__(self, faults: Faults, old_listing: set[str] | None = None) -> None:
        super().__init__()
        self.faults = faults
        self.old_listing = old_listing

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self.faults.run("list", lambda: self._shown().ls(path, detail=detail))

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        return self.faults.run("list", lambda: self._shown().find(path, detail=detail))

    def info(self, path: str, **_: Any) -> Any:
        return self.faults.run("info", lambda: MemoryFileSystem.info(self, path))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return self.faults.run("read", lambda: MemoryFileSystem.cat_file(self, path, start, end))

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        inner = MemoryFileSystem()
        half = value[: len(value) // 2]
        self.faults.run(
            "put", lambda: inner.pipe_file(path, value), lambda: inner.pipe_file(path, half)
        )

    def rm_file(self, path: str) -> None:
        self.faults.run("delete", lambda: MemoryFileSystem().rm_file(path))

    def _shown(self) -> MemoryFileSystem:
        if self.old_listing is None:
            return MemoryFileSystem()
        seen = MemoryFileSystem(global_store=False, skip_instance_cache=True)
        for path in self.old_listing:
            seen.pipe_file(path, self.store[path].getvalue() if path in self.store else b"gone")
        return seen
