"""The manifest's file: readable, complete, and any change of it is seen."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.checkpoint import manifest as module
from raytf.checkpoint.manifest import (
    Manifest,
    Part,
    Shard,
    TensorEntry,
    parse_step,
    step_name,
)
from raytf.errors import CheckpointDamagedError, ConfigError

SHARD = "step-0000000100/a0001-g0002-r00000-of-00002-0.safetensors"


def part(**changes: Any) -> Part:
    fields: dict[str, Any] = {
        "start": 0,
        "stop": 3,
        "shard": SHARD,
        "offset": 80,
        "nbytes": 24,
        "xxh3": "0123456789abcdef",
    }
    return Part(**{**fields, **changes})


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "run": "mnist",
        "attempt": 3,
        "generation": 2,
        "step": 100,
        "epoch": 4,
        "position": {"epoch": 4, "next": 17, "seed": 2**63 + 1},
        "world_size": 2,
        "time": 1764608550.123456,
        "metrics": {"loss": 0.1 + 0.2, "auc": math.nan, "top": math.inf, "low": -math.inf},
        "best": {"metric": "auc", "mode": "max"},
        "versions": {"tensorflow": "2.21.0"},
        "fingerprint": {"rows": 60000},
        "threads": 4,
        "model": {"layers": ["dense"]},
        "tensors": (
            TensorEntry(name="w/ü [0:2] % #", shape=(3, 2), dtype="F32", parts=(part(),)),
            TensorEntry(name="s", shape=(), dtype="I64", parts=(part(stop=1, nbytes=8),)),
            TensorEntry(name="none", shape=(0, 2), dtype="BOOL", parts=()),
        ),
        "shards": (Shard(path=SHARD, nbytes=200, xxh3="fedcba9876543210"),),
        "state": {"history": {"loss": [1.5, math.nan, 1e-7]}, "empty": {}, "none": None},
    }
    return Manifest(**{**fields, **changes})


def test_round_trip() -> None:
    before = manifest()
    after = Manifest.from_bytes(before.to_bytes(), "m")
    assert repr(after) == repr(before)  # NaN is not equal to itself
    assert after.to_bytes() == before.to_bytes()
    assert after.nbytes == 24 + 8


def test_a_person_and_any_json_reader_can_read_it() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = manifest().to_bytes().decode()
    document = json.loads(text, parse_constant=refuse)
    assert document["format"] == 1
    assert document["step"] == 100
    assert document["tensors"][0] == {
        "name": "w/ü [0:2] % #",
        "shape": [3, 2],
        "dtype": "F32",
        "parts": [
            {
                "rows": [0, 3],
                "shard": SHARD,
                "offset": 80,
                "bytes": 24,
                "xxh3": "0123456789abcdef",
            }
        ],
    }
    assert document["metrics"]["auc"] == {"$float": "nan"}
    assert '"w/ü' in text
    assert text.splitlines()[1] == '  "format": 1,'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(["$float", "$dict"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_state_round_trips(value: Any) -> None:
    after = Manifest.from_bytes(manifest(state={"x": value}).to_bytes(), "m").state["x"]
    assert repr(after) == repr(value)


def test_numpy_numbers_become_plain_ones() -> None:
    written = manifest(metrics={"loss": np.float32(0.1), "n": np.int64(3)})
    after = Manifest.from_bytes(written.to_bytes(), "m")
    assert after.metrics == {"loss": float(np.float32(0.1)), "n": 3}
    assert type(after.metrics["n"]) is int


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": {1: 2}}, "state.a has a key that is no text"),
        ({"a": [0, object()]}, r"state.a\[1\] is of type object"),
        ({"a": {1, 2}}, "of type set"),
        ({"a": np.zeros(2)}, "of type ndarray"),
    ],
)
def test_what_json_would_lose_is_refused(state: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        manifest(state=state).to_bytes()


def test_every_truncation_is_seen() -> None:
    data = manifest().to_bytes()
    for size in range(len(data) - 1):
        with pytest.raises(CheckpointDamagedError) as caught:
            Manifest.from_bytes(data[:size], "/x/manifest.json")
        assert caught.value.context["path"] == "/x/manifest.json"


def test_every_flipped_bit_is_seen_or_means_the_same() -> None:
    """A flip can make `1E-07` of `1e-07`, or change a float's last digit to one that is read as the
    same float; whatever is accepted is exactly what was written.
    """
    data = manifest().to_bytes()
    accepted = 0
    for index in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            try:
                after = Manifest.from_bytes(bytes(flipped), "m")
            except CheckpointDamagedError:
                continue
            accepted += 1
            assert repr(after) == repr(manifest())
    assert accepted < 5


def test_noise_is_damage_and_nothing_else() -> None:
    draw = random.Random(3)
    for size in (0, 1, 50, 1000):
        with pytest.raises(CheckpointDamagedError):
            Manifest.from_bytes(draw.randbytes(size), "m")
    for text in ("[]", "3", "{}", "null", '{"digest": 3}', "[" * 100_000):
        with pytest.raises(CheckpointDamagedError):
            Manifest.from_bytes(text.encode(), "m")


def test_a_newer_format_is_told_from_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 7)
    data = manifest().to_bytes()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 7; this raytf reads format 1"):
        Manifest.from_bytes(data, "m")
    with pytest.raises(CheckpointDamagedError):
        Manifest.from_bytes(data.replace(b'"format": 7', b'"format": 8'), "m")


def entry(**changes: Any) -> tuple[TensorEntry, ...]:
    fields: dict[str, Any] = {"name": "w", "shape": (3, 2), "dtype": "F32", "parts": (part(),)}
    return (TensorEntry(**{**fields, **changes}),)


def shard(path: str) -> tuple[Shard, ...]:
    return (Shard(path=path, nbytes=200, xxh3=""),)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tensors": entry(parts=())}, "parts for 0 of 3 rows"),
        ({"tensors": entry(parts=(part(start=1),))}, "no part that begins at row 0"),
        ({"tensors": entry(parts=(part(stop=2),))}, "a part of 24 bytes for rows 0 to 2"),
        ({"tensors": entry(parts=(part(offset=177),))}, "past the end"),
        ({"tensors": entry(parts=(part(shard="x"),))}, "not among the shards"),
        ({"tensors": entry(dtype="F31")}, "unknown type 'F31'"),
        ({"tensors": entry(shape=(-1, 2))}, "impossible shape"),
        ({"tensors": entry() + entry()}, "one name"),
        ({"shards": shard(SHARD) + shard(SHARD)}, "listed twice"),
        ({"shards": shard(SHARD) + shard("../other/x")}, "outside"),
        ({"shards": shard(SHARD) + shard("/etc/x")}, "outside"),
        ({"shards": shard(SHARD) + shard("step-1/../../x")}, "outside"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], told: str) -> None:
    wrong = manifest(**changes)
    assert told in wrong.faults()[0]
    with pytest.raises(CheckpointDamagedError, match=r"contradicts itself|wrong kind"):
        Manifest.from_bytes(wrong.to_bytes(), "m")


def test_a_missing_field_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [f.name for f in dataclasses.fields(Manifest) if f.name not in ("tensors", "shards")]
    assert set(fields) == set(module._PLAIN_FIELDS)
    monkeypatch.setattr(module, "_PLAIN_FIELDS", tuple(f for f in fields if f != "epoch"))
    monkeypatch.setattr(module, "_ORDER", tuple(f for f in module._ORDER if f != "epoch"))
    data = manifest().to_bytes()
    monkeypatch.undo()
    with pytest.raises(CheckpointDamagedError, match="missing or of a wrong kind"):
        Manifest.from_bytes(data, "m")


def test_step_names() -> None:
    assert step_name(100) == "step-0000000100"
    assert parse_step("step-0000000100") == 100
    assert parse_step(step_name(12_345_678_901)) == 12_345_678_901
    assert sorted([step_name(9), step_name(10), step_name(100)], key=parse_step) == [
        "step-0000000009",
        "step-0000000010",
        "step-0000000100",
    ]
    for name in ("", "step-1", "step-000000010x", "Step-0000000100", "step--000000001"):
        assert parse_step(name) is None
    for name in ("step-00000000100", "step-0000000100 ", "step-0000000100\n", "x/step-0000000100"):
        assert parse_step(name) is None
    with pytest.raises(ConfigError):
        step_name(-1)
