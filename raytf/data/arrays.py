"""Structures of arrays: what one element of a source is made of, and what may be in it.

A *structure* is an array, or a tuple or dict of structures, or None. An *element* is the tuple
`(x, y, sample_weight)` of structures. Owns walking them, describing them (`ArraySpec`), and the
checks of dtypes and values that every source shares. Reads no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from raytf.errors import DataError

__all__ = [
    "ArraySpec",
    "Structure",
    "check_dtype",
    "check_values",
    "dtype_name",
    "map_leaves",
    "named_leaves",
    "to_array",
]

# Array, None, tuple of structures or dict of structures. Not expressible without recursion that
# type checkers then want narrowed at every use.
Structure = Any


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of an element.

    Attributes:
        shape: without the batch dimension; () for one number per sample.
        dtype: numpy's name of it ("float32"), or "str" or "bytes" for strings of any length. Both
            are strings to TensorFlow; a "bytes" array may have dtype object, holding `bytes`.
    """

    shape: tuple[int, ...]
    dtype: str


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns numpy's name, with all lengths of unicode called "str" and of bytes "bytes"."""
    return {"U": "str", "S": "bytes"}.get(dtype.kind, dtype.name)


@overload
def map_leaves(function: Callable[[Any], Any], structure: Structure, /) -> Structure: ...
@overload
def map_leaves(
    function: Callable[..., Any], structure: Structure, /, *others: Structure
) -> Structure: ...
def map_leaves(
    function: Callable[..., Any], structure: Structure, /, *others: Structure
) -> Structure:
    """Applies `function` to each array of equal structures; None stays None."""
    if structure is None:
        return None
    if isinstance(structure, tuple):
        items = cast("tuple[Any, ...]", structure)
        return tuple(
            map_leaves(function, item, *(other[i] for other in others))
            for i, item in enumerate(items)
        )
    if isinstance(structure, dict):
        pairs = cast("dict[str, Any]", structure)
        return {
            key: map_leaves(function, item, *(other[key] for other in others))
            for key, item in pairs.items()
        }
    return function(structure, *others)


def named_leaves(structure: Structure, name: str) -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) of a structure, with paths as the user would write them: `x['image']`."""
    if structure is None:
        return
    if isinstance(structure, tuple):
        for i, item in enumerate(cast("tuple[Any, ...]", structure)):
            yield from named_leaves(item, f"{name}[{i}]")
    elif isinstance(structure, dict):
        for key, item in cast("dict[Any, Any]", structure).items():
            yield from named_leaves(item, f"{name}[{key!r}]")
    else:
        yield name, structure


def to_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Returns `value` as an array of a dtype TensorFlow has, in native byte order.

    Raises:
        DataError: it is ragged, masked, or of a dtype that TensorFlow does not have.
    """
    if isinstance(value, np.ma.MaskedArray):
        masked = int(np.ma.getmaskarray(cast("Any", value)).sum())
        if masked:
            raise DataError(
                f"{name} is a masked array with {masked} masked values, which training cannot "
                "leave out. Fill them first (value.filled(...)) or drop their rows."
            )
    try:
        array: npt.NDArray[Any] = np.asarray(cast("Any", value))
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise DataError(
            f"{name} is ragged: its rows have different lengths, so it is no array. Pad or cut "
            f"them to one length. numpy says: {error}"
        ) from error
    check_dtype(array.dtype, name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


_DTYPE_HINTS = {
    "O": (
        "rows of different lengths or of mixed types give dtype object. Pad rows to one length, "
        "turn strings into .astype(str) and missing values into numbers"
    ),
    "M": "TensorFlow has no times. Use a number, for example value.astype('int64')",
    "m": "TensorFlow has no durations. Use a number, for example value.astype('int64')",
    "V": "TensorFlow has no records. Use a dict of one array per field",
}


def check_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Raises DataError if TensorFlow has no such dtype."""
    kinds = "biufcUS"
    known = dtype.kind in kinds and dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    if dtype.kind in "US" or known or dtype.name == "bfloat16":
        return
    hint = _DTYPE_HINTS.get(dtype.kind, "use one of numpy's usual numbers, bools or strings")
    raise DataError(f"{name} has dtype {dtype}, which cannot be trained on: {hint}.")


def _first(bad: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64] | None) -> int:
    """The row number of the first True; `rows` are the numbers of the rows looked at."""
    index = int(np.argmax(bad.reshape(len(bad), -1).any(axis=1)))
    return index if rows is None else int(rows[index])


def check_values(
    y: Structure, sample_weight: Structure, rows: npt.NDArray[np.int64] | None = None
) -> None:
    """Refuses what would silently spoil training: NaN in y; NaN, infinite or negative weights.

    Args:
        y, sample_weight: structures of numpy arrays, leading dimension n.
        rows: their row numbers, shape (n,), for the message; None if they start at 0.

    Raises:
        DataError: with the number of bad values and the first row that has one.
    """
    for name, array in named_leaves(y, "y"):
        # min() is NaN if any value is; it needs no memory, so the copy below is made only then.
        if array.dtype.kind == "f" and array.size and np.isnan(_quiet_min(array)):
            bad = np.isnan(array)
            raise DataError(
                f"{name} has {int(bad.sum())} NaN values, the first in row {_first(bad, rows)}: "
                "the loss would be NaN. Fill them or drop those rows."
            )
    for name, array in named_leaves(sample_weight, "sample_weight"):
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{name} must be real numbers. Received: dtype {dtype_name(array.dtype)}."
            )
        bad = ~(np.isfinite(array) & (array >= 0))
        if bad.any():
            raise DataError(
                f"{name} has {int(bad.sum())} values that are NaN, infinite or negative, the "
                f"first in row {_first(bad, rows)}. Weights must be finite and >= 0; 0 leaves a "
                "sample out of the loss."
            )


def _quiet_min(array: npt.NDArray[Any]) -> Any:
    with np.errstate(invalid="ignore"):
        return array.min()
