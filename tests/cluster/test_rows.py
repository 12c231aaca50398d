from __future__ import annotations

import numpy as np
import pytest

from raytf.cluster.rows import in_row_order
from raytf.errors import RaytfError


def pieces(*rows: int) -> tuple[np.ndarray, np.ndarray]:
    index = np.array(rows)
    return index, index[:, None] * 10.0


def test_rows_of_several_ranks_and_batches() -> None:
    out = in_row_order({1: [pieces(2, 3), pieces(6)], 0: [pieces(0, 1), pieces(4, 5)]})
    np.testing.assert_array_equal(out, np.arange(7)[:, None] * 10.0)


def test_structures_are_kept() -> None:
    index, values = pieces(1, 0)
    out = in_row_order({0: [(index, {"a": values, "b": (values, [values + 1])})]})
    np.testing.assert_array_equal(out["a"][:, 0], [0, 10])
    assert isinstance(out["b"], tuple) and isinstance(out["b"][1], list)
    np.testing.assert_array_equal(out["b"][1][0][:, 0], [1, 11])


@pytest.mark.parametrize("rows", [(0, 2), (0, 0), (1, 2)])
def test_missing_or_repeated_rows_are_a_bug(rows: tuple[int, ...]) -> None:
    with pytest.raises(RaytfError, match="raytf bug"):
        in_row_order({0: [pieces(*rows)]})


def test_nothing_delivered() -> None:
    with pytest.raises(RaytfError, match="no rank"):
        in_row_order({})
