"""The event log: it never holds anybody up, loses nothing without saying so, and can be read."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.events import (
    Event,
    EventWriter,
    Kind,
    file_name,
    follow,
    next_part,
    parse_name,
    read_events,
    to_line,
)


class Store:
    """Files in memory, with a gate and faults."""

    def __init__(self, appends: bool = True) -> None:
        self.files: dict[str, bytes] = {}
        self.writes = 0
        self.fail: Callable[[int], str | None] = lambda n: None  # "torn", "before", "after"
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.synced: list[str] = []
        self.appends = appends

    def sink(self, name: str, data: bytes, append: bool) -> None:
        self.entered.set()
        assert self.open.wait(10)
        assert append == self.appends
        self.writes += 1
        how = self.fail(self.writes)
        old = self.files.get(name, b"") if append else b""
        if how == "torn":
            self.files[name] = old + data[: len(data) // 2]
        elif how != "before":
            self.files[name] = old + data
        if how is not None:
            raise OSError(how)

    def names(self) -> list[str]:
        return list(self.files)

    def read(self, name: str, offset: int) -> bytes:
        return self.files[name][offset:]

    def writer(self, **more: object) -> EventWriter:
        given = {"attempt": 3, "writer": "driver", "appends": self.appends}
        given |= {"flush_s": 0.01, "retry_s": 0.001}
        return EventWriter(self.sink, **{**given, **more})  # type: ignore[arg-type]


def event(n: int, kind: Kind = Kind.WORKER_ERROR, **more: object) -> Event:
    told = {"time": float(n), "kind": kind, "run": "r", "attempt": 3, "step": n}
    return Event(**{**told, **more})  # type: ignore[arg-type]


def steps(store: Store) -> list[int | None]:
    return [e.step for e in read_events(store.names, store.read)]


def test_names() -> None:
    assert file_name(3, "driver") == "attempt-0003-driver.jsonl"
    assert file_name(3, "driver", 1) == "attempt-0003-driver-0001.jsonl"
    assert file_name(12345, "rank-1/x") == "attempt-12345-rank_1_x.jsonl"
    assert parse_name("attempt-0003-driver.jsonl") == (3, "driver", None)
    assert parse_name("attempt-0003-driver-0012.jsonl") == (3, "driver", 12)
    for foreign in ("x.jsonl", "attempt-3-a.jsonl", "attempt-0003-a.json", "events.jsonl"):
        assert parse_name(foreign) is None
    names = [file_name(3, "driver", 1), file_name(3, "driver", 2), file_name(4, "driver", 7)]
    assert next_part(names, 3, "driver") == 3
    assert next_part(names, 3, "rank-1") == 1


def test_what_is_emitted_is_in_the_file_with_its_writer() -> None:
    store = Store()
    writer = store.writer(sync=store.synced.append)
    for n in range(5):
        writer.emit(event(n))
    assert writer.flush()
    assert list(store.files) == ["attempt-0003-driver.jsonl"]
    assert steps(store) == [0, 1, 2, 3, 4]
    fields = [e.fields for e in read_events(store.names, store.read)]
    assert [f["seq"] for f in fields] == [1, 2, 3, 4, 5]
    assert {f["writer"] for f in fields} == {"driver"}
    assert store.synced == []
    assert writer.close()
    assert store.synced == ["attempt-0003-driver.jsonl"]
    writer.emit(event(9))
    assert writer.dropped == 1
    assert writer.close()


def test_close_writes_what_is_left() -> None:
    store = Store()
    writer = store.writer(flush_s=3600.0)
    writer.emit(event(1))
    assert writer.close()
    assert steps(store) == [1]


def test_events_of_a_moment_share_a_write() -> None:
    store = Store()
    writer = store.writer(flush_s=3600.0, flush_events=50)
    for n in range(50):
        writer.emit(event(n))
    assert store.entered.wait(10)
    assert writer.close()
    assert store.writes == 1
    assert len(steps(store)) == 50


def test_emit_does_not_wait_for_a_store_that_hangs_and_drops_are_told() -> None:
    store = Store()
    store.open.clear()
    writer = store.writer(max_queue=10)
    writer.emit(event(0))
    assert store.entered.wait(10)
    began = time.monotonic()
    for n in range(1, 1000):
        writer.emit(event(n))
    assert time.monotonic() - began < 2.0
    assert writer.dropped == 990
    store.open.set()
    assert writer.flush()
    writer.emit(event(5000))
    assert writer.close()
    events = read_events(store.names, store.read)
    assert [e.step for e in events if e.step is not None] == [*range(10), 5000]
    told = [e.fields["dropped"] for e in events if e.kind is Kind.MESSAGE]
    assert sum(told) == 990


def test_a_fault_is_heard_after_a_flood_of_steps() -> None:
    store = Store()
    store.open.clear()
    writer = store.writer(max_queue=10)
    for n in range(100):
        writer.emit(event(n, Kind.STEP_REACHED))
    writer.emit(event(100))
    store.open.set()
    assert writer.close()
    assert 100 in steps(store)
    assert writer.dropped == 92


def test_a_store_that_fails_is_asked_again_and_nothing_is_lost() -> None:
    store = Store()
    store.fail = lambda n: "before" if n <= 2 else None
    writer = store.writer()
    for n in range(20):
        writer.emit(event(n))
    assert writer.flush()
    assert steps(store) == list(range(20))
    assert writer.dropped == 0
    assert writer.close()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["torn", "before", "after", None]), max_size=3),
    st.booleans(),
    st.integers(1, 6),
)
def test_whatever_a_failed_write_leaves_each_event_is_read_once(
    faults: list[str | None], appends: bool, count: int
) -> None:
    store = Store(appends)
    store.fail = lambda n: faults[n - 1] if n <= len(faults) else None
    writer = store.writer(flush_events=2, part_bytes=200)
    for n in range(count):
        writer.emit(event(n))
    assert writer.close()
    assert steps(store) == list(range(count))


def test_a_store_that_stays_broken_does_not_keep_close() -> None:
    store = Store()
    store.fail = lambda n: "before"
    writer = store.writer()
    writer.emit(event(1))
    assert not writer.flush(0.05)
    assert not writer.close(0.2)
    assert writer.dropped == 1


def test_parts_grow_until_they_are_full() -> None:
    store = Store(appends=False)
    writer = store.writer(part_bytes=300, first_part=4)
    for n in range(12):
        writer.emit(event(n))
        assert writer.flush()
    assert writer.close()
    assert steps(store) == list(range(12))
    assert min(store.files) == "attempt-0003-driver-0004.jsonl"
    assert len(store.files) > 2
    assert all(len(data) < 500 for data in store.files.values())
    assert next_part(store.names(), 3, "driver") == 4 + len(store.files)


def test_from_a_signal_handler() -> None:
    store = Store()
    writer = store.writer()
    before = signal.signal(signal.SIGUSR1, lambda *_: writer.emit(event(-1)))
    try:
        for n in range(300):
            writer.emit(event(n))
            if n % 10 == 0:
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert writer.close()
    assert len(steps(store)) == 330


def test_fields_that_cannot_be_read_do_not_lose_the_event() -> None:
    class Changing(dict[str, object]):
        def items(self) -> object:  # type: ignore[override]
            raise RuntimeError("dictionary changed size during iteration")

    store = Store()
    writer = store.writer()
    writer.emit(event(1, fields={"a": Changing(b=1)}))
    writer.emit(event(2))
    assert writer.close()
    first, second = read_events(store.names, store.read)
    assert "RuntimeError" in first.fields["unwritten"]
    assert second.step == 2


def lines(*events: Event) -> bytes:
    return b"".join(to_line(e).encode() + b"\n" for e in events)


def test_reading_merges_by_time_and_keeps_each_writers_order() -> None:
    store = Store()
    store.files = {
        # a clock that was set back: what was written later happened later
        "attempt-0001-a.jsonl": lines(event(1, time=10.0), event(2, time=8.0), event(3, time=12.0)),
        "attempt-0002-b.jsonl": lines(event(4, time=9.0), event(5, time=11.0), event(6, time=12.0)),
        "notes.txt": b"not ours",
    }
    assert steps(store) == [4, 1, 2, 5, 3, 6]


def test_reading_counts_what_is_torn() -> None:
    store = Store()
    whole = lines(event(1), event(2))
    store.files = {
        "attempt-0001-a.jsonl": whole[:-20],
        "attempt-0001-b.jsonl": b"\n" + whole[:30] + b"\n" + lines(event(3)) + b"[" * 100_000,
        "attempt-0001-c.jsonl": lines(event(4))[:-1],  # whole, but for its end of line
    }
    events = read_events(store.names, store.read)
    assert [e.step for e in events] == [1, 3, 4]
    assert events.skipped == 3


def test_a_file_that_vanishes_is_no_error() -> None:
    def read(name: str, offset: int) -> bytes:
        raise FileNotFoundError(name)

    assert read_events(lambda: ["attempt-0001-a.jsonl"], read) == []


def test_follow_yields_what_comes_and_waits_for_the_end_of_a_line() -> None:
    store = Store()
    name, later = "attempt-0001-a.jsonl", "attempt-0001-b.jsonl"
    torn = lines(event(2))
    script = [
        lambda: store.files.update({name: lines(event(1)) + torn[:10]}),
        lambda: store.files.update({name: lines(event(1)) + torn}),
        lambda: store.files.update({later: lines(event(3))}),
        lambda: None,
    ]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        script.pop(0)()

    seen = follow(store.names, store.read, sleep, poll_s=0.5, stop=lambda: not script)
    assert [(e.step, len(slept)) for e in seen] == [(1, 1), (2, 2), (3, 3)]
    assert slept == [0.5] * 4


def test_follow_leaves_full_parts_alone() -> None:
    store = Store(appends=False)
    store.files = {file_name(1, "a", n): lines(event(n)) for n in range(1, 50)}
    reads: list[str] = []
    polls = iter([False, False, True])

    def read(name: str, offset: int) -> bytes:
        reads.append(name)
        return store.read(name, offset)

    seen = list(follow(store.names, read, lambda s: None, stop=lambda: next(polls)))
    assert len(seen) == 49
    assert len(reads) == 49 + 1 + 1


def test_lines_are_json_for_other_tools() -> None:
    store = Store()
    writer = store.writer()
    writer.emit(event(1, fields={"loss": float("nan")}))
    assert writer.close()
    (data,) = store.files.values()
    assert json.loads(data)["fields"]["loss"] == "NaN"
