"""Puts rows that ranks delivered in pieces back into the order of the data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytf.errors import RaytfError

__all__ = ["in_row_order"]


def in_row_order(delivered: Mapping[int, Sequence[tuple[Any, Any]]]) -> Any:
    """Joins `(row numbers, outputs)` pieces of all ranks.

    Args:
        delivered: rank -> pieces; row numbers have shape (n,), outputs are arrays of leading
            dimension n, or tuples, lists or dicts of them.

    Returns:
        The outputs in the same structure, row `i` for row `i` of the data.

    Raises:
        RaytfError: a row is missing or came twice.
    """
    pieces = [piece for rank in sorted(delivered) for piece in delivered[rank]]
    if not pieces:
        raise RaytfError("no rank delivered any row; a raytf bug.")
    rows = np.concatenate([np.asarray(index, np.int64).reshape(-1) for index, _ in pieces])
    order = np.argsort(rows, kind="stable")
    if not np.array_equal(rows[order], np.arange(len(rows))):
        raise RaytfError(
            f"the ranks delivered {len(rows)} rows that are not 0..{len(rows) - 1}; a raytf bug."
        )
    return _joined([outputs for _, outputs in pieces], order)


def _joined(outputs: Sequence[Any], order: np.ndarray) -> Any:
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: _joined([piece[key] for piece in outputs], order) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(
            _joined([piece[i] for piece in outputs], order) for i in range(len(first))
        )
    return np.concatenate([np.asarray(piece) for piece in outputs])[order]
