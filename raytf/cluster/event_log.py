"""The event log of a run on its storage, and which progress records of workers are events.

Joins `faults.events`, which knows no files, and `checkpoint.storage`, which knows no events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raytf.checkpoint.storage import Storage
from raytf.errors import RaytfError, StorageError
from raytf.faults.events import (
    Event,
    EventList,
    EventWriter,
    Kind,
    next_part,
    read_events,
)

__all__ = ["EVENTS", "QUIET", "EventLog", "event_of", "events_of", "names", "read_from"]

EVENTS = "events"  # directory below a run's directory
QUIET = {Kind.STEP_REACHED, Kind.PHASE, Kind.MESSAGE, Kind.EPOCH_ENDED}  # shown by the display
_OUTCOMES = {
    "committed": Kind.CHECKPOINT_COMMITTED,
    "failed": Kind.CHECKPOINT_FAILED,
    "skipped": Kind.CHECKPOINT_SKIPPED,
    "superseded": Kind.CHECKPOINT_FAILED,
}
_SUBJECT = ("rank", "node", "pid", "step", "phase", "generation")


class EventLog:
    """Writes the events of one process of a run.

    Args:
        storage: the run's directory.
        run: name of the run.
        attempt: number of the attempt.
        writer: `driver` or `run_actor`.
    """

    def __init__(self, storage: Storage, run: str, attempt: int, writer: str) -> None:
        self._storage = storage.join(EVENTS)
        self._run = run
        self._attempt = attempt
        self._writer_name = writer
        first = 1
        if not storage.is_local:
            first = next_part(names(self._storage), attempt, writer)
        self._writer = EventWriter(
            self._write,
            attempt=attempt,
            writer=writer,
            appends=storage.is_local,
            first_part=first,
        )

    def _write(self, name: str, data: bytes, append: bool) -> None:
        if not append:
            self._storage.write_bytes(data, name)
            return
        path = self._storage.join(name).path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)

    def emit(self, kind: Kind, time: float, **given: Any) -> Event:
        """Makes and writes an event; what is no name of its subject goes into its fields."""
        subject = {name: given.pop(name) for name in _SUBJECT if name in given}
        event = Event(
            time=time,
            kind=kind,
            run=self._run,
            attempt=self._attempt,
            fields={"writer": self._writer_name, **given},
            **subject,
        )
        self._writer.emit(event)
        return event

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def names(storage: Storage) -> list[str]:
    """Names of the files in a directory; [] if it is not there."""
    storage.fs.invalidate_cache()
    try:
        found = storage.fs.ls(storage.path, detail=False)
    except FileNotFoundError:
        return []
    return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]


def events_of(storage: Storage) -> EventList:
    """All events of a run, oldest first.

    Args:
        storage: the run's directory.

    Raises:
        StorageError: the store does not answer.
    """
    place = storage.join(EVENTS)
    try:
        return read_events(lambda: names(place), lambda name, at: read_from(place, name, at))
    except RaytfError:
        raise
    except Exception as error:  # a store raises what it likes
        path = storage.join(EVENTS).url
        raise StorageError(
            f"The events in {path} cannot be read: {error}. Check that the storage can be reached.",
            path=path,
        ) from error


def read_from(place: Storage, name: str, offset: int) -> bytes:
    """The bytes of an event file from `offset` on.

    Only local files grow without bound; others are parts of a quarter MiB, read whole, because
    not every store gives a range (Arrow's bridge), or an empty one (S3).
    """
    if not place.is_local:
        return place.read_bytes(name)[offset:]
    with open(place.join(name).path, "rb") as file:
        file.seek(offset)
        return file.read()


def event_of(record: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]] | None:
    """Kind and content of the event that a worker's progress record tells of. Pure; None if it
    tells of none.
    """
    kind = record.get("kind")
    if kind == "event":
        rest = {k: v for k, v in record.items() if k not in ("kind", "event", "time")}
        return Kind(record["event"]), rest
    if kind == "step":
        logs = dict(record.get("logs") or {})
        shown = {k: record.get(k) for k in ("epoch", "examples_per_s", "seconds")}
        return Kind.STEP_REACHED, {"step": record["total_step"], "rank": 0, "logs": logs, **shown}
    if kind == "epoch":
        fields = {k: record.get(k) for k in ("epoch", "seconds", "rows")}
        logs = dict(record.get("logs") or {})
        return Kind.EPOCH_ENDED, {"step": record.get("total_step"), "logs": logs, **fields}
    if kind == "start":
        fields = {k: record.get(k) for k in ("epochs", "steps_per_epoch", "global_batch_size")}
        return Kind.WORKER_READY, {"rank": 0, **fields}
    if kind == "phase":
        return Kind.PHASE, {"rank": 0, "phase": record["phase"]}
    if kind == "restored":
        return Kind.RESTORED, {"step": record["step"], "source": record.get("source")}
    if kind == "message":
        return Kind.MESSAGE, {"text": record["text"]}
    if kind == "checkpoint":
        fields = {k: record.get(k) for k in ("seconds", "deleted", "error", "stall_s", "bytes")}
        return _OUTCOMES[record["outcome"]], {"step": record["step"], **fields}
    return None
