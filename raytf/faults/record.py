"""One event: what it holds, and how it reads as a line of JSON. Pure.

Owns the schema of DESIGN.md and its rules for other versions: an unknown kind, an unknown field or
a newer version is kept and shown, it never stops a reader. JSON has no NaN: such numbers are
written as the texts "NaN", "Infinity" and "-Infinity" and read back as numbers.
"""

from __future__ import annotations

import json
import math
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

from raytf.faults.redaction import is_secret_name, redact

__all__ = ["FAULT_KINDS", "VERSION", "Event", "Kind", "event_line", "from_line", "to_line"]

VERSION = 1
_MAX_TEXT = 100_000  # characters of one text: stacks of all ranks fit, a runaway repr does not
_MAX_DEPTH = 20
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Kind(StrEnum):
    """What can happen. The values are what is in the files: they never change their meaning."""

    RUN_STARTED = "run_started"
    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    RUN_FINISHED = "run_finished"
    WORKER_STARTED = "worker_started"
    WORKER_READY = "worker_ready"
    WORKER_KILLED = "worker_killed"
    WORKER_EXITED = "worker_exited"
    WORKER_ERROR = "worker_error"
    WORKER_REPLACED = "worker_replaced"
    NODE_LOST = "node_lost"
    NODE_EXCLUDED = "node_excluded"
    NODE_READMITTED = "node_readmitted"
    DRAIN_NOTICED = "drain_noticed"
    GENERATION_FORMED = "generation_formed"
    RESIZED = "resized"
    RESTORED = "restored"
    STEP_REACHED = "step_reached"
    EPOCH_ENDED = "epoch_ended"
    PHASE = "phase"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    HANG_DETECTED = "hang_detected"
    STRAGGLER_DETECTED = "straggler_detected"
    NAN_DETECTED = "nan_detected"
    DIVERGENCE_DETECTED = "divergence_detected"
    DECISION = "decision"
    DRILL_FIRED = "drill_fired"
    MESSAGE = "message"


# After one of these, training stands still until the run is mended.
FAULT_KINDS = frozenset(
    {
        Kind.WORKER_KILLED,
        Kind.WORKER_EXITED,
        Kind.WORKER_ERROR,
        Kind.NODE_LOST,
        Kind.HANG_DETECTED,
        Kind.NAN_DETECTED,
        Kind.DIVERGENCE_DETECTED,
    }
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One change of state.

    Attributes:
        time: UTC, seconds since the epoch.
        kind: a Kind, or the text of one that this version does not know.
        run: name of the run.
        attempt: number of the attempt, from 1; 0 before the first.
        v: version of the schema it was written with.
        generation: of the group of ranks: each time they meet anew it grows by one.
        rank, node, pid: the *subject*: who died, not who says so.
        step: completed steps of the run.
        phase: what the subject was doing (data, step, save, validate, ...).
        fields: everything else, plain JSON values; `fields["writer"]` names the writer.
        extra: top-level entries of a newer version, kept so that nothing is lost.
    """

    time: float
    kind: Kind | str
    run: str
    attempt: int
    v: int = VERSION
    generation: int | None = None
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def writer(self) -> str | None:
        """Who wrote it down."""
        return self.fields.get("writer")

    def with_fields(self, **more: Any) -> Event:
        """The same event with more fields; what is there already is kept."""
        return replace(self, fields={**more, **self.fields})


_KINDS = {str(kind): kind for kind in Kind}
_OPTIONAL = ("generation", "rank", "node", "pid", "step", "phase")
_NAMES = ("v", "time", "kind", "run", "attempt", *_OPTIONAL, "fields")


def to_line(event: Event) -> str:
    """One line of JSON, without its newline; every text in it is redacted.

    Values that are no JSON become their text: an event is never lost because of what is in it.
    """
    told: dict[str, Any] = {
        "v": event.v,
        "time": event.time,
        "kind": str(event.kind),
        "run": event.run,
        "attempt": event.attempt,
    }
    for name in _OPTIONAL:
        if (value := getattr(event, name)) is not None:
            told[name] = value
    told["fields"] = event.fields
    told.update({k: v for k, v in event.extra.items() if k not in told})
    return json.dumps(_encoded(told), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def from_line(line: str | bytes) -> Event:
    """Reads a line.

    Raises:
        ValueError: it is no event: torn, or something else.
    """
    read: Any = json.loads(line)
    if not isinstance(read, dict):
        raise ValueError("an event is a JSON object")
    told = cast(dict[str, Any], _decoded(read))
    try:
        kind, fields = str(told["kind"]), told.get("fields")
        return Event(
            time=float(told["time"]),
            kind=_KINDS.get(kind, kind),
            run=str(told["run"]),
            attempt=int(told["attempt"]),
            v=int(told.get("v", VERSION)),
            fields=_as_fields(fields),
            extra={k: v for k, v in told.items() if k not in _NAMES},
            **{name: told[name] for name in _OPTIONAL if name in told},
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"no event: {error!r} is missing or of another type") from error


def _as_fields(read: Any) -> dict[str, Any]:
    if isinstance(read, dict):
        return cast(dict[str, Any], read)
    return {} if read is None else {"fields": read}


def _encoded(value: Any, name: str = "", depth: int = 0) -> Any:
    if value is None or value is True or value is False or type(value) is int:
        return value
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _not_finite(float(value))
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            items = cast(Mapping[Any, Any], value).items()
            return {redact(str(k)): _encoded(v, str(k), depth + 1) for k, v in list(items)}
        if isinstance(value, list | tuple | set | frozenset):
            return [_encoded(v, name, depth + 1) for v in cast(tuple[Any], tuple(value))]  # pyright: ignore[reportUnknownArgumentType]
        if hasattr(value, "tolist"):  # NumPy's arrays and scalars
            return _encoded(value.tolist(), name, depth + 1)
    return _text(_safe_text(value), name)


def _text(text: str, name: str) -> str:
    if name and is_secret_name(name):
        return "***"
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"
    # A lone surrogate (a path that is no UTF-8) could not be written to a file.
    return redact(str(text)).encode("utf-8", "backslashreplace").decode("utf-8")


def _safe_text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # somebody's __str__: the event matters more
        return f"<{type(value).__name__}: {type(error).__name__} in its text>"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {k: _decoded(v) for k, v in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_decoded(v) for v in cast(list[Any], value)]
    return value


def event_line(event: Event) -> str:
    """How an event reads in a log: one line, without stacks and the like."""
    moment = clock.strftime("%H:%M:%S", clock.gmtime(event.time))
    parts = [f"{moment}Z", f"#{event.attempt}", str(event.kind)]
    for name in ("rank", "node", "step", "phase"):
        if (value := getattr(event, name)) is not None:
            parts.append(f"{name}={value}")
    for name, value in event.fields.items():
        if name in ("writer", "seq") or isinstance(value, Mapping | list):
            continue
        first, *rest = str(value).strip().splitlines() or [""]
        text = first if len(first) <= 120 and not rest else f"{first[:119]}…"
        parts.append(f"{name}={text}")
    return redact(" ".join(parts))
