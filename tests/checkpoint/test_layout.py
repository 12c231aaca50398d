"""Shares are balanced and complete, and every file opens with the safetensors package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from raytf.checkpoint.dtypes import ITEMSIZE, dtype_code, numpy_dtype
from raytf.checkpoint.layout import Image, Slice, TensorInfo, divide, group
from raytf.errors import ConfigError
from tests.checkpoint.states import filled, infos, state

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(SHAPES, st.sampled_from(sorted(ITEMSIZE)), st.booleans()), max_size=12
).map(lambda found: [TensorInfo(f"t{i}", *each) for i, each in enumerate(found)])


def whole(info: TensorInfo) -> Slice:
    return Slice(info, 0, info.rows)


@given(TENSORS, st.integers(1, 7))
def test_shares_hold_every_row_once_and_are_balanced(
    tensors: list[TensorInfo], num_shares: int
) -> None:
    shares = divide(tensors, num_shares)
    assert len(shares) == num_shares
    assert shares == divide(list(tensors), num_shares)
    rows: dict[str, list[int]] = {t.name: [] for t in tensors}
    pieces: dict[str, int] = {t.name: 0 for t in tensors}
    for share in shares:
        for piece in share:
            rows[piece.tensor.name] += range(piece.start, piece.stop)
            pieces[piece.tensor.name] += 1
    for tensor in tensors:
        assert rows[tensor.name] == list(range(tensor.rows))
        assert pieces[tensor.name] >= 1, "an empty tensor is in some share, too"
    total = sum(t.nbytes for t in tensors)
    assert sum(piece.nbytes for share in shares for piece in share) == total
    largest_row = max((t.row_bytes for t in tensors), default=0)
    for share in shares:
        assert abs(sum(piece.nbytes for piece in share) - total / num_shares) <= largest_row


def test_frozen_and_other_bytes_are_each_spread_over_all() -> None:
    tensors = [TensorInfo("f", (100,), "F32", True), TensorInfo("w", (100,), "F32")]
    for share in divide(tensors, 4):
        assert [(piece.tensor.name, piece.nbytes) for piece in share] == [("w", 100), ("f", 100)]


def test_names_of_parts() -> None:
    info = TensorInfo("w", (10, 2), "F32")
    assert whole(info).key == "w"
    assert Slice(info, 2, 5).key == "w[2:5]"
    assert Slice(info, 2, 5).shape == (3, 2)
    assert Slice(info, 2, 5).nbytes == 24
    scalar = TensorInfo("s", (), "I64")
    assert (scalar.rows, scalar.nbytes, whole(scalar).key, whole(scalar).shape) == (1, 8, "s", ())


@given(TENSORS, st.integers(1, 200))
def test_groups_are_bounded_and_keep_kinds_apart(tensors: list[TensorInfo], limit: int) -> None:
    slices = [whole(t) for t in tensors]
    files = group(slices, limit)
    assert all(files)
    flat = [piece for file in files for piece in file]
    assert sorted(flat, key=lambda p: p.key) == sorted(slices, key=lambda p: p.key)
    for file in files:
        assert len({piece.tensor.stable for piece in file}) == 1
        assert sum(p.nbytes for p in file) <= limit or len([p for p in file if p.nbytes]) == 1


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_shares"):
        divide([], 0)
    with pytest.raises(ConfigError, match="max_bytes"):
        group([], 0)


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    **state(1),
    "w[0:2]": np.arange(3, dtype=np.int32),
    "__metadata__": np.arange(2, dtype=np.uint8),
    "": np.arange(4, dtype=np.float32),
    'quote " back \\ line \n ü 漢': np.arange(5, dtype=np.uint16),
}


def test_the_safetensors_package_opens_what_is_written(tmp_path: Path) -> None:
    slices = tuple(whole(info) for info in infos(ARRAYS))
    image = filled(slices, ARRAYS)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(image.pieces()))
    with safetensors.safe_open(path, "numpy") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert len(found) == len(ARRAYS)
    for name, array in ARRAYS.items():
        read = found["__metadata__'" if name == "__metadata__" else name]
        assert read.shape == array.shape
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()


def test_equal_keys_in_one_file_are_told_apart(tmp_path: Path) -> None:
    tensors = {"w": np.arange(4, dtype=np.int32), "w[0:2]": np.arange(9, 12, dtype=np.int32)}
    first, second = infos(tensors)
    image = filled((Slice(first, 0, 2), whole(second), Slice(first, 2, 4)), tensors)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(image.pieces()))
    found = safetensors.numpy.load_file(path)
    assert {key: value.tolist() for key, value in found.items()} == {
        "w[0:2]": [0, 1],
        "w[0:2]'": [9, 10, 11],
        "w[2:4]": [2, 3],
    }


def test_image_is_laid_out_as_it_says() -> None:
    slices = tuple(whole(info) for info in infos(ARRAYS))
    image = filled(slices, ARRAYS)
    data = b"".join(image.pieces())
    head = int.from_bytes(data[:8], "little")
    assert head % 8 == 0
    assert json.loads(data[8 : 8 + head])
    assert len(data) == image.nbytes == image.buffer.nbytes
    assert xxhash.xxh3_64_hexdigest(data) == image.xxh3
    for piece, offset, digest in zip(slices, image.offsets, image.digests(), strict=True):
        stored = data[offset : offset + piece.nbytes]
        assert stored == ARRAYS[piece.tensor.name].tobytes()
        assert xxhash.xxh3_64_hexdigest(stored) == digest
        assert offset % ITEMSIZE[piece.tensor.dtype] == 0


def test_the_buffer_is_reused() -> None:
    info = TensorInfo("w", (2,), "U8")
    image = Image([whole(info)])
    memory = image.buffer.ctypes.data
    image.views[0][:] = [1, 2]
    first = image.digests(), image.xxh3
    image.views[0][:] = [3, 4]
    assert (image.digests(), image.xxh3) != first
    assert bytes(image.pieces()[0])[-2:] == b"\3\4"
    assert image.buffer.ctypes.data == memory


def test_subset_shares_memory_and_is_a_file_of_its_own(tmp_path: Path) -> None:
    slices = tuple(whole(info) for info in infos(ARRAYS))
    image = filled(slices, ARRAYS)
    chosen = [4, 0, 2, 3]
    part = image.subset(chosen)
    data = b"".join(part.pieces())
    assert len(data) == part.nbytes
    assert part.xxh3 == xxhash.xxh3_64_hexdigest(data)
    assert part.digests() == [image.digests()[i] for i in chosen]
    for piece, offset in zip(part.slices, part.offsets, strict=True):
        assert data[offset : offset + piece.nbytes] == ARRAYS[piece.tensor.name].tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    assert set(safetensors.numpy.load_file(path)) == {slices[i].key for i in chosen}
    image.views[0][:] = 0
    assert b"".join(part.pieces()) != data


def test_types() -> None:
    for code, size in ITEMSIZE.items():
        assert numpy_dtype(code).itemsize == size
        assert dtype_code(numpy_dtype(code)) == code
        assert dtype_code(numpy_dtype(code).name) == code
    for wrong in ("complex128", np.dtype("U3"), object):
        with pytest.raises(ConfigError, match="cannot be stored"):
            dtype_code(wrong)
    with pytest.raises(ConfigError, match="F31"):
        numpy_dtype("F31")
