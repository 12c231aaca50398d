"""One meaning of a storage path, for raytf and for Ray."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest

from raytf.checkpoint import storage as module
from raytf.checkpoint.storage import Storage, resolve, write_bytes
from raytf.errors import ConfigError

ODD = ["a b", "ü-ö", "100%", "x#y", "q?z", "a+b", "[1]", "c:d", "%20"]


@pytest.mark.parametrize("name", ODD)
def test_odd_local_names_round_trip(tmp_path: Path, name: str) -> None:
    for given in (str(tmp_path / name), tmp_path / name, f"file://{tmp_path / name}"):
        found = resolve(given)
        assert found.path == str(tmp_path / name)
        found.write_bytes(b"1", "f")
        assert (tmp_path / name / "f").read_bytes() == b"1"
        assert resolve(found.url) == found


@pytest.mark.parametrize("name", ODD)
def test_ray_sees_the_same_place(tmp_path: Path, name: str) -> None:
    path, filesystem = resolve(f"file://{tmp_path / name}").for_ray()
    with_ray = f"{path}/f"
    filesystem.create_dir(path)
    with filesystem.open_output_stream(with_ray) as stream:
        stream.write(b"2")
    assert (tmp_path / name / "f").read_bytes() == b"2"


def test_relative_home_and_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve("runs/a").path == str(tmp_path / "runs" / "a")
    assert resolve("./runs/../b/").path == str(tmp_path / "b")
    assert resolve("~/r").path == str(tmp_path / "home" / "r")
    assert resolve().path == str(tmp_path / "home" / "ray_results")
    os.chdir("/")
    assert resolve(tmp_path).path == str(tmp_path)


def test_memory() -> None:
    found = resolve("memory://raytf-test/a b/")
    assert found.is_process_local
    assert not found.is_local
    assert found.url == "memory://raytf-test/a b"
    found.write_bytes(b"3", "sub", "f")
    assert found.exists("sub", "f")
    assert resolve(found.url).read_bytes("sub", "f") == b"3"
    assert not found.exists("nothing")
    path, filesystem = found.for_ray()
    assert filesystem.get_file_info(f"{path}/sub/f").size == 1


def test_join_and_remove(tmp_path: Path) -> None:
    run = resolve(tmp_path).join("a", "b")
    assert run.path == f"{tmp_path}/a/b"
    run.remove()  # nothing there: nothing happens
    run.write_bytes(b"", "f")
    run.remove()
    assert not run.exists()


@pytest.mark.parametrize("kind", ["pyarrow", "wrapped", "fsspec"])
def test_a_filesystem_that_the_user_gives(tmp_path: Path, kind: str) -> None:
    memory = fsspec.filesystem("memory")
    filesystem: Any = {
        "pyarrow": pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()),
        "wrapped": pafs.PyFileSystem(pafs.FSSpecHandler(memory)),
        "fsspec": memory,
    }[kind]
    found = resolve(f"raytf-{kind}/runs", filesystem)
    found.write_bytes(b"4", "sub", "f")
    assert found.exists("sub", "f")
    assert found.read_bytes("sub", "f") == b"4"
    path, for_ray = found.for_ray()
    assert for_ray.get_file_info(f"{path}/sub/f").size == 1
    if kind == "pyarrow":
        assert for_ray is filesystem


def test_a_local_filesystem_that_the_user_gives(tmp_path: Path) -> None:
    for filesystem in (pafs.LocalFileSystem(), fsspec.filesystem("file")):
        assert resolve(str(tmp_path), filesystem) == resolve(tmp_path)


def test_a_storage_pickles(tmp_path: Path) -> None:
    found = resolve(tmp_path)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("path", "filesystem", "text"),
    [
        ("nope://x", None, "no known kind of storage"),
        ("", None, "must be a path or URL"),
        ("  ", None, "must be a path or URL"),
        ("s3://bucket/x", fsspec.filesystem("memory"), "has a scheme"),
        ("x", object(), "pyarrow or fsspec"),
    ],
)
def test_refused(path: str, filesystem: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(path, filesystem)


@pytest.mark.parametrize(
    ("scheme", "extra"), [("s3", "raytf[s3]"), ("gs", "raytf[gcs]"), ("abfs", "raytf[azure]")]
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str
) -> None:
    def missing(protocol: str) -> Any:
        raise ImportError(f"Install the package for {protocol}")

    monkeypatch.setattr(module.fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError) as caught:
        resolve(f"{scheme}://bucket/x")
    assert extra in str(caught.value)


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    values = [bytes([n]) * 200_000 for n in range(2)]
    write_bytes(resolve(tmp_path).fs, path, values[0])
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if Path(path).read_bytes() not in values:
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(50):
        write_bytes(resolve(tmp_path).fs, path, values[n % 2])
    stop.set()
    reader.join()
    assert not wrong
    assert os.listdir(tmp_path) == ["f"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Storage = resolve(tmp_path)
    found.write_bytes(b"old", "f")

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        found.write_bytes(b"new", "f")
    assert found.read_bytes("f") == b"old"
    assert os.listdir(tmp_path) == ["f"]
