"""One row for each thing that went wrong."""

from __future__ import annotations

import json

import pytest

from raytf.faults.events import Event, Kind
from raytf.faults.incidents import Incident, Incidents, markdown_table, short_node
from tests.faults import logs


def rows(name: str) -> list[Incident]:
    return Incidents.of(logs.ALL[name]().events)


def test_nothing_went_wrong() -> None:
    assert rows("unbroken") == []
    assert "Nothing has gone wrong" in markdown_table([], str)


def test_a_killed_worker() -> None:
    (row,) = rows("killed")
    assert (row.kind, row.rank, row.node, row.step, row.phase) == (
        "killed",
        1,
        "node-1",
        137,
        "step",
    )
    assert row.evidence == ("the process is gone", "exit signal 9")
    assert row.decision.startswith("restart: rank 1 on node node-1 was killed")
    assert row.lost_steps == 12 and row.stopped and not row.ended
    # 0.3 s until it was seen, 0.05 s to decide, 6.4 s for the new group, 0.25 s for its report
    assert row.cost_s == pytest.approx(0.3 + 0.05 + 6.4 + 0.25, abs=1e-3)
    assert row.cost == "7.0 s, 12 steps lost"
    assert (row.where, row.said) == ("rank 1 on node node-1", "was killed")


def test_a_hang_has_stacks_and_stands_until_it_is_mended() -> None:
    (row,) = rows("hang")
    assert [title for title, _ in row.stacks] == ["rank 0", "rank 1"]
    (still,) = Incidents.of(logs.hang(is_over=False).events)
    assert still.cost_s is None and still.cost == "stands still since"
    assert row.cost_s is not None and row.cost_s > 31


def test_a_driver_that_died_is_seen_by_the_next_one() -> None:
    (row,) = rows("driver_death")
    assert (row.kind, row.attempt, row.step, row.lost_steps) == ("driver_lost", 1, 80, 5)
    assert row.cost_s is not None and row.cost_s > 600


def test_what_ends_the_attempt() -> None:
    (row,) = rows("nan")
    assert row.kind == "nan" and row.ended and row.cost == "the attempt ended"
    again = logs.nan()
    again.begin(2, 25, 3600.0).train(60)
    (row,) = Incidents.of(again.events)
    assert row.lost_steps == 18 and row.cost_s is not None and row.cost_s < 2


def test_notices_do_not_stop_training_and_are_counted() -> None:
    failed, straggler = rows("storage_failures")
    assert (failed.kind, failed.count, failed.stopped) == ("checkpoint_failed", 3, False)
    assert failed.evidence == ("503 Slow Down",) and failed.cost == "none"
    assert (straggler.kind, straggler.rank, straggler.node) == (
        "straggler_detected",
        1,
        "node-1",
    )


def test_ranks_that_fail_together_cost_their_time_once() -> None:
    log = logs.Log().begin(1).train(30)
    for rank in (0, 1, 1):  # the last one is the same seen by another
        log.add(Kind.NODE_LOST, 0.1, rank=rank, node="n", evidence=[f"seen {log.now:.1f}"])
    log.add(Kind.DECISION, 0.1, action="restart", reason="the node is gone")
    log.group(2, 25).train(50)
    first, second = Incidents.of(log.events)
    assert first.cost_s is not None and first.cost_s > 5 and second.cost_s == 0
    assert first.lost_steps == 5 and second.lost_steps == 0
    assert len(second.evidence) == 2
    assert first.decision == second.decision == "restart: the node is gone"


def test_continue_closes_it() -> None:
    log = logs.Log().begin(1).train(30)
    log.add(Kind.NAN_DETECTED, 0.0, rank=0)
    log.add(Kind.DECISION, 0.5, action="continue", reason='on_nan="ignore"')
    (row,) = Incidents.of(log.events)
    assert row.cost_s == pytest.approx(0.5)


def test_a_traceback_is_a_stack_and_not_evidence() -> None:
    log = logs.Log().begin(1).train(10)
    trace = 'Traceback:\n  File "a.py", line 1\nValueError: x'
    log.add(
        Kind.WORKER_ERROR, rank=0, fault="user_error", text=trace, summary="rank 0 raised an error"
    )
    (row,) = Incidents.of(log.events)
    assert row.stacks == (("what it said", trace),)
    assert row.evidence == ("rank 0 raised an error",)
    assert row.said == "raised an error"


def test_add_says_whether_the_table_changed() -> None:
    fold = Incidents()
    told = [fold.add(e) for e in logs.killed().events]
    assert sum(told) == 4  # seen, decided, steps lost, mended
    assert fold.open == []


def test_other_types_than_expected_are_no_trouble() -> None:
    odd = {"evidence": 3, "stacks": [1], "detect_s": None, "fault": 5, "text": None}
    event = Event(time=1.0, kind=Kind.WORKER_KILLED, run="r", attempt=1, fields=odd)
    decision = Event(time=2.0, kind=Kind.DECISION, run="r", attempt=1, fields={"action": None})
    (row,) = Incidents.of([event, decision])
    assert row.kind == "killed" and row.evidence == ("3",)
    json.dumps(row.to_json())


def test_the_table_holds_no_markup() -> None:
    table = markdown_table(rows("hostile"), str)
    assert "<" not in table and "`" not in table and "**" not in table
    assert [line.count("|") for line in table.splitlines()] == [9, 9, 9]


def test_rays_long_ids_are_cut_where_people_read() -> None:
    node = "4f3a9c1be77d" + "0" * 44
    log = logs.Log().begin(1).add(Kind.NODE_LOST, rank=1, node=node)
    (row,) = Incidents.of(log.events)
    assert row.where == "rank 1 on node 4f3a9c1be77d" and row.node == node
    assert node not in markdown_table([row], str)
    assert row.to_json()["node"] == node
    assert short_node("worker-node-with-a-long-name-0") == "worker-node-with-a-long-name-0"
