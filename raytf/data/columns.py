"""Arrow columns as numpy arrays: which types are taken, their shapes, and the decoding.

Owns every rule about types and nulls. Numbers and bools become arrays of the same type; strings and
binary become `bytes` objects (strings in UTF-8, as TensorFlow has them); dictionary encoding is
undone; lists of one length become a further dimension. Decimals, times, structs and maps are
refused: a silent conversion would lose digits, zones or names.
"""

# pyarrow and fsspec have no type stubs, so their objects are Any here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from raytf.data.arrays import ArraySpec
from raytf.errors import DataError

__all__ = ["column_spec", "decode", "estimate_bytes", "is_variable_list", "ragged_text"]


def is_variable_list(arrow_type: Any) -> bool:
    """Returns whether lists of this type may differ in length as far as the type says."""
    import pyarrow.types as types

    return types.is_list(arrow_type) or types.is_large_list(arrow_type)


def column_spec(name: str, arrow_type: Any, list_size: int | None = None) -> ArraySpec:
    """Returns shape and dtype of a column.

    Args:
        name: of the column, for messages.
        arrow_type: a pyarrow DataType.
        list_size: the length of the lists if the type is a list of any length.

    Raises:
        DataError: the type cannot be trained on; the message says what to do.
    """
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_dictionary(arrow_type):
        return column_spec(name, arrow_type.value_type)
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        if arrow_type.permutation not in (None, list(range(len(arrow_type.shape)))):
            raise DataError(f"Column {name!r} is {arrow_type}: permuted tensors are not taken.")
        inner = column_spec(name, arrow_type.value_type)
        return ArraySpec((*arrow_type.shape, *inner.shape), inner.dtype)
    if types.is_fixed_size_list(arrow_type):
        inner = column_spec(name, arrow_type.value_type)
        return ArraySpec((arrow_type.list_size, *inner.shape), inner.dtype)
    if is_variable_list(arrow_type):
        if list_size is None:
            raise DataError(
                f"Column {name!r} is {arrow_type}: lists in lists are taken with fixed sizes only. "
                "Write it as a fixed-size list, or flat, and reshape it in transform."
            )
        inner = column_spec(name, arrow_type.value_type)
        return ArraySpec((list_size, *inner.shape), inner.dtype)
    if _is_bytes(arrow_type):
        return ArraySpec((), "bytes")
    if types.is_boolean(arrow_type):
        return ArraySpec((), "bool")
    if types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return ArraySpec((), np.dtype(arrow_type.to_pandas_dtype()).name)
    raise DataError(
        f"Column {name!r} has type {arrow_type}, which cannot be trained on: {_hint(arrow_type)} "
        "Taken are numbers, bools, strings, binary, and lists of them of one length. Leave it out "
        "with columns=[...] if it is no feature."
    )


def _is_bytes(arrow_type: Any) -> bool:
    import pyarrow.types as types

    return (
        types.is_string(arrow_type)
        or types.is_large_string(arrow_type)
        or types.is_string_view(arrow_type)
        or types.is_binary(arrow_type)
        or types.is_large_binary(arrow_type)
        or types.is_binary_view(arrow_type)
        or types.is_fixed_size_binary(arrow_type)
    )


def _hint(arrow_type: Any) -> str:
    import pyarrow.types as types

    if types.is_temporal(arrow_type):
        return "TensorFlow has no times. Write it as a number, for example seconds as int64."
    if types.is_decimal(arrow_type):
        return "TensorFlow has no decimals. Write it as double, or as an integer of cents."
    if types.is_struct(arrow_type) or types.is_map(arrow_type):
        return "write each of its fields as a column of its own."
    if types.is_null(arrow_type):
        return "all its values are null."
    return "TensorFlow has no such type."


def estimate_bytes(spec: ArraySpec, num_rows: int, encoded_bytes: int) -> int:
    """Returns what a column chunk takes in memory: exact for numbers, an estimate for strings.

    Args:
        spec: of the column.
        num_rows: of the chunk.
        encoded_bytes: of the chunk in the file, uncompressed (from the footer).
    """
    num_values = num_rows * math.prod(spec.shape)
    if spec.dtype == "bytes":
        return encoded_bytes + 41 * num_values  # a pointer and the head of a bytes object each
    return num_values * np.dtype(spec.dtype).itemsize


def decode(column: Any, spec: ArraySpec, where: str) -> npt.NDArray[Any]:
    """Returns a column as one array, maybe a read-only view of Arrow's memory.

    Args:
        column: a pyarrow ChunkedArray.
        spec: what `column_spec` said of it.
        where: the column and its place, for messages.

    Returns:
        Shape (rows, *spec.shape); dtype object if spec.dtype is "bytes".

    Raises:
        DataError: the column has nulls, or lists of other lengths than `spec` has.
    """
    chunks = [_decode_array(chunk, spec.shape, where) for chunk in column.chunks if len(chunk)]
    values = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    return values.reshape(len(column), *spec.shape)


def _decode_array(array: Any, shape: tuple[int, ...], where: str) -> npt.NDArray[Any]:
    """The values of an array, those of lists one after the other."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise DataError(
            f"{where} has {array.null_count} nulls, which are no numbers. Fill them first, or drop "
            "those rows."
        )
    if types.is_dictionary(array.type):
        values = _decode_array(array.dictionary, shape, where)
        return values[array.indices.to_numpy(zero_copy_only=False)]
    if types.is_fixed_size_list(array.type):
        return _decode_array(array.flatten(), shape[1:], where)
    if is_variable_list(array.type):
        sizes = pc.call_function("min_max", [array.value_lengths()]).as_py()
        if sizes["min"] != shape[0] or sizes["max"] != shape[0]:
            raise DataError(ragged_text(where, f"{sizes['min']} to {sizes['max']} values"))
        return _decode_array(array.flatten(), shape[1:], where)
    if _is_bytes(array.type):
        return _decode_bytes(array)
    return array.to_numpy(zero_copy_only=False)


def ragged_text(where: str, found: str) -> str:
    """Returns the message for lists that differ in length."""
    return (
        f"{where} is ragged: its lists have {found}. All lists of a column must have one length: "
        "pad or cut them when writing the file."
    )


def _decode_bytes(array: Any) -> npt.NDArray[Any]:
    import pyarrow as pa
    import pyarrow.types as types

    is_text = types.is_string(array.type) or types.is_large_string(array.type)
    if is_text:
        # Words and categories repeat: one bytes object for each different one saves memory.
        encoded = array.dictionary_encode()
        words = encoded.dictionary.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
        return words[encoded.indices.to_numpy(zero_copy_only=False)]
    return array.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
