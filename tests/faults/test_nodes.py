"""Which nodes a run stays away from, and that it always has somewhere to be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.nodes import NodeBook, NodeDecision

HOUR = 3600.0
THREE = {"a": 1, "b": 1, "c": 1}


def settled(
    book: NodeBook, now: float, workers: int = 2, capacity: dict[str, int] | None = None
) -> tuple[NodeBook, list[tuple[str, str]]]:
    book, decisions = book.settle(now, workers, THREE if capacity is None else capacity)
    return book, [(d.action, d.node) for d in decisions]


def test_two_faults_close_together_exclude_and_one_does_not() -> None:
    book, told = settled(NodeBook().record("a", 0.0), 0.0)
    assert (told, book.excluded()) == ([], frozenset())
    book, told = settled(book.record("a", 60.0), 60.0)
    assert (told, book.excluded()) == ([("exclude", "a")], {"a"})
    assert settled(book, 61.0)[1] == []


def test_faults_of_different_nodes_do_not_add_up() -> None:
    book = NodeBook().record("a", 0.0).record("b", 1.0).record("c", 2.0)
    assert settled(book, 3.0)[1] == []


def test_faults_far_apart_fade() -> None:
    book = NodeBook(half_life_s=HOUR)
    for hours in range(0, 50, 5):
        book, told = settled(book.record("a", hours * HOUR), hours * HOUR)
        assert told == []
    assert book.nodes["a"].faults == 10
    assert book.score("a", 45 * HOUR) == 1.0 + sum(0.5 ** (5 * n) for n in range(1, 10))
    assert book.score("a", 46 * HOUR) == book.score("a", 45 * HOUR) / 2


def test_return_on_probation_and_longer_each_time() -> None:
    book, _ = settled(NodeBook().record("a", 0.0).record("a", 0.0), 0.0)
    book, told = settled(book, HOUR - 1)
    assert told == []
    book, told = settled(book, HOUR)
    assert (told, book.excluded()) == ([("readmit", "a")], frozenset())
    book, (decision,) = book.record("a", HOUR + 5).settle(HOUR + 5, 2, THREE)
    assert decision.action == "exclude"
    assert "probation" in decision.reason
    assert decision.until == HOUR + 5 + 2 * HOUR
    book, told = settled(book, 3 * HOUR + 5)
    assert told == [("readmit", "a")]
    # a probation that passes without a fault ends
    book, told = settled(book.record("a", 30 * HOUR), 30 * HOUR)
    assert told == []


def test_never_below_the_workers_needed_and_then_it_says_so() -> None:
    book = NodeBook().record("a", 0.0).record("a", 1.0)
    book, (decision,) = book.settle(1.0, 3, THREE)
    assert decision.action == "keep"
    assert "only 2 of 3 workers" in decision.reason
    assert book.excluded() == frozenset()
    assert book.settle(2.0, 3, THREE)[1] == ()  # said once for each fault
    assert book.record("a", 3.0).settle(3.0, 3, THREE)[1][0].action == "keep"
    # with another node there, it goes
    assert settled(book.record("a", 4.0), 4.0, 3, {**THREE, "d": 1})[1] == [("exclude", "a")]


def test_the_least_bad_comes_back_when_nothing_else_is_left() -> None:
    book = NodeBook().record("a", 0.0).record("a", 0.0).record("a", 0.0)
    book, _ = settled(book.record("b", 1.0).record("b", 1.0), 1.0, 1)
    assert book.excluded() == {"a", "b"}
    book, (decision,) = book.settle(2.0, 1, {"a": 1, "b": 1})  # c is gone
    assert (decision.action, decision.node) == ("readmit", "b")
    assert "only 0 of 1 workers" in decision.reason
    assert book.settle(3.0, 1, {"a": 1, "b": 1})[1] == ()
    book, told = settled(book, 4.0, 1, {"a": 1})
    assert told == [("readmit", "a")]


def test_without_capacity_nothing_keeps_a_node_in() -> None:
    book = NodeBook(max_faults=1).record("a", 0.0)
    assert book.settle(0.0, 5, None)[1][0].action == "exclude"


def test_a_clock_set_back_makes_nothing_worse() -> None:
    book = NodeBook().record("a", 1000.0)
    assert book.score("a", 0.0) == 1.0
    assert settled(book, 0.0)[1] == []


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None]),
        st.floats(0, 2 * HOUR),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(1, 3))
def test_any_course(events: list[Any], workers: int, max_faults: int) -> None:
    book, now = NodeBook(max_faults=max_faults), 0.0
    for node, passed, capacity in events:
        now += passed
        before = book.excluded()
        if node is not None:
            book = book.record(node, now)
        again = NodeBook.from_json(json.loads(json.dumps(book.to_json())))
        assert again == book  # it survives a driver restart
        book, decisions = book.settle(now, workers, capacity)
        assert again.settle(now, workers, capacity) == (book, decisions)
        out = book.excluded()
        # what was decided is what changed
        expected = set(before)
        for decision in decisions:
            assert isinstance(decision, NodeDecision)
            if decision.action == "exclude":
                expected.add(decision.node)
                assert decision.node == node
                assert decision.until is not None and decision.until > now
            elif decision.action == "readmit":
                expected.discard(decision.node)
        assert out == expected
        # no exclusion that could be lifted leaves the run without places
        left = sum(n for name, n in capacity.items() if name not in out)
        assert left >= workers or not any(capacity.get(name, 0) for name in out)
        assert book.settle(now, workers, capacity) == (book, ())  # settled is settled


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=10), st.integers(1, 4))
def test_below_the_limit_nobody_is_excluded(faults: list[str], max_faults: int) -> None:
    book = NodeBook(max_faults=max_faults)
    for number, node in enumerate(faults):
        book = book.record(node, float(number))
        book, _ = book.settle(float(number), 1, None)
        for name in "abc":
            enough = faults[: number + 1].count(name) >= max_faults
            assert (name in book.excluded()) == enough


def test_unknown_entries_of_a_newer_version_are_left_out() -> None:
    told = replace(NodeBook(), max_faults=3).record("a", 1.0).to_json()
    told["nodes"]["a"]["colour"] = "red"
    assert NodeBook.from_json(told).nodes["a"].faults == 1
