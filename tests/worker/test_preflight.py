"""The store tried by all ranks before anything is built on it; ranks are threads here."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raytf.checkpoint.storage import Storage, resolve
from raytf.errors import StorageError
from raytf.worker.links import Links
from raytf.worker.preflight import check_space, check_store


class Meeting:
    """`Links.share` for threads."""

    def __init__(self, number: int) -> None:
        self.values: dict[str, dict[int, Any]] = {}
        self.number = number
        self.changed = threading.Condition()

    def share(self, rank: int, key: str, value: Any) -> list[Any]:
        with self.changed:
            seen = self.values.setdefault(key, {})
            assert rank not in seen, f"{key} is used twice"
            seen[rank] = value
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(seen) == self.number, timeout=20)
            return [seen[r] for r in sorted(seen)]


def links(meeting: Meeting, rank: int) -> Links:
    def refused(*args: Any) -> Any:
        raise AssertionError("preflight needs `share` only")

    names = ("join", "hold", "ready", "compare", "post", "restored", "progress", "deliver")
    verbs: dict[str, Any] = {name: refused for name in names}
    return Links(
        rank=rank,
        num_workers=meeting.number,
        num_cpus=1,
        num_gpus=0,
        host="h",
        share=lambda key, value: meeting.share(rank, key, value),
        **verbs,
    )


def on_all(number: int, check: Callable[[Links], None]) -> list[BaseException | None]:
    """What each rank raised."""
    meeting = Meeting(number)
    with ThreadPoolExecutor(number) as pool:
        calls = [pool.submit(check, links(meeting, rank)) for rank in range(number)]
        return [call.exception() for call in calls]


def on_stores(*stores: Storage) -> str:
    """The error, which must be the same StorageError on every rank; "" without any."""
    errors = on_all(len(stores), lambda mine: check_store(stores[mine.rank], mine))
    assert {type(error) for error in errors} in ({StorageError}, {type(None)})
    texts = {str(error).rpartition("cannot hold")[2] for error in errors if error is not None}
    assert len(texts) < 2
    return "".join(texts)


def test_one_place(tmp_path: Path) -> None:
    place = resolve(str(tmp_path / "run"))
    assert on_stores(place, place, place) == ""
    assert on_stores(place) == ""
    assert os.listdir(tmp_path / "run") == []


def test_every_rank_has_a_directory_of_its_own(tmp_path: Path) -> None:
    text = on_stores(*(resolve(str(tmp_path / node)) for node in "ab"))
    assert "rank 0: cannot read: FileNotFoundError: what rank 1 wrote is not there" in text
    assert "rank 1: cannot read: FileNotFoundError: what rank 0 wrote is not there" in text
    assert "a file system that all nodes mount" in text
    assert os.listdir(tmp_path / "a") == []


class Strange(MemoryFileSystem):
    """A filesystem on which some things are refused."""

    cachable = False

    def __init__(self, refuses: str = "", tears: bool = False) -> None:
        super().__init__()
        self.refuses, self.tears = refuses, tears

    def _ask(self, verb: str, path: Any) -> None:
        if self.refuses == verb:
            raise PermissionError(13, "Permission denied", path)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        self._ask("write", path)
        super().pipe_file(path, value, *args, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._ask("read", path)
        data = super().cat_file(path, *args, **kwargs)
        return data[:-1] if self.tears else data

    def rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._ask("delete", path)
        super().rm(path, *args, **kwargs)


@pytest.fixture
def path() -> str:
    return f"/{uuid.uuid4().hex}/run"


@pytest.mark.parametrize(
    ("strange", "said"),
    [
        ({"refuses": "write"}, "rank 1: cannot write: PermissionError: [Errno 13]"),
        ({"refuses": "read"}, "rank 1: cannot read: PermissionError: [Errno 13]"),
        ({"tears": True}, "rank 1: cannot read: OSError: what rank 0 wrote reads differently"),
    ],
)
def test_a_rank_that_cannot(path: str, strange: dict[str, Any], said: str) -> None:
    text = on_stores(Storage(Strange(), path), Storage(Strange(**strange), path))
    assert said in text
    assert "rank 0:" not in text


def test_a_chief_that_cannot_delete(path: str) -> None:
    text = on_stores(Storage(Strange(refuses="delete"), path), Storage(Strange(), path))
    assert "rank 0: cannot delete: PermissionError: [Errno 13] Permission denied" in text


def space(*free: int | None) -> list[BaseException | None]:
    return on_all(len(free), lambda mine: check_space(free[mine.rank], 100 << 20, "s3://b", mine))


def test_room_for_two_checkpoints() -> None:
    assert space(200 << 20, None) == [None, None]
    errors = space(300 << 20, 150 << 20)
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    assert "s3://b has 150 MiB free on rank 1's node; two checkpoints" in text
    assert "need 200 MiB" in text
    assert isinstance(errors[0], StorageError)
    assert errors[0].context["rank"] == 1
