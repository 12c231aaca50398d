"""Who holds a group up, judged from made-up beats."""

from __future__ import annotations

from typing import Any

from raytf.cluster.hang import FACTOR, LEAST_S, MOST_S, Watchdog


def beats(dog: Watchdog, now: float, **told: dict[str, Any]) -> None:
    for rank, what in told.items():
        dog.heard(int(rank[1:]), what, now)


def at(phase: str, step: int, since_s: float = 0.0) -> dict[str, Any]:
    return {"phase": phase, "step": step, "since_s": since_s}


def trained(timeout_s: Any = "auto", step_s: float = 1.0) -> Watchdog:
    """Two ranks that have done a hundred steps."""
    dog = Watchdog(timeout_s=timeout_s, num_workers=2)
    for step in range(101):
        beats(dog, step * step_s, r0=at("step", step), r1=at("step", step))
    return dog


def test_nothing_is_judged_before_all_ranks_have_spoken() -> None:
    dog = Watchdog(timeout_s=1.0, num_workers=2)
    dog.heard(0, at("step", 0), 0.0)
    assert dog.judge(1000.0) is None


def test_a_running_group_is_left_alone() -> None:
    dog = trained()
    assert dog.judge(100.5) is None
    assert dog.judge(129.0) is None


def test_the_rank_outside_of_the_collective_is_the_culprit() -> None:
    dog = trained()
    beats(dog, 140.0, r0=at("step", 101, 39.0), r1=at("data", 101, 39.0))
    assert dog.judge(140.0) is None  # data was never seen: it has the limit of a first time
    dog.slowest["data"] = 0.1
    hang = dog.judge(140.0)
    assert hang is not None
    assert (hang.ranks, hang.phase) == ((1,), "data")
    assert "while the others wait" in hang.text


def test_the_rank_that_is_behind_is_the_culprit() -> None:
    dog = trained()
    beats(dog, 140.0, r0=at("step", 102, 39.0), r1=at("step", 101, 39.5))
    hang = dog.judge(140.0)
    assert hang is not None
    assert hang.ranks == (1,)
    assert "behind the others" in hang.text


def test_who_waits_is_no_culprit() -> None:
    dog = trained()
    beats(dog, 140.0, r0=at("wait", 101, 39.0), r1=at("step", 101, 39.0))
    hang = dog.judge(140.0)
    assert hang is not None
    assert (hang.ranks, hang.phase) == ((1,), "step")


def test_nobody_ahead_means_all() -> None:
    dog = trained()
    beats(dog, 140.0, r0=at("step", 101, 39.0), r1=at("step", 101, 39.0))
    hang = dog.judge(140.0)
    assert hang is not None
    assert hang.ranks == (0, 1)


def test_a_silent_process_is_named_whatever_its_phase() -> None:
    dog = trained()
    beats(dog, 100.0 + LEAST_S + 1, r0=at("step", 101, LEAST_S))
    hang = dog.judge(100.0 + LEAST_S + 1)
    assert hang is not None
    assert hang.ranks == (1,)
    assert "no sign of life" in hang.text


def test_a_stop_of_ten_seconds_is_survived() -> None:
    dog = trained()
    beats(dog, 110.0, r0=at("step", 101, 9.0))
    assert dog.judge(110.0) is None


def test_limits_adapt_and_are_clamped() -> None:
    dog = trained(step_s=4.0)
    assert dog.limit_s("step") == FACTOR * 4.0
    assert trained(step_s=0.01).limit_s("step") == LEAST_S
    assert trained(step_s=1000.0).limit_s("step") == MOST_S
    assert dog.limit_s("validate") == MOST_S
    assert trained(timeout_s=7.0).limit_s("step") == 7.0
    dog.begin()  # a new group compiles anew
    assert dog.limit_s("step") == MOST_S


def test_a_fixed_limit_holds_from_the_first_step_on() -> None:
    dog = Watchdog(timeout_s=5.0, num_workers=1)
    dog.heard(0, at("callback", 3, 6.0), 0.0)
    hang = dog.judge(0.0)
    assert hang is not None
    assert hang.phase == "callback"


def test_building_and_exporting_are_not_judged() -> None:
    dog = Watchdog(timeout_s=5.0, num_workers=1)
    for phase in ("starting", "building", "export", "idle"):
        dog.heard(0, at(phase, 0, 1e4), 0.0)
        assert dog.judge(0.0) is None
