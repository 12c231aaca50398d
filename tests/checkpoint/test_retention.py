"""The rule of what is kept, without files."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.checkpoint.retention import Record, Rule, best_steps, to_delete
from raytf.errors import ConfigError


def records(*steps: int, **metrics: list[Any]) -> list[Record]:
    return [
        Record(step=step, metrics={name: values[i] for name, values in metrics.items()})
        for i, step in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("rule", "deleted"),
    [
        (Rule(), []),
        (Rule(keep_last=1), [10, 20, 30, 40]),
        (Rule(keep_last=2), [10, 20, 30]),
        (Rule(keep_last=9), []),
        (Rule(keep_best="loss"), [10, 30, 40]),
        (Rule(keep_best="loss", best_mode="max"), [20, 30, 40]),
        (Rule(keep_best="other"), [10, 20, 30, 40]),
        (Rule(keep_every=20), [10, 30]),
        (Rule(keep_every=7), [10, 20, 30, 40]),
        (Rule(keep_last=2, keep_best="loss"), [10, 30]),
        (Rule(keep_last=1, keep_best="loss", keep_every=30), [10, 40]),
    ],
)
def test_union(rule: Rule, deleted: list[int]) -> None:
    kept = records(10, 20, 30, 40, 50, loss=[9.0, 1.0, 2.0, 3.0, 4.0])
    assert to_delete(kept, rule) == deleted
    assert to_delete(kept[::-1], rule) == deleted


def test_pinned_and_read_ones_stay() -> None:
    kept = [Record(step=1, pinned=True), Record(step=2, reading=True), *records(3, 4)]
    assert to_delete(kept, Rule(keep_last=1)) == [3]


def test_the_best_value() -> None:
    values = [math.nan, 3.0, 1.0, 1.0, -math.inf, None]
    assert best_steps(records(1, 2, 3, 4, loss=values[:4]), "loss", "min") == [3]
    assert best_steps(records(1, 2, 3, 4, 5, 6, loss=values), "loss", "min") == [5]
    assert best_steps(records(1, 2, 3, 4, 5, 6, loss=values), "loss", "max") == [2]
    assert best_steps(records(1, loss=[math.nan]), "loss", "max") == []
    assert best_steps([], "loss", "max") == []
    assert to_delete(records(1, 2, 3, loss=[math.nan] * 3), Rule(keep_best="loss")) == [1, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.floats(), st.booleans(), st.booleans()),
        unique_by=lambda each: each[0],
        max_size=20,
    ),
    st.none() | st.integers(1, 5),
    st.none() | st.just("loss"),
    st.none() | st.integers(1, 50),
)
def test_what_never_goes(
    found: list[tuple[int, float, bool, bool]],
    keep_last: int | None,
    keep_best: str | None,
    keep_every: int | None,
) -> None:
    kept = [
        Record(step=step, metrics={"loss": loss}, pinned=pinned, reading=reading)
        for step, loss, pinned, reading in found
    ]
    rule = Rule(keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
    deleted = to_delete(kept, rule)
    assert deleted == sorted(set(deleted))
    if kept:
        assert max(record.step for record in kept) not in deleted
    for record in kept:
        assert not ((record.pinned or record.reading) and record.step in deleted)
    left = [record for record in kept if record.step not in deleted]
    assert to_delete(left, rule) == [], "what was kept once is kept again"
    if keep_best:
        assert best_steps(left, "loss", "min") == best_steps(kept, "loss", "min")


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every": -1}, {"best_mode": "largest"}])
def test_impossible_rules(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Rule(**wrong)


def test_several_of_the_best_are_kept() -> None:
    kept = records(1, 2, 3, 4, 5, loss=[3.0, 1.0, 2.0, math.nan, 4.0])
    assert best_steps(kept, "loss", "min", 2) == [2, 3]
    rule = Rule(keep_best="loss", num_best=2)
    assert to_delete(kept, rule) == [1, 4]  # 5 is the newest
