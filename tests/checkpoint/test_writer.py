"""The saving threads of several ranks, in one process, on a real directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint.layout import TensorInfo, divide
from raytf.checkpoint.manifest import Manifest
from raytf.checkpoint.retention import Rule
from raytf.checkpoint.store import CheckpointStore
from raytf.checkpoint.writer import Outcome, Snapshot, Writer
from raytf.errors import StorageError, SupersededError


class Table:
    """Where the ranks of one process meet."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.changed = threading.Condition()
        self.values: dict[str, dict[int, Any]] = {}

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self.table = table
        self.rank = rank

    def post(self, key: str, value: Any) -> None:
        with self.table.changed:
            self.table.values.setdefault(key, {})[self.rank] = value
            self.table.changed.notify_all()

    def share(self, key: str, value: Any) -> list[Any]:
        self.post(key, value)
        with self.table.changed:
            seen = self.table.values[key]
            whole = self.table.changed.wait_for(
                lambda: len(seen) == self.table.num_workers, timeout=20
            )
            assert whole, f"{key}: only {sorted(seen)} came"
            return [seen[rank] for rank in sorted(seen)]


class Ranks:
    """All ranks of a run; `save` copies `arrays` on each and hands them over."""

    def __init__(self, path: Path, num_workers: int = 2, attempt: int = 1, **options: Any) -> None:
        self.store = CheckpointStore(str(path))
        self.table = Table(num_workers)
        self.num_workers = num_workers
        self.attempt = attempt
        self.number = 0
        self.outcomes: list[list[Outcome]] = [[] for _ in range(num_workers)]
        self.writers = [self._writer(rank, options) for rank in range(num_workers)]

    def _writer(self, rank: int, options: dict[str, Any]) -> Writer:
        values: dict[str, Any] = {
            "rule": Rule(),
            "may_commit": lambda: None,
            "done": self.outcomes[rank].append,
        }
        return Writer(
            CheckpointStore(self.store.storage),
            rank=rank,
            num_workers=self.num_workers,
            attempt=self.attempt,
            generation=1,
            peers=self.table.seat(rank),
            **(values | options),
        )

    def save(self, step: int, arrays: dict[str, np.ndarray], wait: bool = True) -> None:
        self.number += 1
        infos = [TensorInfo(n, a.shape, "F32", n.startswith("frozen")) for n, a in arrays.items()]
        shares = divide(infos, self.num_workers)
        for rank, writer in enumerate(self.writers):
            images = writer.images(shares[rank])
            for image in images:
                for piece, view in zip(image.slices, image.views, strict=True):
                    rows = arrays[piece.tensor.name][piece.start : piece.stop]
                    view[:] = np.frombuffer(rows.tobytes(), np.uint8)
            writer.submit(
                Snapshot(
                    number=self.number,
                    step=step,
                    images=images,
                    own={"rank": rank},
                    head=head(step, self.num_workers, self.attempt),
                )
            )
        if wait:
            self.drain()

    def drain(self) -> None:
        for writer in self.writers:
            writer.drain()

    def errors(self) -> list[Any]:
        return [outcome.error for mine in self.outcomes for outcome in mine if outcome.error]

    def kinds(self) -> list[list[str]]:
        return [[outcome.kind for outcome in mine] for mine in self.outcomes]


def head(step: int, num_workers: int, attempt: int) -> dict[str, Any]:
    return {
        "run": "r",
        "attempt": attempt,
        "generation": 1,
        "step": step,
        "epoch": 0,
        "position": {},
        "world_size": num_workers,
        "time": 0.0,
        "metrics": {},
        "best": None,
        "versions": {},
        "fingerprint": {},
        "threads": 1,
        "model": {},
        "state": {"loop": {}},
    }


def arrays(seed: int, rows: int = 1000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng(0)
    return {
        "frozen/kernel": fixed.normal(size=(rows, 8)).astype("float32"),
        "kernel": rng.normal(size=(rows, 8)).astype("float32"),
        "bias": rng.normal(size=(8,)).astype("float32"),
    }


def equal(store: CheckpointStore, step: int, wanted: dict[str, np.ndarray]) -> bool:
    read = store.read(step)
    return set(read) == set(wanted) and all(
        np.array_equal(read[name], value) for name, value in wanted.items()
    )


def test_all_ranks_write_their_share_and_all_is_there(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.save(10, arrays(1))
    assert ranks.errors() == []
    assert ranks.kinds() == [["committed"], ["committed"]]
    assert equal(ranks.store, 10, arrays(1))
    assert ranks.store.verify(10) == []
    written = [mine[0].written_bytes for mine in ranks.outcomes]
    assert max(written) < 1.1 * min(written)
    manifest = ranks.store.manifest(10)
    assert manifest.world_size == 2
    assert [manifest.state["own"][i]["rank"] for i in manifest.state["own_of_rank"]] == [0, 1]


def test_unchanged_tensors_are_not_written_again(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.save(10, arrays(1))
    ranks.save(20, arrays(2))
    first, second = (sum(mine[i].written_bytes for mine in ranks.outcomes) for i in range(2))
    assert second < 0.6 * first
    used = {part.shard for t in ranks.store.manifest(20).tensors for part in t.parts}
    assert any(shard.startswith("step-0000000010/") for shard in used)
    assert equal(ranks.store, 20, arrays(2))


def test_a_shared_shard_outlives_the_step_it_was_written_for(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, rule=Rule(keep_last=1))
    for step in (10, 20, 30):
        ranks.save(step, arrays(step))
    assert ranks.store.steps() == [30]
    assert equal(ranks.store, 30, arrays(30))
    assert ranks.store.verify(30) == []
    again = Ranks(tmp_path, attempt=2, rule=Rule(keep_last=1))
    again.save(40, arrays(40))  # a new attempt knows nothing: all is written anew
    assert equal(again.store, 40, arrays(40))
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        "recent.json",
        "step-0000000040",
    ]


def test_a_restored_run_knows_what_is_durable(tmp_path: Path) -> None:
    Ranks(tmp_path).save(10, arrays(1))
    again = Ranks(tmp_path, attempt=2)
    for writer in again.writers:
        writer.knows(again.store.manifest(10))
    again.save(20, arrays(2))
    assert sum(mine[0].written_bytes for mine in again.outcomes) < 1.2 * 4 * 8 * 1000
    assert equal(again.store, 20, arrays(2))


def test_only_the_newest_waits_and_the_others_are_counted(tmp_path: Path) -> None:
    go = threading.Event()
    ranks = Ranks(tmp_path, at=lambda phase, step: go.wait(20) and None)
    for step in (10, 20, 30, 40):
        ranks.save(step, arrays(step), wait=False)
        while step == 10 and not all(writer.busy for writer in ranks.writers):
            pass
    go.set()
    ranks.drain()
    assert ranks.store.steps() == [10, 40]
    assert equal(ranks.store, 40, arrays(40))
    for kinds in ranks.kinds():
        assert sorted(kinds) == ["committed", "committed", "skipped", "skipped"]


def test_a_save_that_one_rank_gives_up_does_not_exist(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.table.seat(1).post("save/1/10", None)  # as rank 1 does when it cannot keep up
    ranks.num_workers = 1
    images = ranks.writers[0].images(divide([TensorInfo("a", (4,), "F32")], 2)[0])
    ranks.writers[0].submit(Snapshot(number=1, step=10, images=images, own={}, head={}))
    ranks.writers[0].drain()
    assert ranks.kinds()[0] == ["skipped"]
    assert ranks.store.steps() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path, rank: int) -> None:
    ranks = Ranks(tmp_path)
    broken = ranks.writers[rank]._store

    def refuse(items: Any) -> Any:
        raise StorageError("no space left")

    good = broken.write_shards
    broken.write_shards = refuse  # type: ignore[method-assign]
    ranks.save(10, arrays(1))
    assert ranks.kinds() == [["failed"], ["failed"]]
    assert f"rank {rank}: no space left" in str(ranks.outcomes[0][0].error)
    assert ranks.store.steps() == []
    broken.write_shards = good  # type: ignore[method-assign]
    ranks.save(20, arrays(2))  # and the next one is whole
    assert equal(ranks.store, 20, arrays(2))


def test_a_superseded_attempt_commits_nothing(tmp_path: Path) -> None:
    def taken() -> None:
        raise SupersededError("attempt 2 has taken over")

    ranks = Ranks(tmp_path, may_commit=taken)
    ranks.save(10, arrays(1))
    assert ranks.kinds() == [["superseded"], ["superseded"]]
    assert ranks.store.steps() == []


def test_a_step_that_is_there_stays(tmp_path: Path) -> None:
    Ranks(tmp_path).save(10, arrays(1))
    before = (tmp_path / "checkpoints/step-0000000010/manifest.json").read_bytes()
    ranks = Ranks(tmp_path, attempt=2)
    ranks.save(10, arrays(1))
    assert ranks.kinds() == [["committed"], ["committed"]]
    assert (tmp_path / "checkpoints/step-0000000010/manifest.json").read_bytes() == before
    ranks.save(20, arrays(1))  # refers to nothing of what was dropped
    assert ranks.store.verify(20) == []
    assert equal(ranks.store, 20, arrays(1))


def test_buffers_are_used_again(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, num_workers=1)
    seen: list[int] = []
    images: Callable[..., Any] = ranks.writers[0].images

    def watch(slices: Any) -> Any:
        given = images(slices)
        seen.extend(id(image.buffer) for image in given)
        return given

    ranks.writers[0].images = watch  # type: ignore[method-assign]
    for step in range(1, 6):
        ranks.save(step, arrays(step))
    assert len(set(seen)) == 2  # two files, each of one buffer


def test_manifests_are_read_by_people_and_programs(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.save(10, arrays(1))
    path = tmp_path / "checkpoints/step-0000000010/manifest.json"
    assert Manifest.from_bytes(path.read_bytes(), str(path)) == ranks.store.manifest(10)
