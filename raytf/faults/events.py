"""The event log: who writes it without ever holding up a step, who reads it while it grows.

Owns the files of `{storage_path}/{name}/events/`: one per writer and attempt where the store can
append (`attempt-0003-driver.jsonl`), numbered parts where it cannot
(`attempt-0003-driver-0001.jsonl`; the last part is written anew, longer each time, until it is
full). What an event is belongs to `record`, whose names are here too. Stores come in as functions.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from raytf.faults.record import (
    FAULT_KINDS,
    VERSION,
    Event,
    Kind,
    event_line,
    from_line,
    to_line,
)
from raytf.faults.redaction import redact

__all__ = [
    "FAULT_KINDS",
    "VERSION",
    "Event",
    "EventList",
    "EventWriter",
    "Kind",
    "event_line",
    "file_name",
    "follow",
    "from_line",
    "next_part",
    "parse_name",
    "read_events",
    "redact",
    "to_line",
]

# The part of the queue that chatter may not fill, so that a fault is still heard after a flood.
_CHATTY = frozenset({Kind.STEP_REACHED, Kind.PHASE, Kind.MESSAGE})
_CHATTY_SHARE = 0.8
_NAME = re.compile(r"attempt-(\d{4,})-([A-Za-z0-9_.]+?)(?:-(\d{4,}))?\.jsonl")
_MAX_RETRY_S = 10.0

Sink = Callable[[str, bytes, bool], None]
ReadBytes = Callable[[str, int], bytes]


def file_name(attempt: int, writer: str, part: int | None = None) -> str:
    """`attempt-0003-driver.jsonl`, or `attempt-0003-driver-0001.jsonl` with a part."""
    safe = re.sub(r"[^A-Za-z0-9_.]", "_", writer) or "_"
    return f"attempt-{attempt:04d}-{safe}{'' if part is None else f'-{part:04d}'}.jsonl"


def parse_name(name: str) -> tuple[int, str, int | None] | None:
    """Attempt, writer and part of an event file; None for any other file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return int(found[1]), found[2], None if found[3] is None else int(found[3])


def next_part(names: Iterable[str], attempt: int, writer: str) -> int:
    """The first free part: a writer that starts again must not write over what it left."""
    own = parse_name(file_name(attempt, writer))
    parsed = [p for p in map(parse_name, names) if p is not None and own is not None]
    return max((part or 0 for a, w, part in parsed if own and (a, w) == own[:2]), default=0) + 1


class _Flush:
    def __init__(self) -> None:
        self.done = threading.Event()


class EventWriter:
    """Writes the events of one writer, in a thread of its own.

    `emit` neither blocks nor raises, and may be called from any thread or signal handler. What does
    not fit in the queue is dropped, newest first and chatter (steps, phases, messages) before the
    rest; how many were dropped is told by a later event. A sink that fails is asked again, with
    growing pauses, and nothing is lost meanwhile unless the queue fills.

    Args:
        sink: `(name, data, append)`: adds `data` to the file, or with append=False makes it the
            whole file. It may raise; then the same data comes again. Runs in the writer's thread.
        attempt: of the run.
        writer: `driver`, `run_actor`, `rank_0`: part of the file's name and of each event.
        appends: whether the store can append.
        first_part: for stores that cannot: see `next_part`.
        flush_s: longest time that an event waits, in seconds.
        flush_events: events after which it does not wait any longer.
        max_queue: events that wait at most.
        part_bytes: size at which a new part begins.
        retry_s: first pause after a failed write; it doubles up to 10 s.
        sync: called at `close` for each file written and not replaced: makes it durable (fsync).
    """

    def __init__(
        self,
        sink: Sink,
        *,
        attempt: int,
        writer: str,
        appends: bool = True,
        first_part: int = 1,
        flush_s: float = 1.0,
        flush_events: int = 200,
        max_queue: int = 10_000,
        part_bytes: int = 256 * 1024,
        retry_s: float = 0.1,
        sync: Callable[[str], None] | None = None,
    ) -> None:
        self._sink, self._sync = sink, sync
        self._attempt, self._writer, self._appends = attempt, writer, appends
        self._flush_s, self._flush_events = flush_s, flush_events
        self._max_queue, self._part_bytes, self._retry_s = max_queue, part_bytes, retry_s
        self._queue = queue.SimpleQueue[Event | _Flush]()
        self._lock = threading.RLock()  # reentrant: a signal handler may emit
        self._waiting = 0  # events taken and not written yet
        self._dropped = self._dropped_told = 0
        self._last: Event | None = None
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._seq = 0
        self._part, self._part_data = first_part, b""
        self._pending: list[bytes] = []  # lines that are due
        self._torn = False
        self._thread = threading.Thread(target=self._run, name="raytf-events", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Takes an event; returns at once, whatever the store does."""
        chatty = event.kind in _CHATTY
        bound = self._max_queue * _CHATTY_SHARE if chatty else self._max_queue
        with self._lock:
            if self._waiting >= bound or self._closing.is_set():
                self._dropped += 1
                return
            self._waiting += 1
        self._queue.put(event)

    @property
    def dropped(self) -> int:
        """Events that will never be written."""
        return self._dropped

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until all that was emitted before is written; whether it is."""
        token = _Flush()
        self._queue.put(token)
        return token.done.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Writes what is left and ends the thread; whether all could be written in time."""
        if not self._closing.is_set():
            self._deadline = time.monotonic() + timeout_s
            self._closing.set()
            self._queue.put(_Flush())
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive() and self._waiting == 0

    def _run(self) -> None:
        while not self._closing.is_set():
            self._settle(self._gather())
        self._settle(self._drain())
        if self._sync is not None and not self._pending and self._appends and self._seq:
            self._try(lambda: self._sync and self._sync(file_name(self._attempt, self._writer)))
        with self._lock:
            self._dropped += len(self._pending)

    def _settle(self, tokens: list[_Flush]) -> None:
        self._write()
        for token in tokens:
            if not self._pending:
                token.done.set()

    def _gather(self) -> list[_Flush]:
        """Waits for a first event, then for more until it is time to write."""
        tokens = self._take(None)
        until = time.monotonic() + self._flush_s
        while not tokens and len(self._pending) < self._flush_events:
            left = until - time.monotonic()
            if left <= 0:
                break
            tokens = self._take(left)
        return tokens + self._drain()

    def _drain(self) -> list[_Flush]:
        tokens: list[_Flush] = []
        while not self._queue.empty():
            tokens += self._take(None)
        return tokens

    def _take(self, wait_s: float | None) -> list[_Flush]:
        try:
            item = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return []
        if isinstance(item, _Flush):
            return [item]
        self._last = item
        self._pending.append(self._line(item))
        return []

    def _line(self, event: Event) -> bytes:
        self._seq += 1
        try:
            text = to_line(event.with_fields(writer=self._writer, seq=self._seq))
        except Exception as error:  # fields that change while they are read, and the like
            text = to_line(
                Event(
                    time=event.time,
                    kind=event.kind,
                    run=event.run,
                    attempt=event.attempt,
                    fields={
                        "writer": self._writer,
                        "seq": self._seq,
                        "unwritten": f"its fields could not be written: {type(error).__name__}",
                    },
                )
            )
        return text.encode("utf-8") + b"\n"

    def _write(self) -> None:
        self._tell_of_drops()
        pause = self._retry_s
        while self._pending and not self._try(self._write_once):
            if self._closing.is_set():
                if time.monotonic() + pause > self._deadline:
                    return
                time.sleep(pause)  # the last tries: nobody waits but `close`
            else:
                self._closing.wait(pause)
            pause = min(pause * 2, _MAX_RETRY_S)

    def _tell_of_drops(self) -> None:
        with self._lock:
            new = self._dropped - self._dropped_told
            if not new or self._last is None:
                return
            self._dropped_told = self._dropped
            self._waiting += 1
        last = self._last
        text = f"{new} events were dropped: the store was too slow or did not answer"
        told = Event(
            time=last.time,
            kind=Kind.MESSAGE,
            run=last.run,
            attempt=last.attempt,
            fields={"text": text, "dropped": new},
        )
        self._pending.append(self._line(told))

    def _write_once(self) -> None:
        lines = list(self._pending)
        data = b"".join(lines)
        if self._appends:
            # Part of a failed write may be there. It must not swallow the first line of this one;
            # lines that come twice are told apart by the reader.
            self._sink(file_name(self._attempt, self._writer), b"\n" * self._torn + data, True)
        else:
            name = file_name(self._attempt, self._writer, self._part)
            self._sink(name, self._part_data + data, False)
            self._part_data += data
            if len(self._part_data) >= self._part_bytes:
                self._part, self._part_data = self._part + 1, b""
        del self._pending[: len(lines)]
        with self._lock:
            self._waiting -= len(lines)

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception:  # any store, any error: it is asked again, and the run goes on
            self._torn = True
            return False
        self._torn = False
        return True


class EventList(list[Event]):
    """Events in order of time.

    Attributes:
        skipped: lines that could not be read: torn by a death in mid-write, or foreign.
    """

    def __init__(self, events: Iterable[Event] = (), skipped: int = 0) -> None:
        super().__init__(events)
        self.skipped = skipped


class _Tail:
    """What of one file has been read so far."""

    def __init__(self, name: str) -> None:
        self.name, self.offset, self.skipped = name, 0, 0
        self._rest = b""
        self._seen = set[int]()  # a failed append may be there twice
        self._latest = float("-inf")

    def read(self, read_bytes: ReadBytes, is_last: bool) -> list[tuple[float, Event]]:
        """New events, each with its place in time.

        A clock that was set back does not change the order of one writer's events.

        Args:
            is_last: whether nothing will come any more: a line without its end is torn then.
        """
        data = read_bytes(self.name, self.offset)
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if is_last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        events: list[tuple[float, Event]] = []
        for line in lines:
            if not line.strip() or hash(line) in self._seen:
                continue
            self._seen.add(hash(line))
            try:
                event = from_line(line)
            except (ValueError, RecursionError):
                self.skipped += 1
                continue
            self._latest = max(self._latest, event.time)
            events.append((self._latest, event))
        return events


def _merged(batches: Iterable[Sequence[tuple[float, Event]]]) -> list[Event]:
    found = [placed for batch in batches for placed in batch]
    return [event for _, event in sorted(found, key=lambda placed: placed[0])]


def read_events(list_names: Callable[[], Iterable[str]], read_bytes: ReadBytes) -> EventList:
    """All events of a run, in order of time; those of one writer stay in their order.

    Args:
        list_names: names in the folder of events; others than event files are ignored.
        read_bytes: `(name, offset)` -> the file's bytes from `offset` on, b"" at its end. What it
            raises comes out, except FileNotFoundError: a file may be deleted meanwhile.
    """
    tails = [_Tail(name) for name in sorted(set(list_names())) if parse_name(name)]
    batches = [_read(tail, read_bytes, is_last=True) for tail in tails]
    return EventList(_merged(batches), sum(tail.skipped for tail in tails))


def _read(tail: _Tail, read_bytes: ReadBytes, is_last: bool) -> list[tuple[float, Event]]:
    try:
        return tail.read(read_bytes, is_last)
    except FileNotFoundError:
        return []


def follow(
    list_names: Callable[[], Iterable[str]],
    read_bytes: ReadBytes,
    sleep: Callable[[float], None],
    *,
    poll_s: float = 1.0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """The events so far and then each new one; ends when `stop` says so, asked once a poll.

    Within one poll they come in order of time. A line that is still being written waits for its
    end. Parts that have a successor are read once more and then left alone.
    """
    tails: dict[str, _Tail] = {}
    complete = set[str]()
    while True:
        stopping = stop()  # asked first: what was written before that is still read
        names = sorted(n for n in set(list_names()) if parse_name(n))
        for name in names:
            tails.setdefault(name, _Tail(name))
        open_names = [n for n in names if n not in complete]
        yield from _merged([_read(tails[n], read_bytes, is_last=False) for n in open_names])
        complete.update(_with_successor(names))
        if stopping:
            return
        sleep(poll_s)


def _with_successor(names: Sequence[str]) -> list[str]:
    newest: dict[tuple[int, str], int] = {}
    parsed = [(name, found) for name in names if (found := parse_name(name))]
    for _, (attempt, writer, part) in parsed:
        newest[attempt, writer] = max(newest.get((attempt, writer), 0), part or 0)
    return [n for n, (a, w, part) in parsed if part is not None and part < newest[a, w]]
