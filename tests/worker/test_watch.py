"""What goes wrong while a run is alive is seen, named, and never saved. Real ranks, without Ray."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint.store import CheckpointStore
from raytf.config import SaveConfig, WatchConfig
from raytf.data import Order
from raytf.worker.saving import Place
from tests.worker.broken import BATCH, ROWS, left_by
from tests.worker.group import run_group
from tests.worker.watched import Watched

pytestmark = [pytest.mark.tf, pytest.mark.timeout(200)]


def run(case: Watched, workers: int = 2) -> list[dict[str, Any]]:
    return run_group("tests.worker.watched:train", workers, case, bare=True)


def rows_of(epoch: int, batch: int) -> list[int]:
    return Order(ROWS, 3, True).rows(epoch, batch * BATCH, min(ROWS, (batch + 1) * BATCH)).tolist()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    (tmp_path / "run" / "outputs").mkdir(parents=True)
    return str(tmp_path / "run")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bits:
    """The state of two ranks, read in a second."""

    names = ("a", "b")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.read_at: list[float] = []

    def read(self) -> np.ndarray:
        self.read_at.append(self.clock.now)
        self.clock.now += 1.0
        return np.array([1, 2], np.uint64)


class Twin:
    """An agreement with a rank that says the same as this one."""

    asked = 0

    def sum(self, values: list[float]) -> np.ndarray:
        self.asked += 1
        plan, mine = values[:2], np.array(values[2:]).reshape(2, 2)
        return np.array([*plan, *mine[:, [0, 0]].ravel()])


class TestWhenItLooks:
    """The plan alone: no strategy, no clock but this one."""

    def watch(self, clock: Clock, **config: Any) -> tuple[Any, Bits, Twin]:
        from raytf.worker.watch import Watch

        bits, twin = Bits(clock), Twin()
        watch = Watch(
            config=WatchConfig(**config),
            agreement=twin,  # type: ignore[arg-type]
            rank=0,
            num_ranks=2,
            health=None,
            bits=bits,  # type: ignore[arg-type]
            rows=lambda epoch, step: None,
            clock=clock,
        )
        return watch, bits, twin

    def steps(self, watch: Any, clock: Clock, number: int, step_s: float) -> None:
        for step in range(number):
            clock.now += step_s
            watch.before_step(Place(epoch=0, step=step, total_step=step, is_open=True))

    def test_about_every_five_seconds_and_comparing_takes_its_share_only(self) -> None:
        clock = Clock()
        watch, bits, twin = self.watch(clock)
        self.steps(watch, clock, 400_000, 0.002)  # 800 s
        assert 140 <= twin.asked <= 180
        assert 3 <= len(bits.read_at) <= 5
        gaps = np.diff(bits.read_at)
        assert all(gaps >= 190.0)  # of which it takes one second

    def test_slow_steps_are_looked_at_one_by_one(self) -> None:
        clock = Clock()
        watch, _, twin = self.watch(clock)
        self.steps(watch, clock, 30, 20.0)
        assert twin.asked >= 20

    def test_as_often_as_it_is_told(self) -> None:
        clock = Clock()
        watch, bits, _ = self.watch(clock, agree_every_steps=7)
        self.steps(watch, clock, 50, 0.01)
        assert len(bits.read_at) == 7

    def test_one_step_is_looked_at_once(self) -> None:
        clock = Clock()
        watch, bits, twin = self.watch(clock)
        end = Place(epoch=1, total_step=7)
        watch.before_save(end)
        watch.before_save(end)
        watch.epoch_end(end)
        assert (twin.asked, len(bits.read_at)) == (1, 1)


@pytest.mark.parametrize(
    ("digests", "odd", "first"),
    [
        ([[1, 2, 3], [1, 9, 3], [1, 2, 3]], [1], 1),
        ([[1, 2, 3], [1, 2, 9]], [0, 1], 2),
        ([[9, 2], [1, 2], [1, 2], [1, 7]], [0, 1, 2, 3], 0),
        ([[1, 2], [1, 2], [1, 2], [8, 7]], [3], 0),
    ],
)
def test_who_is_odd(digests: list[list[int]], odd: list[int], first: int) -> None:
    from raytf.worker.watch import odd_ranks

    assert odd_ranks(np.array(digests, np.uint64)) == (odd, first)


class TestNotANumber:
    def test_stops_with_the_batch_and_saves_nothing_of_it(self, storage: str) -> None:
        ranks = run(Watched(storage=storage, drill="nan rank=1 step=10"))
        for rank in ranks:
            error = rank["error"]
            assert (error["step"], error["epoch"], error["batch_step"]) == (10, 1, 3)
            assert error["rows"] == rows_of(1, 3)
            # relu makes 0 of it, so that no loss would have told
            assert error["variable"] == "gradient of dense/kernel"
            assert error["on_nan"] == "stop"
            text = "gradient of dense/kernel is not a finite number at step 10 (epoch 2, batch 3)"
            assert error["nan"] == text
            assert rank["text"].startswith(f"TrainingError: {text}. The batch's rows: ")
            assert "raytf-beat" not in rank["threads"]
        assert ranks[0]["saved"][-1] == 9  # the next one would have been of step 12

    def test_a_gradient_alone_several_steps_per_call(self, storage: str) -> None:
        case = Watched(
            storage=storage,
            drill="nan rank=0 step=7",
            watch=WatchConfig(on_nan="rollback"),
            integers=True,
            per_call=3,
        )
        (error, other) = (rank["error"] for rank in run(case))
        assert error == other
        assert (error["step"], error["epoch"], error["batch_step"]) == (7, 1, 0)
        assert error["variable"].startswith("gradient of sequential/embedding")
        assert error["on_nan"] == "rollback"

    def test_ignored_if_asked(self, storage: str) -> None:
        case = Watched(
            storage=storage, drill="nan rank=1 step=3", watch=WatchConfig(on_nan="ignore"), epochs=1
        )
        assert run(case)[0]["result"]["steps"] == 7
        kernel = CheckpointStore(storage).read(7, ["dense/kernel"])["dense/kernel"]
        assert np.isnan(kernel).any()

    def test_steps_that_the_loss_scale_leaves_out_are_none(self, storage: str) -> None:
        case = Watched(
            storage=storage, kind="mixed", integers=True, drill="nan rank=0 step=3", epochs=1
        )
        assert run(case, workers=1)[0]["result"]["steps"] == 7
        store = CheckpointStore(storage)
        name = next(t.name for t in store.manifest(7).tensors if "dynamic_scale" in t.name)
        assert store.read(7, [name])[name] == 2.0**14  # halved once
        bias = store.read(7, ["sequential/dense/bias"])["sequential/dense/bias"]
        assert np.isfinite(bias).all()

    def test_a_loss_alone(self, storage: str) -> None:
        case = Watched(storage=storage, kind="loss", drill="nan rank=0 step=3", epochs=1)
        error = run(case, workers=1)[0]["error"]
        assert (error["step"], error["variable"]) == (3, "loss")

    def test_tf_keras(self, storage: str) -> None:
        for rank in run(Watched(storage=storage, kind="legacy", drill="nan rank=1 step=4")):
            assert (rank["error"]["step"], rank["error"]["rows"]) == (4, rows_of(0, 4))
            assert rank["error"]["variable"] == "weight dense/kernel:0"


class TestBatchesLeftOut:
    SKIP = ((0, 2), (1, 0), (1, 6))  # one of them the smaller last batch

    def counts(self) -> list[float]:
        counts = np.full(ROWS, 2.0)
        for epoch, batch in self.SKIP:
            counts[rows_of(epoch, batch)] -= 1
        return counts.tolist()

    def left(self, case: Watched, starts: int = 1) -> dict[str, Any]:
        from tests.worker.group import GroupFailed

        for attempt in range(1, starts):
            with pytest.raises(GroupFailed):
                run_group(
                    "tests.worker.watched:train",
                    2,
                    dataclasses.replace(case, attempt=attempt),
                    bare=True,
                    grace_s=0.5,
                )
        run(dataclasses.replace(case, attempt=starts))
        return left_by(case.storage)

    def test_counted_but_not_read_and_exact_over_a_restart(self, tmp_path: Path) -> None:
        cases = []
        for name in ("whole", "broken"):
            (tmp_path / name / "outputs").mkdir(parents=True)
            cases.append(Watched(storage=str(tmp_path / name), skip=self.SKIP, per_call=2))
        whole = self.left(cases[0])
        assert whole["ledger"] == self.counts()
        assert (whole["step"], whole["position"]["epoch"]) == (14, 2)
        broken = self.left(dataclasses.replace(cases[1], drill="kill rank=0 step=8"), starts=2)
        assert broken["tensors"] == whole["tensors"]


class TestReplicas:
    def test_the_odd_rank_of_three_and_the_variable_are_named(self, storage: str) -> None:
        case = Watched(
            storage=storage,
            poke=(1, 4),
            watch=WatchConfig(agree_every_steps=2),
            save=SaveConfig(every_steps=100),
        )
        ranks = run(case, workers=3)
        for rank, found in enumerate(ranks):
            error = found["error"]
            assert (error["ranks"], error["variable"], error["step"]) == ([1], "frozen/kernel", 4)
            assert ("diverged" in error) == (rank == 1)
            assert error.get("collateral", False) == (rank != 1)
            assert "frozen/kernel differs on rank 1 before step 4" in found["text"]
        assert ranks[0]["saved"] == []

    def test_of_two_both_are_named_and_nothing_of_it_is_saved(self, storage: str) -> None:
        case = Watched(storage=storage, poke=(0, 5), watch=WatchConfig(agree_every_steps=3))
        ranks = run(case)
        assert [rank["error"]["ranks"] for rank in ranks] == [[0, 1]] * 2
        assert [rank["error"]["step"] for rank in ranks] == [6, 6]
        assert all("diverged" in rank["error"] for rank in ranks)
        assert ranks[0]["saved"] == [3]


class TestWhereTimeGoes:
    def test_a_slow_transform_is_blamed_on_the_data_of_its_rank(self, storage: str) -> None:
        case = Watched(storage=storage, slow_data_s=0.1, save=SaveConfig(every_steps=99), epochs=3)
        ranks = run(case)
        shown = ranks[0]["shown"]
        categories = {k for record in shown for k in record["seconds"]}
        assert {"start", "compile", "step"} <= categories
        told = sum(sum(record["seconds"].values()) for record in shown)
        assert told == pytest.approx(ranks[0]["seconds"], rel=0.05, abs=1.0)
        # 21 steps of 8 or fewer rows, two rows at a time: about 0.4 s each
        seconds = [totals(rank["beats"]) for rank in ranks]
        assert seconds[1]["data"] > 3 * seconds[1].get("step", 0.0)
        assert seconds[0]["wait"] > 2 * seconds[0].get("data", 0.0)
        live = [b["phase"] for b in ranks[1]["beats"] if b["phase"] in ("data", "step")]
        assert live.count("data") > len(live) / 2

    def test_a_rank_that_stops_is_seen_and_goes_on(self, storage: str) -> None:
        drill = "slow rank=1 step=4 phase=data for_s=2.5; stop rank=0 step=5 for_s=0.5"
        ranks = run(Watched(storage=storage, drill=drill))
        assert [rank["result"]["steps"] for rank in ranks] == [14, 14]
        stuck = [
            [b for b in rank["beats"] if b["since_s"] > 0.5 and b["step"] == 4] for rank in ranks
        ]
        assert {b["phase"] for b in stuck[1]} == {"data"}
        assert {b["phase"] for b in stuck[0]} == {"wait"}
        assert all(b["steps"] == 0 for b in stuck[0][1:])


def totals(beats: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for beat in beats:
        for phase, seconds in beat["seconds"].items():
            found[phase] = found.get(phase, 0.0) + seconds
    return found


@pytest.mark.parametrize(
    ("drill", "text"),
    [
        ("raise rank=0 step=3 phase=callback", "RuntimeError: drill: raised at step 3"),
        ("raise rank=0 step=3", "RuntimeError: drill: raised at step 3 in phase step"),
        ("exit rank=0 step=3 code=4 phase=data", "SystemExit: 4"),
    ],
)
def test_drills_that_the_training_thread_does_itself(storage: str, drill: str, text: str) -> None:
    case = Watched(storage=storage, drill=drill, epochs=1)
    assert text in run(case, workers=1)[0]["text"]
