"""Callbacks' state: captured in one process, put back in another, and nobody can tell.

Without Keras first: which attributes are state, and that values come back as what they were.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import logging
import math
import random
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.errors import CheckpointDamagedError, ConfigError
from raytf.worker import callback_files
from raytf.worker.callback_state import CallbackStates
from raytf.worker.callback_values import Uncapturable, decode, encode, snapshot, unchanged

Arrays = dict[str, np.ndarray]


def through_json(state: Any) -> Any:
    """As it comes back from a manifest, whose keys may be sorted."""
    return json.loads(json.dumps(state, allow_nan=False, sort_keys=True))


def everywhere(callback: Any) -> bool:
    return not getattr(callback, "chief_only", False)


# --- values


def back(value: Any) -> Any:
    arrays: Arrays = {}
    node = through_json(encode(value, "callback/A/x", arrays))
    return decode(node, {key: array.copy() for key, array in arrays.items()})


Pair = collections.namedtuple("Pair", "a b")

VALUES = [
    *(None, True, False, 0, -5, 2**200, "", "äöü\n\x00", "\ud800", b"", b"\x00", bytearray(b"a")),
    *(0.1, -0.0, 1e-320, 1.7976931348623157e308, math.inf, -math.inf, 3 + 4j, complex(0.0, -0.0)),
    *([], [1, [2.5, "x"], None], (), (1,), ((1, 2), [3]), set(), {1, 2, "a"}, frozenset({(1, 2)})),
    *({}, {"b": 1, "a": 2}, {1: "a", None: "b", (1, 2): 3, "1": 4}, {"__array__": 1, "x": 2}),
    *(collections.deque([1, 2], maxlen=3), collections.deque(), range(1, 9, 2)),
    *(collections.OrderedDict(b=1, a=2), collections.Counter("abca")),
    *(collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2})),
    *(np.float32(0.1), np.int8(-3), np.bool_(True), np.float64(-0.0), np.str_("x")),
    *(np.complex64(1j), np.datetime64("2026-01-02"), np.zeros(()), np.zeros((0, 3), "int16")),
    *(np.arange(6).reshape(2, 3), np.array(["a", "bcd"]), np.array([b"a"]), np.ones(3, ">f4")),
    np.array([1, "x", None], object),
    np.arange(5000.0),
    np.arange(5000).astype(">i4"),
    np.array(["long"] * 3000),
    np.asfortranarray(np.arange(6000, dtype="uint8").reshape(60, 100)),
    np.array([{"k": np.arange(2000)}, [1]], object),
]  # fmt: skip


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype
        assert a.dtype.byteorder == b.dtype.byteorder
        assert a.shape == b.shape
        if a.dtype.hasobject:
            for x, y in zip(a.ravel(), b.ravel(), strict=True):
                same(x, y)
        else:
            assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        same(list(a.items()), list(b.items()))
        assert getattr(a, "default_factory", 0) == getattr(b, "default_factory", 0)
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        assert getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, float):
        assert a.hex() == b.hex()
    else:
        assert a == b
        assert repr(a) == repr(b) or isinstance(a, set | frozenset)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{str(v)[:20]!a}")
def test_values_come_back_exactly(value: Any) -> None:
    same(back(value), value)
    same(back({"in": [value]}), {"in": [value]})


def test_nan_comes_back_bit_for_bit() -> None:
    for value in (math.nan, -math.nan):
        assert math.isnan(back(value))
        assert math.copysign(1, back(value)) == math.copysign(1, value)


def test_large_arrays_go_by_key_and_small_ones_inline() -> None:
    arrays: Arrays = {}
    weights = [np.zeros(2, "float32"), np.ones((40, 40), "float32")]
    node = encode({"best": weights, 5: np.arange(1000.0)}, "callback/E/w", arrays)
    assert list(arrays) == ["callback/E/w/best/1", "callback/E/w/#1"]
    assert node["__dict__"][0][1][1] == {"__array__": "callback/E/w/best/1"}
    assert not np.shares_memory(arrays["callback/E/w/best/1"], weights[1])


def test_arrays_by_key_are_of_types_that_a_tensor_file_knows() -> None:
    for value in VALUES:
        arrays: Arrays = {}
        encode(value, "k", arrays)
        for array in arrays.values():
            assert array.dtype.isnative
            assert array.dtype.kind in "fiub"
            assert array.flags.c_contiguous


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for size in (3, 5000):
        same(back(np.ones(size, ml_dtypes.bfloat16)), np.ones(size, ml_dtypes.bfloat16))
    same(back(ml_dtypes.bfloat16(1.5)), ml_dtypes.bfloat16(1.5))


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 1,
        math,
        int,
        Pair(1, 2),
        threading.Lock(),
        [1, {"a": object()}],
        collections.defaultdict(lambda: 1),
        np.zeros(2, [("a", "i4")]),
        np.ma.zeros(3),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(Uncapturable):
        encode(value, "k", {})


def test_a_missing_array_is_damage() -> None:
    with pytest.raises(CheckpointDamagedError, match="callback/A/x"):
        decode({"__array__": "callback/A/x"}, {})


# --- changes


def test_changes_deep_inside_are_seen() -> None:
    def grow(v: Any) -> None:
        v["a"][0].append(1)

    def poke(v: Any) -> None:
        v["b"][3, 4] = 7

    def move(v: Any) -> None:
        v["r"].random()

    def field(v: Any) -> None:
        v["n"].x = 2

    for change in (grow, poke, move, field):
        value = {
            "a": [[]],
            "b": np.zeros((50, 50)),
            "r": random.Random(1),
            "n": types.SimpleNamespace(x=1),
        }
        shot = snapshot(value)
        assert unchanged(shot, value)
        change(value)
        assert not unchanged(shot, value)


def test_equal_is_not_enough() -> None:
    for before, after in [(0, False), (1, 1.0), (0.0, -0.0), ([], ()), ("1", b"1")]:
        assert not unchanged(snapshot(before), after)
    assert unchanged(snapshot(math.nan), math.nan)
    assert unchanged(snapshot({3, "a", 2.5}), {2.5, "a", 3})


def test_a_circle_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    shot = snapshot(loop)
    assert unchanged(shot, loop)
    loop[0] = 2
    assert not unchanged(shot, loop)


# --- which attributes are state


class Plain:
    """Like a callback, without Keras."""

    def __init__(self, **attributes: Any) -> None:
        self._model = self.params = None
        for name, value in attributes.items():
            setattr(self, name, value)


def resumed(
    make: Callable[[], list[Any]],
    change: Callable[[list[Any]], None],
    begin: Callable[[list[Any]], None] = lambda callbacks: None,
    now: Callable[[], list[Any]] | None = None,
) -> tuple[list[Any], list[Any], list[str]]:
    """The old callbacks, the new ones with the state put back, and the messages."""
    old, new = make(), (now or make)()
    states = CallbackStates(old, everywhere)
    begin(old)
    states.began()
    change(old)
    state, shared, chief = states.capture()
    other = CallbackStates(new, everywhere)
    other.before_train_begin(through_json(state))
    begin(new)
    other.began()
    messages = other.restore(through_json(state), {**shared, **chief})
    return old, new, messages


def test_counters_are_state_and_settings_are_not() -> None:
    def change(callbacks: list[Any]) -> None:
        callbacks[0].wait = 3
        callbacks[0].seen.append("x")

    _, (new,), messages = resumed(
        lambda: [Plain(patience=2, wait=0, seen=[])],
        change,
        now=lambda: [Plain(patience=9, wait=0, seen=[])],
    )
    assert (new.patience, new.wait, new.seen) == (9, 3, ["x"])
    assert messages == []


def test_what_on_train_begin_would_reset_is_state() -> None:
    def begin(callbacks: list[Any]) -> None:
        callbacks[0].best, callbacks[0].started = None, draws.pop()

    draws = [3, 2, 1]
    old, (new,), _ = resumed(
        lambda: [Plain(best=5, started=0)], lambda c: setattr(c[0], "best", 5), begin
    )
    assert new.best == 5  # as when it was made, but on_train_begin sets it to None
    assert new.started == old[0].started == 1  # not what this start has drawn


def test_a_new_and_a_deleted_attribute() -> None:
    def change(callbacks: list[Any]) -> None:
        callbacks[0].fresh = (1, 2)
        del callbacks[0].gone

    _, (new,), _ = resumed(lambda: [Plain(gone=1)], change)
    assert new.fresh == (1, 2)
    assert not hasattr(new, "gone")


def test_a_capture_shares_nothing() -> None:
    (callback,) = callbacks = [Plain(rows=[], big=None, data={})]
    states = CallbackStates(callbacks, everywhere)
    states.began()
    callback.rows.append([1])
    callback.big = np.zeros(2000)
    state, shared, _ = states.capture()
    before = copy.deepcopy((state, shared["callback/Plain/big"]))
    callback.rows[0].append(2)
    callback.big[:] = 1
    assert state == before[0]
    assert np.array_equal(shared["callback/Plain/big"], before[1])
    new = [Plain(rows=[], big=None, data={})]
    other = CallbackStates(new, everywhere)
    other.restore(state, shared)
    new[0].big[:] = 5
    assert not shared["callback/Plain/big"].any()


def test_names_and_the_place_of_arrays() -> None:
    class Chief(Plain):
        chief_only = True

    def make() -> list[Any]:
        return [Plain(x=0), Chief(x=0), Plain(x=0)]

    callbacks = make()
    states = CallbackStates(callbacks, everywhere)
    for place, callback in enumerate(callbacks):
        callback.x = np.full(1000, place)
    state, shared, chief = states.capture()
    assert set(state["callbacks"]) == {"Plain", "Plain#2", "Chief"}
    assert set(shared) == {"callback/Plain/x", "callback/Plain#2/x"}
    assert set(chief) == {"callback/Chief/x"}
    on_another_rank = [Plain(x=0), Plain(x=0)]
    CallbackStates(on_another_rank, everywhere).restore(state, shared)
    assert [c.x[0] for c in on_another_rank] == [0, 2]


def test_messages_about_what_does_not_match() -> None:
    class Other(Plain):
        pass

    _, new, messages = resumed(
        lambda: [Plain(x=0), Plain(x=0)],
        lambda c: setattr(c[1], "x", 1),
        now=lambda: [Plain(x=0), Other(x=4)],
    )
    assert new[1].x == 4
    assert messages == [
        "Plain#2 has state in the checkpoint and is no callback any more.",
        "Other has no state in the checkpoint; it starts anew.",
    ]


class Speaking(Plain):
    def get_state(self) -> Any:
        return {"count": self.count, "array": np.arange(self.count), "t": (1,)}

    def set_state(self, state: Any) -> None:
        assert state["t"] == (1,)
        self.count = int(state["count"])
        self.array = state["array"]


def test_get_state_and_set_state_are_used() -> None:
    def change(callbacks: list[Any]) -> None:
        callbacks[0].count = 3000
        callbacks[0].other = 1

    _, (new,), messages = resumed(lambda: [Speaking(count=0, other=0)], change)
    assert new.count == 3000
    assert np.array_equal(new.array, np.arange(3000))
    assert new.other == 0
    assert messages == []


def test_get_state_that_gives_no_data_names_the_callback() -> None:
    class Wrong(Speaking):
        def get_state(self) -> Any:
            return {"lock": [threading.Lock()]}

    states = CallbackStates([Wrong(count=0)], everywhere)
    with pytest.raises(ConfigError, match=r"Wrong\.get_state\(\) must return .* in it: lock"):
        states.capture()


def test_a_class_that_learned_to_speak_meanwhile() -> None:
    Silent = type("Speaking", (Plain,), {})
    _, _, messages = resumed(
        lambda: [Silent(count=0)], lambda c: None, now=lambda: [Speaking(count=0)]
    )
    assert len(messages) == 1
    assert "other way round" in messages[0]


@dataclasses.dataclass
class Tracker:
    total: float = 0.0
    rows: list[Any] = dataclasses.field(default_factory=list)


def test_objects_that_are_kept_get_their_content_back() -> None:
    def make() -> list[Any]:
        return [
            Plain(
                rng=np.random.default_rng(1),
                old=np.random.RandomState(1),
                draw=random.Random(1),
                tracker=Tracker(),
                space=types.SimpleNamespace(a=1, b=2),
            )
        ]

    def change(callbacks: list[Any]) -> None:
        c = callbacks[0]
        c.rng.normal(size=3)
        c.old.normal(size=3)
        c.draw.gauss(0, 1)
        c.tracker.total += 2.5
        c.tracker.rows.append(np.arange(1000))
        c.space.a = "x"
        del c.space.b

    (old,), (new,), messages = resumed(make, change)
    assert messages == []
    assert new.rng.normal() == old.rng.normal()
    assert new.old.normal() == old.old.normal()
    assert new.draw.gauss(0, 1) == old.draw.gauss(0, 1)
    assert new.tracker.total == 2.5
    assert np.array_equal(new.tracker.rows[0], np.arange(1000))
    assert vars(new.space) == {"a": "x"}


def test_an_object_of_another_kind_is_named() -> None:
    _, _, messages = resumed(
        lambda: [Plain(rng=random.Random(1))],
        lambda c: c[0].rng.random(),
        now=lambda: [Plain(rng=np.random.default_rng(1))],
    )
    assert messages == [
        "Plain.rng was a Random and is Generator of another shape or kind now; it starts anew."
    ]


class Mine:
    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"n": 0}


def test_what_cannot_be_captured_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def stream() -> Any:
        yield 1

    callback = Plain(
        lock=threading.Lock(), mine=Mine(), stays=Mine(), call=None, code=len, rows=stream(), pair=0
    )
    states = CallbackStates([callback], everywhere)
    states.began()
    callback.lock = threading.Lock()
    callback.mine.inner["n"] = 1  # the same object, changed inside
    callback.call = lambda: 1  # a plain function: code, no state
    callback.code = [].append  # bound to a list: somebody's state
    callback.pair = Pair(np.arange(1000), object())
    for _ in range(3):
        state, shared, _ = states.capture()
        assert state["callbacks"]["Plain"]["attributes"] == {}
        assert shared == {}
    named = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert sorted(named) == ["code", "lock", "mine", "pair", "rows"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "Plain.lock (lock) cannot be captured" in caplog.text
    assert "get_state() and set_state(state)" in caplog.text


def test_what_on_train_begin_makes_and_nobody_changes_is_no_loss(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    callback = Plain(lock=None, file=None)
    states = CallbackStates([callback], everywhere)
    callback.lock = threading.Lock()
    with open(tmp_path / "log", "w") as callback.file:
        states.began()
        states.capture()
    assert caplog.records == []


def test_two_captures_of_one_state_are_equal() -> None:
    callback = Plain(history={})
    states = CallbackStates([callback], everywhere)
    states.began()
    callback.history = {"loss": [0.1 * n for n in range(100)]}
    first = states.capture()
    assert states.capture()[0] == first[0]


# --- files


def test_a_log_file_is_brought_back(tmp_path: Path) -> None:
    path = tmp_path / "log ü.csv"
    file = callback_files.LogFile(str(path))
    assert file.capture() == {"bytes": 0, "text": ""}
    path.write_bytes(b"a,b\r\n1,2\r\n")
    known = through_json(file.capture())
    path.write_bytes(b"a,b\r\n1,2\r\n3,4\r\n")
    file.restore(known)
    assert path.read_bytes() == b"a,b\r\n1,2\r\n"
    path.unlink()  # another node
    file.restore(known)
    assert path.read_bytes() == b"a,b\r\n1,2\r\n"
    path.write_bytes(b"\xff\r\n")
    known = through_json(file.capture())
    path.write_bytes(b"\xff\r\nxx")
    file.restore(known)
    assert path.read_bytes() == b"\xff\r\n"
    file.restore({"bytes": 0, "text": ""})
    assert path.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [path]


def test_a_long_log_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callback_files, "KEPT_BYTES", 8)
    path = tmp_path / "log.csv"
    path.write_bytes(b"0123456789")
    file = callback_files.LogFile(str(path))
    known = through_json(file.capture())
    assert known == {"bytes": 10}
    path.write_bytes(b"0123456789 and more")
    file.restore(known)
    assert path.read_bytes() == b"0123456789"
    path.write_bytes(b"0123")
    file.restore(known)
    assert path.read_bytes() == b"0123"
    assert "held 10 bytes when the checkpoint was taken and holds 4 now" in caplog.text
