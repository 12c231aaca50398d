"""A run is read the same from every store: written with the event log, opened, followed, drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import raytf
from raytf.checkpoint.storage import Storage, resolve
from raytf.cli.runs import _followed
from raytf.cluster.event_log import EventLog
from raytf.errors import NotFoundError
from raytf.faults.board import TENSORBOARD, Board
from raytf.faults.events import Event, Kind
from raytf.status import run_names
from tests.contracts.stores import BACKENDS, Backend, s3_server
from tests.faults import logs


@pytest.fixture(scope="module")
def s3_options() -> Iterator[Callable[[], dict[str, Any]]]:
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(s3_server()))


@pytest.fixture(params=BACKENDS, ids=lambda make: make.__name__)
def backend(
    request: pytest.FixtureRequest, tmp_path: Path, s3_options: Callable[[], dict[str, Any]]
) -> Backend:
    return request.param(tmp_path, s3_options)


def write(storage: Storage, events: list[Event], attempt: int) -> None:
    log = EventLog(storage, "mnist", attempt, "run_actor")
    for event in events:
        names = ("rank", "node", "pid", "step", "phase", "generation")
        subject = {n: v for n in names if (v := getattr(event, n)) is not None}
        log.emit(Kind(event.kind), event.time, **subject, **event.fields)
    log.close()


def test_a_run(backend: Backend, tmp_path: Path) -> None:
    storage = resolve(backend.url, backend.filesystem)
    with pytest.raises(NotFoundError):
        raytf.open_run(backend.url, storage_filesystem=backend.filesystem)
    events = logs.driver_death().events
    for attempt in (1, 2):
        write(storage, [e for e in events if e.attempt == attempt], attempt)
    run = raytf.open_run(backend.url, storage_filesystem=backend.filesystem)
    assert [e.kind for e in run.events] == [e.kind for e in events]
    told = run.status()
    assert (told["state"], told["step"], told["lost_steps"]) == ("FINISHED", 200, 5)
    assert "went silent" in run.report()
    above = Storage(storage.fs, storage.path.rpartition("/")[0], storage.scheme)
    assert run_names(above) == ["mnist"]
    followed = islice(_followed(storage), len(events))
    assert [e.kind for e in followed] == [e.kind for e in events]

    def sync(path: str) -> None:
        storage.write_bytes(Path(path).read_bytes(), TENSORBOARD, Path(path).name)

    board = Board(str(tmp_path / "scratch"), attempt=1, sync=sync)
    for event in events:
        board.add(event)
    assert board.close(30) and board.dropped == 0
    (name,) = [path.name for path in (tmp_path / "scratch").iterdir()]
    local = (tmp_path / "scratch" / name).read_bytes()
    assert storage.read_bytes(TENSORBOARD, name) == local
