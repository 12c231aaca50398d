"""The store's own rules on local files; what holds on every filesystem is in tests/contracts."""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint import reading as reading_module
from raytf.checkpoint.manifest import Manifest
from raytf.checkpoint.retention import Rule
from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import CheckpointDamagedError, ConfigError, RaytfError, StorageError
from tests.checkpoint.faulty import AT_ONCE
from tests.checkpoint.states import draft, nothing, same, save, state


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run", retry=AT_ONCE)


def files_of(store: CheckpointStore) -> list[Path]:
    return sorted(p for p in Path(store.root.path).rglob("*") if p.is_file())


def test_places(tmp_path: Path) -> None:
    run = CheckpointStore(tmp_path / "run")
    assert run.url == str(tmp_path / "run")
    assert run.root.path == str(tmp_path / "run" / "checkpoints")
    assert run.path(100) == run.step_url(100) == f"{run.root.path}/step-0000000100"
    for given in (run.root.path, run.root, run.storage, f"{run.url}/"):
        assert CheckpointStore(given).root.path == run.root.path
    assert CheckpointStore(resolve("memory://a/run")).step_url(1).startswith("memory://a/run/check")
    assert os.listdir(tmp_path) == [], "nothing is opened before it is used"
    assert repr(run) == f"CheckpointStore({run.url!r})"


def test_every_flipped_bit_and_every_truncation_is_seen(store: CheckpointStore) -> None:
    """A selection of bits, all truncations of a shard's end and some others, in every file."""
    save(store, state(1), 10)
    draw = random.Random(7)
    for path in files_of(store):
        if path.name == "recent.json":
            continue  # it only helps listings along
        good = path.read_bytes()
        flips = {(i, draw.randrange(8)) for i in draw.sample(range(len(good)), min(60, len(good)))}
        spoilt = [good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :] for i, bit in flips]
        spoilt += [good[:size] for size in (0, 1, len(good) // 2, len(good) - 1)]
        if path.suffix != ".json":  # a manifest may end in more white space
            spoilt += [good + b"\0"]
        for data in spoilt:
            path.write_bytes(data)
            problems = store.verify(10)
            try:
                arrays = store.read(10)
            except CheckpointDamagedError as error:
                assert error.context["path"] == str(path)
                assert problems
            else:  # a flip outside of all tensors, or one that means the same
                assert same(arrays, state(1))
                assert problems or store.manifest(10) == Manifest.from_bytes(good, "m")
            if path.suffix != ".json":
                assert [problem.path for problem in problems] == [str(path)]
        path.write_bytes(good)
    assert store.verify(10) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_single_bit_of_every_shard(store: CheckpointStore) -> None:
    save(store, state(1), 10)
    for path in files_of(store):
        good = path.read_bytes()
        if path.suffix == ".json":
            continue
        for index, bit in itertools.product(range(len(good)), range(8)):
            path.write_bytes(good[:index] + bytes([good[index] ^ 1 << bit]) + good[index + 1 :])
            assert [problem.path for problem in store.verify(10)] == [str(path)]
        path.write_bytes(good)


def test_recent_is_only_a_help(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    save(store, state(1), 10)
    recent = Path(store.root.path) / "recent.json"
    for text in ("", "{", "[]", "{}", '{"steps": 3}', '{"steps": ["x", -1, true, 99]}', "\x00"):
        recent.write_text(text)
        assert store.steps() == [10]
        assert store.latest() == 10
    assert "recent.json cannot be read" in caplog.text
    recent.unlink()
    assert store.steps() == [10]
    save(store, state(2), 20)
    assert recent.read_text() == '{"steps": [20]}'


def test_recent_is_bounded_and_holds_the_step_that_comes(store: CheckpointStore) -> None:
    for step in [*range(100, 170), 5]:
        store._catalog.announce(step)
    recent = store._catalog._recent()
    assert len(recent) == 64
    assert 5 in recent and 169 in recent


def test_the_order_of_a_commit(store: CheckpointStore) -> None:
    """Announced, then asked, then written: nothing may come between the last two."""
    manifest = draft(store, state(1), 10)
    path = Path(store.path(10)) / "manifest.json"

    def may_commit() -> None:
        assert "[10]" in (Path(store.root.path) / "recent.json").read_text()
        assert not path.exists()
        assert store.steps() == []

    store.commit(manifest, may_commit)
    assert path.exists()


def test_a_manifest_that_contradicts_itself_is_not_committed(store: CheckpointStore) -> None:
    manifest = draft(store, state(1), 10)
    wrong = Manifest(**{**manifest.__dict__, "shards": manifest.shards[1:]})
    with pytest.raises(RaytfError, match="bug in raytf"):
        store.commit(wrong, nothing)
    assert store.steps() == []


def test_a_manifest_that_reads_back_otherwise_is_an_error(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = draft(store, state(1), 10)
    real = store.files.write_small_atomic

    def torn(path: str, data: bytes) -> None:
        real(path, data[:-9] if path.endswith("manifest.json") else data)

    monkeypatch.setattr(store.files, "write_small_atomic", torn)
    with pytest.raises(CheckpointDamagedError, match="does not read back"):
        store.commit(manifest, nothing)


def test_trouble_on_the_way_is_not_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = save(store, state(1), 10)

    def unreachable(*_: Any) -> Any:
        raise StorageError("unreachable")

    monkeypatch.setattr(store.files, "read_range", unreachable)
    with pytest.raises(StorageError):
        store.read_part(written.tensors[0].parts[0])
    with pytest.raises(StorageError):
        store.read(10)
    with pytest.raises(StorageError):
        store.verify(10)


def test_a_bad_transfer_is_read_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, state(1), 10, world=1)
    real = store.files.read_range
    calls: list[int] = []

    def once_bad(path: str, *where: Any) -> Any:
        data = real(path, *where)
        calls.append(data.size)
        if len(calls) == 1:
            data[:] ^= 255
        return data

    monkeypatch.setattr(store.files, "read_range", once_bad)
    problems: list[Any] = []
    part = store.manifest(10).tensors[0].parts[0]
    assert store.read_part(part, problems) == state(1)["dense/kernel"].tobytes()
    calls.clear()
    assert same(store.read(10, problems=problems), state(1))
    assert problems == []
    assert len(calls) > 1


def test_neighbours_are_read_together(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": np.full(1000, i, np.uint8) for i in range(50)}
    save(store, tensors, 10, world=2)
    real = store.files.read_range
    calls: list[str] = []
    monkeypatch.setattr(
        store.files, "read_range", lambda path, *where: (calls.append(path), real(path, *where))[1]
    )
    assert same(store.read(10), tensors)
    assert len(calls) == 2
    calls.clear()
    monkeypatch.setattr(reading_module, "MAX_RUN_BYTES", 10_000)
    assert same(store.read(10), tensors)
    assert len(calls) == 6
    calls.clear()
    monkeypatch.setattr(reading_module, "MAX_GAP_BYTES", 500)
    assert same(store.read(10, ["t0", "t2"]), {name: tensors[name] for name in ("t0", "t2")})
    assert len(calls) == 2


def test_what_is_read_may_be_changed(store: CheckpointStore) -> None:
    save(store, state(1), 10, world=1)
    arrays = store.read(10)
    for array in arrays.values():
        assert array.flags.writeable and array.flags.aligned
        array[...] = 0
    assert same(store.read(10), state(1))


def test_a_read_only_store_can_be_read(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, state(1), 10)

    def refuse(*_: Any) -> Any:
        raise StorageError("read-only")

    monkeypatch.setattr(store.files, "write", refuse)
    monkeypatch.setattr(store.files, "delete", refuse)
    with store.reading(10):
        assert same(store.read(10), state(1))


def test_marker_of_a_dead_reader_counts_for_an_hour(tmp_path: Path) -> None:
    now = [1000.0]
    store = CheckpointStore(tmp_path, clock=lambda: now[0])
    for step in (10, 20):
        save(store, state(step), step)
    gone = store.reading(10)
    gone.__enter__()
    now[0] += 3600
    other = CheckpointStore(tmp_path, clock=lambda: now[0])
    assert other.retain(Rule(keep_last=1), nothing) == []
    with pytest.raises(ConfigError, match="being read"):
        other.delete(10)
    now[0] += 1.1
    assert other.retain(Rule(keep_last=1), nothing) == [10]
    gone.__exit__(None, None, None)


def spoil(store: CheckpointStore, manifest: Manifest) -> None:
    path = (
        Path(store.root.path)
        / next(t for t in manifest.tensors if t.name == "dense/kernel").parts[0].shard
    )
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose(store: CheckpointStore, manifest: Manifest) -> None:
    (Path(store.root.path) / manifest.shards[0].path).unlink()


def garble(store: CheckpointStore, manifest: Manifest) -> None:
    (Path(store.path(manifest.step)) / "manifest.json").write_text("{}")


@pytest.mark.parametrize("harm", [spoil, lose, garble])
def test_the_last_good_one_is_never_deleted(
    store: CheckpointStore, harm: Callable[[CheckpointStore, Manifest], None]
) -> None:
    """A later process finds the newest ones damaged: what is before them has to stay."""
    for step in (10, 20, 30, 40):
        written = save(store, state(step), step)
        if step > 20:
            harm(store, written)
    later = CheckpointStore(store.url)
    assert later.retain(Rule(keep_last=1), nothing) == [10]
    assert later.steps() == [20, 30, 40]
    assert same(later.read(20), state(20))
    save(later, state(50), 50, attempt=2)
    assert later.retain(Rule(keep_last=1), nothing) == [20, 30, 40]
    assert same(later.read(50), state(50))


def test_nothing_good_left_means_nothing_is_deleted(store: CheckpointStore) -> None:
    for step in (10, 20):
        spoil(store, save(store, state(step), step))
    assert CheckpointStore(store.url).retain(Rule(keep_last=1), nothing) == []


def test_a_failed_deletion_is_tried_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save(store, state(step), step)
    real = store.files.delete
    asked: list[str] = []

    def fails(path: str) -> None:
        asked.append(path)
        if path.endswith("safetensors"):
            raise StorageError(f"Cannot delete {path}")
        real(path)

    monkeypatch.setattr(store.files, "delete", fails)
    assert store.retain(Rule(keep_last=1), nothing) == [10]
    assert asked[0] == "step-0000000010/manifest.json", "the manifest goes first"
    assert store.steps() == [20]
    assert "stays for now" in caplog.text
    monkeypatch.undo()
    assert Path(store.path(10)).exists()
    assert store.retain(Rule(keep_last=1), nothing) == []
    assert not Path(store.path(10)).exists()
    assert store.verify(20) == []


def test_a_manifest_that_cannot_be_deleted_keeps_its_step(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        save(store, state(step), step)
    real = store.files.delete

    def fails(path: str) -> None:
        if path.startswith("step-0000000010"):
            raise StorageError(f"Cannot delete {path}")
        real(path)

    monkeypatch.setattr(store.files, "delete", fails)
    with caplog.at_level(logging.WARNING):
        assert store.retain(Rule(keep_last=1), nothing) == [20]
    assert "Step 10 stays for now" in caplog.text
    assert store.verify(10) == []
    monkeypatch.undo()
    assert store.retain(Rule(keep_last=1), nothing) == [10]


def test_quarantined_steps_go_in_time(store: CheckpointStore) -> None:
    save(store, state(10), 10)
    spoil(store, save(store, state(20), 20))
    store.quarantine(20, 1, store.verify(20))
    save(store, state(30), 30)
    assert store.retain(Rule(keep_last=2), nothing) == []
    assert Path(store.path(20)).exists(), "only one newer good one is kept"
    save(store, state(40), 40)
    assert store.retain(Rule(keep_last=2), nothing) == [10]
    assert not Path(store.path(20)).exists()


def test_a_quarantined_step_goes_even_if_nothing_else_does(store: CheckpointStore) -> None:
    spoil(store, save(store, state(20), 20))
    store.quarantine(20, 1)
    save(store, state(30), 30)
    assert store.retain(Rule(keep_last=1), nothing) == []
    assert not Path(store.path(20)).exists()


def test_quarantine_never_overwrites(store: CheckpointStore) -> None:
    for seed in (1, 2):
        save(store, state(seed), 20, attempt=seed)
        store.quarantine(20, 9)
    names = sorted(p.name for p in Path(store.path(20)).glob("manifest*"))
    assert names == ["manifest.bad-9-2.json", "manifest.bad-9.json"]


def test_may_delete_is_asked_each_time(store: CheckpointStore) -> None:
    for step in (10, 20, 30, 40):
        save(store, state(step), step)
    asked: list[list[int]] = []
    assert store.retain(Rule(keep_last=1), lambda: asked.append(store.steps())) == [10, 20, 30]
    assert asked == [[10, 20, 30, 40], [20, 30, 40], [30, 40]]


def test_manifests_are_not_read_again_at_every_save(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(10):
        save(store, {"s": np.asarray(step)}, step, world=1)
    rule = Rule(keep_best="loss", keep_every=1)
    store.retain(rule, nothing)
    real = store.files.read
    read: list[str] = []
    monkeypatch.setattr(store.files, "read", lambda path: (read.append(path), real(path))[1])
    store.retain(rule, nothing)
    assert [path for path in read if path.endswith("manifest.json")] == []


def test_sweep_leaves_newer_attempts_alone(store: CheckpointStore) -> None:
    draft(store, state(1), 10, attempt=5)
    assert store.sweep(3, 9) == []
    assert len(store.sweep(5, 2)) == 4
    assert not Path(store.path(10)).exists()


def test_a_newer_format_stops_deletions(store: CheckpointStore) -> None:
    """What it names is unknown, so nothing may be taken for a leftover."""
    from raytf.checkpoint import manifest as module

    save(store, state(10), 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FORMAT", 2)
        draft_20 = draft(store, state(20), 20)
        store.commit(draft_20, nothing)
    later = CheckpointStore(store.url)
    with pytest.raises(ConfigError, match="format 2"):
        later.retain(Rule(keep_last=1), nothing)
    with pytest.raises(ConfigError, match="format 2"):
        later.verify(20)
    assert later.steps() == [10, 20]
