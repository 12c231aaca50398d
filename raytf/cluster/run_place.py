"""A run's place in the store, from the driver's side: whose it is, what it began with, whether it
is finished.

Owns `run.json` (what must not change when a run is resumed), the lease while a driver works on the
run, and what the driver can decide about an old state before any worker starts.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raytf.checkpoint.lease import Lease
from raytf.checkpoint.storage import FINAL, Storage
from raytf.checkpoint.store import CheckpointStore
from raytf.config import SaveConfig, TrainSpec, WatchConfig
from raytf.data import is_factory
from raytf.data.fingerprint import describe
from raytf.errors import ConfigError, StorageError
from raytf.faults.drill import Strike
from raytf.worker.links import Origin, RunPlace

__all__ = ["Finished", "OpenRun", "changed", "finished", "fingerprint", "open_run"]

RUN = "run.json"
_VERSION = 1
_log = logging.getLogger("raytf")


def fingerprint(spec: TrainSpec) -> dict[str, Any]:
    """What must be the same when a run is resumed, as JSON; workers compare the model."""
    data: Any = spec.train_data
    return {
        "seed": spec.seed,
        "global_batch_size": spec.global_batch_size,
        "shuffle": spec.shuffle,
        "drop_remainder": spec.drop_remainder,
        "legacy_keras": spec.legacy_keras,
        "train_data": {"factory": True} if is_factory(data) else describe(data),
    }


def changed(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`name: old value -> new value` for everything that differs. Pure."""
    lines: list[str] = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            lines += changed(before, now, f"{prefix}{name}.")
        elif before != now:
            lines.append(f"{prefix}{name}: {before!r} -> {now!r}")
    return lines


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a finished run left.

    Attributes:
        result: of rank 0's session.
        epochs_asked: `epochs` of the command that finished it.
    """

    result: dict[str, Any]
    epochs_asked: int


def finished(storage: Storage) -> Finished | None:
    """The result of a finished run, if there is one."""
    if not storage.exists(FINAL, "final.json"):  # written last by worker.export
        return None
    index = json.loads(storage.read_bytes(FINAL, "final.json"))
    result = index["result"]
    return Finished(
        result=result, epochs_asked=int(result.get("epochs_asked", result.get("epochs", 0)))
    )


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that this driver holds.

    Attributes:
        place: for the workers.
        finished: its result, if what is asked for has been done already.
    """

    place: RunPlace
    finished: Finished | None


@contextlib.contextmanager
def open_run(
    storage: Storage,
    spec: TrainSpec,
    save: SaveConfig,
    *,
    num_best: int = 1,
    watch: WatchConfig | None = None,
    kills: tuple[Strike, ...] = (),
    origin: Origin | None = None,
) -> Iterator[OpenRun]:
    """Takes the run for this process, checks that it is the same run, and gives it back at the end.

    Args:
        storage: the run's directory.
        spec: checked, with sources.
        save: effective settings.
        num_best: how many of the best `save.keep_best` keeps.
        watch: what counts as a fault while training is alive.
        kills: faults to inject.
        origin: what a new run starts from.

    Raises:
        RunInUseError: another driver is at it.
        ConfigError: something changed that must not.
        StorageError: the store cannot be written or read.
    """
    _check_store(storage)
    lease = Lease.acquire(storage, say=_log.warning)
    lease.start()
    try:
        mine = fingerprint(spec)
        run, is_new = _identify(storage, mine)
        done = finished(storage)
        asked = None if done is None else done.epochs_asked
        place = RunPlace(
            storage=storage,
            run=run,
            attempt=lease.attempt,
            owner=lease.owner,
            save=save,
            num_best=num_best,
            watch=watch or WatchConfig(),
            fingerprint=mine,
            kills=kills,
            origin=origin,
            go_on=asked is not None and spec.epochs > asked,
        )
        if origin is not None and not is_new:
            _check_origin(storage, origin)
        is_done = done is not None and spec.epochs <= done.epochs_asked
        yield OpenRun(place=place, finished=done if is_done else None)
    finally:
        lease.release()


def _check_store(storage: Storage) -> None:
    """A small file written, read and deleted: bad credentials show before Ray starts."""
    name = f".driver-{uuid.uuid4().hex[:8]}"
    try:
        storage.write_bytes(b"raytf", name)
        if storage.read_bytes(name) != b"raytf":
            raise OSError("what was written reads differently")
        storage.fs.rm_file(storage.join(name).path)
    except Exception as error:  # a store raises what it likes; all of it means "cannot"
        raise StorageError(
            f"{storage.url} cannot be written and read: {type(error).__name__}: {error}. Check "
            "storage_path, permissions and credentials.",
            path=storage.url,
        ) from error


def _identify(storage: Storage, mine: dict[str, Any]) -> tuple[str, bool]:
    """The run's id, and whether it begins now.

    Raises:
        ConfigError: the run began with something else.
    """
    if not storage.exists(RUN):
        if finished(storage) is not None or CheckpointStore(storage).latest() is not None:
            raise ConfigError(
                f"{storage.url} holds a run of another kind ({RUN} is missing): whether it is this "
                "one cannot be told. Choose another name, or move it away.",
                path=storage.url,
            )
        record = {
            "version": _VERSION,
            "run": uuid.uuid4().hex,
            "created": time.time(),
            "raytf": importlib.metadata.version("raytf"),
            "fingerprint": mine,
        }
        storage.write_bytes(json.dumps(record, indent=1).encode(), RUN)
        return str(record["run"]), True
    record = json.loads(storage.read_bytes(RUN))
    lines = changed(record["fingerprint"], mine)
    if lines:
        raise ConfigError(
            f"{storage.url} holds a run that began with other values:\n  "
            + "\n  ".join(lines)
            + "\nA run that goes on must see the batches it would have seen. Put the old values "
            "back, or give the new run another name (resume_from= starts it from this one's "
            "state).",
            path=storage.url,
        )
    return str(record["run"]), False


def _check_origin(storage: Storage, origin: Origin) -> None:
    if CheckpointStore(storage).latest() is None:
        return  # begun, but nothing saved yet: it still starts from there
    if origin.storage.path == storage.path:
        raise ConfigError(
            f"resume_from={origin.url!r} is a checkpoint of this very run, which has newer ones. "
            "Going back is a new run: give it another name."
        )
    _log.info("%s has checkpoints of its own: resume_from is not used again", storage.url)
