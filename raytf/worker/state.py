"""All state of one rank by name: what a checkpoint holds, and how it is copied out and put back.

Variables are equal on all ranks, so each rank copies its share of them only. What a rank has for
itself (random state, callbacks on the chief) goes along as JSON or as tensors of its own.
"""

from __future__ import annotations

import base64
import mmap
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from raytf.checkpoint.layout import Slice, TensorInfo, divide
from raytf.checkpoint.writer import Images
from raytf.errors import ConfigError
from raytf.worker.callback_state import CallbackStates
from raytf.worker.survivor import random_state, set_random_state

__all__ = [
    "Cell",
    "RankState",
    "Variables",
    "aligned",
    "array_of",
    "base_name",
    "code_of",
    "difference",
]

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNMENT = 64  # bytes; what TensorFlow's kernels count on
_MIN_LENT_BYTES = 64 * 1024
_NAMES = {code: name for name, code in _CODES.items()}


def code_of(dtype: Any, what: str) -> str:
    """safetensors' name of a dtype.

    Raises:
        ConfigError: it has none (strings); `what` names the tensor.
    """
    name = tf.as_dtype(dtype).name
    if name not in _CODES:
        raise ConfigError(
            f"{what} has dtype {name}, which a checkpoint cannot hold. Keep such values outside of "
            "the model's state."
        )
    return _CODES[name]


def array_of(data: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Bytes of a checkpoint (uint8, one axis) as an array of a dtype and shape; no copy, if they
    lie in one piece.
    """
    kind = tf.as_dtype(_NAMES[dtype]).as_numpy_dtype
    return np.frombuffer(np.ascontiguousarray(data), dtype=kind).reshape(tuple(shape))


def aligned(nbytes: int) -> np.ndarray:
    """New memory (uint8) that TensorFlow can use in place."""
    if nbytes < _MIN_LENT_BYTES:
        return np.empty(nbytes, np.uint8)
    # numpy asks for huge pages. Virtual machines that give free ones back to their host get them
    # anew, each in a millisecond: twice the time of small pages, which are used again.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)


@dataclass(frozen=True)
class Cell:
    """One variable of a rank.

    Attributes:
        name: in the checkpoint.
        variable: this rank's own `tf.Variable`.
        stable: expected not to change (frozen weights).
        alone: each rank has a value of its own (tf_keras's metrics).
        merge: what such values become for another number of ranks: "sum": rank 0 has the sum, the
            others zero; "mean": all have the mean; "own": a rank takes that of its number, a new
            one a variation of an old one's (random generators).
    """

    name: str
    variable: Any
    stable: bool = False
    alone: bool = False
    merge: Literal["sum", "mean", "own"] = "own"

    def info(self, name: str) -> TensorInfo:
        shape = tuple(self.variable.shape)
        return TensorInfo(name, shape, code_of(self.variable.dtype, name), self.stable)


@dataclass(frozen=True)
class _Source:
    info: TensorInfo
    read: Callable[[], Any]


class Variables:
    """All variables of a rank by the names they have in a checkpoint.

    Args:
        cells: the variables.
        rank: this rank; part of the names of those that it alone has.
    """

    def __init__(self, cells: Sequence[Cell], rank: int) -> None:
        self._rank = rank
        self.cells = {_of_rank(c.name, rank) if c.alone else c.name: c for c in cells}

    def tensors(self) -> dict[str, TensorInfo]:
        """What they are; those of one rank alone without its number."""
        return {cell.name: cell.info(cell.name) for cell in self.cells.values()}

    def for_ranks(
        self, arrays: dict[str, np.ndarray], then: int, now: int
    ) -> dict[str, np.ndarray]:
        """The arrays of a state of `then` ranks for this one of `now` ranks; see `Cell.merge`."""
        if then == now:
            return arrays
        mine: dict[str, np.ndarray] = {}
        for name, cell in self.cells.items():
            if cell.alone:
                old = [arrays[_of_rank(cell.name, rank)] for rank in range(then)]
                mine[name] = _merged(old, cell.merge, self._rank)
        return {**arrays, **mine}

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets every variable that `arrays` names.

        A variable may go on to use an array's memory until it is changed, which is in memory of its
        own then: nobody may write into the arrays.
        """
        for name, cell in self.cells.items():
            if name in arrays:
                cell.variable.assign(_lent(arrays[name]))


class RankState:
    """Captures and restores one rank.

    Args:
        variables: of the rank.
        callbacks: of this rank.
        rank: this rank.
        num_workers: ranks that share the writing.
    """

    def __init__(
        self,
        variables: Variables,
        callbacks: CallbackStates,
        rank: int,
        num_workers: int,
    ) -> None:
        self.callbacks = callbacks
        self.variables = variables
        self._rank = rank
        self._num_workers = num_workers
        self._divided: tuple[tuple[TensorInfo, ...], tuple[Slice, ...]] = ((), ())

    def capture(self, images_for: Callable[[Sequence[Slice]], Images]) -> tuple[Images, Any]:
        """Copies this rank's part of the state into buffers; the only thing that training waits
        for.

        Args:
            images_for: gives the buffers for these slices.

        Returns:
            The filled buffers, and this rank's JSON.
        """
        callbacks, arrays, own_arrays = self.callbacks.capture()
        shared, own = list[_Source](), list[_Source]()
        for name, cell in self.variables.cells.items():
            read = cell.variable.read_value
            (own if cell.alone else shared).append(_Source(cell.info(name), read))
        shared += [_of_array(name, array) for name, array in arrays.items()]
        own += [_of_array(name, array) for name, array in own_arrays.items()]
        slices = [*self._share([s.info for s in shared])]
        slices += [Slice(s.info, 0, s.info.rows) for s in own]
        images = images_for(slices)
        by_name = {source.info.name: source for source in (*shared, *own)}
        for image in images:
            for piece, view in zip(image.slices, image.views, strict=True):
                _copy(by_name[piece.tensor.name].read(), piece, view)
        return images, {"callbacks": callbacks, "random": self._read_random()}

    def _share(self, infos: list[TensorInfo]) -> tuple[Slice, ...]:
        key = tuple(infos)
        if self._divided[0] != key:
            self._divided = (key, divide(infos, self._num_workers)[self._rank])
        return self._divided[1]

    def _read_random(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        kind, keys, place, has_gauss, cached = np.random.get_state()
        return {
            "python": [version, _packed(np.array(words, np.uint32)), gauss],
            "numpy": [kind, _packed(np.asarray(keys, np.uint32)), place, has_gauss, cached],
            "tensorflow": random_state(),
        }

    def set_random(self, state: Mapping[str, Any]) -> None:
        """Puts Python's, NumPy's and TensorFlow's random state back."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(int(w) for w in _unpacked(words)), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, _unpacked(keys), *rest))
        set_random_state(state["tensorflow"])


def base_name(name: str) -> tuple[str, int | None]:
    """The name of a tensor without the number of the rank that alone has it, and that number."""
    base, at, rank = name.rpartition("@")
    return (base, int(rank)) if at and base and rank.isdigit() else (name, None)


def _of_rank(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def _merged(old: list[np.ndarray], merge: str, rank: int) -> np.ndarray:
    if merge == "sum":
        return np.sum(old, axis=0, dtype=old[0].dtype) if rank == 0 else np.zeros_like(old[0])
    if merge == "mean":
        return np.mean(old, axis=0).astype(old[0].dtype)
    if rank < len(old):
        return old[rank]
    varied = old[rank % len(old)].copy()
    varied.reshape(-1)[-1] ^= rank * 0x9E3779B9  # of a Philox generator's state the key
    return varied


def _of_array(name: str, array: np.ndarray) -> _Source:
    return _Source(
        TensorInfo(name, array.shape, code_of(array.dtype, name)), lambda: np.asarray(array)
    )


def _copy(value: Any, piece: Slice, view: np.ndarray) -> None:
    # Live memory of a variable, where `numpy()` would copy all of it first, other ranks' rows as
    # well: nothing of it may outlive this copy.
    array = np.asarray(value)
    rows = array[piece.start : piece.stop] if array.ndim else array
    np.copyto(view, np.ascontiguousarray(rows).reshape(-1).view(np.uint8))


def _lent(array: np.ndarray) -> Any:
    """A large array as a tensor in the same memory; others as they are.

    TensorFlow writes into no memory that is not its own: a variable that is assigned such a tensor
    is copied by the first operation that changes it (read in 2.21, `PrepareToUpdateVariable`).
    """
    plain = array.dtype.isbuiltin == 1 and array.dtype.kind in "fiuc"
    in_place = array.flags.carray and array.ctypes.data % _ALIGNMENT == 0
    if not plain or not in_place or array.nbytes < _MIN_LENT_BYTES:
        return array
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _packed(words: np.ndarray) -> str:
    return base64.b64encode(words.astype("<u4").tobytes()).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)


def difference(here: Mapping[str, TensorInfo], there: Mapping[str, Any]) -> list[str]:
    """How the tensors of a model and of a checkpoint differ; one line each, empty if they do not.

    Args:
        here: of the built model.
        there: of the checkpoint, objects with `shape` and `dtype`.
    """
    lines: list[str] = []
    for name in sorted({*here, *there}):
        mine, other = here.get(name), there.get(name)
        if mine is None:
            lines.append(f"- {name} {_described(other)} is in the checkpoint only")
        elif other is None:
            lines.append(f"+ {name} {_described(mine)} is in the model only")
        elif (tuple(mine.shape), mine.dtype) != (tuple(other.shape), other.dtype):
            lines.append(f"~ {name}: model {_described(mine)}, checkpoint {_described(other)}")
    return lines


def _described(info: Any) -> str:
    return f"{info.dtype}{list(info.shape)}"
