"""Sources in memory and sequences: what is read, what is refused and in which words."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from raytf.data.arrays import ArraySpec, map_leaves, named_leaves
from raytf.data.sources import (
    ArraySource,
    SequenceSource,
    Source,
    as_source,
    check_batch,
    is_factory,
)
from raytf.errors import ConfigError, DataError

X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
Y = np.arange(10)
ROWS = np.array([7, 0, 7, 3])


def equal(one: Any, other: Any) -> bool:
    """Equal structures of equal arrays with equal dtypes."""
    if isinstance(one, tuple):
        return isinstance(other, tuple) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and np.array_equal(one, other)


class Squares:
    """A sequence like a torch Dataset."""

    def __init__(self, size: int = 10, items: dict[int, Any] | None = None) -> None:
        self.size = size
        self.items = items or {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if i >= self.size:
            raise IndexError(i)
        return self.items.get(i, (np.full((2,), i, np.float32), i * i))


class Foreign:
    """Batch-indexed like zarr: takes arrays of row numbers, is no numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self.array[rows]


SOURCES = {
    "arrays": lambda: ArraySource(X, Y),
    "weighted": lambda: ArraySource(X, Y, np.ones(10, np.float32)),
    "x only": lambda: ArraySource(X),
    "dict": lambda: ArraySource({"a": X, "b": (X[:, 0], Y)}, {"out": Y}),
    "foreign": lambda: ArraySource(Foreign(X), Y),
    "sequence": lambda: SequenceSource(Squares()),
    "list": lambda: SequenceSource([({"a": X[i]}, Y[i], 0.5) for i in range(10)]),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_the_contract(make: Any) -> None:
    """What a pipeline relies on, for every source."""
    source = make()
    assert isinstance(source, Source)
    assert len(source) == 10
    spec, element = source.spec(), source.read(ROWS)
    assert len(spec) == len(element) == 3
    for (name, want), (path, array) in zip(
        named_leaves(spec, "e"), named_leaves(element, "e"), strict=True
    ):
        assert name == path
        assert (array.shape[1:], array.dtype.name) == (want.shape, want.dtype)
        assert len(array) == len(ROWS)
    assert equal(map_leaves(lambda a: a[[1]], element), source.read(np.array([0])))
    assert equal(map_leaves(lambda a: a[:0], element), source.read(ROWS[:0]))
    map_leaves(lambda a: a.fill(0), element)  # the caller may write to what it got
    again = source.read(ROWS)
    assert equal(map_leaves(lambda a: a[[0]], again), map_leaves(lambda a: a[[2]], again))
    assert again[0] is not None and any(a.any() for _, a in named_leaves(again, ""))
    assert equal(pickle.loads(pickle.dumps(source)).read(ROWS), again)
    assert source.blocks() is None
    whole = source.in_memory()
    if whole is not None:
        assert equal(map_leaves(lambda a: a[ROWS], whole), again)


# ---------------------------------------------------------------------------- arrays


def test_array_source_reads_rows_as_they_are() -> None:
    source = ArraySource(X, Y)
    x, y, weight = source.read(ROWS)
    assert np.array_equal(x, X[ROWS]) and np.array_equal(y, Y[ROWS]) and weight is None
    assert source.spec() == (ArraySpec((2, 3), "float32"), ArraySpec((), "int64"), None)
    assert source.in_memory()[0] is X  # no copy


def test_array_source_takes_structures() -> None:
    source = ArraySource({"image": X, "meta": (Y, X[:, 0, 0])}, (Y, Y * 2), Y)
    x, y, weight = source.read(ROWS)
    assert list(x) == ["image", "meta"]
    assert np.array_equal(x["meta"][1], X[ROWS, 0, 0])
    assert np.array_equal(y[1], Y[ROWS] * 2)
    assert np.array_equal(weight, Y[ROWS])


def test_array_source_takes_what_numpy_takes() -> None:
    class Tensor:  # like a tensor of another framework
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return X

    source = ArraySource(Tensor(), list(range(10)))
    assert equal(source.read(ROWS)[:2], (X[ROWS], Y[ROWS]))
    assert ArraySource([[1, 2], [3, 4]]).spec()[0] == ArraySpec((2,), "int64")


def test_array_source_takes_big_endian_arrays() -> None:
    x = ArraySource(Y.astype(">i4"), Y).read(ROWS)[0]
    assert x.dtype == np.dtype("int32") and x.dtype.isnative
    assert np.array_equal(x, Y[ROWS])


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array(["a", "bcd"]), "str"),
        (np.array([b"a", b"bcd"]), "bytes"),
        (np.array([True, False]), "bool"),
        (np.array([1, 2], np.float16), "float16"),
        (np.array([1, 2], np.uint64), "uint64"),
        (np.array([1, 2], np.complex64), "complex64"),
    ],
)
def test_array_source_keeps_dtypes(array: np.ndarray, dtype: str) -> None:
    source = ArraySource(array)
    assert source.spec()[0] == ArraySpec((), dtype)
    assert equal(source.read(np.array([1]))[0], array[1:])


def test_array_source_reads_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        data = file.create_dataset("x", data=X)
        source = ArraySource(data, Y)
        assert equal(source.read(ROWS)[0], X[ROWS])  # h5py itself wants rows sorted and once
        assert source.spec()[0] == ArraySpec((2, 3), "float32")
        assert source.in_memory() is None


def test_a_memory_map_travels_as_its_path(tmp_path: Path) -> None:
    big = np.arange(400_000, dtype=np.float32).reshape(1000, 400)
    np.save(tmp_path / "x.npy", big)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArraySource(mapped)
    assert source.in_memory() is None
    data = pickle.dumps(source)
    assert len(data) < 2000
    assert equal(pickle.loads(data).read(ROWS)[0], big[ROWS])
    (tmp_path / "x.npy").unlink()
    with pytest.raises(DataError, match=r"x\.npy cannot be opened on this node.*all nodes share"):
        pickle.loads(data)


@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_maps_keep_offset_and_order(tmp_path: Path, order: Any) -> None:
    path = tmp_path / "raw.bin"
    path.write_bytes(b"header__" + X.tobytes(order))
    mapped = np.memmap(path, np.float32, "r", 8, X.shape, order)
    assert equal(pickle.loads(pickle.dumps(ArraySource(mapped))).read(ROWS)[0], X[ROWS])


@pytest.mark.parametrize("mode", ["r", "c"])
def test_part_of_a_memory_map_travels_by_value(tmp_path: Path, mode: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
    part = mapped[2:]
    if mode == "c":
        mapped[2:] = part = mapped[2:] + 1  # is in memory only
        part = mapped
    source = ArraySource(part)
    expected = np.array(part)
    (tmp_path / "x.npy").unlink()
    assert equal(pickle.loads(pickle.dumps(source)).read(ROWS[3:])[0], expected[ROWS[3:]])


def bad(array: np.ndarray, *places: Any, value: Any = np.nan) -> np.ndarray:
    copy = array.astype(np.float64)
    for place in places:
        copy[place] = value
    return copy


class Sparse:
    shape = (10, 2)


Sparse.__module__ = "scipy.sparse"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ArraySource(None), "x is None"),
        (lambda: ArraySource((X, None)), r"x\[1\] is None"),
        (lambda: ArraySource(X[:0], Y[:0]), r"x has 0 rows: .*shape \(0, 2, 3\)"),
        (lambda: ArraySource(Foreign(X[:0])), "x has 0 rows"),
        (lambda: ArraySource([]), "x has 0 rows"),
        (lambda: ArraySource(np.zeros((4, 0))), r"rows without any values.*\(4, 0\)"),
        (lambda: ArraySource({}), "x is an empty dict"),
        (lambda: ArraySource(X, ()), "y is an empty tuple"),
        (lambda: ArraySource({1: X}), "x has the key 1; names .* strings"),
        (lambda: ArraySource(5.0, Y), r"x is a scalar \(float\)"),
        (lambda: ArraySource((1, 2)), r"x\[0\] is a scalar \(int\)"),
        (lambda: ArraySource("train.npy"), r"x is a scalar \(str\)"),
        (lambda: ArraySource(X, {"a": Y[0]}), r"y\['a'\] is a scalar"),
        (lambda: ArraySource([[1, 2], [3]]), "x is ragged.*Pad or cut.*inhomogeneous"),
        (lambda: ArraySource(np.array([[1], [2, 3]], object)), "x has dtype object.*Pad rows"),
        (lambda: ArraySource(X, np.array(["a", None] * 5)), "y has dtype object.*astype"),
        (lambda: ArraySource(Y.astype("M8[s]")), r"datetime64\[s\].*no times"),
        (lambda: ArraySource(Y.astype("m8[s]")), r"timedelta64\[s\].*no durations"),
        (lambda: ArraySource(np.zeros(3, "i4,f4")), "no records. Use a dict"),
        (lambda: ArraySource(Y.astype(np.longdouble)), "float128|longdouble"),
        (lambda: ArraySource([X, Y]), "x is a list of arrays.*tuple.*np.stack"),
        (lambda: ArraySource(Sparse()), r"x is a sparse matrix.*\.toarray\(\)"),
        (
            lambda: ArraySource(X, Y[:9]),
            r"same number of rows .*Received: x \(10, 2, 3\), y \(9,\)",
        ),
        (
            lambda: ArraySource({"a": X, "b": Foreign(X[1:])}, Y),
            r"x\['a'\] \(10, 2, 3\), x\['b'\] \(9, 2, 3\), y \(10,\)",
        ),
        (lambda: ArraySource(X, Y, Y[:3]), r"y \(10,\), sample_weight \(3,\)"),
        (
            lambda: ArraySource(X, bad(X, (4, 1, 2), (6, 0, 0))),
            "y has 2 NaN values, the first in row 4: the loss would be NaN",
        ),
        (lambda: ArraySource(X, (Y, bad(Y, 9))), r"y\[1\] has 1 NaN values, the first in row 9"),
        (
            lambda: ArraySource(X, Y, bad(Y, 3, 5)),
            "sample_weight has 2 values that are NaN, infinite or negative, the first in row 3",
        ),
        (lambda: ArraySource(X, Y, bad(Y, 2, value=-0.1)), "1 values .*negative.*row 2"),
        (lambda: ArraySource(X, Y, bad(Y, 8, value=np.inf)), "1 values .*infinite.*row 8"),
        (lambda: ArraySource(X, Y, Foreign(bad(Y, 8))), "1 values that are NaN.*row 8"),
        (lambda: ArraySource(X, Y, Y.astype(str)), "sample_weight must be real numbers.*dtype str"),
        (
            lambda: ArraySource(np.ma.masked_greater(Y, 7)),
            "masked array with 2 masked values.*Fill",
        ),
        (
            lambda: ArraySource(types.SimpleNamespace(shape=(3,))),
            "x has dtype object",
        ),
    ],
)
def test_array_source_refuses(make: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


def test_array_source_takes_harmless_relatives_of_what_it_refuses() -> None:
    ArraySource(bad(X, 3), Y)  # NaN in x: a normalising layer may expect it
    ArraySource(X, bad(Y, 3, value=np.inf))
    ArraySource(X, Y, Y * 0)
    assert np.array_equal(ArraySource(np.ma.array(Y)).read(ROWS)[0], Y[ROWS])


# ---------------------------------------------------------------------------- sequences


def test_sequence_source_reads_and_stacks() -> None:
    source = SequenceSource(Squares())
    x, y, weight = source.read(ROWS)
    assert np.array_equal(x, [[7, 7], [0, 0], [7, 7], [3, 3]]) and x.dtype == np.float32
    assert np.array_equal(y, ROWS**2) and weight is None
    assert source.spec() == (ArraySpec((2,), "float32"), ArraySpec((), "int64"), None)


def test_sequence_source_takes_items_without_y_and_strings() -> None:
    assert SequenceSource([({"t": "ab"},), ({"t": "abcd"},)]).read(np.array([0, 1]))[0][
        "t"
    ].tolist() == ["ab", "abcd"]
    assert SequenceSource(Squares(2, {0: X[0], 1: X[1]})).spec()[1:] == (None, None)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            (np.zeros((3,), np.float32), 1),
            r"Sample 3 differs from sample 0. Expected: x \(2,\) float32, y \(\) int64. "
            r"Received: x \(3,\) float32, y \(\) int64.*pad, resize or cast",
        ),
        ((np.zeros((2,)), 1), r"Received: x \(2,\) float64, y"),
        ((np.zeros((2,), np.float32), 1.0), r"y \(\) float64"),
        ((np.zeros((2,), np.float32), None), r"Received: x \(2,\) float32\. All"),
        ((np.zeros((2,), np.float32), 1, 1.0), r"sample_weight \(\) float64"),
        (({"a": np.zeros((2,), np.float32)}, 1), r"Received: x\['a'\] \(2,\)"),
        ([1, 2], r"Sample 3 is a list. Return a tuple \(x, y\)"),
        ((1, 2, 3, 4), r"Sample 3 must be .* Received: a tuple of 4"),
        ((), r"Sample 3 must be .* Received: a tuple of 0"),
        ((None, 1), "Sample 3 must be .* with x=None"),
        ((np.array([1, "a"], object), 1), "x of sample 3 has dtype object"),
        (([[1], [1, 2]], 1), "x of sample 3 is ragged"),
    ],
)
def test_sequence_source_names_the_sample_that_differs(item: Any, text: str) -> None:
    source = SequenceSource(Squares(10, {3: item}))
    assert len(source.read(np.array([0, 1, 2]))[1]) == 3
    with pytest.raises(DataError, match=text):
        source.read(np.array([2, 3]))


def test_sequence_source_refuses_bad_values_by_row() -> None:
    samples = [(1.0, 2.0, 1.0), (1.0, np.nan, 1.0), (1.0, 2.0, -1.0)]
    source = SequenceSource(samples)
    with pytest.raises(DataError, match="y has 1 NaN values, the first in row 1"):
        source.read(np.array([0, 1]))
    with pytest.raises(DataError, match="sample_weight has 1 .* row 2"):
        source.read(np.array([2]))
    with pytest.raises(DataError, match="y has 1 NaN values, the first in row 0"):
        SequenceSource(samples[1:])
    with pytest.raises(DataError, match="0 samples: there is nothing"):
        SequenceSource([])


def test_sequence_source_explains_a_wrong_length() -> None:
    sequence = Squares(5)
    source = SequenceSource(sequence)
    sequence.size = 3
    with pytest.raises(DataError, match="says 5 samples, but sample 4 raises IndexError"):
        source.read(np.array([4]))


def test_a_users_own_error_is_left_as_it_is() -> None:
    class Broken(Squares):
        def __getitem__(self, i: int) -> Any:
            if i == 3:
                raise PermissionError("bucket")
            return super().__getitem__(i)

    with pytest.raises(PermissionError, match="bucket"):
        SequenceSource(Broken()).read(np.array([3]))


# ---------------------------------------------------------------------------- as_source


class Own:
    def __len__(self) -> int:
        return 3

    def spec(self) -> Any: ...

    def read(self, rows: Any) -> Any: ...


class Whole(Own):
    def in_memory(self) -> None: ...

    def blocks(self) -> None: ...


def named(cls_name: str, module: str, **attributes: Any) -> Any:
    """An instance of a class that looks as if another package had made it."""
    return type(cls_name, (), {"__module__": module, **attributes})()


SIZED = {"__len__": lambda self: 3, "__getitem__": lambda self, i: (i, i)}


def test_as_source_passes_sources_and_wraps_sequences() -> None:
    for source in (ArraySource(X, Y), Whole()):
        assert as_source(source, "train_data") is source
        assert not is_factory(source)
    wrapped = as_source(Squares(), "train_data")
    assert isinstance(wrapped, SequenceSource) and not is_factory(wrapped)
    assert len(as_source([(1, 2), (3, 4)], "train_data")) == 2
    callable_source = type("Callable", (Whole,), {"__call__": lambda self, ctx: None})()
    assert as_source(callable_source, "train_data") is callable_source
    assert not is_factory(callable_source)


def test_as_source_passes_factories() -> None:
    def make(ctx: Any) -> Any: ...

    for factory in (make, functools.partial(make), lambda ctx: ctx):
        assert as_source(factory, "train_data") is factory
        assert is_factory(factory)


def generate() -> Any:
    yield 1, 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (named("Dataset", "ray.data.dataset", **SIZED), "ray.data Dataset, .*not built yet.*Parq"),
        (named("DataIterator", "ray.data.iterator"), "ray.data DataIterator, .*not built yet"),
        (
            named("_MapDataset", "tensorflow.python.data.ops.map_op", **SIZED),
            r"tf.data.Dataset.*def train_data\(ctx\): return dataset",
        ),
        (named("PyDataset", "keras.src.trainers.data_adapters", **SIZED), "whole batches.*one sam"),
        (named("Sequence", "tf_keras.src.utils", **SIZED), "Keras Sequence, .*whole batches"),
        (
            type("Mine", (type(named("PyDataset", "keras.src.x", **SIZED)),), {})(),
            "train_data is a Keras Mine",
        ),
        ((X, Y), r"train_data is a tuple.*write raytf.ArraySource\(x, y\)"),
        ({"x": X}, r"train_data is a dict.*ArraySource"),
        (X, r"train_data is a ndarray.*ArraySource"),
        (named("DataFrame", "pandas.core.frame", **SIZED), "DataFrame.*ArraySource"),
        (named("Table", "pyarrow.lib", **SIZED), "Table.*ArraySource"),
        (named("Tensor", "torch", shape=(3,), dtype=1, **SIZED), "Tensor.*ArraySource"),
        ([X, Y], r"list of ndarray.*one tuple \(x, y\) per sample.*ArraySource"),
        ("s3://bucket/data", r"path or URL: 's3://bucket/data'.*raytf.ParquetSource\(url\)"),
        (Path("/data"), "path or URL.*ParquetSource"),
        (b"/data", "path or URL.*ParquetSource"),
        (generate(), "train_data is a generator, which has no random access.*f.ctx. -> tf.data"),
        (iter([1]), "list_iterator, which has no random access"),
        ({1, 2}, "set, which has no random access"),
        (Squares, "train_data is the class Squares. Give an instance"),
        (5, "must be a raytf source, .*Received: int"),
        (None, "Received: NoneType"),
        (Own(), r"Own\) looks like a source but lacks in_memory, blocks.*may return None"),
    ],
)
def test_as_source_refuses(data: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        as_source(data, "train_data")


def test_as_source_names_the_argument() -> None:
    with pytest.raises(ConfigError, match="^validation_data is a tuple"):
        as_source((X, Y), "validation_data")
    with pytest.raises(DataError, match="0 samples"):
        as_source([], "train_data")


def test_check_batch() -> None:
    check_batch(1, 4, 4)
    with pytest.raises(ConfigError, match="global_batch_size=3 is less than num_workers=4"):
        check_batch(100, 3, 4)
    with pytest.raises(DataError, match="0 rows: there is nothing to train on"):
        check_batch(0, 4, 4)


def test_the_floor_imports_neither_tensorflow_nor_ray_nor_file_formats() -> None:
    code = (
        "import sys, raytf.data; "
        "heavy = {'tensorflow', 'keras', 'ray', 'pyarrow', 'fsspec'} & set(sys.modules); "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
