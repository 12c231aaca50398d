"""One suite for all filesystems: what is saved is read, found, kept and deleted alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash

from raytf.checkpoint.layout import Image, Slice, TensorInfo
from raytf.checkpoint.retention import Rule
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import CheckpointDamagedError, ConfigError, NotFoundError
from tests.checkpoint.states import draft, nothing, same, save, state
from tests.contracts.stores import BACKENDS, Backend, s3_server

KERNEL = "dense/kernel"


@pytest.fixture(scope="module")
def s3_options() -> Iterator[Callable[[], dict[str, Any]]]:
    """Starts the server when the first test asks for it."""
    with ExitStack() as stack:
        yield cache(lambda: stack.enter_context(s3_server()))


@pytest.fixture(params=BACKENDS, ids=lambda make: make.__name__)
def backend(
    request: pytest.FixtureRequest, tmp_path: Path, s3_options: Callable[[], dict[str, Any]]
) -> Backend:
    return request.param(tmp_path, s3_options)


@pytest.fixture
def store(backend: Backend) -> CheckpointStore:
    return backend.store()


def put(backend: Backend, path: str, data: bytes | None) -> None:
    """Changes a file behind the store's back; None deletes it."""
    full = f"{backend.path}/checkpoints/{path}"
    if data is None:
        backend.fsspec.rm_file(full)
    else:
        if "file" in backend.fsspec.protocol:
            backend.fsspec.makedirs(full.rpartition("/")[0], exist_ok=True)
        backend.fsspec.pipe_file(full, data)


def test_an_empty_store(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.latest() is None
    assert store.best() is None
    assert store.best("loss", "min") is None
    assert store.pinned() == set()
    assert store.retain(Rule(keep_last=1), nothing) == []
    assert store.sweep(1, 1) == []
    with pytest.raises(NotFoundError, match="step 3"):
        store.manifest(3)
    with pytest.raises(NotFoundError):
        store.verify(3)
    with pytest.raises(NotFoundError):
        store.pin(3)
    with pytest.raises(NotFoundError):
        store.delete(3)
    with pytest.raises(NotFoundError), store.reading(3):
        pass
    assert store.files.tree() == {}, "looking leaves nothing behind"


@pytest.mark.parametrize("world", [1, 3])
def test_save_and_read(backend: Backend, store: CheckpointStore, world: int) -> None:
    written = save(store, state(5), 100, world=world, max_bytes=64)
    other = backend.store()
    assert other.steps() == [100]
    assert other.latest() == 100
    assert other.manifest(100) == written
    assert other.verify(100) == []
    assert same(other.read(100), state(5))
    some = other.read(100, [KERNEL])
    assert same(some, {KERNEL: state(5)[KERNEL]})
    with pytest.raises(NotFoundError, match="no tensor 'nope'"):
        other.read(100, ["nope"])
    for tensor in written.tensors:
        assert b"".join(map(other.read_part, tensor.parts)) == state(5)[tensor.name].tobytes()
    assert backend.store("-other").steps() == [], "a run whose name begins alike is another run"


def test_files_are_where_they_are_said_to_be(backend: Backend, store: CheckpointStore) -> None:
    save(store, state(5), 100)
    directory = f"{backend.path}/checkpoints/step-0000000100"
    assert store.path(100).strip("/").endswith(directory.strip("/").rpartition("runs [1]")[2])
    assert backend.fsspec.isfile(f"{directory}/manifest.json")
    name = "a0001-g0001-r00000-of-00002-0.safetensors"
    tensors = safetensors.numpy.load(backend.fsspec.cat_file(f"{directory}/{name}"))
    assert tensors[f"{KERNEL}[0:4]"].tobytes() == state(5)[KERNEL][:4].tobytes()


def test_the_checkpoints_directory_itself_is_a_store(backend: Backend) -> None:
    save(backend.store(), state(5), 100)
    assert backend.store("/checkpoints").steps() == [100]


def test_steps_are_numbers(store: CheckpointStore) -> None:
    for step in (9, 10, 100, 2_000_000_000, 12_345_678_901):
        save(store, {"s": np.asarray(step)}, step, world=1)
    assert store.steps() == [9, 10, 100, 2_000_000_000, 12_345_678_901]
    assert store.latest() == 12_345_678_901
    assert store.read(store.latest() or 0)["s"] == 12_345_678_901


def test_what_is_not_committed_is_not_there(store: CheckpointStore) -> None:
    save(store, state(1), 10)
    manifest = draft(store, state(2), 20)
    assert store.steps() == [10]
    assert store.latest() == 10
    assert store.commit(manifest, nothing) is True
    assert store.steps() == [10, 20]


def test_a_step_that_is_there_and_good_is_done(store: CheckpointStore) -> None:
    save(store, state(1), 10)
    before = {path: store.files.read(path) for path in store.files.tree()}
    assert store.commit(draft(store, state(1), 10), nothing) is False
    assert {path: store.files.read(path) for path in store.files.tree()} == before
    assert store.commit(draft(store, state(2), 10, attempt=2), nothing) is False
    assert same(store.read(10), state(1))
    store.sweep(3, 1)
    assert store.files.tree().keys() == before.keys()


def test_no_shard_is_overwritten(store: CheckpointStore) -> None:
    first = save(store, state(1), 10)
    again = draft(store, state(1), 10)
    assert again.shards == first.shards, "the same bytes are not written twice"
    before = {path: store.files.read(path) for path in store.files.tree()}
    others = [draft(store, state(2), 10), draft(store, state(3), 10)]
    for path, data in before.items():
        assert store.files.read(path) == data
    for shard in (shard for manifest in others for shard in manifest.shards):
        assert xxhash.xxh3_64_hexdigest(store.files.read(shard.path)) == shard.xxh3
    assert same(store.read(10), state(1))


def test_a_damaged_step_is_committed_anew(backend: Backend, store: CheckpointStore) -> None:
    old = save(store, state(1), 10)
    data = store.files.read("step-0000000010/manifest.json")
    put(backend, old.shards[0].path, None)
    assert store.commit(draft(store, state(2), 10, attempt=2), nothing) is True
    assert same(backend.store().read(10), state(2))
    assert store.files.read("step-0000000010/manifest.bad-2.json") == data
    assert store.verify(10) == []


def test_a_commit_without_its_shards_is_refused(backend: Backend, store: CheckpointStore) -> None:
    manifest = draft(store, state(1), 10)
    path = manifest.shards[0].path
    put(backend, path, store.files.read(path)[:-1])
    with pytest.raises(CheckpointDamagedError, match="has .* bytes where") as caught:
        store.commit(manifest, nothing)
    assert caught.value.context["path"].endswith(path)
    put(backend, path, None)
    with pytest.raises(CheckpointDamagedError, match="is missing"):
        store.commit(manifest, nothing)
    assert store.steps() == []


def test_repair_from_another_copy(backend: Backend, store: CheckpointStore) -> None:
    save(store, state(1), 10)
    twin = save(store, state(1), 20, attempt=2)
    part = next(t for t in twin.tensors if t.name == KERNEL).parts[0]
    data = bytearray(store.files.read(part.shard))
    data[part.offset] ^= 1
    put(backend, part.shard, bytes(data))
    assert [p.path for p in store.verify(20)] == [store.files.absolute(part.shard)]
    problems: list[Any] = []
    assert store.read_part(part, problems) == state(1)[KERNEL][:4].tobytes()
    assert [(p.path, p.repaired) for p in problems] == [(store.files.absolute(part.shard), True)]
    for broken in (data[: part.offset + 3], data[: part.offset - 9], b"", None):
        put(backend, part.shard, broken if broken is None else bytes(broken))
        assert same(backend.store().read(20), state(1))
        assert len(store.verify(20)) == 1


def test_no_other_copy(backend: Backend, store: CheckpointStore) -> None:
    save(store, state(1), 10)
    written = save(store, state(2), 20)
    part = next(t for t in written.tensors if t.name == KERNEL).parts[0]
    put(backend, part.shard, store.files.read(part.shard)[: part.offset + 3])
    with pytest.raises(CheckpointDamagedError, match="ends at byte") as caught:
        store.read_part(part)
    assert caught.value.context["path"] == store.files.absolute(part.shard)
    with pytest.raises(CheckpointDamagedError):
        store.read(20)
    assert "frozen" in store.read(20, ["frozen"]), "other tensors can still be read"
    assert same(store.read(10), state(1))


def test_quarantine(backend: Backend, store: CheckpointStore) -> None:
    save(store, state(1), 10)
    save(store, state(2), 20)
    data = store.files.read("step-0000000020/manifest.json")
    store.quarantine(20, 7, store.verify(20))
    assert backend.store().steps() == [10]
    assert store.files.read("step-0000000020/manifest.bad-7.json") == data
    store.quarantine(20, 7)
    assert store.sweep(9, 1) == [], "its shards stay as long as its manifest names them"
    save(store, state(3), 20, attempt=8)
    assert same(store.read(20), state(3))


def test_retention_keeps_what_others_name(backend: Backend, store: CheckpointStore) -> None:
    known = save(store, state(1), 10, metrics={"loss": 30.5})
    for step in (20, 30, 40):
        known = save(store, state(step), step, known=known, metrics={"loss": float(step)})
    assert store.best("loss", "min") == 20
    assert store.best("loss", "max") == 40
    store.pin(30)
    store.pin(30)
    assert backend.store().pinned() == {30}
    with store.reading(20):
        assert store.retain(Rule(keep_last=1), nothing) == [10]
    assert store.steps() == [20, 30, 40]
    with pytest.raises(ConfigError, match="pinned"):
        store.delete(30)
    store.pin(30, False)
    assert store.retain(Rule(keep_best="loss"), nothing) == [30]
    assert store.steps() == [20, 40]
    with pytest.raises(ConfigError, match="newest"):
        store.delete(40)
    store.delete(20)
    assert same(backend.store().read(40), state(40)), "the frozen part was written with step 10"
    named = {shard.path for shard in store.manifest(40).shards}
    assert set(store.files.tree()) == named | {"step-0000000040/manifest.json", "recent.json"}


def test_best_as_the_run_says(store: CheckpointStore) -> None:
    best = {"metric": "auc", "mode": "max"}
    for step, auc in ((1, 0.5), (2, 0.9), (3, float("nan")), (4, 0.9), (5, 0.1)):
        save(store, {"s": np.asarray(step)}, step, world=1, metrics={"auc": auc}, best=best)
    assert store.best() == 2
    assert store.best("auc") == 2
    assert store.best("auc", "min") == 5
    assert store.best("loss", "min") is None
    with pytest.raises(ConfigError, match="mode"):
        store.best("loss")


def test_sweep(store: CheckpointStore) -> None:
    first = save(store, state(1), 10)
    dead = draft(store, state(2), 20)
    older = draft(store, state(2), 30, attempt=2)
    mine = draft(store, state(2), 30, attempt=3)
    store.files.write("step-0000000040/manifest.json.1234.tmp", [memoryview(b"half")])
    store.files.write("step-0000000010/notes.txt", [memoryview(b"by hand")])
    store.files.write("step-0000000010/reading-1000-abc", [memoryview(b"dead")])
    swept = store.sweep(3, 1)
    gone = {shard.path for m in (dead, older) for shard in m.shards}
    assert set(swept) == gone | {
        "step-0000000040/manifest.json.1234.tmp",
        "step-0000000010/reading-1000-abc",
    }
    left = {shard.path for m in (first, mine) for shard in m.shards}
    assert set(store.files.tree()) == left | {
        "recent.json",
        "step-0000000010/manifest.json",
        "step-0000000010/notes.txt",
    }
    assert set(store.files.list()) == {"recent.json", "step-0000000010", "step-0000000030"}
    assert store.commit(mine, nothing) is True


def test_only_what_changed_is_written(store: CheckpointStore) -> None:
    info = [TensorInfo(name, (4,), "U8") for name in "abc"]
    image = Image([Slice(i, 0, 4) for i in info])
    for view in image.views:
        view[:] = 7
    part = image.subset([1])
    path = store.shard_path(10, 1, 1, 0, 1, 0)
    shard = store.write_shards([(path, part)])[0]
    assert (shard.path, shard.nbytes, shard.xxh3) == (path, part.nbytes, part.xxh3)
    assert safetensors.numpy.load(store.files.read(path))["b"].tolist() == [7] * 4


def test_a_large_shard(store: CheckpointStore) -> None:
    """More than s3fs sends in one request, and more than is read in one go."""
    rows = np.random.default_rng(0).integers(0, 255, (130, 1 << 20), np.uint8)
    written = save(store, {"w": rows}, 10, world=1, max_bytes=1 << 30)
    assert written.shards[0].nbytes > 130 << 20
    assert store.verify(10) == []
    assert store.read(10)["w"].tobytes() == rows.tobytes()


def test_what_other_processes_do_is_seen(backend: Backend, store: CheckpointStore) -> None:
    """Filesystems remember listings; the store must not believe them."""
    written = save(store, state(1), 10)
    path = written.shards[0].path
    data = store.files.read(path)
    assert store.files.list("step-0000000010")
    assert store.files.size(path) == len(data)
    put(backend, path, None)
    assert store.files.size(path) is None
    assert path not in store.files.tree()
    put(backend, path, data + b"x")
    assert store.files.size(path) == len(data) + 1
    assert store.files.tree()[path] == len(data) + 1
    put(backend, "step-0000000020/manifest.json", b"{}")
    assert store.steps() == [10, 20]
    put(backend, "step-0000000010/manifest.json", None)
    assert store.steps() == [20]


def test_manifest_fields_survive(backend: Backend, store: CheckpointStore) -> None:
    sent = dataclasses.replace(
        draft(store, state(1), 10), state={"ü": [1.5, float("inf"), None, {"$float": "x"}]}
    )
    store.commit(sent, nothing)
    assert backend.store().manifest(10) == sent
