"""The element types of tensors on disk: safetensors' codes, their sizes and their NumPy types.

Owns the two-way table. bfloat16 and the 8-bit floats come from `ml_dtypes`, which is imported only
when one of them is met.
"""

# ml_dtypes registers its types with NumPy at run time: to a type checker they are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from raytf.errors import ConfigError

__all__ = ["ITEMSIZE", "dtype_code", "numpy_dtype"]

_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_CODES = {name: code for table in (_NUMPY, _ML_DTYPES) for code, name in table.items()}

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}  # bytes of one element


def numpy_dtype(code: str) -> np.dtype[Any]:
    """The NumPy type of a safetensors code.

    Raises:
        ConfigError: the code is not one that raytf writes.
    """
    if code in _NUMPY:
        return np.dtype(_NUMPY[code])
    if code in _ML_DTYPES:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), _ML_DTYPES[code]))
    raise ConfigError(f"{code!r} is no element type that raytf stores ({', '.join(ITEMSIZE)}).")


def dtype_code(dtype: Any) -> str:
    """The safetensors code of a NumPy type, or of a type's name such as "float32", "bfloat16".

    Raises:
        ConfigError: tensors of this type cannot be stored.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _CODES:
        raise ConfigError(
            f"Tensors of type {name!r} cannot be stored; these can: {', '.join(_CODES)}."
        )
    return _CODES[name]
