"""When to save: absolute steps, seconds, measured cost; few looks, saves on time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from raytf.checkpoint.cadence import NEVER, Cadence


def cadence(
    every_steps: int | None = None,
    every_s: float | None = None,
    auto: bool = False,
    max_overhead: float = 0.02,
) -> Cadence:
    return Cadence(every_steps=every_steps, every_s=every_s, auto=auto, max_overhead=max_overhead)


@dataclass
class Run:
    """A run whose steps take what `step_s(step)` says; `now` moves by nothing else."""

    plan: Cadence
    step_s: Callable[[int], float]
    first: int = 0
    per_call: int = 1
    stall_s: float = 0.0
    write_s: float | None = None
    slowdown: float = 0.0
    saves: list[tuple[int, float]] = field(default_factory=list)
    looks: list[tuple[int, float]] = field(default_factory=list)
    now: float = 1000.0

    def until(self, last: int) -> Run:
        step, due = self.first, self.first
        while True:
            if step >= due:
                got = self.plan.look(step, self.now)
                assert got.next_look > step
                self.looks.append((step, self.now))
                due = got.next_look
                if got.save:
                    self.saves.append((step, self.now))
                    self.now += self.stall_s
                    self.plan.saved(step, self.now, self.stall_s)
                    if self.write_s is not None:
                        self.plan.wrote(self.write_s, self.slowdown)
            if step >= last:
                return self
            for _ in range(self.per_call):
                step += 1
                self.now += self.step_s(step)

    @property
    def saved_steps(self) -> list[int]:
        return [step for step, _ in self.saves]

    def gaps(self) -> list[float]:
        times = [1000.0, *(now for _, now in self.saves)]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def test_steps_are_absolute_so_a_resumed_run_saves_at_the_same_steps() -> None:
    assert Run(cadence(every_steps=10), lambda s: 0.1).until(35).saved_steps == [10, 20, 30]
    assert Run(cadence(every_steps=10), lambda s: 9.0, first=17).until(45).saved_steps == [
        *(20, 30, 40)
    ]
    assert Run(cadence(every_steps=10), lambda s: 9.0, first=20).until(31).saved_steps == [30]


def test_steps_need_no_clock_and_look_at_multiples_only() -> None:
    plan = cadence(every_steps=100)
    assert not plan.timed
    run = Run(plan, lambda s: float("nan")).until(1000)
    assert [step for step, _ in run.looks] == list(range(0, 1001, 100))
    assert cadence(every_s=1).timed
    assert cadence(auto=True).timed


def test_several_steps_per_call_save_at_the_first_look_behind_the_multiple() -> None:
    run = Run(cadence(every_steps=10), lambda s: 1.0, per_call=4).until(60)
    assert run.saved_steps == [12, 20, 32, 40, 52, 60]
    run = Run(cadence(every_steps=3), lambda s: 1.0, per_call=10).until(40)
    assert run.saved_steps == [10, 20, 30, 40]


def test_nothing_given_never_looks() -> None:
    plan = cadence().look(0, 0.0)
    assert not plan.save
    assert plan.next_look == NEVER
    assert int(float(NEVER)) == NEVER


def test_an_earlier_step_is_a_restore_and_no_save() -> None:
    plan = cadence(every_steps=10)
    plan.look(0, 0.0)
    assert plan.look(10, 1.0).save
    assert plan.look(20, 2.0).save
    back = plan.look(10, 3.0)
    assert (back.save, back.next_look) == (False, 20)
    assert plan.look(20, 4.0).save


def test_a_step_is_saved_once() -> None:
    plan = cadence(every_steps=10)
    plan.look(0, 0.0)
    plan.saved(10, 1.0, 0.1)  # at the end of an epoch
    assert not plan.look(10, 1.0).save
    assert plan.look(20, 2.0).save
    assert not plan.look(20, 2.0).save


@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.7, 2.9])
def test_seconds_are_kept_within_a_tenth_with_few_looks(step_s: float) -> None:
    every = 30.0
    run = Run(cadence(every_s=every), lambda s: step_s).until(int(400 / step_s))
    assert len(run.saves) >= 11
    for gap in run.gaps():
        assert every <= gap <= every * 1.1 + step_s
    ramp = 20
    assert len(run.looks) <= ramp + 20 * len(run.saves)


def test_the_first_looks_double() -> None:
    run = Run(cadence(every_s=1000), lambda s: 0.01).until(2000)
    assert [step for step, _ in run.looks][:8] == [0, 1, 2, 4, 8, 16, 32, 64]


def test_steps_longer_than_the_interval_save_each() -> None:
    assert Run(cadence(every_s=0.5), lambda s: 2.0).until(5).saved_steps == [1, 2, 3, 4, 5]


def test_a_slow_first_step_is_no_measure() -> None:
    def step_s(step: int) -> float:
        return 40.0 if step == 1 else 0.01

    run = Run(cadence(every_s=60), step_s).until(30000)
    assert len(run.looks) <= 20 + 20 * (len(run.saves) + 1)
    for gap in run.gaps():
        assert 60 <= gap <= 66.1


def test_uneven_steps_are_still_on_time() -> None:
    draw = random.Random(1)
    times = [draw.choice([0.01, 0.02, 0.2]) for _ in range(20001)]
    run = Run(cadence(every_s=20), lambda s: times[s]).until(20000)
    assert len(run.saves) > 30
    for gap in run.gaps():
        assert 20 <= gap <= 22.4
    assert len(run.looks) <= 20 + 20 * len(run.saves)


@pytest.mark.parametrize("factor", [3.0, 0.2])
def test_a_change_of_pace_is_noticed(factor: float) -> None:
    run = Run(cadence(every_s=30), lambda s: 0.1 * (factor if s > 1000 else 1)).until(4000)
    for gap in run.gaps():
        assert 30 <= gap <= 36
    for gap in run.gaps()[-2:]:
        assert gap <= 33.1


def test_steps_and_seconds_whichever_comes_first() -> None:
    slow = Run(cadence(every_steps=100, every_s=10), lambda s: 0.5).until(300)
    fast = Run(cadence(every_steps=100, every_s=10), lambda s: 0.01).until(300)
    assert {100, 200, 300} <= set(slow.saved_steps)
    assert len(slow.saves) > 10
    assert fast.saved_steps == [100, 200, 300]
    assert all(gap <= 11.6 for gap in slow.gaps())


def test_a_skipped_save_is_not_asked_for_at_every_step() -> None:
    plan = cadence(every_s=10)
    saves, due = [], 0
    for step in range(1001):
        if step >= due:
            got = plan.look(step, step * 0.1)  # and nobody calls saved(): the writer was busy
            due = got.next_look
            saves += [step] if got.save else []
    assert 9 <= len(saves) <= 10


def test_auto_before_and_after_the_first_measurement() -> None:
    plan = cadence(auto=True)
    assert plan.interval_s == 20
    run = Run(plan, lambda s: 0.05, stall_s=0.01, write_s=1.0, slowdown=0.05).until(4000)
    assert 20 <= run.gaps()[0] <= 22.1
    assert plan.interval_s == 10  # 0.06 s of cost would allow 3 s
    assert all(10 <= gap <= 11.1 for gap in run.gaps()[1:])


@pytest.mark.parametrize(
    ("stall", "write", "slowdown", "interval"),
    [
        (0.5, 1.0, 0.0, 25.0),  # stall / 2 %
        (0.5, 10.0, 0.1, 75.0),  # (0.5 + 1) / 2 %
        (0.0, 100.0, 0.0, 150.0),  # the write takes that long
        (30.0, 1.0, 0.0, 600.0),  # bounded
        (0.0, 0.1, -0.5, 10.0),  # noise is no gain
    ],
)
def test_auto_keeps_the_overhead(
    stall: float, write: float, slowdown: float, interval: float
) -> None:
    plan = cadence(auto=True)
    plan.saved(1, 0.0, stall)
    plan.wrote(write, slowdown)
    assert plan.interval_s == pytest.approx(interval)


def test_auto_overhead_in_a_run() -> None:
    plan = cadence(auto=True, max_overhead=0.05)
    run = Run(plan, lambda s: 0.1, stall_s=1.0, write_s=2.0, slowdown=0.25).until(20000)
    overhead = len(run.saves) * (1.0 + 2.0 * 0.25) / (run.now - 1000)
    assert 0.04 < overhead <= 0.05


def test_auto_waits_for_the_first_write_to_be_measured() -> None:
    plan = cadence(auto=True)
    plan.saved(1, 0.0, 0.001)
    assert plan.interval_s == 20
    plan.wrote(0.1, 0.0)
    assert plan.interval_s == 10


def test_auto_follows_costs_that_change() -> None:
    plan = cadence(auto=True)
    for step in range(1, 20):
        plan.saved(step, 0.0, 1.0 if step < 5 else 0.2)
        plan.wrote(1.0, 0.0)
    assert plan.interval_s == pytest.approx(10, rel=0.01)


def test_equal_inputs_give_equal_plans() -> None:
    runs = [
        Run(cadence(every_steps=70, every_s=9), lambda s: 0.01 * (s % 7 + 1)).until(5000)
        for _ in range(2)
    ]
    assert runs[0].looks == runs[1].looks
    assert runs[0].saves == runs[1].saves
