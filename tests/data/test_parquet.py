"""ParquetSource: columns to tensors, files on any URL, and memory that stays within its bound."""

from __future__ import annotations

import datetime
import decimal
import pickle
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import fsspec.implementations.local
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import cache
from raytf.data.arrays import ArraySpec
from raytf.data.cache import GroupCache, Table, count_bytes
from raytf.data.columns import decode
from raytf.data.order import Order
from raytf.data.parquet import ParquetSource
from raytf.data.sources import Source, as_source
from raytf.errors import ConfigError, DataError

N = 100


def frame(num_rows: int = N, start: int = 0) -> pa.Table:
    rows = np.arange(start, start + num_rows)
    return pa.table({"a": rows, "b": rows.astype(np.float32) / 2, "y": rows * 10})


def write(path: Path, table: pa.Table | None = None, rows: int = 10, **kwargs: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(frame() if table is None else table, path, row_group_size=rows, **kwargs)
    return str(path)


def column(array: Any, tmp_path: Path, **kwargs: Any) -> ParquetSource:
    """A source whose x is the only column of a new file, 3 rows in 2 row groups."""
    url = write(tmp_path / "c.parquet", pa.table({"c": array}), rows=2, **kwargs)
    return ParquetSource(url, columns="c")


def values(source: ParquetSource) -> np.ndarray:
    return source.read(np.arange(len(source)))[0]


# ---------------------------------------------------------------------------- contract


@pytest.mark.parametrize("cache_bytes", [1 << 20, 500])
def test_the_contract(tmp_path: Path, cache_bytes: int) -> None:
    url = write(tmp_path / "t.parquet")
    source = ParquetSource(url, label="y", cache_bytes=cache_bytes)
    assert isinstance(source, Source) and as_source(source, "train_data") is source
    assert len(source) == N
    specs = {"a": ArraySpec((), "int64"), "b": ArraySpec((), "float32")}
    assert source.spec() == (specs, ArraySpec((), "int64"), None)
    rows = np.array([71, 3, 71, 0, 99])
    x, y, weight = source.read(rows)
    assert x["a"].tolist() == rows.tolist() and x["b"].dtype == np.float32
    assert x["b"].tolist() == (rows / 2).tolist() and y.tolist() == (rows * 10).tolist()
    assert weight is None
    x["a"][:] = 0  # the caller may write to what it got
    assert source.read(rows)[0]["a"].tolist() == rows.tolist()
    assert source.read(rows[:0])[1].shape == (0,)
    again = pickle.loads(pickle.dumps(source))
    assert again.read(rows)[1].tolist() == y.tolist()
    assert (len(again), again.spec(), again.blocks()) == (N, source.spec(), source.blocks())
    assert source.decoded_bytes == N * 20


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_rows_in_any_order(parquet_url: str, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, N - 1), max_size=30)), np.int64)
    bound = data.draw(st.sampled_from([200, 450, 1 << 20]))
    x, y, _ = ParquetSource(parquet_url, label="y", cache_bytes=bound).read(rows)
    assert x["a"].tolist() == rows.tolist() and y.tolist() == (rows * 10).tolist()


@pytest.fixture(scope="module")
def parquet_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("parquet") / "t.parquet")


@pytest.mark.parametrize(
    ("arguments", "x", "y"),
    [
        ({"columns": "a"}, "a", None),
        ({"columns": ["b"], "label": "a"}, ["b"], "a"),
        ({"columns": ["b", "a"], "label": ["y"]}, ["b", "a"], ["y"]),
        ({"label": "a"}, ["b", "y"], "a"),
        ({}, ["a", "b", "y"], None),
        ({"label": "y", "sample_weight": "a"}, ["b"], "y"),
        ({"columns": "a", "label": "a"}, "a", "a"),
    ],
)
def test_columns_and_label(parquet_url: str, arguments: dict, x: Any, y: Any) -> None:
    source = ParquetSource(parquet_url, **arguments)
    expected = {"a": 7, "b": 3.5, "y": 70}
    for part, names in zip(source.read(np.array([7])), (x, y), strict=False):
        if isinstance(names, list):
            assert {name: v.tolist() for name, v in part.items()} == {
                name: [expected[name]] for name in names
            }
            assert list(part) == names
        elif names is None:
            assert part is None
        else:
            assert part.tolist() == [expected[names]]
    weight = source.read(np.array([7]))[2]
    assert (weight is None) == ("sample_weight" not in arguments)
    assert weight is None or weight.tolist() == [7]


def test_only_the_wanted_columns_are_read(
    parquet_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = pq.ParquetFile.read_row_group

    def spy(self: Any, i: int, columns: Any = None, **kwargs: Any) -> Any:
        asked.append((i, columns))
        return real(self, i, columns=columns, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    source = ParquetSource(parquet_url, columns="b", label="y")
    assert asked == []  # a source is made from footers
    source.read(np.array([25, 27]))
    assert asked == [(2, ["b", "y"])]
    source.read(np.array([29, 20]))
    assert len(asked) == 1
    whole = source.in_memory()
    assert sorted(i for i, _ in asked) == list(range(10))  # each once
    assert whole is not None and whole[0].tolist() == (np.arange(N) / 2).tolist()


# ---------------------------------------------------------------------------- types

TAKEN: list[tuple[str, Any, ArraySpec, list[Any]]] = [
    ("int8", pa.array([1, 2, 3], pa.int8()), ArraySpec((), "int8"), [1, 2, 3]),
    ("uint64", pa.array([1, 2, 2**63], pa.uint64()), ArraySpec((), "uint64"), [1, 2, 2**63]),
    ("half", pa.array([1, 2, 3], pa.float16()), ArraySpec((), "float16"), [1, 2, 3]),
    ("double", pa.array([1.5, 2, 3]), ArraySpec((), "float64"), [1.5, 2, 3]),
    ("bool", pa.array([True, False, True]), ArraySpec((), "bool"), [True, False, True]),
    ("string", pa.array(["é", "", "é"]), ArraySpec((), "bytes"), ["é".encode(), b"", "é".encode()]),
    (
        "large string",
        pa.array(["a", "b", "a"], pa.large_string()),
        ArraySpec((), "bytes"),
        [b"a", b"b", b"a"],
    ),
    (
        "binary",
        pa.array([b"\x00\xff\x00", b"", b"a\x00"]),
        ArraySpec((), "bytes"),
        [b"\x00\xff\x00", b"", b"a\x00"],
    ),
    (
        "fixed binary",
        pa.array([b"ab", b"c\x00", b"de"], pa.binary(2)),
        ArraySpec((), "bytes"),
        [b"ab", b"c\x00", b"de"],
    ),
    (
        "dictionary of strings",
        pa.array(["a", "b", "a"]).dictionary_encode(),
        ArraySpec((), "bytes"),
        [b"a", b"b", b"a"],
    ),
    (
        "list",
        pa.array([[1, 2], [3, 4], [5, 6]]),
        ArraySpec((2,), "int64"),
        [[1, 2], [3, 4], [5, 6]],
    ),
    (
        "large list",
        pa.array([[1.0], [2.0], [3.0]], pa.large_list(pa.float32())),
        ArraySpec((1,), "float32"),
        [[1], [2], [3]],
    ),
    (
        "fixed list",
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint8(), 2)),
        ArraySpec((2,), "uint8"),
        [[1, 2], [3, 4], [5, 6]],
    ),
    (
        "list of fixed lists",
        pa.array([[[1, 2]] * 3, [[3, 4]] * 3, [[5, 6]] * 3], pa.list_(pa.list_(pa.int16(), 2))),
        ArraySpec((3, 2), "int16"),
        [[[1, 2]] * 3, [[3, 4]] * 3, [[5, 6]] * 3],
    ),
    (
        "list of strings",
        pa.array([["a", "b"], ["c", "d"], ["a", "a"]]),
        ArraySpec((2,), "bytes"),
        [[b"a", b"b"], [b"c", b"d"], [b"a", b"a"]],
    ),
    (
        "tensor",
        pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.arange(18, dtype=np.float32).reshape(3, 2, 3)
        ),
        ArraySpec((2, 3), "float32"),
        np.arange(18).reshape(3, 2, 3).tolist(),
    ),
]


@pytest.mark.parametrize(
    ("array", "spec", "expected"), [t[1:] for t in TAKEN], ids=[t[0] for t in TAKEN]
)
def test_types_that_are_taken(
    tmp_path: Path, array: Any, spec: ArraySpec, expected: list[Any]
) -> None:
    source = column(array, tmp_path)
    assert source.spec()[0] == spec
    assert values(source).tolist() == expected
    assert values(source).shape == (3, *spec.shape)
    assert source.read(np.array([2, 0]))[0].tolist() == [expected[2], expected[0]]
    if spec.dtype != "bytes":
        assert values(source).dtype.name == spec.dtype
        assert source.decoded_bytes == values(source).nbytes
    whole = source.in_memory()
    assert whole is not None and whole[0].tolist() == expected


NOW = datetime.datetime(2024, 1, 1)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([NOW] * 3), r"Column 'c' has type timestamp\[us\].*no times.*seconds as int64"),
        (pa.array([NOW.date()] * 3), r"type date32\[day\].*no times"),
        (pa.array([NOW.time()] * 3), r"type time64.*no times"),
        (pa.array([NOW - NOW] * 3), r"type duration.*no times"),
        (pa.array([decimal.Decimal("1.5")] * 3), r"type decimal128\(2, 1\).*as double"),
        (pa.array([{"k": 1}] * 3), "type struct<k: int64>.*column of its own"),
        (pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int64())), "type map<.*of its own"),
        (pa.nulls(3), "type null.*all its values are null"),
        (pa.array([[[1], [2]]] * 3), "lists in lists are taken with fixed sizes only"),
        (pa.array([[NOW]] * 3), r"type timestamp"),
    ],
)
def test_types_that_are_refused(tmp_path: Path, array: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        column(array, tmp_path)
    # A column that is not asked for may have any type.
    url = write(tmp_path / "d.parquet", pa.table({"c": array, "ok": [1, 2, 3]}))
    assert values(ParquetSource(url, columns="ok")).tolist() == [1, 2, 3]


@pytest.mark.parametrize("statistics", [True, False])
def test_nulls_are_refused_with_their_number(tmp_path: Path, statistics: bool) -> None:
    array = pa.array([None, 2, None])
    if statistics:  # on the driver, for the whole data
        with pytest.raises(DataError, match="Column 'c' has 2 nulls.*Fill them first"):
            column(array, tmp_path)
    else:
        source = column(array, tmp_path, write_statistics=False)
        with pytest.raises(DataError, match=r"'c' of row group 0 of .*c\.parquet has 1 nulls"):
            values(source)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1, None], [2, 3], [4, 5]], pa.list_(pa.int64())),
        pa.array([[1, None], [2, 3], [4, 5]], pa.list_(pa.int64(), 2)),
        pa.array(["a", None, "b"]).dictionary_encode(),
    ],
)
def test_nulls_inside_are_refused(tmp_path: Path, array: Any) -> None:
    with pytest.raises(DataError, match="'c' .*has 1 nulls"):
        values(column(array, tmp_path, write_statistics=False))


def test_ragged_lists_are_refused_from_the_footer_or_when_decoding(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'c' of row group 1 of .* 3 values in 1 rows, not 2"):
        column(pa.array([[1, 2], [3, 4], [5, 6, 7]]), tmp_path)
    with pytest.raises(DataError, match=r"'c' of row group 0 .* ragged: .* 3 values in 2 rows"):
        column(pa.array([[1], [2, 3], [4]]), tmp_path)
    source = column(pa.array([[1], [2, 3, 4], [5, 6]]), tmp_path)  # the sum looks right
    with pytest.raises(DataError, match=r"'c' of row group 0 .* 1 to 3 values.*pad or cut"):
        values(source)


def test_bad_labels_and_weights_are_refused_by_row(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0] * 4, "y": [1, 2, 3, np.nan], "w": [1.0, 1, -1, 1]})
    url = write(tmp_path / "t.parquet", table, rows=2)
    source = ParquetSource(url, columns="x", label="y")
    assert len(source.read(np.array([0, 1]))[0]) == 2
    with pytest.raises(DataError, match="y has 1 NaN values, the first in row 3"):
        source.read(np.array([2]))
    with pytest.raises(DataError, match="sample_weight has 1 .*negative, the first in row 2"):
        ParquetSource(url, columns="x", sample_weight="w").read(np.array([2]))
    with pytest.raises(DataError, match=r"y\['y'\] has 1 NaN"):
        ParquetSource(url, columns="x", label=["y"]).read(np.array([2]))


def test_decode_handles_slices_and_chunks() -> None:
    for array in (
        pa.array([[1, 2], [3, 4], [5, 6]]),
        pa.array([[1, 2]] * 3, pa.list_(pa.int8(), 2)),
    ):
        chunked = pa.chunked_array([array.slice(1, 2), array.slice(0, 1), array.slice(0, 0)])
        expected = [*array.slice(1, 2).to_pylist(), array[0].as_py()]
        assert decode(chunked, ArraySpec((2,), "int64"), "c").tolist() == expected


def test_repeated_words_share_memory(tmp_path: Path) -> None:
    url = write(tmp_path / "t.parquet", pa.table({"c": ["word" * 100] * 1000}), rows=1000)
    array = values(ParquetSource(url, columns="c"))
    assert len({id(word) for word in array}) == 1
    assert count_bytes({"c": array}) == 8000 + 400 + 33


# ---------------------------------------------------------------------------- files


def test_directories_and_globs_in_natural_order(tmp_path: Path) -> None:
    for part in (10, 2, 1):
        write(tmp_path / "d" / f"part-{part}.parquet", frame(10, part * 100))
    write(tmp_path / "d" / "sub" / "x.pq", frame(10, 0))
    (tmp_path / "d" / "_SUCCESS").touch()
    write(tmp_path / "d" / "_temporary" / "y.parquet", frame(10, 7))
    (tmp_path / "d" / ".part-3.parquet.crc").touch()
    (tmp_path / "d" / "notes.txt").touch()
    wanted = [*range(100, 110), *range(200, 210), *range(1000, 1010)]
    for url in (f"{tmp_path}/d", f"{tmp_path}/d/", f"file://{tmp_path}/d", tmp_path / "d"):
        assert values(ParquetSource(url, columns="a")).tolist() == [*wanted, *range(10)]
    glob = ParquetSource(f"{tmp_path}/d/part-*.parquet", columns="a")
    assert values(glob).tolist() == wanted


@pytest.mark.parametrize("name", ["a b", "50%", "%20", "#1", "größe-数", "a[1]", "q?x", "a=b&c"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    url = write(tmp_path / name / f"{name}.parquet")
    assert len(ParquetSource(url, columns="a")) == N
    assert len(ParquetSource(tmp_path / name, columns="a")) == N
    assert values(pickle.loads(pickle.dumps(ParquetSource(url, columns="a"))))[99] == 99


def test_urls_of_other_filesystems() -> None:
    fs = fsspec.filesystem("memory")
    try:
        for part in (1, 2):
            with fs.open(f"/raytf data/p{part}.parquet", "wb") as file:
                pq.write_table(frame(10, part * 10), file)
        for url in ("memory://raytf data", "memory://raytf data/p*.parquet"):
            source = ParquetSource(url, columns="a")
            assert values(source).tolist() == list(range(10, 30))
        given_fs = ParquetSource("/raytf data/p2.parquet", columns="a", filesystem=fs)
        assert values(pickle.loads(pickle.dumps(given_fs))).tolist() == list(range(20, 30))
    finally:
        fs.rm("/raytf data", recursive=True)


def test_empty_row_groups_and_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", frame(0))
    with pq.ParquetWriter(tmp_path / "1.parquet", frame().schema) as writer:
        for rows in (3, 0, 4):
            writer.write_table(frame(rows, rows))
    source = ParquetSource(tmp_path, columns="a", cache_bytes=40)
    assert values(source).tolist() == [3, 4, 5, 4, 5, 6, 7]
    assert source.blocks() == ((3, 4), 1)
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(DataError, match=r"0\.parquet: the data has 0 rows"):
        ParquetSource(tmp_path, columns="a")


def test_files_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet")
    other = pa.table({"a": [1.0], "y": [1], "z": [1]})
    write(tmp_path / "2.parquet", other)
    text = (
        r"2\.parquet does not agree with .*1\.parquet: column 'a' is double, not int64; "
        r"column 'b' is missing; column 'z' is only there"
    )
    with pytest.raises(DataError, match=text):
        ParquetSource(tmp_path)
    with pytest.raises(DataError, match="column 'a' is double, not int64. All files"):
        ParquetSource(tmp_path, columns="a")
    assert len(ParquetSource(tmp_path, columns="y")) == N + 1  # only what is wanted counts


def test_files_may_order_their_columns_differently(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet")
    write(tmp_path / "2.parquet", frame().select(["y", "b", "a"]))
    source = ParquetSource(tmp_path, label="y")
    assert source.read(np.array([5, 105]))[0]["a"].tolist() == [5, 5]


def test_columns_with_dots_and_common_beginnings(tmp_path: Path) -> None:
    nested = pa.array(
        [[("k", {"l": [1]})]], pa.map_(pa.string(), pa.struct({"l": pa.list_(pa.int8())}))
    )
    table = pa.table({"m": nested, "a.b": [[1, 2]], "a": [[3.0]], "a.list.element": [5]})
    url = write(tmp_path / "t.parquet", table)
    x = ParquetSource(url, columns=["a.b", "a", "a.list.element"]).read(np.array([0]))[0]
    assert {name: v.tolist() for name, v in x.items()} == {
        "a.b": [[1, 2]],
        "a": [[3.0]],
        "a.list.element": [5],
    }


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    url = write(tmp_path / "t.parquet")
    source = ParquetSource(url, columns="a")
    write(tmp_path / "t.parquet", rows=50)
    with pytest.raises(DataError, match=r"t\.parquet has changed.*row group 3 had 10 rows"):
        source.read(np.array([35]))
    with pytest.raises(DataError, match=r"row group 0 had 10 rows"):
        source.read(np.array([0]))


def test_what_is_not_there(tmp_path: Path) -> None:
    url = write(tmp_path / "k=1" / "t.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    for bad, text in (
        (f"{tmp_path}/none", "none: no file or directory there. Check the URL"),
        (f"{tmp_path}/none*", r"none\*: no files that match there"),
        (f"{tmp_path}/empty", r"empty: no files \*\.parquet, \*\.parq, \*\.pq there"),
        (f"{tmp_path}/bad.parquet", r"bad\.parquet is no Parquet file, or is damaged"),
    ):
        with pytest.raises(DataError, match=text):
            ParquetSource(bad)
    for arguments in ({"columns": ["a", "q"]}, {"label": "q"}, {"sample_weight": "q"}):
        with pytest.raises(DataError, match=r"no column 'q' in .*t\.parquet. It has: a, b, y"):
            ParquetSource(url, **arguments)
    with pytest.raises(DataError, match=r"no column 'k'.*directories \(Hive partitions\)"):
        ParquetSource(tmp_path / "k=1", columns="k")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"columns": []}, r"columns must be the name .* Received: \[\]"),
        ({"columns": ["a", "a"]}, "list of different names"),
        ({"columns": [1]}, r"columns must be the name .* Received: \[1\]"),
        ({"label": []}, "label must be the name"),
        ({"label": ["a", "b", "y"]}, r"columns must be .* Received: \[\]"),
        ({"sample_weight": ["a"]}, r"sample_weight must be the name of a column.*\['a'\]"),
        ({"cache_bytes": 0}, "cache_bytes must be an integer >= 1. Received: 0"),
        ({"cache_bytes": 1e9}, "cache_bytes must be an integer"),
        ({"cache_bytes": True}, "cache_bytes must be an integer"),
        ({"cache_bytes": 199}, r"=199 is less than one row group: group 0 of .* 200 bytes.* 800,"),
        ({"filesystem": "s3"}, "filesystem must be an fsspec filesystem.*Received: str"),
    ],
)
def test_arguments_that_cannot_work(parquet_url: str, arguments: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ParquetSource(parquet_url, **arguments)


def test_weights_must_be_numbers(tmp_path: Path) -> None:
    url = write(tmp_path / "t.parquet", pa.table({"x": [1], "w": ["a"], "v": [[1.0]]}))
    with pytest.raises(DataError, match="sample_weight='w' must be a column of numbers.*bytes"):
        ParquetSource(url, columns="x", sample_weight="w")
    with pytest.raises(DataError, match=r"sample_weight='v' .* float64 of shape \(1,\)"):
        ParquetSource(url, columns="x", sample_weight="v")


def test_unknown_and_missing_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'nope://x/y' is no URL that fsspec knows"):
        ParquetSource("nope://x/y")

    def no_package(url: str, **kwargs: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_package)
    with pytest.raises(ConfigError, match=r"pip install 'raytf\[s3\]'.*Install s3fs"):
        ParquetSource("s3://bucket/data")
    with pytest.raises(ConfigError, match=r"see fsspec's 'dropbox' protocol"):
        ParquetSource("dropbox://bucket/data")


def test_a_worker_reads_each_footer_once(parquet_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[bool] = []
    real = pq.ParquetFile.__init__

    def spy(self: Any, *args: Any, metadata: Any = None, **kwargs: Any) -> None:
        known.append(metadata is not None)
        real(self, *args, metadata=metadata, **kwargs)

    source = pickle.loads(pickle.dumps(ParquetSource(parquet_url)))
    monkeypatch.setattr(pq.ParquetFile, "__init__", spy)
    for row in (0, 50, 90):
        source.read(np.array([row]))
    assert known == [False, True, True]


def test_files_are_closed(tmp_path: Path, parquet_url: str) -> None:
    opened: list[Any] = []

    class Watching(fsspec.implementations.local.LocalFileSystem):
        protocol = "watching"
        cachable = False

        def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
            opened.append(super()._open(path, *args, **kwargs))
            return opened[-1]

    source = ParquetSource(parquet_url, label="y", filesystem=Watching())
    source.in_memory()
    assert len(opened) == 11  # the footer, ten row groups
    assert all(file.closed for file in opened)
    (tmp_path / "bad.parquet").write_bytes(b"bad")
    with pytest.raises(DataError, match="no Parquet file"):
        ParquetSource(tmp_path / "bad.parquet", filesystem=Watching())
    assert opened[-1].closed


# ---------------------------------------------------------------------------- memory


def test_blocks_depend_on_size_only(parquet_url: str) -> None:
    """2000 bytes decoded, 20 bytes a row, groups of 10 rows."""
    assert ParquetSource(parquet_url, cache_bytes=2000).blocks() is None
    sizes, window = ParquetSource(parquet_url, cache_bytes=1999).blocks() or ((), 0)
    assert (sizes, window) == ((10,) * 10, 39)  # half the cache, less the block that overfills
    assert ParquetSource(parquet_url, cache_bytes=200).blocks() == ((10,) * 10, 1)
    assert ParquetSource(parquet_url, columns="b", cache_bytes=400).blocks() is None


def test_a_window_is_read_once_and_the_bound_is_kept(
    parquet_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: Counter[int] = Counter()
    used: list[int] = []
    real_load, real_keep = ParquetSource._load, GroupCache._keep

    def load(self: ParquetSource, number: int) -> Any:
        loads[number] += 1
        return real_load(self, number)

    def keep(self: GroupCache, group: int, columns: Any) -> None:
        real_keep(self, group, columns)
        used.append(self.used_bytes)

    monkeypatch.setattr(ParquetSource, "_load", load)
    monkeypatch.setattr(GroupCache, "_keep", keep)
    source = ParquetSource(parquet_url, label="y", cache_bytes=1300)
    assert source.in_memory() is None
    blocks = source.blocks()
    assert blocks is not None
    order = Order(len(source), 4, True, *blocks)
    seen = []
    for start in range(0, N, 7):
        rows = order.rows(0, start, min(start + 7, N))
        seen += source.read(rows)[0]["a"].tolist()
    assert sorted(seen) == list(range(N))
    assert loads == dict.fromkeys(range(10), 1)
    assert max(used) <= 1300 and len(used) == 10


def test_the_cache_keeps_what_was_used_last() -> None:
    loads: list[int] = []

    def load(group: int) -> dict[str, np.ndarray]:
        loads.append(group)
        return {"c": np.full(2, group)}  # 16 bytes

    kept = GroupCache(np.arange(0, 11, 2), {"c": ArraySpec((), "int64")}, load, 32)
    for row in (0, 2, 1, 4, 0, 3):  # groups 0 1 0 2 0 1
        assert kept.read(np.array([row]))["c"].tolist() == [row // 2]
    assert loads == [0, 1, 2, 1]
    assert kept.used_bytes == 32
    none = GroupCache(np.arange(0, 11, 2), {"c": ArraySpec((), "int64")}, load, 15)
    assert none.read(np.array([9, 0, 8]))["c"].tolist() == [4, 0, 4]
    assert none.used_bytes == 0


def test_a_read_holds_few_groups_at_once() -> None:
    alive, most = 0, 0
    lock = threading.Lock()

    class Watched(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1 if self.base is None else 0

    def load(group: int) -> dict[str, np.ndarray]:
        nonlocal alive, most
        array = Watched((1,), np.int64)
        array[:] = group
        with lock:
            alive += 1
            most = max(most, alive)
        return {"c": array}

    kept = GroupCache(np.arange(101), {"c": ArraySpec((), "int64")}, load, 1)
    assert kept.read(np.arange(100)[::-1])["c"].tolist() == list(range(100))[::-1]
    assert 1 < most <= cache._NUM_READERS


@pytest.mark.parametrize("bound", [None, 50_000, 800])
def test_threads_read_together_and_load_each_group_once(bound: int | None) -> None:
    loads: Counter[int] = Counter()
    lock = threading.Lock()

    def load(group: int) -> dict[str, np.ndarray]:
        with lock:
            loads[group] += 1
        return {"c": np.arange(group * 10, group * 10 + 10)}

    starts, specs = np.arange(0, 1001, 10), {"c": ArraySpec((), "int64")}
    kept = Table(starts, specs, load) if bound is None else GroupCache(starts, specs, load, bound)
    barrier = threading.Barrier(6)

    def read(worker: int) -> bool:
        barrier.wait(10)
        random = np.random.default_rng(worker % 2)  # threads want the same groups at once
        batches = [random.integers(0, 1000, 32) for _ in range(60)]
        return all(np.array_equal(kept.read(rows)["c"], rows) for rows in batches)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(6)))
    if bound != 800:
        assert set(loads.values()) == {1}
    if isinstance(kept, GroupCache):
        assert kept.used_bytes <= (bound or 0)


def test_threads_read_one_source(parquet_url: str) -> None:
    for bound in (1 << 20, 450):
        source = ParquetSource(parquet_url, label="y", cache_bytes=bound)
        barrier = threading.Barrier(4)

        def read(worker: int, source: Any = source, barrier: Any = barrier) -> bool:
            barrier.wait(10)
            rows = np.random.default_rng(worker).permutation(N)
            return all(
                source.read(rows[i : i + 9])[1].tolist() == (rows[i : i + 9] * 10).tolist()
                for i in range(0, N, 9)
            )

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(4)))


@pytest.mark.parametrize("kind", ["table", "groups"])
def test_a_failed_load_is_raised_and_can_be_tried_again(kind: str) -> None:
    failing = True

    def load(group: int) -> dict[str, np.ndarray]:
        if failing and group == 3:
            raise OSError("storage hiccup")
        return {"c": np.full(1, group)}

    starts, specs = np.arange(6), {"c": ArraySpec((), "int64")}
    kept = Table(starts, specs, load) if kind == "table" else GroupCache(starts, specs, load, 99)
    rows = np.arange(5)
    with pytest.raises(OSError, match="storage hiccup"):
        kept.read(rows)
    failing = False
    assert kept.read(rows)["c"].tolist() == [0, 1, 2, 3, 4]
