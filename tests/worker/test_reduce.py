"""Packing is a pure rule."""

import pytest

from raytf.worker.reduce import plan_packs

pytestmark = pytest.mark.tf


def test_one_pack_per_dtype() -> None:
    sizes = [("float32", 8), ("int64", 8), ("float32", 4), ("int64", 16)]
    assert plan_packs(sizes, 1000) == [[0, 2], [1, 3]]


def test_packs_are_bounded_and_keep_order() -> None:
    sizes = [("float32", 40)] * 5
    assert plan_packs(sizes, 100) == [[0, 1], [2, 3], [4]]


def test_a_large_tensor_goes_alone() -> None:
    assert plan_packs([("float32", 10), ("float32", 500), ("float32", 10)], 100) == [[0], [1], [2]]


def test_every_tensor_is_in_exactly_one_pack() -> None:
    sizes = [("float32" if i % 3 else "float16", i * 7) for i in range(50)]
    packs = plan_packs(sizes, 200)
    assert sorted(i for pack in packs for i in pack) == list(range(50))
    assert all(len({sizes[i][0] for i in pack}) == 1 for pack in packs)


def test_nothing() -> None:
    assert plan_packs([], 10) == []
