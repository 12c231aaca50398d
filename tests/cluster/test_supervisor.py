"""The run actor's judgement, from made-up evidence: no Ray, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from raytf.cluster.failures import describe, said, with_decision
from raytf.cluster.hang import Watchdog
from raytf.cluster.supervisor import Supervisor
from raytf.errors import ConfigError, RaytfError, TrainingError
from raytf.faults.events import Kind
from raytf.faults.nodes import NodeBook
from raytf.faults.policy import Limits

NODE = "a" * 56
GONE = "Worker unexpectedly exits with a connection error code 2. End of file."


class Events(list[tuple[Kind, dict[str, Any]]]):
    def __call__(self, kind: Kind, **fields: Any) -> None:
        self.append((kind, fields))

    def of(self, kind: Kind) -> list[dict[str, Any]]:
        return [fields for k, fields in self if k is kind]


def make(**limits: Any) -> tuple[Supervisor, Events]:
    events = Events()
    supervisor = Supervisor(
        limits=Limits(num_workers=2, **limits),
        num_workers=2,
        attempt=1,
        emit=events,
        nodes=NodeBook(max_faults=2),
        watchdog=Watchdog(timeout_s=5.0, num_workers=2),
    )
    group(supervisor)
    return supervisor, events


def group(supervisor: Supervisor) -> None:
    supervisor.begin()
    for rank in range(2):
        supervisor.hello(rank, NODE[:-1] + str(rank), 100 + rank, None)


def decide(supervisor: Supervisor, deaths: Any = None, reached: int = 10, **more: Any) -> Any:
    values: dict[str, Any] = {
        "deaths": deaths or {},
        "preempted": [],
        "lost_nodes": [],
        "startup": None,
        "reached": reached,
        "now": 50.0,
        "wall": 1e9,
        "jitter": 0.0,
        "capacity": None,
    }
    return supervisor.decide(**(values | more))


class Unavailable(Exception):
    """As TensorFlow's, by module and name."""


Unavailable.__module__, Unavailable.__name__ = "tensorflow.python.framework", "UnavailableError"


def test_the_dead_rank_is_the_culprit_and_its_survivor_a_victim() -> None:
    supervisor, events = make()
    supervisor.error(0, describe(Unavailable("Socket closed"), 0, 10), now=49.5)
    decision = decide(supervisor, {1: GONE})
    assert decision.action == "restart"
    fault = events.of(Kind.WORKER_KILLED)[0]
    assert (fault["rank"], fault["pid"], fault["victims"]) == (1, 101, [0])
    assert fault["node"].endswith("1")
    assert fault["detect_s"] == pytest.approx(0.5)
    assert events.of(Kind.DECISION)[0]["action"] == "restart"


def test_what_cannot_heal_stops_at_once() -> None:
    supervisor, events = make(max_failures=3)
    for rank in range(2):
        supervisor.error(rank, describe(ConfigError("another optimizer"), rank), now=1.0)
    assert decide(supervisor).action == "stop"
    assert events.of(Kind.WORKER_ERROR)[0]["error_type"].endswith("ConfigError")


def test_the_same_error_at_the_same_step_twice_stops() -> None:
    supervisor, _ = make()
    actions = []
    for _ in range(2):
        group(supervisor)
        supervisor.error(1, describe(ValueError("bad row 17"), 1, 12), now=1.0)
        actions.append(decide(supervisor, reached=12).action)
    assert actions == ["restart", "stop"]


@pytest.mark.parametrize(("allowed", "restarts"), [(0, 0), (1, 1), (3, 3)])
def test_max_failures_is_exact(allowed: int, restarts: int) -> None:
    supervisor, _ = make(max_failures=allowed)
    actions = []
    for number in range(allowed + 1):
        group(supervisor)
        actions.append(decide(supervisor, {0: GONE}, reached=10 * number).action)
    assert actions == ["restart"] * restarts + ["stop"]


def test_a_hang_is_told_once_and_blamed_on_the_rank_that_hung() -> None:
    supervisor, events = make()
    supervisor.watchdog.heard(0, {"phase": "step", "step": 4, "since_s": 9.0}, 50.0)
    supervisor.watchdog.heard(1, {"phase": "callback", "step": 4, "since_s": 9.0}, 50.0)
    hang = supervisor.hang(50.0)
    assert hang is not None
    assert hang.ranks == (1,)
    assert supervisor.hang(51.0) is None
    supervisor.stacks(1, "Thread 0x1: sleep")
    decision = decide(supervisor, {1: "killed by `ray.kill`"}, reached=4)
    assert decision.action == "restart"
    told = events.of(Kind.HANG_DETECTED)[0]
    assert (told["rank"], told["phase"], told["stacks"]) == (
        1,
        "callback",
        {"1": "Thread 0x1: sleep"},
    )


def test_a_node_that_fails_again_is_excluded() -> None:
    supervisor, events = make()
    for number in range(2):
        group(supervisor)
        supervisor.error(0, describe(Unavailable("Socket closed"), 0, 10), now=49.5)
        decide(supervisor, {1: "SIGSEGV received"}, reached=10 * (number + 1))
    bad = NODE[:-1] + "1"
    assert supervisor.nodes.excluded() == {bad}
    assert events.of(Kind.NODE_EXCLUDED)[0]["node"] == bad


def test_the_last_error_says_why_the_run_stops() -> None:
    fault = {
        "summary": f"rank 1 on node {'ab' * 28} was killed",
        "reason": "failure 4 of 3: the run stops.",
        "action": "stop",
        "kind": "killed",
    }
    error = with_decision(TrainingError("rank 1 failed"), fault)
    assert isinstance(error, TrainingError)
    assert error.message.endswith(
        "rank 1 on node abababab was killed. failure 4 of 3: the run stops."
    )
    assert with_decision(RaytfError("x"), None).message == "x"
    assert said({"summary": "a died", "reason": "a died; once more"}) == "a died; once more"


def test_a_rank_that_is_slow_again_and_again_is_told_of_and_left_alone() -> None:
    supervisor, events = make()
    for _ in range(4):
        supervisor.heard(0, {"phase": "wait", "seconds": {"step": 2.0, "wait": 8.0}}, 1.0)
        supervisor.heard(1, {"phase": "step", "seconds": {"step": 9.0, "wait": 1.0}}, 1.0)
        supervisor.look_for_stragglers()
    told = events.of(Kind.STRAGGLER_DETECTED)
    assert [(t["rank"], t["phase"]) for t in told] == [(1, "step")]
    assert "slow in step" in told[0]["summary"]
    assert events.of(Kind.DECISION) == []
