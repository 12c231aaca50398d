"""How a run is, from its storage alone: it need not be running, and the cluster need not exist.

Owns the judgement of a run's state in Ray Train's words, and the places a run's facts are read
from: events, `lease.json`, `final/final.json`, `nodes.json`, `run.json`, the newest manifest. A run
that says it is running and has not given a sign of life for a while is not called running: that
cannot be known from here, and `state` is UNKNOWN.
"""

from __future__ import annotations

import calendar
import json
import logging
import time as clock
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.checkpoint.holder import Holder, Process, is_dead
from raytf.checkpoint.lease import EXPIRES_S, read_holder
from raytf.checkpoint.storage import FINAL, Storage
from raytf.checkpoint.store import CheckpointStore
from raytf.cluster.event_log import EVENTS, events_of, names
from raytf.errors import NotFoundError, RaytfError, StorageError
from raytf.faults.events import Event, EventList, Kind
from raytf.faults.goodput import Ledger
from raytf.faults.incidents import Incidents
from raytf.faults.nodes import NodeBook

__all__ = [
    "RUN",
    "Facts",
    "history_of",
    "is_run",
    "listing",
    "read_facts",
    "read_json",
    "run_names",
    "status",
]

RUN = "run.json"
NODES = "nodes.json"
SILENT_S = 2 * EXPIRES_S  # the lease is renewed every 3 s: after this, something is wrong
_SHAPE = ("epochs", "steps_per_epoch", "global_batch_size")
_log = logging.getLogger("raytf")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found in a run's storage.

    Attributes:
        name, url: of the run.
        events: all, in order of time.
        holder: who has the lease, or had it last.
        holder_is_dead: whether its process is known to be gone (it ran on this host).
        final: content of `final/final.json`; None while the run is not finished.
        run: content of `run.json`.
        nodes: content of `nodes.json`.
        saved_step, saved_at: newest committed checkpoint; UTC seconds.
        versions, fingerprint: of its manifest.
    """

    name: str
    url: str
    events: Sequence[Event] = ()
    holder: Holder | None = None
    holder_is_dead: bool = False
    final: Mapping[str, Any] | None = None
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    nodes: Mapping[str, Any] | None = None
    saved_step: int | None = None
    saved_at: float | None = None
    versions: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_facts(storage: Storage) -> Facts:
    """Reads a run's facts.

    Args:
        storage: the run's directory.

    Raises:
        NotFoundError: there is no run.
        StorageError: the store does not answer.
    """
    found = listing(storage)
    if not is_run(found):
        raise NotFoundError(
            f"There is no run in {storage.url}: it holds neither {RUN} nor events nor checkpoints. "
            "`raytf runs` lists the runs of a storage path.",
            path=storage.url,
        )
    holder = read_holder(storage)
    facts: dict[str, Any] = {"holder": holder}
    if holder is not None:
        facts["holder_is_dead"] = is_dead(holder, Process.this())
    store = CheckpointStore(storage)
    latest = store.latest()
    if latest is not None:
        facts |= {"saved_step": latest} | _of_manifest(store, latest)
    run = read_json(storage, RUN) if RUN in found else None
    return Facts(
        name=storage.path.rstrip("/").rsplit("/", 1)[-1],
        url=storage.url,
        events=events_of(storage) if EVENTS in found else EventList(),
        final=read_json(storage, FINAL, "final.json") if FINAL in found else None,
        run=run or {},
        nodes=read_json(storage, NODES) if NODES in found else None,
        **facts,
    )


def _of_manifest(store: CheckpointStore, step: int) -> dict[str, Any]:
    try:
        manifest = store.manifest(step)
    except RaytfError as error:  # damaged or just deleted: everything else is still to be told
        _log.debug("%s", error)
        return {}
    told = {"versions": manifest.versions, "fingerprint": manifest.fingerprint}
    return {"saved_at": manifest.time, **told}


def listing(storage: Storage) -> list[str]:
    """Names in a directory; [] if it is not there.

    Raises:
        StorageError: the store does not answer.
    """
    try:
        return names(storage)
    except NotADirectoryError:
        return []
    except Exception as error:  # a store raises what it likes
        raise StorageError(
            f"{storage.url} cannot be listed: {error}. Check that the storage can be reached.",
            path=storage.url,
        ) from error


def is_run(found: Iterable[str]) -> bool:
    """Whether a directory with these names in it is a run's."""
    return bool({RUN, EVENTS, "checkpoints"} & set(found))


def run_names(storage: Storage) -> list[str]:
    """Names of the runs below a storage path, in order.

    Raises:
        StorageError: the store does not answer.
    """
    below = [name for name in listing(storage) if not name.startswith(".")]
    return sorted(name for name in below if is_run(listing(storage.join(name))))


def read_json(storage: Storage, *parts: str) -> dict[str, Any] | None:
    """An object from a file; None if it is not there, or torn (then it is as good as not there)."""
    try:
        read = json.loads(storage.read_bytes(*parts))
    except FileNotFoundError:
        return None
    except ValueError as error:
        _log.debug("%s: %s", storage.join(*parts).url, error)
        return None
    return read if isinstance(read, dict) else None


def status(facts: Facts, now: float) -> dict[str, Any]:
    """The state of a run as plain data. Pure.

    Args:
        facts: from `read_facts`.
        now: UTC seconds since the epoch.

    Returns:
        `state` (INITIALIZING, RUNNING, RESTARTING, FINISHED, ERRORED, ABORTED as in Ray Train, or
        UNKNOWN), `note` (why, a sentence or ""), `silent_s`; `attempt`, `step`, `epoch` (from 0),
        `epochs`, `num_steps`, `metrics`, `examples_per_s`, `eta_s`, `last_save` (`step`, `age_s`),
        `faults` (rows of `incidents`), `restarts`, `goodput`, `lost_steps`, `excluded_nodes`,
        `holder`, `name`, `url`. What cannot be known is None.
    """
    events = facts.events
    alive_at = _last_sign(facts)
    silent_s = None if alive_at is None else max(0.0, now - alive_at)
    state, note = _state(facts, silent_s)
    is_live = state in ("INITIALIZING", "RUNNING", "RESTARTING")
    ledger = Ledger.of(events, now if is_live else None)
    progress = _progress(events)
    told = {
        "name": facts.name,
        "url": facts.url,
        "state": state,
        "note": note,
        "silent_s": silent_s,
        "attempt": _attempt(facts),
        **progress,
        "eta_s": _eta_s(progress) if is_live else None,
        "last_save": _last_save(facts, now),
        "faults": [row.to_json() for row in Incidents.of(events)],
        "restarts": ledger.restarts,
        "lost_steps": ledger.lost_steps,
        "goodput": ledger.goodput if events else None,
        "wall_s": ledger.wall_s if events else None,
        "excluded_nodes": _excluded(facts, now),
        "holder": _holder(facts),
    }
    result = (facts.final or {}).get("result")
    if state == "FINISHED" and isinstance(result, Mapping):
        told |= {"metrics": dict(result.get("metrics") or told["metrics"])}
        told |= {"step": result.get("steps", told["step"])}
    return told


def _state(facts: Facts, silent_s: float | None) -> tuple[str, str]:
    end, started = _end(facts.events)
    holder = facts.holder
    taken = holder is not None and not holder.released
    if end is not None and not (taken and holder and holder.attempt > end.attempt):
        return ("FINISHED", "") if end.kind is Kind.RUN_FINISHED else _ended_badly(end)
    is_done = facts.final is not None and not started
    if not taken and (is_done or (holder is not None and facts.final is not None)):
        return "FINISHED", ""
    if holder is not None and holder.released:
        return "ABORTED", "its driver gave it back without finishing it"
    silent = "no sign of life" if silent_s is None else f"no sign of life for {silent_s:.0f} s"
    if facts.holder_is_dead:
        return ("FINISHED", "") if is_done else ("UNKNOWN", f"its driver is gone; {silent}")
    if silent_s is None or silent_s > SILENT_S:
        return ("FINISHED", "") if is_done else ("UNKNOWN", silent)
    return _live_state(facts)


def _end(events: Sequence[Event]) -> tuple[Event | None, bool]:
    """How the newest attempt ended, if it has; whether one has started and not ended."""
    end, started = None, False
    for event in events:
        if event.kind is Kind.ATTEMPT_STARTED:
            end, started = None, True
        elif event.kind in (Kind.ATTEMPT_ENDED, Kind.RUN_FINISHED):
            end, started = event, False
    return end, started


def _ended_badly(event: Event) -> tuple[str, str]:
    error = str(event.fields.get("error") or "")
    text = str(event.fields.get("text") or "").strip().splitlines()[:1]
    note = ": ".join(part for part in (error, *text) if part)
    by_hand = error in ("KeyboardInterrupt", "SystemExit", "CancelledError") or not error
    return ("ABORTED" if by_hand else "ERRORED"), note


def _live_state(facts: Facts) -> tuple[str, str]:
    fold = Incidents()
    began = not facts.events and facts.saved_step is not None
    for event in facts.events:
        fold.add(event)
        if event.kind is Kind.ATTEMPT_STARTED:
            began = False
        began = began or event.kind is Kind.STEP_REACHED
    if fold.open:
        row = fold.open[0]
        return "RESTARTING", f"{row.where} {row.said}"
    return ("RUNNING", "") if began else ("INITIALIZING", "")


def _attempt(facts: Facts) -> int | None:
    numbers = [max((event.attempt for event in facts.events), default=0)]
    numbers += [facts.holder.attempt] if facts.holder is not None else []
    return max(numbers) or None


def _last_sign(facts: Facts) -> float | None:
    """UTC seconds, by the clocks of those who gave it."""
    signs = [event.time for event in facts.events[-1:]]
    if facts.holder is not None:
        try:
            read = clock.strptime(facts.holder.time, "%Y-%m-%dT%H:%M:%SZ")
            signs.append(float(calendar.timegm(read)))
        except ValueError:
            _log.debug("The lease of %s does not say when it was renewed", facts.url)
    return max(signs, default=facts.saved_at)


def _progress(events: Sequence[Event]) -> dict[str, Any]:
    step: int | None = None
    epoch: int | None = None
    speed: float | None = None
    metrics: dict[str, Any] = {}
    shape: dict[str, Any] = {name: None for name in _SHAPE}
    for event in events:
        fields = event.fields
        shape |= {name: fields[name] for name in _SHAPE if fields.get(name) is not None}
        if event.kind is Kind.STEP_REACHED and event.rank in (None, 0):
            step = event.step
            epoch = fields.get("epoch")
            speed = fields.get("examples_per_s")
            metrics |= _mapping(fields.get("logs"))
        elif event.kind is Kind.EPOCH_ENDED:
            epoch = fields.get("epoch")
            step = step if event.step is None else event.step
            metrics |= _mapping(fields.get("logs"))
        elif event.kind is Kind.RESTORED and event.step is not None:
            step = event.step
    total = None
    if _is_number(shape["epochs"]) and _is_number(shape["steps_per_epoch"]):
        total = int(shape["epochs"] * shape["steps_per_epoch"])
    return {
        "step": step,
        "num_steps": total,
        "epoch": epoch,
        "epochs": shape["epochs"],
        "global_batch_size": shape["global_batch_size"],
        "metrics": metrics,
        "examples_per_s": speed,
    }


def _eta_s(progress: Mapping[str, Any]) -> float | None:
    """Seconds to the end at the present speed, validation not counted."""
    names = ("step", "num_steps", "global_batch_size", "examples_per_s")
    step, total, batch, speed = (progress[name] for name in names)
    if not all(map(_is_number, (step, total, batch, speed))) or speed <= 0:
        return None
    return max(0, total - step) * batch / speed


def _last_save(facts: Facts, now: float) -> dict[str, Any] | None:
    told = [e for e in facts.events if e.kind is Kind.CHECKPOINT_COMMITTED][-1:]
    step, at = facts.saved_step, facts.saved_at
    seconds = None
    for event in told:
        if step is None or event.step == step:
            step, seconds = event.step, event.fields.get("seconds")
            at = event.time if at is None else at
    if step is None:
        return None
    return {"step": step, "age_s": None if at is None else max(0.0, now - at), "seconds": seconds}


def _excluded(facts: Facts, now: float) -> list[dict[str, Any]]:
    """Nodes that the run stays away from, with the seconds until they may come back."""
    if facts.nodes is not None:
        try:
            book = NodeBook.from_json(facts.nodes)
        except (KeyError, TypeError, AttributeError) as error:
            _log.debug("%s of %s: %r", NODES, facts.url, error)
        else:
            return [
                {"node": node, "left_s": max(0.0, (until or now) - now)}
                for node in sorted(book.excluded())
                if (until := book.nodes[node].excluded_until) is None or until > now
            ]
    out: dict[str, float | None] = {}
    for event in facts.events:
        node = event.node or ""
        if event.kind is Kind.NODE_EXCLUDED:
            until: Any = event.fields.get("until")
            out[node] = float(until) if _is_number(until) else None
        elif event.kind is Kind.NODE_READMITTED:
            out.pop(node, None)
    return [
        {"node": node, "left_s": None if until is None else max(0.0, until - now)}
        for node, until in sorted(out.items())
        if until is None or until > now
    ]


def _holder(facts: Facts) -> dict[str, Any] | None:
    seen = facts.holder
    if seen is None:
        return None
    told = {"host": seen.host, "pid": seen.pid, "attempt": seen.attempt, "since": seen.since}
    return told | {"renewed": seen.time, "released": seen.released, "is_dead": facts.holder_is_dead}


def history_of(facts: Facts) -> dict[str, list[float]]:
    """Metric name -> one value per epoch: the finished run's own, else as far as events tell."""
    result = _mapping((facts.final or {}).get("result"))
    told = _mapping(result.get("history"))
    if told:
        return {name: list(values) for name, values in told.items()}
    epochs: dict[int, Mapping[str, Any]] = {}
    for event in facts.events:
        epoch = event.fields.get("epoch")
        if event.kind is Kind.EPOCH_ENDED and isinstance(epoch, int):
            epochs[epoch] = _mapping(event.fields.get("logs"))  # told again: the last one counts
    history: dict[str, list[float]] = {}
    for epoch in sorted(epochs):
        for name, value in epochs[epoch].items():
            if _is_number(value):
                history.setdefault(str(name), []).append(float(value))
    return history


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
