"""The order of samples: each row once per epoch, whatever the number of workers, frozen values."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data.order import Order, Plan, Position, sample_keys, share
from raytf.data.permutation import fold, mix64
from raytf.errors import DataError

SEEDS = st.integers(0, 2**32 - 1)


def epoch_of(order: Order, epoch: int = 0) -> np.ndarray:
    return order.rows(epoch, 0, order.num_rows)


def is_permutation(rows: np.ndarray) -> bool:
    return rows.dtype == np.int64 and np.array_equal(np.sort(rows), np.arange(len(rows)))


# ---------------------------------------------------------------------------- permutation


@pytest.mark.parametrize("size", [*range(66), 1023, 1024, 1025, 60_000, 65_536, 100_003])
def test_every_row_comes_once(size: int) -> None:
    assert is_permutation(epoch_of(Order(size, 3, True)))


@given(st.integers(1, 40_000), SEEDS, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_row_comes_once_for_any_seed_and_epoch(size: int, seed: int, epoch: int) -> None:
    assert is_permutation(epoch_of(Order(size, seed, True), epoch))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_at_a_position_do_not_depend_on_how_they_are_asked_for(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 50_000))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = epoch_of(Order(size, 5, True), 2)
    order = Order(size, 5, True)
    order.rows(1, 0, min(size, 10))  # a memo of another epoch must not be used
    assert np.array_equal(order.rows(2, start, stop), whole[start:stop])


@pytest.mark.parametrize("blocks", [None, (16_000, 10_000, 14_000)])
def test_reading_in_batches_is_reading_at_once(blocks: tuple[int, ...] | None) -> None:
    window = None if blocks is None else 20_000
    order = Order(40_000, 1, True, blocks, window)
    whole = epoch_of(Order(40_000, 1, True, blocks, window), 4)
    parts = [order.rows(4, i, min(i + 1000, 40_000)) for i in range(0, 40_000, 1000)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_caller_may_write_to_what_it_got() -> None:
    order = Order(100, 1, True)
    expected = epoch_of(order).copy()
    epoch_of(order)[:] = 0
    assert np.array_equal(epoch_of(order), expected)


def test_values_never_change() -> None:
    """These are what resumed runs rely on: if they must change, Position's version must too."""
    assert epoch_of(Order(10, 0, True), 0).tolist() == [8, 5, 7, 6, 0, 2, 4, 1, 3, 9]
    assert epoch_of(Order(10, 0, True), 1).tolist() == [6, 5, 3, 8, 9, 4, 1, 2, 7, 0]
    mnist = Order(60_000, 7, True)
    assert mnist.rows(0, 0, 4).tolist() == [36357, 31898, 15410, 23308]
    assert mnist.rows(3, 59_996, 60_000).tolist() == [14211, 25714, 23426, 19404]
    assert Order(1023, 1, True).rows(0, 0, 3).tolist() == [93, 353, 942]
    assert Order(1024, 1, True).rows(0, 0, 3).tolist() == [830, 261, 800]
    huge = Order(10**12, 2**32 - 1, True).rows(5, 10**11, 10**11 + 2)
    assert huge.tolist() == [693798327328, 861938200588]
    blocked = Order(12, 3, True, blocks=(4, 3, 5), window_rows=6)
    assert epoch_of(blocked, 0).tolist() == [8, 11, 9, 6, 7, 5, 4, 10, 0, 1, 2, 3]
    assert epoch_of(blocked, 1).tolist() == [1, 4, 2, 5, 0, 6, 3, 11, 10, 7, 8, 9]
    keys = sample_keys(7, 1, np.array([0, 1, 2**40]))
    assert keys[:2].tolist() == [[2564036672, 1263606898], [658209321, 1698440706]]
    assert keys[2].tolist() == [165322437, 3087189514]
    rows = epoch_of(Order(100_000, 42, True), 2).astype("<i8").tobytes()
    assert hashlib.sha256(rows).hexdigest()[:16] == "c10ad2369706b929"


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_of(Order(1000, seed, True), epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for one, other in itertools.combinations(orders, 2):
        # Two random permutations agree in 1 place on average, in 12 with probability 1e-9.
        assert (one == other).sum() < 12


def test_seed_and_epoch_are_not_added() -> None:
    """With seed + epoch as the key, run 2 would see run 1's second epoch first."""
    assert not np.array_equal(epoch_of(Order(100, 1, True), 1), epoch_of(Order(100, 2, True), 0))
    assert not np.array_equal(epoch_of(Order(100, 1, True), 0), epoch_of(Order(100, 0, True), 1))


def test_huge_orders_need_no_memory_and_stay_in_range() -> None:
    for size in (2**40 + 1, 2**62 - 1):
        rows = Order(size, 1, True).rows(0, size - 20_000, size)
        assert len(np.unique(rows)) == 20_000
        assert rows.min() >= 0 and rows.max() < size
        assert abs(rows.astype(float).mean() / size - 0.5) < 0.02  # 0.002 is one standard error


def test_without_shuffle_rows_are_in_file_order() -> None:
    assert np.array_equal(Order(9, 1, False).rows(3, 2, 7), [2, 3, 4, 5, 6])
    blocked = Order(9, 1, False, blocks=(4, 5), window_rows=2)
    assert np.array_equal(epoch_of(blocked), np.arange(9))


def test_all_permutations_of_few_rows_are_equally_likely() -> None:
    size, epochs = 4, 4800
    order = Order(size, 11, True)
    counts = dict.fromkeys(itertools.permutations(range(size)), 0)
    for epoch in range(epochs):
        counts[tuple(epoch_of(order, epoch).tolist())] += 1
    expected = epochs / math.factorial(size)
    chi2 = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi2 < 23 + 5 * math.sqrt(2 * 23)  # 23 degrees of freedom, 5 standard deviations


@pytest.mark.parametrize("size", [1000, 60_000])
def test_a_shuffle_looks_random(size: int) -> None:
    epochs = 200 if size == 1000 else 20
    order = Order(size, 5, True)
    rows = np.stack([epoch_of(order, epoch) for epoch in range(epochs)])
    positions = np.arange(size)
    displacement = np.abs(rows - positions).mean() / size
    assert displacement == pytest.approx(1 / 3, abs=0.01)
    fixed = (rows == positions).sum(axis=1).mean()
    assert fixed == pytest.approx(1, abs=5 / math.sqrt(epochs))
    rises = (np.diff(rows, axis=1) > 0).mean()
    assert rises == pytest.approx(0.5, abs=5 / math.sqrt(12 * epochs * size))
    # Where rows come from and where they go to, in a grid of 20 x 20: independent.
    grid, _, _ = np.histogram2d(np.tile(positions, epochs), rows.ravel(), bins=20)
    expected = epochs * size / 400
    assert ((grid - expected) ** 2 / expected).sum() < 361 + 6 * math.sqrt(2 * 361)
    # Distances of neighbours: a structured order repeats a few of them.
    distances = np.bincount((np.diff(rows, axis=1) % size).ravel(), minlength=size)[1:]
    mean = epochs * (size - 1) / (size - 1)
    assert distances.max() < mean + 7 * math.sqrt(mean) + 5


def test_order_is_safe_for_threads_and_pickle() -> None:
    order = Order(50_000, 1, True, blocks=(20_000, 30_000), window_rows=5000)
    expected = {e: epoch_of(Order(50_000, 1, True, (20_000, 30_000), 5000), e) for e in range(3)}
    barrier = threading.Barrier(4)

    def read(worker: int) -> bool:
        barrier.wait(10)
        good = True
        for i in range(60):
            epoch, start = (worker + i) % 3, (i * 811) % 49_000
            rows = order.rows(epoch, start, start + 64)
            good &= np.array_equal(rows, expected[epoch][start : start + 64])
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
    assert pickle.loads(pickle.dumps(order)) == order
    assert len(pickle.dumps(order)) < 1000  # without what it remembered


def test_reading_batch_by_batch_computes_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit would be flaky here; 16k rows take 0.5 ms, 64 rows 0.08 ms."""
    calls: list[int] = []
    real = Order._shuffled

    def counted(self: Order, epoch: int, start: int, stop: int) -> np.ndarray:
        calls.append(stop - start)
        return real(self, epoch, start, stop)

    monkeypatch.setattr(Order, "_shuffled", counted)
    order = Order(60_000, 1, True)
    for start in range(0, 60_000 - 64, 64):
        order.rows(0, start, start + 64)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_rows": -1}, r"num_rows must be in \[0, 2\*\*62\)\. Received: -1"),
        ({"num_rows": 2**62}, r"num_rows must be in"),
        ({"num_rows": True}, r"num_rows must be in .* Received: True"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*64\)\. Received: -1"),
        ({"seed": 2**64}, r"seed must be in"),
        ({"blocks": (4, 6)}, r"blocks and window_rows go together.*\(2 blocks\).*None"),
        ({"window_rows": 4}, r"blocks and window_rows go together.*blocks=None, window_rows=4"),
        ({"blocks": (4, 5), "window_rows": 1}, r"sum to num_rows=10.*2 blocks with the sum 9"),
        ({"blocks": (12, -2), "window_rows": 1}, r"counts >= 0 that sum to num_rows=10"),
        ({"blocks": (10,), "window_rows": 0}, r"window_rows must be an integer >= 1. Received: 0"),
    ],
)
def test_order_refuses(arguments: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Order(**{"num_rows": 10, "seed": 1, "shuffle": True, **arguments})


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 11), (5, 4)])
def test_rows_outside_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(DataError, match=rf"\[{start}, {stop}\) are not within an epoch of 10 rows"):
        Order(10, 1, True).rows(0, start, stop)
    with pytest.raises(DataError, match=r"epoch must be in .* Received: -1"):
        Order(10, 1, True).rows(-1, 0, 1)


# ---------------------------------------------------------------------------- blocks


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.integers(1, 900), SEEDS)
@settings(max_examples=80, deadline=None)
def test_block_shuffle_gives_every_row_once(blocks: list[int], window: int, seed: int) -> None:
    order = Order(sum(blocks), seed, True, tuple(blocks), window)
    for epoch in (0, 1):
        assert is_permutation(epoch_of(order, epoch))


def test_block_shuffle_reads_few_blocks_at_a_time() -> None:
    blocks = tuple([100, 50, 150] * 20)  # 6000 rows
    starts = np.cumsum((0, *blocks))
    order = Order(6000, 1, True, blocks, 400)
    rows = epoch_of(order)
    block_of = np.searchsorted(starts, rows, side="right") - 1
    first = {int(b): int(np.argmax(block_of == b)) for b in range(60)}
    last = {int(b): 5999 - int(np.argmax(block_of[::-1] == b)) for b in range(60)}
    # A window has at least 400 rows and at most one block more; a block lies in one window.
    assert max(last[b] - first[b] for b in range(60)) < 400 + 150
    # Within a window rows of several blocks are mixed.
    assert np.mean(block_of[1:] != block_of[:-1]) > 0.5


def test_block_shuffle_changes_blocks_and_rows_each_epoch() -> None:
    blocks = (100,) * 50
    order = Order(5000, 1, True, blocks, 300)
    one, two = epoch_of(order, 0), epoch_of(order, 1)
    assert (one == two).sum() < 20
    assert set(one[:300] // 100) != set(two[:300] // 100)
    # Two windows must not be permuted alike.
    assert not np.array_equal(np.argsort(one[:300]), np.argsort(one[300:600]))


def test_first_blocks_of_epochs_are_spread_over_all_blocks() -> None:
    order = Order(1000, 3, True, (100,) * 10, 100)
    counts = np.bincount([order.rows(e, 0, 1)[0] // 100 for e in range(1000)], minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 9 + 5 * math.sqrt(18)


# ---------------------------------------------------------------------------- batches


@given(st.integers(1, 5000), st.integers(1, 700), st.booleans())
def test_a_plan_covers_the_epoch(num_rows: int, batch: int, drop: bool) -> None:
    if drop and num_rows < batch:
        return
    plan = Plan(num_rows, batch, drop)
    slices = [plan.batch(step) for step in range(plan.steps_per_epoch)]
    assert slices[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))
    sizes = [stop - start for start, stop in slices]
    assert sizes[: plan.full_steps] == [batch] * plan.full_steps
    assert sizes[plan.full_steps :] == ([plan.tail_rows] if plan.tail_rows else [])
    assert sum(sizes) == (num_rows // batch * batch if drop else num_rows)


@pytest.mark.parametrize(
    ("plan", "full", "tail", "steps"),
    [
        (Plan(60_000, 64), 937, 32, 938),
        (Plan(60_000, 64, True), 937, 0, 937),
        (Plan(64, 64), 1, 0, 1),
        (Plan(10, 64), 0, 10, 1),
    ],
)
def test_plan_numbers(plan: Plan, full: int, tail: int, steps: int) -> None:
    assert (plan.full_steps, plan.tail_rows, plan.steps_per_epoch) == (full, tail, steps)


def test_plan_refuses_to_train_on_nothing() -> None:
    with pytest.raises(DataError, match="0 rows: there is nothing to train on"):
        Plan(0, 64)
    text = "drop_remainder=True .* 63 rows are less than one batch of 64.*at most 63"
    with pytest.raises(DataError, match=text):
        Plan(63, 64, drop_remainder=True)
    with pytest.raises(DataError, match="global_batch_size must be >= 1. Received: 0"):
        Plan(10, 0)
    for step in (-1, 3):
        with pytest.raises(DataError, match=rf"step must be in \[0, 3\)\. Received: {step}"):
            Plan(10, 4).batch(step)


@given(st.integers(0, 3000), st.integers(1, 70))
def test_shares_cover_the_batch(batch: int, workers: int) -> None:
    shares = [share(batch, workers, rank) for rank in range(workers)]
    assert shares[0][0] == 0 and shares[-1][1] == batch
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the first ranks take the extra rows


def test_shares_of_a_small_batch_may_be_empty() -> None:
    assert [share(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_share_refuses(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(DataError, match=rf"rank in .* batch_rows={arguments[0]}"):
        share(*arguments)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_stream_of_samples_does_not_depend_on_workers(workers: int) -> None:
    plan, order = Plan(1003, 64), Order(1003, 9, True)
    stream = []
    for step in range(plan.steps_per_epoch):
        start, stop = plan.batch(step)
        for rank in range(workers):
            first, last = share(stop - start, workers, rank)
            stream.append(order.rows(1, start + first, start + last))
    assert np.array_equal(np.concatenate(stream), epoch_of(order, 1))


# ---------------------------------------------------------------------------- position


def test_position_round_trip() -> None:
    position = Position(seed=7, epoch=3, next_step=41)
    record = json.loads(json.dumps(position.to_json()))
    assert record == {"version": 1, "seed": 7, "epoch": 3, "next_step": 41}
    assert Position.from_json(record) == position
    numpy_made = Position(seed=np.int64(7), epoch=np.int64(3), next_step=np.int64(41))
    assert json.loads(json.dumps(numpy_made.to_json())) == record


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 300), st.integers(0, 300))
def test_advancing_adds_up(num_rows: int, batch: int, first: int, second: int) -> None:
    plan = Plan(num_rows, batch)
    start = Position(seed=1)
    end = start.advance(plan, first).advance(plan, second)
    assert end == start.advance(plan, first + second)
    assert end.epoch * plan.steps_per_epoch + end.next_step == first + second
    assert end.next_step < plan.steps_per_epoch


def test_advance_goes_to_the_next_epoch() -> None:
    plan = Plan(10, 4)
    assert Position(seed=1, next_step=1).advance(plan) == Position(seed=1, next_step=2)
    assert Position(seed=1, next_step=2).advance(plan) == Position(seed=1, epoch=1)
    with pytest.raises(DataError, match="num_steps must be >= 0. Received: -1"):
        Position(seed=1).advance(plan, -1)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"version": 2, "new": 1}, "has version 2, but this raytf reads version 1.*raytf version"),
        ({"version": 1, "seed": 1, "epoch": 0}, r"fields \['epoch', 'next_step', .*Received"),
        ({"version": 1, "seed": 1, "epoch": 0, "next_step": 0, "rank": 1}, "'rank'.*damaged"),
        ({"version": 1, "seed": 1, "epoch": -1, "next_step": 0}, "Position.epoch must be .*: -1"),
        ({"version": 1, "seed": 1, "epoch": 0, "next_step": 1.5}, "Position.next_step .*: 1.5"),
        ({"version": "1", "seed": 1, "epoch": 0, "next_step": 0}, "Position.version .*: '1'"),
    ],
)
def test_position_refuses(record: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Position.from_json(record)


# ---------------------------------------------------------------------------- sample keys


def test_sample_keys_are_functions_of_seed_epoch_and_row() -> None:
    rows = np.array([5, 3, 5, 2**40])
    keys = sample_keys(1, 2, rows)
    assert keys.shape == (4, 2) and keys.dtype == np.int64
    assert np.array_equal(keys[0], keys[2])
    assert np.array_equal(keys[[1, 0]], sample_keys(1, 2, rows[[1, 0]]))
    assert not np.array_equal(keys, sample_keys(2, 2, rows))
    assert not np.array_equal(keys, sample_keys(1, 3, rows))
    assert sample_keys(1, 2, rows[:0]).shape == (0, 2)


def test_sample_keys_differ_and_fill_32_bits() -> None:
    keys = sample_keys(3, 0, np.arange(20_000))
    assert len(np.unique(keys, axis=0)) == 20_000
    assert keys.min() >= 0 and keys.max() < 2**32
    assert np.abs(keys.mean(axis=0) / 2**32 - 0.5).max() < 0.015  # 0.002 is one standard error
    bits = (keys[:, :, None] >> np.arange(32)) & 1
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02


def test_sample_keys_refuse_a_negative_seed() -> None:
    with pytest.raises(DataError, match=r"seed=-1, epoch=0"):
        sample_keys(-1, 0, np.arange(2))


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the reference splitmix64 seeded with 0 and with 1234567.
    assert int(mix64(np.array([0]), 0)[0]) == 0xE220A8397B1DCDAF
    assert int(mix64(np.array([1234567]), 0)[0]) == 6457827717110365317
    assert fold(1234567) == 6457827717110365317
