"""Events as lines: nothing is lost, nothing stops a reader, no secret gets out."""

from __future__ import annotations

import json
import math
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.record import VERSION, Event, Kind, event_line, from_line, to_line


def event(**values: object) -> Event:
    told = {"time": 1_700_000_000.5, "kind": Kind.WORKER_KILLED, "run": "mnist", "attempt": 3}
    return Event(**{**told, **values})  # type: ignore[arg-type]


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    # These three texts are how numbers that JSON lacks are written: they read as numbers.
    | st.text(st.characters(codec="utf-8", exclude_characters=":=@"), max_size=20).filter(
        lambda text: text not in ("NaN", "Infinity", "-Infinity")
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b c", "ü"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["writer", "text", "n"]), PLAIN), st.sampled_from(Kind))
def test_round_trip(fields: dict[str, object], kind: Kind) -> None:
    before = event(kind=kind, rank=1, node="ab12", pid=7, step=30, phase="step", fields=fields)
    line = to_line(before)
    assert "\n" not in line
    assert from_line(line) == before
    assert from_line(line.encode()) == before


def test_the_schema_is_what_the_design_says() -> None:
    told = json.loads(to_line(event(rank=0, fields={"writer": "driver"})))
    assert told == {
        "v": VERSION,
        "time": 1_700_000_000.5,
        "kind": "worker_killed",
        "run": "mnist",
        "attempt": 3,
        "rank": 0,
        "fields": {"writer": "driver"},
    }


def test_numbers_that_json_does_not_have() -> None:
    line = to_line(event(fields={"loss": math.nan, "all": [math.inf, -math.inf]}))
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    fields = from_line(line).fields
    assert math.isnan(fields["loss"])
    assert fields["all"] == [math.inf, -math.inf]


def test_what_a_newer_version_wrote_is_kept_and_shown() -> None:
    line = '{"v":9,"time":1,"kind":"worker_teleported","run":"r","attempt":2,"where":"x"}'
    read = from_line(line)
    assert (read.v, read.kind, read.extra) == (9, "worker_teleported", {"where": "x"})
    assert json.loads(to_line(read)) == {**json.loads(line), "fields": {}}
    assert "worker_teleported" in event_line(read)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        '{"v":1}',
        "[]",
        "3",
        "null",
        '{"time":"x","kind":"a","run":"r","attempt":1}',
        b"\xff",
    ],
)
def test_what_is_no_event(line: str | bytes) -> None:
    with pytest.raises(ValueError):
        from_line(line)


def test_any_value_can_be_told() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    loop: list[object] = []
    loop.append(loop)
    fields = {
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "path": PurePosixPath("/a"),
        "set": {1},
        1: "one",
        "broken": Broken(),
        "loop": loop,
        "surrogate": "a\udcffb",
        "kind": Kind.MESSAGE,
    }
    read = from_line(to_line(event(fields=fields))).fields
    assert read["array"] == [0, 1, 2]
    assert (read["scalar"], read["path"], read["set"], read["1"]) == (0.5, "/a", [1], "one")
    assert "RuntimeError" in read["broken"]
    assert read["surrogate"] == r"a\udcffb"
    assert read["kind"] == "message"


def test_every_text_is_redacted() -> None:
    told = event(
        run="s3://k:s3cret@b/r",
        node="https://u:s3cret@h",
        fields={
            "a": ["x token=s3cret"],
            "api_key": "s3cret",
            "?sig=s3cret": 1,
            "n": {"pwd": "s3cret"},
        },
    )
    assert "s3cret" not in to_line(told)
    assert "s3cret" not in event_line(told)


def test_a_runaway_text_is_cut() -> None:
    text = from_line(to_line(event(fields={"stack": "x " * 100_000}))).fields["stack"]
    assert len(text) < 101_000
    assert text.endswith("(100000 more characters)")


def test_a_line_for_people() -> None:
    told = event(rank=1, step=30, fields={"writer": "d", "seq": 4, "why": "gone\nstack", "x": [1]})
    assert event_line(told) == "22:13:20Z #3 worker_killed rank=1 step=30 why=gone…"
