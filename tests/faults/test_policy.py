"""What is done about faults: budgets are exact, hopeless things stop, everything ends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.config import RecoveryConfig, WatchConfig
from raytf.faults.fault import Fault, FaultKind
from raytf.faults.nodes import NodeBook
from raytf.faults.policy import Decision, History, Limits, decide, limits_from

K = FaultKind
TRACE = 'Traceback (most recent call last):\n  File "/u/train.py", line 7, in f\nValueError: bad'
NOT_GIVEN = Limits()
GO_ON = {"restart", "replace", "rollback", "skip_batch"}


def fault(kind: FaultKind = K.KILLED, **known: Any) -> Fault:
    return Fault(**{"kind": kind, "rank": 1, "ranks": (1,), "step": 30, "node": "n1", **known})


def user_error(step: int = 30, text: str = TRACE, error_type: str = "ValueError") -> Fault:
    return fault(K.USER_ERROR, step=step, root_text=text, error_type=error_type)


def answers(limits: Limits, faults: Iterable[Fault], **more: Any) -> list[Decision]:
    """The decisions until one stops; a history is kept as the run actor keeps it."""
    history, told = History(), list[Decision]()
    for attempt, one in enumerate(faults, start=1):
        decision = decide(one, history, limits, float(attempt), **more)
        told.append(decision)
        if decision.action == "stop":
            break
        history = history.after(
            one, decision, reached=one.step or 0, time=float(attempt), attempt=attempt
        )
    return told


def actions(limits: Limits, faults: Iterable[Fault], **more: Any) -> list[str]:
    return [d.action for d in answers(limits, faults, **more)]


def moving(kind: FaultKind, count: int = 50, **known: Any) -> list[Fault]:
    """Faults that always leave some progress behind."""
    return [fault(kind, step=10 * n, **known) for n in range(1, count + 1)]


@pytest.mark.parametrize("kind", [K.KILLED, K.OOM, K.NODE_LOST, K.UNKNOWN, K.COLLECTIVE, K.HANG])
@pytest.mark.parametrize("n", [0, 1, 3, 10])
@pytest.mark.parametrize("progress", [True, False])
def test_max_failures_is_exact(kind: FaultKind, n: int, progress: bool) -> None:
    faults = moving(kind) if progress else [fault(kind)] * 50
    told = answers(Limits(max_failures=n), faults)
    assert [d.action for d in told] == ["restart"] * n + ["stop"]
    assert all(d.counts_as == "failure" for d in told[:-1])
    assert f"max_failures={n}" in told[-1].reason
    if n:
        assert f"failure 1 of {n}" in told[0].reason


def test_preemptions_have_a_budget_of_their_own() -> None:
    both = [fault(K.PREEMPTED), fault(K.KILLED)] * 20
    told = answers(Limits(max_failures=2, max_preemption_failures=-1), both)
    assert [d.counts_as for d in told[:-1]] == ["preemption", "failure"] * 2 + ["preemption"]
    assert told[-1].action == "stop"
    only = [fault(K.PREEMPTED)] * 10
    assert actions(Limits(max_preemption_failures=2), only) == ["restart"] * 2 + ["stop"]
    assert actions(Limits(max_failures=0), only) == ["restart"] * 10


def test_minus_one_is_unbounded() -> None:
    limits = Limits(max_failures=-1)
    assert actions(limits, [fault()] * 200) == ["restart"] * 200
    assert "failure 3:" in answers(limits, [fault()] * 3)[2].reason


def test_not_given_goes_on_as_long_as_there_is_progress() -> None:
    assert actions(NOT_GIVEN, moving(K.KILLED, 200)) == ["restart"] * 200


@pytest.mark.parametrize("kind", [K.KILLED, K.OOM, K.STORAGE, K.HANG, K.UNKNOWN])
def test_not_given_stops_after_three_attempts_without_a_new_step(kind: FaultKind) -> None:
    told = answers(NOT_GIVEN, [*moving(kind, 5), *[fault(kind, step=50)] * 9])
    assert [d.action for d in told] == ["restart"] * 6 + ["stop"]
    assert "3 attempts in a row ended without a new step (furthest: 50)" in told[-1].reason
    assert actions(NOT_GIVEN, [fault(kind, step=0)] * 9) == ["restart"] * 2 + ["stop"]


def test_preemptions_are_no_lack_of_progress() -> None:
    faults = [fault(step=30), *[fault(K.PREEMPTED, step=30)] * 5, fault(step=40)]
    assert "stop" not in actions(NOT_GIVEN, faults)


@pytest.mark.parametrize("limits", [NOT_GIVEN, Limits(max_failures=5), Limits(max_failures=-1)])
def test_the_same_error_at_the_same_step_twice_stops_with_the_users_words(limits: Limits) -> None:
    other = user_error(20, TRACE.replace("line 7", "line 9"))
    told = answers(limits, [other, user_error(), user_error()])
    assert [d.action for d in told] == ["restart", "restart", "stop"]
    assert told[-1].message.startswith(TRACE)
    assert "the same error came twice at step 30" in told[-1].message
    tf = fault(K.TENSORFLOW_ERROR, root_text="shapes differ", error_type="InvalidArgumentError")
    assert actions(limits, [tf, tf]) == ["restart", "stop"]


def test_another_error_or_another_step_is_tried_again() -> None:
    there, elsewhere = user_error(), user_error(text=TRACE.replace("line 7", "line 8"))
    limits = Limits(max_failures=5)
    assert actions(limits, [there, elsewhere]) == ["restart"] * 2
    assert actions(limits, [there, user_error(31)]) == ["restart"] * 2
    assert actions(limits, [fault(), there, fault()]) == ["restart"] * 3


@pytest.mark.parametrize(
    "name",
    [
        "ConfigError",
        "DataError",
        "ModelMismatchError",
        "NotFoundError",
        "ResourceError",
        "RunInUseError",
    ],
)
def test_what_cannot_heal_stops_at_once(name: str) -> None:
    told = answers(Limits(max_failures=-1), [user_error(error_type=name)])
    assert [d.action for d in told] == ["stop"]
    assert name in told[0].reason


@pytest.mark.parametrize("kind", FaultKind)
def test_superseded_and_off_stop_on_everything(kind: FaultKind) -> None:
    assert actions(Limits(mode="off", max_failures=9), [fault(kind)]) == ["stop"]
    superseded = fault(K.SUPERSEDED)
    assert actions(Limits(max_failures=-1), [superseded]) == ["stop"]


def test_failures_to_start_have_a_bound() -> None:
    late = fault(K.STARTUP, step=None, rank=None)
    for limits in (NOT_GIVEN, Limits(max_failures=50), Limits(max_failures=-1)):
        assert actions(limits, [late] * 9) == ["restart"] * 2 + ["stop"]
    assert actions(Limits(max_failures=1), [late] * 9) == ["restart", "stop"]
    # not in a row
    mixed = [late, late, fault(step=30), late, late, fault(step=60)]
    assert "stop" not in actions(Limits(max_failures=50), mixed)


def test_replace_only_where_survivors_can_go_on() -> None:
    for mode, action in (("auto", "replace"), ("survivor", "replace"), ("restart", "restart")):
        limits = Limits(mode=mode)  # type: ignore[arg-type]
        assert actions(limits, [fault()], can_replace=True) == [action]
        assert actions(limits, [fault()]) == ["restart"]
    limits = Limits(max_in_place=3)
    assert (
        actions(limits, moving(K.KILLED, 5), can_replace=True) == ["replace"] * 3 + ["restart"] * 2
    )


def test_nan() -> None:
    nan = fault(K.NAN, root_text="loss is NaN")
    assert actions(NOT_GIVEN, [nan]) == ["stop"]
    assert actions(Limits(on_nan="ignore"), [nan] * 9) == ["continue"] * 9
    rollback = Limits(on_nan="rollback", max_failures=0)
    told = answers(rollback, moving(K.NAN, 9))
    assert [d.action for d in told] == ["skip_batch"] * 3 + ["stop"]
    assert [d.skip_step for d in told[:3]] == [10, 20, 30]
    assert {d.counts_as for d in told} == {"none"}
    assert actions(rollback, [nan, nan]) == ["skip_batch", "stop"]  # the batch was not the cause
    assert actions(rollback, [fault(K.NAN, step=None)] * 9) == ["rollback"] * 3 + ["stop"]


def test_steps_taken_again_after_a_rollback_are_progress() -> None:
    limits = Limits(on_nan="rollback")
    faults = [fault(K.NAN, step=100), fault(step=70), fault(step=80), fault(step=90)]
    assert actions(limits, faults) == ["skip_batch", "restart", "restart", "restart"]


def test_divergence_rolls_back_and_is_bounded() -> None:
    told = answers(NOT_GIVEN, moving(K.DIVERGENCE, 9))
    assert [d.action for d in told] == ["rollback"] * 3 + ["stop"]
    assert actions(Limits(max_failures=1), moving(K.DIVERGENCE, 9)) == ["rollback", "stop"]


@pytest.mark.parametrize("kind", [K.KILLED, K.SEGFAULT, K.EXITED, K.OOM])
def test_a_batch_that_ends_a_worker_twice_is_left_out_if_asked(kind: FaultKind) -> None:
    limits = Limits(poison_batches="skip", max_failures=10)
    told = answers(limits, [fault(kind), fault(kind), fault(kind, step=31), fault(kind)])
    assert [d.action for d in told] == ["restart", "skip_batch", "restart", "stop"]
    assert told[1].skip_step == 30
    assert told[1].counts_as == "failure"
    assert "it is not the cause" in told[3].reason
    assert actions(limits, [fault(kind), fault(kind, rank=0)]) == ["restart"] * 2
    assert actions(replace(limits, max_failures=1), [fault(kind)] * 2) == ["restart", "stop"]


def test_a_batch_that_ends_a_worker_twice_stops_otherwise() -> None:
    limits = Limits(max_failures=10)
    for kind in (K.SEGFAULT, K.EXITED):
        told = answers(limits, [fault(kind)] * 3)
        assert [d.action for d in told] == ["restart", "stop"]
        assert 'poison_batches="skip"' in told[1].reason
    # a kill comes from outside: that it hit the same step twice proves nothing
    assert actions(limits, [fault()] * 3) == ["restart"] * 3


def test_delays_grow_without_progress_and_are_none_with_it() -> None:
    limits = Limits(max_failures=-1)
    assert [d.delay_s for d in answers(limits, moving(K.KILLED, 5))] == [0.0] * 5
    same = [d.delay_s for d in answers(limits, [fault()] * 12)]
    assert same == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 5]
    jittered = [d.delay_s for d in answers(limits, [fault()] * 12, jitter=0.5)]
    assert jittered == [1.5 * delay for delay in same]
    store = answers(limits, moving(K.STORAGE, 2))
    assert [d.delay_s for d in store] == [0.5, 0.5]
    again = answers(Limits(), [fault(K.PREEMPTED)] * 4)
    assert [d.delay_s for d in again] == [0.0, 0.5, 1.0, 2.0]


def test_the_culprits_node_is_avoided_after_two_faults() -> None:
    bad = fault(K.HANG, hardware_like=True)
    nodes = NodeBook().record("n1", 0.0)
    places = {"n1": 1, "n2": 1, "n3": 1}
    limits = Limits(num_workers=2)
    told = decide(bad, History(), limits, 1.0, nodes=nodes, capacity=places, can_replace=True)
    assert (told.action, told.exclude_node) == ("restart", "n1")
    assert "Node n1 is left out" in told.reason
    move = {"nodes": nodes, "capacity": places, "can_replace": True, "can_move": True}
    assert decide(bad, History(), limits, 1.0, **move).action == "replace"
    lost = fault(K.NODE_LOST, hardware_like=True)
    told = decide(lost, History(), limits, 1.0, nodes=nodes, capacity=places, can_replace=True)
    assert (told.action, told.exclude_node) == ("replace", "n1")
    for other, book, room in (
        (bad, NodeBook(), places),
        (replace(bad, hardware_like=False), nodes, places),
        (replace(bad, node=None), nodes, places),
        (bad, nodes, {"n1": 1, "n2": 1}),
    ):
        assert decide(other, History(), limits, 1.0, nodes=book, capacity=room).exclude_node is None


def test_limits_from_the_users_configs() -> None:
    recovery, watch = (
        RecoveryConfig(mode="survivor", max_in_place=4),
        WatchConfig(on_nan="rollback"),
    )
    limits = limits_from(recovery, watch, num_workers=3)
    assert (limits.mode, limits.max_failures, limits.max_in_place) == ("survivor", None, 4)
    assert (limits.on_nan, limits.num_workers) == ("rollback", 3)
    assert limits_from(recovery, watch, max_failures=2).max_failures == 2
    assert limits_from(recovery, watch, max_preemption_failures=2).max_failures == 0
    assert limits_from(recovery, watch, is_default=False).max_failures == 0


FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(FaultKind),
    rank=st.sampled_from([None, 0, 1]),
    node=st.sampled_from(["a", "b", None]),
    step=st.none() | st.integers(0, 20),
    hardware_like=st.booleans(),
    error_type=st.sampled_from([None, "ValueError", "KeyError", "DataError"]),
    root_text=st.sampled_from(["", "bad", TRACE]),
)
LIMITS = st.builds(
    Limits,
    mode=st.sampled_from(["auto", "survivor", "restart", "off"]),
    max_failures=st.none() | st.integers(-1, 4),
    max_preemption_failures=st.integers(-1, 4),
    on_nan=st.sampled_from(["stop", "rollback", "ignore"]),
    poison_batches=st.sampled_from(["stop", "skip"]),
    num_workers=st.just(2),
)


@settings(deadline=None, max_examples=200)
@given(LIMITS, st.lists(FAULTS, max_size=40), st.booleans(), st.floats(0, 0.999))
def test_any_course(limits: Limits, faults: list[Fault], can: bool, jitter: float) -> None:
    history = History()
    for number, one in enumerate(faults):
        told = decide(one, history, limits, float(number), can_replace=can, jitter=jitter)
        assert told == decide(one, history, limits, float(number), can_replace=can, jitter=jitter)
        assert told.reason.endswith(".")
        assert 0.0 <= told.delay_s <= limits.max_backoff_s
        assert (told.skip_step is not None) == (told.action == "skip_batch")
        if told.action == "stop":
            assert told.root_text == one.root_text
            break
        if told.action == "continue":
            assert one.kind is K.NAN
            continue
        assert told.action in GO_ON
        history = history.after(
            one, told, reached=one.step or 0, time=float(number), attempt=number
        )
        assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    failures, preempted = history.count("failure"), history.count("preemption")
    if limits.max_failures not in (None, -1):
        assert failures <= limits.max_failures  # type: ignore[operator]
    if limits.max_preemption_failures != -1:
        assert preempted <= limits.max_preemption_failures
    assert history.acted("rollback", "skip_batch") <= 3 * limits.max_rollbacks


@settings(deadline=None, max_examples=100)
@given(
    st.builds(
        Limits,
        on_nan=st.sampled_from(["stop", "rollback"]),
        poison_batches=st.sampled_from(["stop", "skip"]),
        max_preemption_failures=st.integers(0, 3),
    ),
    st.data(),
)
def test_every_run_of_finite_length_ends(limits: Limits, data: st.DataObject) -> None:
    """A budget that is not given bounds itself: a run of 20 steps cannot fail for ever."""
    bound = 3 * 21 + 3 * limits.max_rollbacks * (3 * 21) + limits.max_preemption_failures + 1
    history = History()
    for number in range(bound + 1):
        one = data.draw(FAULTS) if number < 60 else fault(step=number % 20)
        told = decide(one, history, limits, float(number))
        if told.action == "stop":
            return
        history = history.after(
            one, told, reached=one.step or 0, time=float(number), attempt=number
        )
    pytest.fail(f"still going on after {bound} faults")
