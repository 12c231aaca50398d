"""The ledger: each second of a run is in one category, whatever happens to the run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.goodput import CATEGORIES, Fold, Ledger
from raytf.faults.record import FAULT_KINDS, Event, Kind


class Log:
    """Makes events; times are seconds since the run's start."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.attempt = 1

    def at(self, time: float, kind: Kind, **known: Any) -> Log:
        fields = known.pop("fields", {})
        event = Event(
            time=1e9 + time, kind=kind, run="r", attempt=self.attempt, fields=fields, **known
        )
        self.events.append(event)
        return self

    def report(self, time: float, reached: int, /, **seconds: float) -> Log:
        fields = {"seconds": seconds} if seconds else {}
        return self.at(time, Kind.STEP_REACHED, step=reached, rank=0, fields=fields)

    def started(self, time: float, attempt: int) -> Log:
        self.attempt = attempt
        return self.at(time, Kind.ATTEMPT_STARTED)

    def ledger(self, now: float | None = None) -> Ledger:
        return Ledger.of(self.events, None if now is None else 1e9 + now)


def costs(ledger: Ledger) -> dict[str, float]:
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s)
    assert tuple(ledger.seconds) == CATEGORIES
    return {k: round(v, 6) for k, v in ledger.seconds.items() if v > 1e-9}


def quiet() -> Log:
    """10 s of start, 5 s of compile, 20 steps in 20 s, 2 s of validation, 1 s of saving."""
    log = Log().at(0, Kind.RUN_STARTED).started(1, 1)
    log.at(6, Kind.GENERATION_FORMED)
    log.report(16, 1, compile=5.0, step=1.0)
    log.report(26, 11, step=9.0, data_wait=1.0)
    return log.report(38, 20, step=9.0, validate=2.0, save_stall=1.0)


def test_a_quiet_run() -> None:
    ledger = quiet().at(40, Kind.RUN_FINISHED, step=20).ledger()
    assert costs(ledger) == {
        "start": 10.0,
        "compile": 5.0,
        "data_wait": 1.0,
        "step": 21.0,
        "save_stall": 1.0,
        "validate": 2.0,
    }
    assert (ledger.wall_s, ledger.steps, ledger.restarts, ledger.mttr_s) == (40.0, 20, 0, None)
    assert (ledger.lost_steps, ledger.replayed_steps, ledger.faults) == (0, 0, 0)
    assert ledger.goodput == 21 / 40
    assert ledger.ettr == 25 / 40


def test_a_kill_in_mid_step_and_a_restart_from_the_store() -> None:
    log = quiet()
    log.at(44, Kind.WORKER_KILLED, rank=1, step=25, fields={"detect_s": 1.0})
    log.at(44.2, Kind.WORKER_ERROR, rank=0, step=25)  # an echo
    log.at(45, Kind.DECISION, fields={"action": "restart"}).at(46, Kind.ATTEMPT_ENDED)
    log.started(48, 2).at(60, Kind.RESTORED, step=15)
    log.report(63, 16, compile=1.0, step=1.0)
    log.report(73, 26, step=10.0)  # steps 17 to 25 again, 26 is new
    ledger = log.report(83, 36, step=10.0).ledger()
    assert costs(ledger) == {
        "start": 10.0,
        "compile": 6.0,
        "data_wait": 1.0,
        "step": 19.0 + 5.0 + 1.0 + 10.0,
        "save_stall": 1.0,
        "validate": 2.0,
        "detect": 1.0,
        "restart": 17.0,
        "replay": 10.0,
    }
    assert (ledger.faults, ledger.restarts, ledger.recoveries_s) == (1, 1, (20.0,))
    assert (ledger.lost_steps, ledger.replayed_steps) == (10, 10)
    assert ledger.steps == 36


def test_survivors_lose_nothing() -> None:
    log = quiet().at(40, Kind.WORKER_KILLED, rank=1)
    log.at(44, Kind.GENERATION_FORMED).at(44, Kind.RESTORED, step=22)
    ledger = log.report(46, 23, step=1.0).ledger()
    assert (ledger.lost_steps, ledger.replayed_steps, ledger.restarts) == (0, 0, 1)
    assert (ledger.seconds["detect"], ledger.seconds["restart"]) == (2.0, 5.0)
    assert ledger.mttr_s == 8.0  # nobody said when it died: from the last sign of progress


def test_the_driver_dies_and_the_run_is_continued_an_hour_later() -> None:
    log = quiet().started(38 + 3600, 2)
    log.at(3650, Kind.RESTORED, step=10)
    ledger = log.report(3658, 15, step=5.0).ledger()
    assert costs(ledger)["idle"] == 3600.0
    assert costs(ledger)["restart"] == 15.0
    assert costs(ledger)["replay"] == 5.0
    assert (ledger.faults, ledger.restarts, ledger.lost_steps) == (1, 1, 10)
    assert ledger.ettr > 0.3  # time in which nothing ran is no training time lost by the run


def test_the_driver_says_that_it_starts_before_the_attempt_does() -> None:
    log = quiet()
    log.attempt = 0
    log.at(1000, Kind.RUN_STARTED).started(1003, 2)
    ledger = log.report(1010, 21, step=2.0).ledger()
    assert costs(ledger)["idle"] == 1000.0 - 38
    assert costs(ledger)["restart"] == 8.0
    assert (ledger.faults, ledger.restarts) == (1, 1)


def test_a_finished_run_that_is_given_more_epochs() -> None:
    log = quiet().at(38, Kind.RUN_FINISHED).at(39, Kind.PHASE, phase="idle")
    log.started(1038, 2).at(1040, Kind.RESTORED, step=20)
    ledger = log.report(1050, 25, step=5.0).ledger()
    assert costs(ledger)["idle"] == 1000.0
    assert costs(ledger)["start"] == 17.0
    assert (ledger.faults, ledger.restarts, ledger.lost_steps) == (0, 0, 0)


def test_a_hang_is_all_detection() -> None:
    ledger = quiet().at(98, Kind.HANG_DETECTED, rank=1).ledger()
    assert costs(ledger)["detect"] == 60.0
    ledger = quiet().at(98, Kind.HANG_DETECTED, rank=1).ledger(now=100)
    assert costs(ledger)["restart"] == 2.0


def test_a_long_validation_told_by_events_alone() -> None:
    log = quiet().at(40, Kind.PHASE, rank=0, phase="validate")
    log.at(41, Kind.PHASE, rank=1, phase="step")  # another rank's does not count
    assert costs(log.ledger(now=640))["validate"] == 602.0
    log.at(640, Kind.PHASE, rank=0, phase="step")
    log.report(650, 21)  # and a report without a split
    assert costs(log.ledger())["validate"] == 602.0
    assert costs(log.ledger())["step"] == 19.0 + 12.0


def test_a_long_validation_told_by_events_and_the_report() -> None:
    for seconds in ({"step": 12.0, "validate": 600.0}, {"step": 12.0}):
        log = quiet().at(40, Kind.PHASE, rank=0, phase="validate")
        log.at(640, Kind.PHASE, rank=0, phase="step").report(650, 21, **seconds)
        assert costs(log.ledger())["validate"] == 602.0
        assert costs(log.ledger())["step"] == 31.0


def test_what_a_report_leaves_over_is_idle_and_what_is_too_much_is_scaled() -> None:
    ledger = quiet().report(48, 22, step=6.0).ledger()
    assert costs(ledger)["idle"] == 4.0
    ledger = quiet().report(48, 22, step=15.0, save_stall=5.0).ledger()
    assert costs(ledger)["step"] == 19.0 + 7.5


def test_faults_while_it_restarts_are_one_recovery() -> None:
    log = quiet().at(38, Kind.WORKER_KILLED, rank=1)
    log.started(40, 2).at(45, Kind.WORKER_KILLED, rank=0).started(50, 3)
    ledger = log.report(58, 21, step=1.0).ledger()
    assert (ledger.restarts, ledger.recoveries_s) == (1, (20.0,))
    assert costs(ledger)["restart"] == 19.0


def test_nan_that_is_ignored_is_no_recovery() -> None:
    log = quiet().at(38, Kind.NAN_DETECTED).at(38, Kind.DECISION, fields={"action": "continue"})
    ledger = log.report(40, 22, step=2.0).ledger()
    assert (ledger.restarts, costs(ledger).get("restart")) == (0, None)


def test_a_run_that_stops_on_purpose_and_is_taken_up_again() -> None:
    log = quiet().at(38, Kind.ATTEMPT_ENDED).started(138, 2)
    ledger = log.report(140, 21, step=1.0).ledger()
    assert (costs(ledger)["idle"], ledger.restarts, ledger.faults) == (100.0, 0, 0)


def test_unknown_events_and_odd_numbers_change_nothing() -> None:
    log = quiet()
    before = costs(log.ledger())
    log.events.append(Event(time=1e9 + 38, kind="worker_teleported", run="r", attempt=1))
    log.report(38, 20, step=float("nan"), data_wait=-3.0, colour=7.0)
    log.at(38, Kind.STEP_REACHED, rank=0)
    log.at(38, Kind.STEP_REACHED, rank=1, step=999)
    assert costs(log.ledger()) == before
    assert log.ledger().steps == 20


def test_nothing() -> None:
    ledger = Ledger.of([])
    assert (ledger.wall_s, ledger.goodput, ledger.ettr, ledger.mttr_s) == (0.0, 0.0, 0.0, None)
    assert costs(ledger) == {}
    assert Ledger.of([], now=5.0).wall_s == 0.0


def test_for_programs_and_people() -> None:
    log = quiet().at(44, Kind.WORKER_KILLED, rank=1, step=25, fields={"detect_s": 1.0})
    ledger = log.at(60, Kind.RESTORED, step=15).report(63, 16, step=1.0).ledger()
    told = json.loads(json.dumps(ledger.to_json()))
    assert told["seconds"] == dict(ledger.seconds)
    assert (told["restarts"], told["lost_steps"], told["mttr_s"]) == (1, 10, 20.0)
    line = ledger.line()
    assert line.startswith(
        f"goodput {ledger.goodput:.1%} of 63.0 s | restart 18.0 s | start 10.0 s"
    )
    assert line.endswith("1 restarts, 20.0 s each | 10 steps lost")


KINDS = [*Kind, *[Kind.STEP_REACHED, Kind.RESTORED, Kind.ATTEMPT_STARTED, *FAULT_KINDS] * 3]
SOME_EVENTS = st.lists(
    st.builds(
        Event,
        time=st.floats(0, 1000),
        kind=st.sampled_from(KINDS),
        run=st.just("r"),
        attempt=st.integers(0, 4),
        rank=st.sampled_from([None, 0, 1]),
        step=st.none() | st.integers(0, 50),
        phase=st.sampled_from([None, "validate", "save", "data", "x"]),
        fields=st.fixed_dictionaries(
            {},
            optional={
                "seconds": st.dictionaries(
                    st.sampled_from([*CATEGORIES, "x"]), st.floats(-10, 300), max_size=4
                ),
                "detect_s": st.floats(-1, 100),
                "action": st.sampled_from(["restart", "continue"]),
            },
        ),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(SOME_EVENTS, st.booleans(), st.none() | st.floats(0, 2000))
def test_every_second_is_in_one_category(
    events: list[Event], in_order: bool, now: float | None
) -> None:
    if in_order:
        events = sorted(events, key=lambda e: e.time)
    fold = Fold()
    for event in events:
        fold.add(event)
        ledger = fold.ledger(now)
        assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, abs=1e-6)
        assert min(ledger.seconds.values()) >= -1e-9
        assert 0.0 <= ledger.goodput <= 1.0 + 1e-9
        assert 0.0 <= ledger.ettr <= 1.0 + 1e-9
        assert ledger.restarts <= ledger.faults
        assert ledger.restarts == len(ledger.recoveries_s)
        assert all(seconds >= -1e-9 for seconds in ledger.recoveries_s)
    if events and in_order and now is None:
        assert fold.ledger().wall_s <= events[-1].time - events[0].time + 1e-6
