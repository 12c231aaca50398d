"""Whatever fails at whatever operation, the newest committed state or a newer one reads back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from raytf.checkpoint import files
from raytf.checkpoint.manifest import Manifest
from raytf.checkpoint.retention import Rule
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import CheckpointDamagedError, RaytfError, StorageError, SupersededError
from tests.checkpoint.faulty import (
    AT_ONCE,
    KINDS,
    Faults,
    FaultyLocal,
    FaultyObjects,
    Killed,
    faulty_os,
)
from tests.checkpoint.states import draft, nothing, same, save, state

KILLS = [kind for kind in KINDS if kind.startswith("kill")]
MAX_OPERATIONS = 400


@dataclass
class Place:
    """A directory, seen through a filesystem that is sound or one that fails."""

    url: str
    is_local: bool

    def store(self) -> CheckpointStore:
        return CheckpointStore(self.url, retry=AT_ONCE)

    @contextlib.contextmanager
    def faulty(self, faults: Faults, old_listing: Any = None) -> Iterator[CheckpointStore]:
        path = self.url.removeprefix("memory:/")
        fs: Any = FaultyLocal(faults) if self.is_local else FaultyObjects(faults, old_listing)
        with faulty_os(faults):
            yield CheckpointStore(path, storage_filesystem=fs, retry=AT_ONCE)

    def copy(self) -> dict[str, bytes]:
        return {path: self.store().files.read(path) for path in self.store().files.tree()}

    def put_back(self, content: dict[str, bytes]) -> None:
        fs, root = self.store().root.fs, self.store().root.path
        if fs.exists(root):
            fs.rm(root, recursive=True)
        for path, data in content.items():
            full = f"{root}/{path}"
            fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            with fs.open(full, "wb") as file:
                file.write(data)


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, the machine does not: real syncs would take most of the time."""
    monkeypatch.setattr(files.os, "fsync", lambda handle: None)


@pytest.fixture(params=["local", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield Place(str(tmp_path / "run [1] %#"), True)
        return
    url = f"memory://crash-{uuid.uuid4().hex}/run"
    yield Place(url, False)
    fsspec.filesystem("memory").rm(url.rpartition("/")[0], recursive=True)


def newest_good(store: CheckpointStore) -> tuple[int, dict[str, Any]]:
    """What a restore does, in short."""
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckpointDamagedError):
            return step, store.read(step)
    pytest.fail("no checkpoint is left")


def each_operation(
    place: Place,
    kind: str,
    act: Callable[[CheckpointStore], Any],
    check: Callable[[Any, BaseException | None], None],
) -> int:
    """Runs `act` with a fault at operation 0, 1, ... until one run has fewer operations; calls
    `check(result, error)` after each. The place is put back each time.
    """
    before = place.copy()
    for at in range(MAX_OPERATIONS):
        faults = Faults(kind, at)
        result, failed = None, None
        with place.faulty(faults) as store:
            try:
                result = act(store)
            except (RaytfError, Killed) as error:
                failed = error
        if kind in KILLS and faults.struck:
            assert isinstance(failed, Killed), f"survived its death at {at}: {faults.done[-1]}"
        try:
            check(result, failed)
        except BaseException as error:
            error.add_note(f"{kind} at {at} ({faults.done[at:][:1]}); act: {failed!r}")
            raise
        if not faults.struck:
            assert failed is None
            return at
        place.put_back(before)
    pytest.fail("endless")


def files_named(store: CheckpointStore) -> set[str]:
    manifests = {f"step-{step:010d}/manifest.json" for step in store.steps()}
    shards = {shard.path for step in store.steps() for shard in store.manifest(step).shards}
    return manifests | shards | {"recent.json"}


def goes_on(place: Place, *, world: int = 2) -> None:
    """The next attempt saves, deletes and leaves nothing behind."""
    store = place.store()
    save(store, state(99), 99, attempt=2, world=world)
    store.sweep(2, 1)
    store.retain(Rule(keep_last=1), nothing)
    assert store.steps() == [99]
    assert same(store.read(99), state(99))
    assert set(store.files.tree()) == files_named(store)
    if place.is_local:
        assert sorted(os.listdir(store.root.path)) == ["recent.json", "step-0000000099"]


@pytest.mark.parametrize("kind", KINDS)
def test_save(place: Place, kind: str) -> None:
    first = save(place.store(), state(10), 10)
    known = save(place.store(), state(20), 20, known=first)
    told: list[int] = []

    def act(store: CheckpointStore) -> bool:
        manifest = draft(store, state(30), 30, known=known)
        return store.commit(manifest, nothing)

    def check(result: bool | None, failed: BaseException | None) -> None:
        store = place.store()
        step, arrays = newest_good(store)
        assert step == 30 if result else step in (20, 30)
        assert same(arrays, state(step))
        assert store.verify(10) == store.verify(20) == []
        told.append(step)
        goes_on(place)

    count = each_operation(place, kind, act, check)
    assert count > 10
    assert told[-1] == 30
    assert told[0] == 20 or kind not in KILLS
    if kind in ("503", "503 after"):
        assert set(told) == {30}, "one lost answer must not lose a save"


@pytest.mark.parametrize("kind", KINDS)
def test_retain(place: Place, kind: str) -> None:
    known = None
    for step in (10, 20, 30, 40):
        known = save(place.store(), state(step), step, known=known)

    def act(store: CheckpointStore) -> list[int]:
        return store.retain(Rule(keep_last=2), nothing)

    def check(result: list[int] | None, failed: BaseException | None) -> None:
        store = place.store()
        steps = store.steps()
        assert steps[-2:] == [30, 40]
        assert not set(result or ()) & set(steps)
        for step in steps:  # whole or gone
            assert same(store.read(step), state(step))
        store.retain(Rule(keep_last=2), nothing)
        assert store.steps() == [30, 40]
        assert store.verify(30) == store.verify(40) == []
        goes_on(place)

    assert each_operation(place, kind, act, check) > 10


@pytest.mark.parametrize("kind", [*KILLS, "503 for good"])
def test_delete_by_hand(place: Place, kind: str) -> None:
    known = save(place.store(), state(10), 10)
    save(place.store(), state(20), 20, known=known)

    def check(result: Any, failed: BaseException | None) -> None:
        store = place.store()
        assert store.verify(20) == []
        assert store.steps() in ([10, 20], [20])
        assert store.steps() == [20] or same(store.read(10), state(10))
        goes_on(place)

    each_operation(place, kind, lambda store: store.delete(10), check)


@pytest.mark.parametrize("kind", KINDS)
def test_restore(place: Place, kind: str) -> None:
    save(place.store(), state(10), 10, max_bytes=40)
    before = place.copy()

    def act(store: CheckpointStore) -> Any:
        latest = store.latest()
        assert latest == 10
        with store.reading(latest):
            return store.read(latest)

    def check(result: Any, failed: BaseException | None) -> None:
        # trouble on the way is never called damage
        assert not isinstance(failed, CheckpointDamagedError | FileNotFoundError)
        assert failed is not None or same(result, state(10))
        left = {path for path in place.copy() if "reading-" not in path}
        assert left == set(before)
        assert same(place.store().read(10), state(10))

    each_operation(place, kind, act, check)


def spoil(place: Place, manifest: Manifest) -> None:
    """Flips one bit of a tensor that only this step has."""
    kernel = next(t for t in manifest.tensors if t.name == "dense/kernel").parts[0]
    store = place.store()
    data = bytearray(store.files.read(kernel.shard))
    data[kernel.offset] ^= 1
    full = store.files.absolute(kernel.shard)
    with store.root.fs.open(full, "wb") as file:
        file.write(data)


@pytest.mark.parametrize("kind", [*KILLS, "503 for good", "ENOSPC"])
def test_quarantine(place: Place, kind: str) -> None:
    save(place.store(), state(10), 10)
    spoil(place, save(place.store(), state(20), 20))
    manifest = place.store().files.read("step-0000000020/manifest.json")

    def check(result: Any, failed: BaseException | None) -> None:
        store = place.store()
        step, arrays = newest_good(store)
        assert step == 10
        assert same(arrays, state(10))
        store.quarantine(20, 1)
        assert store.steps() == [10]
        bad = [p for p in store.files.tree() if "manifest.bad-1" in p]
        assert manifest in [store.files.read(path) for path in bad], "its manifest is lost"
        goes_on(place)

    each_operation(place, kind, lambda store: store.quarantine(20, 1), check)


@pytest.mark.parametrize("kind", [*KILLS, "503", "503 after", "ENOSPC"])
def test_commit_over_a_damaged_step(place: Place, kind: str) -> None:
    save(place.store(), state(10), 10)
    spoil(place, save(place.store(), state(20), 20))

    def act(store: CheckpointStore) -> bool:
        return store.commit(draft(store, state(20), 20, attempt=2), nothing)

    def check(result: bool | None, failed: BaseException | None) -> None:
        store = place.store()
        step, arrays = newest_good(store)
        assert step in ((20,) if result else (10, 20))
        assert same(arrays, state(step))
        save(store, state(20), 20, attempt=3)
        assert same(store.read(20), state(20))
        goes_on(place)

    each_operation(place, kind, act, check)


@pytest.mark.parametrize("count", range(0, 14))
def test_listings_that_lag_behind(count: int) -> None:
    """The listing is that of any earlier moment: before the first save, between two operations."""
    url = f"memory://crash-{uuid.uuid4().hex}/run"
    place = Place(url, False)
    try:
        known = save(place.store(), state(10), 10)
        memory = fsspec.filesystem("memory")
        seen = sorted(memory.find(url))[:count]
        for step in (20, 30):
            known = save(place.store(), state(step), step, known=known)
        with place.faulty(Faults(), set(seen)) as store:
            assert store.latest() == 30
            assert store.steps() == [10, 20, 30]
            assert same(store.read(30), state(30))
            save(store, state(40), 40, known=known)
            assert store.retain(Rule(keep_last=2), nothing) == [10, 20]
            assert store.latest() == 40
            store.sweep(1, 2)
            assert store.steps() == [30, 40]
        assert place.store().verify(30) == place.store().verify(40) == []
    finally:
        fsspec.filesystem("memory").rm(url.rpartition("/")[0], recursive=True)


def test_a_superseded_attempt_neither_commits_nor_deletes(place: Place) -> None:
    store = place.store()
    for step in (10, 20):
        save(store, state(step), step)

    def taken_over() -> None:
        raise SupersededError("Another attempt has taken over.")

    with pytest.raises(SupersededError):
        save(store, state(30), 30, may_commit=taken_over)
    with pytest.raises(SupersededError):
        store.retain(Rule(keep_last=1), taken_over)
    assert place.store().steps() == [10, 20]


SCRIPT = """
import os, signal, sys
from raytf.checkpoint.store import CheckpointStore
from tests.checkpoint.faulty import AT_ONCE, FaultyLocal, Faults, faulty_os
from tests.checkpoint.states import save, state

kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
faults = Faults(sys.argv[2], int(sys.argv[3]), kill)
with faulty_os(faults):
    store = CheckpointStore(sys.argv[1], storage_filesystem=FaultyLocal(faults), retry=AT_ONCE)
    save(store, state(20), 20)
"""


def killed_for_real(place: Path, kind: str, at: int) -> bool:
    """Whether the process had come so far."""
    save(CheckpointStore(place), state(10), 10)
    command = [sys.executable, "-c", SCRIPT, str(place), kind, str(at)]
    code = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=50).returncode
    assert code in (0, -signal.SIGKILL)
    step, arrays = newest_good(CheckpointStore(place))
    assert step in ((20,) if code == 0 else (10, 20))
    assert same(arrays, state(step))
    goes_on(Place(str(place), True))
    return code != 0


@pytest.mark.parametrize("at", [6, 20])
def test_sigkill(tmp_path: Path, at: int) -> None:
    assert killed_for_real(tmp_path, "kill tearing", at)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KILLS)
def test_sigkill_at_every_operation(tmp_path: Path, kind: str) -> None:
    at = 0
    while killed_for_real(tmp_path / str(at), kind, at):
        at += 1
    assert at > 20


def test_a_full_disk_is_named(place: Place) -> None:
    with place.faulty(Faults("ENOSPC", 0)) as store:
        with pytest.raises(StorageError, match="No space left"):
            save(store, state(10), 10)
