"""The verbs on files: durable, atomic, retried in passing trouble and never in lasting trouble."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import botocore.exceptions
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raytf.checkpoint import files as module
from raytf.checkpoint.files import Entry, Files, RetryConfig, is_expired, is_transient
from raytf.checkpoint.storage import Storage, resolve
from raytf.errors import ConfigError, StorageError
from tests.checkpoint.faulty import AT_ONCE


def client_error(code: str, status: int) -> botocore.exceptions.ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return botocore.exceptions.ClientError(response, "PutObject")


def from_s3fs(code: str, status: int) -> OSError:
    from s3fs.errors import translate_boto_error

    return translate_boto_error(client_error(code, status))


def with_status(status: Any, name: str = "status") -> Exception:
    error = RuntimeError("some cloud's error")
    setattr(error, name, status)
    return error


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        BrokenPipeError(),
        OSError(errno.ETIMEDOUT, "timed out"),
        OSError(errno.EHOSTUNREACH, "no route"),
        OSError(errno.EBUSY, "busy"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        botocore.exceptions.EndpointConnectionError(endpoint_url="x"),
        botocore.exceptions.ReadTimeoutError(endpoint_url="x"),
        client_error("InternalError", 500),
        client_error("Throttling", 400),
        from_s3fs("SlowDown", 503),
        from_s3fs("InternalError", 500),
        from_s3fs("RequestTimeout", 400),
        from_s3fs("SomethingNew", 502),
        with_status(503),
        with_status(429),
        with_status("503", "code"),
        with_status(500, "status_code"),
        OSError("When reading: AWS Error SLOW_DOWN during GetObject operation: slow"),
        OSError("AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 28, Timeout"),
    ],
    ids=repr,
)
def test_what_passes(error: Exception) -> None:
    assert is_transient(error)
    try:
        raise RuntimeError("wrapped") from error
    except RuntimeError as outer:
        assert is_transient(outer)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "gone"),
        PermissionError(errno.EACCES, "no"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
        OSError(errno.EIO, "bad disk"),
        IsADirectoryError(),
        ValueError("x"),
        client_error("AccessDenied", 403),
        client_error("NoSuchKey", 404),
        from_s3fs("AccessDenied", 403),
        from_s3fs("InvalidBucketName", 400),
        with_status(404),
        with_status(501),
        OSError("AWS Error ACCESS_DENIED during PutObject operation: no"),
        KeyboardInterrupt(),
        GeneratorExit(),
    ],
    ids=repr,
)
def test_what_stays(error: BaseException) -> None:
    assert not is_transient(error)
    assert not is_expired(error)


@pytest.mark.parametrize(
    "error",
    [
        client_error("ExpiredToken", 400),
        from_s3fs("ExpiredToken", 400),
        from_s3fs("TokenRefreshRequired", 400),
        client_error("Whatever", 401),
        with_status(401),
        OSError("AWS Error UNKNOWN (HTTP status 400) ... ExpiredToken: expired"),
    ],
    ids=repr,
)
def test_what_new_credentials_mend(error: Exception) -> None:
    assert is_expired(error)
    assert not is_transient(error)


class Scripted(MemoryFileSystem):
    """Fails the first reads as told, in each instance anew; counts what is asked of it."""

    made: list[Scripted] = []

    def __init__(self, script: Callable[[int], None], **options: Any) -> None:
        super().__init__(**options)
        self.script = script
        self.reads = 0
        Scripted.made.append(self)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        self.reads += 1
        self.script(self.reads)
        return super().cat_file(path, start, end)


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Callable[..., Files]:
    def make(script: Callable[[int], None], **retry: Any) -> Files:
        Scripted.made.clear()
        fs = Scripted(script, skip_instance_cache=True)
        MemoryFileSystem().pipe_file(f"/{request.node.name}/f", b"data")
        return Files(Storage(fs, f"/{request.node.name}", "memory"), RetryConfig(**retry))

    return make


def test_passing_trouble_is_waited_out(scripted: Callable[..., Files]) -> None:
    pauses: list[float] = []

    def script(number: int) -> None:
        if number < 5:
            raise TimeoutError

    files = scripted(script, sleep=pauses.append, first_s=1.0, max_s=4.0)
    assert files.read("f") == b"data"
    assert len(pauses) == 4
    for pause, least in zip(pauses, (1, 2, 4, 4), strict=True):
        assert least <= pause <= least + 1
    assert len(set(pauses)) == 4, "no jitter"


def test_retries_are_bounded(scripted: Callable[..., Files]) -> None:
    def script(number: int) -> None:
        raise ConnectionResetError("reset by peer")

    files = scripted(script, sleep=lambda s: None, num_attempts=4)
    with pytest.raises(StorageError, match="Cannot read .*/f: ConnectionResetError: reset") as got:
        files.read("f")
    assert Scripted.made[0].reads == 4
    assert got.value.context["path"].endswith("/f")
    assert isinstance(got.value.__cause__, ConnectionResetError)


def test_lasting_trouble_is_not_tried_again(scripted: Callable[..., Files]) -> None:
    def script(number: int) -> None:
        raise PermissionError(errno.EACCES, "denied")

    files = scripted(script, sleep=lambda s: pytest.fail("waited"))
    with pytest.raises(StorageError, match="denied"):
        files.read("f")
    assert Scripted.made[0].reads == 1


def test_a_missing_file_stays_one(scripted: Callable[..., Files]) -> None:
    files = scripted(lambda number: None)
    with pytest.raises(FileNotFoundError):
        files.read("nope")
    with pytest.raises(FileNotFoundError):
        files.read_range("nope", 0, 3)
    assert files.size("nope") is None
    assert files.list("nope") == {}
    files.delete("nope")
    files.delete_directory("nope")


def test_expired_credentials_are_renewed_once(scripted: Callable[..., Files]) -> None:
    def script(number: int) -> None:
        if len(Scripted.made) == 1:
            raise from_s3fs("ExpiredToken", 400)

    files = scripted(script, sleep=lambda s: None)
    assert files.read("f") == b"data"
    assert [fs.reads for fs in Scripted.made] == [1, 1]
    assert files.storage.fs is Scripted.made[1]
    assert files.read("f") == b"data"
    assert len(Scripted.made) == 2


def test_credentials_that_stay_bad_are_an_error(scripted: Callable[..., Files]) -> None:
    def script(number: int) -> None:
        raise from_s3fs("ExpiredToken", 400)

    files = scripted(script, sleep=lambda s: None)
    with pytest.raises(StorageError, match="ExpiredToken"):
        files.read("f")
    assert len(Scripted.made) == 2


def local(tmp_path: Path) -> Files:
    return Files(resolve(tmp_path), AT_ONCE)


def test_local_writes_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, then its directory, and the directories that were made for it."""
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(module.os, "fsync", fsync)
    files = local(tmp_path)
    files.write("a/b/x", [memoryview(b"12"), memoryview(b"34")])
    a, b, x = (str(tmp_path / p) for p in ("a", "a/b", "a/b/x"))
    assert {str(tmp_path), a, b, x} == set(synced)
    assert synced[-2:] == [x, b]
    synced.clear()
    files.write_small_atomic("a/b/m", b"5")
    assert synced[0].startswith(f"{b}/m.") and synced[0].endswith(".tmp")
    assert synced[1:] == [b, b], "once for the new name, once for the rename"
    synced.clear()
    files.rename("a/b/m", "a/b/n")
    files.delete("a/b/n")
    assert synced == [b, b]
    assert (tmp_path / "a/b/x").read_bytes() == b"1234"


def test_replacing_is_atomic_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = local(tmp_path)
    files.write_small_atomic("m", b"old")

    def fail(source: str, target: str) -> None:
        assert Path(source).read_bytes() == b"new"
        assert Path(target).read_bytes() == b"old"
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(module.os, "replace", fail)
    with pytest.raises(StorageError, match="bad disk"):
        files.write_small_atomic("m", b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["m"]
    files.write_small_atomic("m", b"new")
    assert files.read("m") == b"new"


def test_files_that_vanish_during_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt tidies up: trouble of the store, never a bare `FileNotFoundError`."""
    files = local(tmp_path)
    real = os.replace

    def swept(source: str, target: str) -> None:
        os.remove(source)
        real(source, target)

    monkeypatch.setattr(module.os, "replace", swept)
    with pytest.raises(StorageError, match="vanished"):
        files.write_small_atomic("a/m", b"1")
    monkeypatch.setattr(module.os, "makedirs", lambda path, exist_ok: None)
    monkeypatch.setattr(module, "sync_directory", lambda path: None)
    with pytest.raises(StorageError, match="directory is deleted"):
        files.write("b/x", [memoryview(b"1")])


def test_a_write_that_failed_leaves_nothing(tmp_path: Path) -> None:
    files = local(tmp_path)
    files.write("d/ok", [memoryview(b"1")])
    pieces: Any = [memoryview(b"1" * 100_000), None]
    with pytest.raises(StorageError, match="AttributeError"):
        files.write("d/x", pieces)
    assert os.listdir(tmp_path / "d") == ["ok"]


def test_ranges(tmp_path: Path) -> None:
    for files in (local(tmp_path), Files(resolve(f"memory://{tmp_path.name}-ranges"), AT_ONCE)):
        files.write("x", [memoryview(b"0123456789")])
        for start, stop in ((0, 10), (0, 3), (4, 7), (9, 10), (8, 20), (10, 12), (30, 40), (3, 3)):
            data = files.read_range("x", start, stop)
            assert data.tobytes() == b"0123456789"[start:stop]
            assert data.flags.writeable
        files.write("empty", [])
        assert files.read("empty") == b""
        assert files.size("empty") == 0
        assert files.exists("empty")


def test_directories(tmp_path: Path) -> None:
    files = local(tmp_path)
    files.write("a [1]*/x?", [memoryview(b"12")])
    files.write("top", [memoryview(b"1")])
    assert files.list() == {"a [1]*": Entry("a [1]*", 0, True), "top": Entry("top", 1, False)}
    assert files.list("a [1]*") == {"x?": Entry("x?", 2, False)}
    assert files.tree() == {"a [1]*/x?": 2, "top": 1}
    assert files.size("a [1]*") is None, "a directory is no file"
    files.delete_directory("a [1]*")
    assert files.exists("a [1]*/x?"), "only empty ones go"
    files.delete("a [1]*/x?")
    files.delete_directory("a [1]*")
    assert os.listdir(tmp_path) == ["top"]


def test_a_listing_that_fails_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else everything would look like a leftover."""
    files = local(tmp_path)
    files.write("a/x", [memoryview(b"1")])

    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match="denied"):
        files.list("a")
    with pytest.raises(StorageError, match="denied"):
        files.tree()


def test_free_space(tmp_path: Path) -> None:
    files = Files(resolve(tmp_path / "not" / "there"), AT_ONCE)
    free = files.free_bytes()
    assert free is not None and free > 0
    assert not (tmp_path / "not").exists()
    assert Files(resolve("memory://x"), AT_ONCE).free_bytes() is None


def test_transfers_run_at_once_where_it_helps(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=20)
    files = Files(Storage(fsspec.filesystem("s3", anon=True), "b/x", "s3"), AT_ONCE)
    assert files.map(lambda n: together.wait() * 0 + n, [1, 2]) == [1, 2]
    seen: list[int] = []
    local(tmp_path).map(lambda n: seen.append(threading.get_ident()), [1, 2, 3])
    assert set(seen) == {threading.get_ident()}


def test_a_missing_bucket_is_not_made(tmp_path: Path) -> None:
    class NoBucket(MemoryFileSystem):
        protocol = "s3"

        def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
            raise FileNotFoundError("The specified bucket does not exist")

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pytest.fail("a bucket was made")

    files = Files(Storage(NoBucket(skip_instance_cache=True), "/x", "s3"), AT_ONCE)
    for write in (
        lambda: files.write("f", [memoryview(b"1")]),
        lambda: files.write_small_atomic("f", b"1"),
    ):
        with pytest.raises(StorageError, match="bucket does not exist"):
            write()


def test_errors_of_ours_pass_unchanged(scripted: Callable[..., Files]) -> None:
    def script(number: int) -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        scripted(script).read("f")
