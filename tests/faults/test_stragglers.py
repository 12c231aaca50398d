"""Who is slow again and again, and that a delay which wanders blames nobody."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.stragglers import Straggler, StragglerBook

Window = dict[int, dict[str, float]]


def window(ranks: int, slow: int | None = None, phase: str = "data", by: float = 3.0) -> Window:
    base = {"data": 0.2, "compute": 0.6, "wait": 0.2}
    told = {r: dict(base) for r in range(ranks)}
    if slow is not None:
        told[slow][phase] *= by
        told[slow]["wait"] = 0.0
    return told


def observed(book: StragglerBook, *windows: Window) -> list[Straggler]:
    told: list[Straggler] = []
    for seen in windows:
        book, new = book.observe(seen)
        told += new
    return told


def test_one_rank_in_one_phase_after_k_windows() -> None:
    slow = window(4, slow=2)
    assert observed(StragglerBook(), slow, slow) == []
    (told,) = observed(StragglerBook(), *[slow] * 10)
    assert (told.rank, told.phase, told.windows, round(told.factor, 6)) == (2, "data", 3, 3.0)
    assert told.summary() == (
        "rank 2 is slow in data: 3.0 x the median of the other ranks for 3 windows in a row, "
        "33% of its time"
    )


def test_two_ranks_and_a_phase_that_only_one_has() -> None:
    (told,) = observed(StragglerBook(windows=1), window(2, slow=0, phase="compute"))
    assert (told.rank, told.phase) == (0, "compute")
    seen = {0: {"compute": 1.0, "save": 1.0}, 1: {"compute": 1.0}}
    (told,) = observed(StragglerBook(windows=1), seen)
    assert (told.rank, told.phase, told.factor) == (0, "save", 1000.0)


def test_told_again_only_after_it_was_well() -> None:
    slow, well = window(3, slow=1), window(3)
    assert len(observed(StragglerBook(), *[slow] * 9)) == 1
    assert len(observed(StragglerBook(), *[slow] * 4, well, *[slow] * 4)) == 2
    assert observed(StragglerBook(), slow, slow, well, slow, slow) == []


def test_waiting_and_small_phases_bother_nobody() -> None:
    seen = window(3)
    seen[0]["wait"] = 50.0
    seen[1]["data"] = 0.25
    assert observed(StragglerBook(), *[seen] * 5) == []
    tiny = {r: {"data": 0.001, "compute": 1.0} for r in range(3)}
    tiny[0]["data"] = 0.01
    assert observed(StragglerBook(), *[tiny] * 5) == []


def test_nobody_to_compare_with() -> None:
    assert observed(StragglerBook(), *[{0: {"data": 9.0}}] * 5, {}, {0: {}, 1: {}}) == []


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(1, 5), max_size=30))
def test_a_wandering_delay_blames_nobody(ranks: int, k: int, moves: list[int]) -> None:
    slow, windows = 0, []
    for move in moves:
        slow = (slow + 1 + move % (ranks - 1)) % ranks if ranks > 2 else 1 - slow  # always another
        windows.append(window(ranks, slow=slow, by=10.0))
    assert observed(StragglerBook(windows=k + 1), *windows) == []


@settings(deadline=None)
@given(
    st.integers(2, 6),
    st.data(),
    st.floats(2.5, 100),
    st.lists(st.floats(0.95, 1.05), min_size=6, max_size=6),
)
def test_a_delay_that_stays_blames_exactly_its_rank(
    ranks: int, data: st.DataObject, by: float, noise: list[float]
) -> None:
    slow = data.draw(st.integers(0, ranks - 1))
    seen = window(ranks, slow=slow, by=by)
    for rank, seconds in seen.items():
        seen[rank] = {phase: s * noise[rank] for phase, s in seconds.items()}
    told = observed(StragglerBook(), *[seen] * 5)
    assert [(t.rank, t.phase) for t in told] == [(slow, "data")]
