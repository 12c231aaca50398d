"""ArraySource: samples from arrays that are in memory, mapped, or indexed by row numbers.

Owns turning what a user gives (arrays, tensors, data frames, tuples and dicts of them) into leaves
that can be gathered from, and every check of them that can be made on the driver.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from raytf.data.arrays import (
    ArraySpec,
    Structure,
    check_dtype,
    check_values,
    dtype_name,
    map_leaves,
    named_leaves,
    to_array,
)
from raytf.errors import DataError

__all__ = ["ArraySource"]

Rows = npt.NDArray[np.int64]


class _Indexed:
    """An array-like read by `obj[int64 array]`: h5py, zarr. One leaf of an ArraySource."""

    def __init__(self, obj: Any, name: str) -> None:
        self.obj = obj
        self._length = len(obj)
        if self._length == 0:
            raise DataError(f"{name} has 0 rows: there is nothing to train on.")
        probe = to_array(obj[np.zeros(1, np.int64)], name)
        if probe.ndim == 0 or len(probe) != 1:
            raise DataError(
                f"{name} ({type(obj).__name__}) must give one row for obj[array of one row "
                f"number]. Received: shape {probe.shape}."
            )
        self.shape = (self._length, *probe.shape[1:])
        self.dtype = probe.dtype

    def __len__(self) -> int:
        return self._length

    def take(self, rows: Rows) -> npt.NDArray[Any]:
        # h5py wants increasing row numbers without repetition; sorted reads are faster anyway.
        unique, inverse = np.unique(rows, return_inverse=True)
        return to_array(self.obj[unique], "batch")[inverse]


class _Mapped:
    """A memory map. It pickles as the path of its file, not as its (maybe huge) content."""

    def __init__(self, array: np.memmap[Any, Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Rows) -> npt.NDArray[Any]:
        return np.asarray(self.array)[rows]

    def __reduce__(self) -> tuple[Any, ...]:
        array = self.array
        # A view has its parent's offset, and "c" has changes that are only in memory: by value.
        if not isinstance(array.base, mmap.mmap) or array.mode == "c" or array.filename is None:
            return _Plain, (np.array(array),)
        array.flush()
        order = "C" if array.flags.c_contiguous else "F"
        path = os.fspath(array.filename)
        return _reopen, (path, array.dtype, array.offset, array.shape, order)


def _reopen(path: str, dtype: Any, offset: int, shape: tuple[int, ...], order: Any) -> _Mapped:
    try:
        return _Mapped(np.memmap(path, dtype, "r", offset, shape, order))
    except (OSError, ValueError) as error:
        raise DataError(
            f"The memory map {path} cannot be opened on this node: {error}. Put the file on "
            "storage that all nodes share under this path, or give np.array(...) of it."
        ) from error


class _Plain:
    """An array in memory."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Rows) -> npt.NDArray[Any]:
        return self.array.take(rows, axis=0)


_Leaf = _Plain | _Mapped | _Indexed

# Their objects have __getitem__ too, but it means labels or columns, or takes no numpy arrays.
_CONVERTIBLE = {"pandas", "polars", "pyarrow", "tensorflow", "torch", "jax", "jaxlib", "xarray"}


def _wrap(value: Any, name: str) -> Structure:
    """Turns what the user gave into a structure of leaves."""
    if value is None:
        raise DataError(f"{name} is None. Leave out what is not there, or give an array.")
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value)
        for key in pairs:
            if not isinstance(key, str):
                raise DataError(f"{name} has the key {key!r}; names of arrays must be strings.")
        if not pairs:
            raise DataError(f"{name} is an empty dict: it needs at least one array.")
        return {key: _wrap(item, f"{name}[{key!r}]") for key, item in pairs.items()}
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        if not items:
            raise DataError(f"{name} is an empty tuple: it needs at least one array.")
        return tuple(_wrap(item, f"{name}[{i}]") for i, item in enumerate(items))
    if isinstance(value, list) and _holds_arrays(cast("list[Any]", value)):
        raise DataError(
            f"{name} is a list of arrays, which can mean two things. Several inputs or outputs: "
            "write a tuple. Rows of one array: write np.stack(list)."
        )
    return _wrap_leaf(value, name)


def _holds_arrays(items: list[Any]) -> bool:
    return bool(items) and hasattr(items[0], "shape") and len(items[0].shape) > 0


def _wrap_leaf(value: Any, name: str) -> _Leaf:
    is_array = isinstance(value, np.ndarray)
    root = type(value).__module__.partition(".")[0]
    indexable = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    if not is_array and root == "scipy":
        raise DataError(f"{name} is a sparse matrix. Sparse data is not taken: use .toarray().")
    if is_array or root in _CONVERTIBLE or isinstance(value, (list, str, bytes)) or not indexable:
        leaf = _plain_or_mapped(value, name)
    else:
        leaf = _Indexed(value, name)
    if 0 in leaf.shape:
        what = "0 rows" if leaf.shape[0] == 0 else "rows without any values"
        raise DataError(
            f"{name} has {what}: there is nothing to train on. Received: shape {leaf.shape}."
        )
    return leaf


def _plain_or_mapped(value: Any, name: str) -> _Plain | _Mapped:
    kind = type(value).__name__
    if isinstance(value, np.memmap):
        mapped = cast("np.memmap[Any, Any]", value)
        if mapped.dtype.isnative and mapped.ndim:
            check_dtype(mapped.dtype, name)
            return _Mapped(mapped)
    array = to_array(value, name)
    if array.ndim == 0:
        raise DataError(
            f"{name} is a scalar ({kind}). Give one value per row: an array whose "
            "first dimension is the number of rows."
        )
    return _Plain(array)


def _spec(leaf: Any) -> ArraySpec:
    return ArraySpec(tuple(int(n) for n in leaf.shape[1:]), dtype_name(leaf.dtype))


class ArraySource:
    """Samples from arrays: use it whenever the data fits into memory, or is mapped or indexed.

    ```python
    raytf.ArraySource(x, y)
    raytf.ArraySource({"image": images, "meta": meta}, (labels, boxes), sample_weight=weights)
    ```

    Arrays are kept as they are given, without a copy. float64 becomes Keras's `floatx` (float32)
    when a batch is made on a worker, as in `model.fit`; all other dtypes stay. NaN in `y` is looked
    for in arrays in memory only; weights are always read and checked.

    Args:
        x: an array, or a tuple or dict (also nested) of arrays for several inputs. An array is
            anything numpy makes one of (tensors, data frames of one type, lists), a `np.memmap`,
            or an object with `len()` and `obj[int64 array]` (h5py, zarr). A memory map of a whole
            file is sent to workers as its path: the file must be there on every node.
        y: the targets, likewise, or None.
        sample_weight: weights >= 0 of each sample in the loss, likewise, or None.

    Raises:
        DataError: empty, ragged, masked or scalar data, different numbers of rows, a dtype
            TensorFlow does not have, NaN in y, weights that are NaN, infinite or negative.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        self._element = (
            _wrap(x, "x"),
            None if y is None else _wrap(y, "y"),
            None if sample_weight is None else _wrap(sample_weight, "sample_weight"),
        )
        names = zip(("x", "y", "sample_weight"), self._element, strict=True)
        leaves = [pair for name, part in names for pair in named_leaves(part, name)]
        if len({len(leaf) for _, leaf in leaves}) > 1:
            shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in leaves)
            raise DataError(
                "All arrays must have the same number of rows (first dimension). "
                f"Received: {shapes}. Give each sample one row in each."
            )
        self._num_rows = len(leaves[0][1])
        check_values(map_leaves(_loaded, self._element[1]), map_leaves(_all, self._element[2]))

    def __repr__(self) -> str:
        return f"ArraySource({self._num_rows} rows, {self.spec()})"

    def __len__(self) -> int:
        return self._num_rows

    def spec(self) -> Structure:
        return map_leaves(_spec, self._element)

    def read(self, rows: Rows) -> Structure:
        return map_leaves(lambda leaf: leaf.take(rows), self._element)

    def in_memory(self) -> Structure | None:
        if any(not isinstance(leaf, _Plain) for _, leaf in named_leaves(self._element, "")):
            return None
        return map_leaves(_loaded, self._element)

    def blocks(self) -> tuple[tuple[int, ...], int] | None:
        return None


def _loaded(leaf: _Leaf) -> npt.NDArray[Any]:
    """The array of a leaf; an empty stand-in for one that is not in memory."""
    return leaf.array if isinstance(leaf, _Plain) else np.empty((0,), leaf.dtype)


def _all(leaf: _Leaf) -> npt.NDArray[Any]:
    return leaf.array if isinstance(leaf, _Plain) else leaf.take(np.arange(len(leaf)))
