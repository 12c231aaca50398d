"""SequenceSource: samples from a random-access sequence, read one by one and stacked.

Owns the rule that all samples look like the first, and the message when one does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from raytf.data.arrays import (
    ArraySpec,
    Structure,
    check_values,
    dtype_name,
    map_leaves,
    named_leaves,
    to_array,
)
from raytf.errors import DataError

__all__ = ["SequenceSource"]

Rows = npt.NDArray[np.int64]


class SequenceSource:
    """Samples from any random-access sequence: `seq[i]` is `(x, y)` or `(x, y, sample_weight)`.

    A torch `Dataset` or a list of such tuples works as it is. x and y are arrays or numbers, or
    tuples or dicts of them; an item that is no tuple is an x without y. All samples must have the
    shapes and dtypes of the first. `seq` must pickle, and bear reads from several threads.

    Raises:
        DataError: the sequence is empty, or its first item cannot be used; from `read`: an item
            differs from the first, or has NaN in y, or a bad weight.
    """

    def __init__(self, seq: Any) -> None:
        self._seq = seq
        self._num_rows = len(seq)
        if self._num_rows == 0:
            raise DataError("The sequence has 0 samples: there is nothing to train on.")
        self._spec = map_leaves(_array_spec, self._item(0))
        check_values(*map_leaves(lambda a: a[None], self._item(0))[1:])

    def __repr__(self) -> str:
        return f"SequenceSource({self._num_rows} rows, {self._spec})"

    def __len__(self) -> int:
        return self._num_rows

    def spec(self) -> Structure:
        return self._spec

    def read(self, rows: Rows) -> Structure:
        items = [self._checked_item(int(row)) for row in rows]
        if not items:
            return map_leaves(lambda s: np.empty((0, *s.shape), s.dtype), self._spec)
        element = map_leaves(lambda *arrays: np.stack(arrays), *items)
        check_values(element[1], element[2], rows)
        return element

    def in_memory(self) -> Structure | None:
        return None

    def blocks(self) -> tuple[tuple[int, ...], int] | None:
        return None

    def _item(self, row: int) -> Structure:
        try:
            item: Any = self._seq[row]
        except IndexError as error:
            raise DataError(
                f"len() of the sequence says {self._num_rows} samples, but sample {row} raises "
                f"IndexError: {error}. Correct __len__."
            ) from error
        if isinstance(item, list):
            raise DataError(
                f"Sample {row} is a list. Return a tuple (x, y) or (x, y, sample_weight); as x or "
                "y, give an array."
            )
        parts = cast("tuple[Any, ...]", item) if isinstance(item, tuple) else (item,)
        if not 1 <= len(parts) <= 3 or parts[0] is None:
            raise DataError(
                f"Sample {row} must be (x, y) or (x, y, sample_weight). "
                f"Received: a tuple of {len(parts)}" + (" with x=None." if parts else ".")
            )
        padded = (*parts, None, None)[:3]
        names = ("x", "y", "sample_weight")
        return tuple(
            _sample(part, f"{name} of sample {row}")
            for part, name in zip(padded, names, strict=True)
        )

    def _checked_item(self, row: int) -> Structure:
        item = self._item(row)
        if not _same(item, self._spec):
            got = map_leaves(_array_spec, item)
            raise DataError(
                f"Sample {row} differs from sample 0. Expected: {_text(self._spec)}. "
                f"Received: {_text(got)}. All samples need the same structure, shapes and "
                "dtypes: pad, resize or cast in __getitem__.",
                row=row,
            )
        return item


def _sample(value: Any, name: str) -> Structure:
    if value is None:
        return None
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value)
        return {key: _sample(item, f"{name}[{key!r}]") for key, item in pairs.items()}
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return tuple(_sample(item, f"{name}[{i}]") for i, item in enumerate(items))
    return to_array(value, name)


def _array_spec(array: npt.NDArray[Any]) -> ArraySpec:
    return ArraySpec(array.shape, dtype_name(array.dtype))


def _same(item: Structure, spec: Structure) -> bool:
    if isinstance(spec, ArraySpec):
        return isinstance(item, np.ndarray) and _array_spec(cast("Any", item)) == spec
    if isinstance(spec, tuple):
        parts = cast("tuple[Any, ...]", spec)
        return (
            isinstance(item, tuple)
            and len(cast("tuple[Any, ...]", item)) == len(parts)
            and all(_same(i, s) for i, s in zip(cast("tuple[Any, ...]", item), parts, strict=True))
        )
    if isinstance(spec, dict):
        named = cast("dict[str, Any]", spec)
        return (
            isinstance(item, dict)
            and item.keys() == named.keys()
            and all(_same(item[key], s) for key, s in named.items())
        )
    return item is None


def _text(spec: Structure) -> str:
    names = zip(("x", "y", "sample_weight"), spec, strict=True)
    leaves = [pair for name, part in names for pair in named_leaves(part, name)]
    return ", ".join(f"{name} {leaf.shape} {leaf.dtype}" for name, leaf in leaves)
