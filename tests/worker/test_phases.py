"""Phases: every second is in one of them, and what another thread reads makes sense."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raytf.faults.goodput import CATEGORIES
from raytf.worker.phases import PHASES, Inside, Phases
from raytf.worker.stacks import stacks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_every_phase_has_a_category_of_the_ledger() -> None:
    assert set(PHASES.values()) <= set(CATEGORIES)


def test_a_split_sums_to_the_time_since_the_last_one(clock: Clock) -> None:
    phases = Phases(clock=clock)
    for phase, seconds in (("starting", 3.0), ("compile", 2.0), ("step", 5.0), ("save", 0.5)):
        phases.enter(phase)
        clock.now += seconds
    assert phases.split() == {"start": 3.0, "compile": 2.0, "step": 5.0, "save_stall": 0.5}
    clock.now += 1.0
    assert phases.split() == {"save_stall": 1.0}
    assert phases.split() == {}


def test_a_phase_within_a_phase_goes_back_even_after_an_error(clock: Clock) -> None:
    phases = Phases(clock=clock)
    phases.enter("step")
    clock.now += 1.0
    with pytest.raises(KeyError), phases.during("callback"):
        clock.now += 2.0
        raise KeyError
    clock.now += 4.0
    assert phases.split() == {"step": 5.0, "idle": 2.0}


class TestWithinSteps:
    """What compiled steps tell divides the time that the host spent in them."""

    def test_data_and_waiting_are_taken_out_of_the_step(self, clock: Clock) -> None:
        phases = Phases(clock=clock)
        phases.probe = lambda: inside
        inside = Inside()
        phases.enter("step")
        phases.look()
        clock.now += 10.0
        inside = Inside(data_s=6.0, batches=5, own_s=1.0, done=5, ended=5)
        assert phases.split() == {"data_wait": 6.0, "step": 4.0}
        assert phases.look()["seconds"] == {"data": 6.0, "step": 1.0, "wait": 3.0}

    def test_a_clock_that_is_set_breaks_no_sum(self, clock: Clock) -> None:
        phases = Phases(clock=clock)
        phases.enter("step")
        for data_s in (3600.0, 10.0):
            phases.probe = lambda data_s=data_s: Inside(data_s, 1, data_s, 1, 1)
            clock.now += 1.0
            assert sum(phases.split().values()) == 1.0

    @pytest.mark.parametrize(
        ("inside", "phase"),
        [
            (Inside(batches=7, done=7, ended=7), "data"),
            (Inside(batches=8, done=7, ended=7), "step"),
            (Inside(batches=8, done=8, ended=7), "wait"),
            (Inside(batches=7, ended=7), "data"),
            (Inside(batches=8, ended=7), "step"),
        ],
    )
    def test_where_a_step_is(self, clock: Clock, inside: Inside, phase: str) -> None:
        phases = Phases(clock=clock)
        phases.probe = lambda: inside
        phases.step = 7
        phases.enter("step")
        phases.look()
        clock.now += 60.0
        beat = phases.look()
        assert (beat["phase"], beat["step"], beat["since_s"]) == (phase, 7, 60.0)
        assert beat["steps"] == 0

    def test_the_batch_that_does_not_come_is_blamed_while_it_does_not_come(
        self, clock: Clock
    ) -> None:
        phases = Phases(clock=clock)
        inside = Inside(data_s=1.0, batches=7, own_s=1.0, done=7, ended=7)
        phases.probe = lambda: inside
        phases.enter("step")
        phases.look()
        clock.now += 5.0
        assert phases.look()["seconds"] == {"data": 5.0}

    def test_steps_in_one_call_are_progress(self, clock: Clock) -> None:
        phases = Phases(clock=clock)
        told = [Inside(batches=n, done=n, ended=n) for n in (1, 40, 80, 80)]
        phases.probe = lambda: told.pop(0)
        phases.enter("step")
        looks = []
        for _ in range(4):
            clock.now += 1.0
            looks.append(phases.look())
        assert [look["steps"] for look in looks] == [1, 39, 40, 0]
        assert [look["since_s"] for look in looks] == [0.0, 0.0, 0.0, 1.0]

    def test_a_probe_that_fails_leaves_the_sign_of_life(self, clock: Clock) -> None:
        def fails() -> Inside:
            raise RuntimeError("the context is being reset")

        phases = Phases(clock=clock)
        phases.probe = fails
        phases.enter("step")
        clock.now += 2.0
        beat = phases.look()
        assert (beat["phase"], beat["since_s"]) == ("step", 2.0)


def test_beats_come_from_a_thread_of_their_own_and_end() -> None:
    beats: list[tuple[str, dict[str, Any]]] = []
    heard = threading.Event()

    def beat(record: dict[str, Any]) -> None:
        beats.append((threading.current_thread().name, record))
        heard.set()

    phases = Phases(beat)
    phases.enter("building")
    phases.start()
    assert heard.wait(20.0)
    phases.stop()
    name, record = beats[0]
    assert name == "raytf-beat"
    assert record["phase"] == "building"
    assert set(record) == {"phase", "step", "since_s", "seconds", "steps"}
    assert 0.0 < record["since_s"] < 20.0
    assert "raytf-beat" not in {thread.name for thread in threading.enumerate()}


def test_stacks_name_every_thread_and_its_place() -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def somewhere_else() -> None:
        arrived.set()
        go_on.wait(20.0)

    thread = threading.Thread(target=somewhere_else, name="the-other-one")
    thread.start()
    assert arrived.wait(20.0)
    text = stacks()
    go_on.set()
    thread.join()
    assert "the-other-one: Thread 0x" in text
    assert "in somewhere_else" in text
    assert "in test_stacks_name_every_thread_and_its_place" in text
