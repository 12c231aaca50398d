"""Where a run's files lie: any fsspec URL resolved once, and the few verbs everybody needs on it.

Owns the meaning of `RunConfig(storage_path, storage_filesystem)`. Ray resolves a storage path with
pyarrow, which knows fewer schemes than fsspec and trips over relative paths and spaces: raytf
resolves with fsspec and hands Ray the bare path together with the same filesystem, so that both see
one place.
"""

# Neither fsspec nor pyarrow ships complete types: what comes out of them is unknown, nothing else.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import json
import os
import posixpath
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from raytf.errors import ConfigError

__all__ = [
    "DEFAULT_STORAGE_PATH",
    "FINAL",
    "SKIPS",
    "Storage",
    "read_skips",
    "resolve",
    "write_bytes",
]

DEFAULT_STORAGE_PATH = "~/ray_results"
FINAL = "final"  # directory of the trained model below a run's directory
SKIPS = "skips.json"  # batches that a run leaves out, below its directory
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "abfs": "azure",
    "abfss": "azure",
    "az": "azure",
    "adl": "azure",
}


@dataclass(frozen=True)
class Storage:
    """A directory on a filesystem.

    Attributes:
        fs: fsspec filesystem.
        path: directory on it, absolute, without scheme and without a slash at the end.
        scheme: of URLs; "" for local files.
    """

    fs: Any
    path: str
    scheme: str = ""

    @property
    def url(self) -> str:
        """For people and for `resolve`: a plain path for local files, else scheme and path."""
        return f"{self.scheme}://{self.path.lstrip('/')}" if self.scheme else self.path

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def is_process_local(self) -> bool:
        """Whether other processes cannot see it (`memory://`)."""
        return isinstance(self.fs, MemoryFileSystem)

    def join(self, *parts: str) -> Storage:
        """A directory or file below this one."""
        return Storage(self.fs, posixpath.join(self.path, *parts), self.scheme)

    def exists(self, *parts: str) -> bool:
        # object stores remember listings; another process may have written
        self.fs.invalidate_cache()
        return bool(self.fs.exists(posixpath.join(self.path, *parts)))

    def read_bytes(self, *parts: str) -> bytes:
        return bytes(self.fs.cat_file(posixpath.join(self.path, *parts)))

    def write_bytes(self, data: bytes, *parts: str) -> None:
        write_bytes(self.fs, posixpath.join(self.path, *parts), data)

    def remove(self) -> None:
        """Deletes the directory with all that is in it; nothing happens if it is not there."""
        if self.exists():
            self.fs.rm(self.path, recursive=True)

    def for_ray(self) -> tuple[str, Any]:
        """`(storage_path, storage_filesystem)` for Ray: bare path and pyarrow filesystem."""
        import pyarrow.fs as pafs

        if self.is_local:
            return self.path, pafs.LocalFileSystem()
        arrow = getattr(self.fs, "fs", None)
        if isinstance(arrow, pafs.FileSystem):  # it came from pyarrow: no second wrapper around it
            return self.path, arrow
        return self.path, pafs.PyFileSystem(pafs.FSSpecHandler(self.fs))


def resolve(
    storage_path: str | os.PathLike[str] | None = None, storage_filesystem: Any = None
) -> Storage:
    """Resolves what a user gave as `RunConfig(storage_path, storage_filesystem)`.

    Args:
        storage_path: fsspec URL or local path; a relative one counts from the present directory.
            None: `~/ray_results`.
        storage_filesystem: fsspec or pyarrow filesystem; `storage_path` is then a path on it,
            without scheme.

    Raises:
        ConfigError: unknown scheme, a missing package (names the extra), or a filesystem of an
            unknown kind.
    """
    given: Any = DEFAULT_STORAGE_PATH if storage_path is None else os.fspath(storage_path)
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"storage_path must be a path or URL. Received: {storage_path!r}.")
    if storage_filesystem is not None:
        return _on_filesystem(given, storage_filesystem)
    scheme, colon, rest = given.partition("://")
    if not colon or scheme in ("file", "local"):
        return Storage(LocalFileSystem(), _local_path(rest if colon else given))
    fs_class = _filesystem_class(scheme)
    try:
        fs, path = fsspec.core.url_to_fs(given)
    except Exception as error:
        raise ConfigError(f"storage_path={given!r} cannot be opened: {error}") from error
    if isinstance(fs, LocalFileSystem):
        return Storage(fs, _local_path(path))
    protocols = (fs_class.protocol,) if isinstance(fs_class.protocol, str) else fs_class.protocol
    return Storage(fs, path.rstrip("/") or path, scheme if scheme in protocols else protocols[0])


def read_skips(storage: Storage) -> list[list[int]]:
    """[epoch, step of the epoch] of each batch that a run leaves out, in the order of the faults.

    Args:
        storage: the run's directory.
    """
    if not storage.exists(SKIPS):
        return []
    return [[int(epoch), int(step)] for epoch, step in json.loads(storage.read_bytes(SKIPS))]


def _local_path(text: str) -> str:
    return Path(os.path.abspath(os.path.expanduser(text))).as_posix()


def _filesystem_class(scheme: str) -> Any:
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        what = f'pip install "raytf[{extra}]"' if extra else f"({error})"
        raise ConfigError(f"{scheme}:// needs a package that is not installed: {what}.") from error
    except ValueError as error:
        raise ConfigError(
            f"{scheme}:// is no known kind of storage. Use a local path, s3://, gs://, abfs:// or "
            "any scheme that an installed fsspec package registers."
        ) from error


def _on_filesystem(path: str, filesystem: Any) -> Storage:
    if "://" in path:
        raise ConfigError(
            f"storage_path={path!r} has a scheme although storage_filesystem is given. Leave one "
            "of the two out."
        )
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        if isinstance(filesystem, LocalFileSystem):
            return Storage(filesystem, _local_path(path))
        protocol = filesystem.protocol
        return Storage(
            filesystem,
            path.rstrip("/") or path,
            protocol if isinstance(protocol, str) else protocol[0],
        )
    pafs = importlib.import_module("pyarrow.fs")
    if isinstance(filesystem, pafs.LocalFileSystem):
        return Storage(LocalFileSystem(), _local_path(path))
    if isinstance(filesystem, pafs.PyFileSystem) and isinstance(
        filesystem.handler, pafs.FSSpecHandler
    ):
        return _on_filesystem(path, filesystem.handler.fs)
    if isinstance(filesystem, pafs.FileSystem):
        wrapper = importlib.import_module("fsspec.implementations.arrow").ArrowFSWrapper(filesystem)
        return Storage(wrapper, path.rstrip("/") or path, filesystem.type_name)
    raise ConfigError(
        "storage_filesystem must be a pyarrow or fsspec filesystem. "
        f"Received: {type(filesystem).__module__}.{type(filesystem).__qualname__}."
    )


def write_bytes(fs: Any, path: str, data: bytes) -> None:
    """Writes a whole file. On local disks a reader, or a crash, sees the old file or the new one,
    never a part.

    Object stores show an object only once it is complete, so a plain write does there.
    """
    if not isinstance(fs, LocalFileSystem):
        parent = posixpath.dirname(path)
        if parent:
            fs.makedirs(parent, exist_ok=True)
        fs.pipe_file(path, data)
        return
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    _sync_directory(directory)


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # the rename itself must outlive a power cut
    finally:
        os.close(handle)
