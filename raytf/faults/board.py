"""TensorBoard's files of a run, written from its events and nothing else, without TensorFlow.

Owns `{storage_path}/{name}/tensorboard/`: which event becomes which point, the text panels, and a
step axis that stays one line over restarts. When a run goes back to an earlier step, a restart mark
(`SessionLog.START`, what `purge_step` of a SummaryWriter writes) makes TensorBoard drop the points
behind that step; those of the new way follow. Names of files sort by attempt, because TensorBoard
reads them in that order, whatever the clocks of two hosts say.

tensorboardX is used for its file format only: its own writer runs a queue of multiprocessing, and
names files by the second.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import socket
import threading
import time as clock
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from raytf.faults.goodput import Fold
from raytf.faults.incidents import Incidents, markdown_table
from raytf.faults.record import FAULT_KINDS, Event, Kind
from raytf.faults.redaction import is_secret_name, redact

__all__ = ["TENSORBOARD", "Board", "Point", "Points", "Rewind"]

TENSORBOARD = "tensorboard"  # directory below a run's directory
_CHATTY = frozenset({Kind.STEP_REACHED, Kind.PHASE, Kind.MESSAGE})
_CHATTY_SHARE = 0.8
_NEVER = 2**62  # a step that no run gets to
_REOPEN_S = 10.0  # after a failed write, before the next is tried
_log = logging.getLogger("raytf")


@dataclass(frozen=True)
class Point:
    """A scalar, or with a text as its value one state of a text panel (Markdown)."""

    tag: str
    step: int
    time: float
    value: float | str


@dataclass(frozen=True)
class Rewind:
    """Points of this step and of later ones are void from here on."""

    step: int
    time: float


class Points:
    """Which points an event becomes. Pure; events come in order of time.

    A tag never gets two points for one step: what is told again after a restart is left out up to
    the step that the run went back to.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._reached = 0
        self._ledger, self._incidents = Fold(), Incidents()

    def of(self, event: Event) -> list[Point | Rewind]:
        """The points of one event, in the order in which they are to be written."""
        self._ledger.add(event)
        grew = self._incidents.add(event)
        made: list[Point | Rewind] = []
        if event.kind is Kind.RESTORED and event.step is not None:
            made += self._rewind(event.step, event.time)
        elif event.kind is Kind.STEP_REACHED and event.rank in (None, 0):
            made += self._step(event)
        elif event.kind is Kind.EPOCH_ENDED:
            step = self._reached if event.step is None else event.step
            made += self._scalars("epoch", _numbers(event.fields.get("logs")), step, event.time)
        elif event.kind is Kind.CHECKPOINT_COMMITTED:
            step = self._reached if event.step is None else event.step
            told = {name: event.fields.get(name) for name in ("seconds", "stall_s", "bytes")}
            made += self._scalars("save", _numbers(told), step, event.time)
        elif event.kind is Kind.RUN_FINISHED:
            made += self._account(self._reached, event.time)
        if grew:
            text = markdown_table(self._incidents.rows, _moment)
            made.append(Point("faults", self._reached, event.time, text))
        return made

    def _step(self, event: Event) -> list[Point | Rewind]:
        if event.step is None:
            return []
        made: list[Point | Rewind] = []
        if event.step < self._last.get("train", 0):
            made += self._rewind(event.step - 1, event.time)  # nobody told of the restore
        self._reached = event.step
        self._last["train"] = event.step
        made += self._scalars("train", _numbers(event.fields.get("logs")), event.step, event.time)
        speed = {"examples_per_s": event.fields.get("examples_per_s")}
        made += self._scalars("throughput", _numbers(speed), event.step, event.time)
        return made + self._account(event.step, event.time)

    def _account(self, step: int, time: float) -> list[Point]:
        ledger = self._ledger.ledger()
        shown = {
            "goodput": ledger.goodput,
            "ettr": ledger.ettr,
            "restarts": ledger.restarts,
            "lost_steps": ledger.lost_steps,
            "save_stall_s": ledger.seconds["save_stall"],
            "data_wait_s": ledger.seconds["data_wait"],
        }
        return self._scalars("run", shown, step, time)

    def _scalars(
        self, group: str, values: Mapping[str, float], step: int, time: float
    ) -> list[Point]:
        made: list[Point] = []
        for name, value in values.items():
            tag = f"{group}/{name}"
            if step > self._last.get(tag, -1):
                self._last[tag] = step
                made.append(Point(tag, step, time, float(value)))
        return made

    def _rewind(self, step: int, time: float) -> list[Rewind]:
        """Back to `step` completed steps, whose own points stay."""
        self._reached = step
        self._last = {tag: min(last, step) for tag, last in self._last.items()}
        return [Rewind(step + 1, time)]


class Board:
    """Writes the files, in a thread of its own.

    `add` neither blocks nor raises. What does not fit in the queue is dropped, chatter (steps)
    first; a directory that cannot be written is told of once, tried again every 10 s, and costs
    the points of that time.

    Args:
        directory: local; made if it is missing.
        attempt: of the run; part of the files' names.
        past: events of earlier attempts, in order of time: the fault table and the ledger go on
            from them. Read in the thread.
        config: shown as a text panel and as hyperparameters.
        sync: called with the path of each file that has changed, at most every `sync_s` seconds
            and at the end: uploads it. Without it the directory is the run's own.
        flush_s: seconds after which points are on disk.
        sync_s: see `sync`.
        max_queue: events that wait at most.
        part_bytes: size at which a new file begins (with `sync`, which sends whole files).
    """

    def __init__(
        self,
        directory: str,
        *,
        attempt: int,
        past: Iterable[Event] = (),
        config: Mapping[str, Any] | None = None,
        sync: Callable[[str], None] | None = None,
        flush_s: float = 5.0,
        sync_s: float = 30.0,
        max_queue: int = 10_000,
        part_bytes: int = 4 * 2**20,
    ) -> None:
        self._past, self._config, self._sync = past, config, sync
        self._flush_s, self._sync_s, self._max_queue = flush_s, sync_s, max_queue
        self._points = Points()
        self._file = _EventFile(directory, attempt, part_bytes if sync else None)
        self._queue = queue.SimpleQueue[Event | _Flush | None]()
        self._lock = threading.RLock()
        self._waiting = self._dropped = 0
        self._closed = self._complained = False
        self._broken_until = self._flushed_at = self._synced_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="raytf-board", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Takes an event; returns at once."""
        bound = self._max_queue * (_CHATTY_SHARE if event.kind in _CHATTY else 1.0)
        with self._lock:
            if self._closed or self._waiting >= bound:
                self._dropped += 1
                return
            self._waiting += 1
        self._queue.put(event)

    @property
    def dropped(self) -> int:
        """Events that did not fit, and points that could not be written."""
        return self._dropped

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until all that was added before is on disk (and uploaded); whether it is."""
        token = _Flush()
        self._queue.put(token)
        return token.done.wait(timeout_s) and token.ok

    def close(self, timeout_s: float = 10.0) -> bool:
        """Writes what is left and ends the thread; whether that was done in time."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._try(self._begin)
        while True:
            try:
                item = self._queue.get(timeout=self._flush_s)
            except queue.Empty:
                self._save(force=False)
                continue
            if item is None:
                break
            if isinstance(item, _Flush):
                item.ok = self._save(force=True)
                item.done.set()
                continue
            self._take(item)
            if clock.monotonic() - self._flushed_at >= self._flush_s:
                self._save(force=False)
        self._save(force=True)
        self._try(self._file.close)

    def _begin(self) -> None:
        latest = 0.0
        for event in self._past:
            self._points.of(event)
            latest = event.time
        if self._config:
            began = latest or clock.time()
            self._file.write(Point("config", 0, began, _config_table(self._config)))
            self._file.hparams(_flat(self._config))

    def _take(self, event: Event) -> None:
        with self._lock:
            self._waiting -= 1
        made: list[Point | Rewind] = []
        self._try(lambda: made.extend(self._points.of(event)), spoils=False)
        if clock.monotonic() < self._broken_until:
            self._lose(len(made))
            return
        for point in made:
            if not self._try(lambda p=point: self._file.write(p)):
                self._lose(1)
                self._broken_until = clock.monotonic() + _REOPEN_S
        if event.kind in FAULT_KINDS:  # who looks at it now wants to see just this
            self._save(force=False)

    def _lose(self, number: int) -> None:
        with self._lock:
            self._dropped += number

    def _save(self, force: bool) -> bool:
        self._flushed_at = clock.monotonic()
        is_written = self._try(self._file.flush)
        due = force or self._flushed_at - self._synced_at >= self._sync_s
        if self._sync is None or not due:
            return is_written
        self._synced_at = self._flushed_at
        return self._try(self._upload, spoils=False) and is_written

    def _upload(self) -> None:
        for path in self._file.changed():
            if self._sync is not None:
                self._sync(path)
            self._file.uploaded(path)

    def _try(self, act: Callable[[], object], spoils: bool = True) -> bool:
        try:
            act()
            return True
        except Exception as error:  # a picture of the run must never harm the run
            if not self._complained:
                self._complained = True
                what = redact(f"{type(error).__name__}: {error}")
                _log.warning("TensorBoard's files are incomplete, the run goes on: %s", what)
            if spoils:
                self._file.abandon()
            return False


class _Flush:
    def __init__(self) -> None:
        self.done, self.ok = threading.Event(), False


class _EventFile:
    """The event files of one Board. After an error a new one is begun: readers stop for good at a
    record that is torn.
    """

    def __init__(self, directory: str, attempt: int, part_bytes: int | None) -> None:
        self._directory, self._attempt, self._part_bytes = directory, attempt, part_bytes
        self._part = 0
        self._path = ""
        self._writer: Any = None
        self._nbytes = 0
        self._is_dirty = False
        self._changed: dict[str, None] = {}

    def write(self, point: Point | Rewind) -> None:
        proto, summary = _module("proto.event_pb2"), _module("summary")
        if isinstance(point, Rewind):
            mark = proto.SessionLog(status=proto.SessionLog.START)
            event = proto.Event(step=point.step, wall_time=point.time, session_log=mark)
        else:
            tag, value = point.tag, point.value
            is_text = isinstance(value, str)
            made = summary.text(tag, value) if is_text else summary.scalar(tag, value)
            event = proto.Event(step=point.step, wall_time=point.time, summary=made)
        self._append(event.SerializeToString())

    def hparams(self, values: Mapping[str, Any]) -> None:
        proto = _module("proto.event_pb2")
        for made in _module("summary").hparams(dict(values), {"epoch/loss": 0.0}):
            self._append(proto.Event(wall_time=clock.time(), summary=made).SerializeToString())

    def _append(self, record: bytes) -> None:
        if self._part_bytes is not None and self._nbytes >= self._part_bytes:
            self.close()
        if self._writer is None:
            self._writer = self._open()
        self._changed[self._path] = None
        self._writer.write(record)
        self._nbytes += len(record) + 16
        self._is_dirty = True

    def _open(self) -> Any:
        os.makedirs(self._directory, exist_ok=True)
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())
        while True:  # another process of the same attempt may have written here
            self._part += 1
            name = f"events.out.tfevents.{self._attempt:010d}.{self._part:04d}.{host}"
            self._path = os.path.join(self._directory, name)
            if not os.path.exists(self._path):
                break
        writer = _module("record_writer").RecordWriter(self._path)
        self._nbytes = 0
        proto = _module("proto.event_pb2")
        head = proto.Event(wall_time=clock.time(), file_version="brain.Event:2")
        writer.write(head.SerializeToString())
        # TensorBoard takes the first mark it sees for the start of the run and obeys those behind
        # it only. This one voids nothing, in whichever place it is read.
        mark = proto.SessionLog(status=proto.SessionLog.START)
        first = proto.Event(step=_NEVER, wall_time=clock.time(), session_log=mark)
        writer.write(first.SerializeToString())
        return writer

    def flush(self) -> None:
        if self._writer is not None and self._is_dirty:
            self._writer.flush()
            self._is_dirty = False

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.flush()
            writer.close()

    def abandon(self) -> None:
        """The present file may end in half a record: nothing more is written to it."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception as error:
            _log.debug("A file of TensorBoard's was left open: %s", error)

    def changed(self) -> list[str]:
        return list(self._changed)

    def uploaded(self, path: str) -> None:
        self._changed.pop(path, None)


def _module(name: str) -> Any:
    """A part of tensorboardX, imported when it is first needed: 0.2 s."""
    return importlib.import_module(f"tensorboardX.{name}")


def _numbers(logs: Any) -> dict[str, float]:
    """What of some logs is a number."""
    if not isinstance(logs, Mapping):
        return {}
    items = cast(Mapping[Any, Any], logs).items()
    kinds = (int, float)
    return {str(k): v for k, v in items if isinstance(v, kinds) and not isinstance(v, bool)}


def _moment(seconds: float) -> str:
    return clock.strftime("%Y-%m-%d %H:%M:%SZ", clock.gmtime(seconds))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Names with dots, plain values; secrets hidden."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        if is_secret_name(str(name)):
            flat[full] = "***"
        elif isinstance(value, Mapping):
            flat |= _flat(cast(Mapping[str, Any], value), f"{full}.")
        elif isinstance(value, bool | int | float):
            flat[full] = value
        elif value is not None:
            flat[full] = redact(str(value))[:1000]
    return flat


def _config_table(config: Mapping[str, Any]) -> str:
    lines = ["| name | value |", "| --- | --- |"]
    for name, value in _flat(config).items():
        text = " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)
