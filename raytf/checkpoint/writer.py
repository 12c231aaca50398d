"""Writes what the training thread has copied, in a thread of its own: shards of all ranks, then the
manifest.

Owns the buffers, the queue and the order of one save. At most one save is in flight, and one, the
newest, waits: a rank that cannot keep up skips saves and counts them. No rank decides alone whether
a save exists: each gives its part, or says that it has none, and rank 0 commits only what is whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raytf.checkpoint.layout import Image, Slice, group
from raytf.checkpoint.manifest import Manifest, Part, Shard, TensorEntry
from raytf.checkpoint.retention import Rule
from raytf.checkpoint.reuse import plan_reuse
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import RaytfError, SupersededError

__all__ = ["Outcome", "Peers", "Snapshot", "Writer"]

MAX_SHARD_BYTES = 256 * 1024 * 1024
_PAUSE = 5.0  # times what a piece took: writing takes a sixth of one core
_MAX_PAUSE_S = 0.2
logger = logging.getLogger("raytf")
Images = list[Image]


class Peers(Protocol):
    """The other ranks, as the writer sees them; see `raytf.worker.links.Links`."""

    def share(self, key: str, value: Any, /) -> list[Any]: ...

    def post(self, key: str, value: Any, /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's copy of its part of a state, to be written.

    Attributes:
        number: of the save, counted alike on all ranks.
        step: steps completed.
        images: shard files, filled.
        own: JSON of this rank (its random state, its callbacks).
        head: fields of the manifest that are known before writing; used on rank 0.
    """

    number: int
    step: int
    images: Images
    own: Mapping[str, Any]
    head: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a save.

    Attributes:
        kind: "committed", "failed", "skipped", or "superseded": another attempt has the run.
        step: of the save.
        seconds: from the start of writing to the commit.
        written_bytes: by this rank.
        error: why it failed.
        deleted: steps that retention has deleted after it.
    """

    kind: str
    step: int
    seconds: float = 0.0
    written_bytes: int = 0
    error: str | None = None
    deleted: tuple[int, ...] = ()


class Writer:
    """The saving thread of one rank.

    Args:
        store: of the run.
        rank: this rank.
        num_workers: ranks that write.
        attempt: of the run, part of shard names.
        generation: of the worker group, part of shard names.
        peers: to exchange what was written.
        rule: what to keep.
        may_commit: raises SupersededError if another attempt has taken the run over; asked before
            every commit and deletion.
        at: `at(phase, step)`; called in the phases "write" and "commit" (fault drills).
        done: called in the writer's thread with the outcome of each save.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        rank: int,
        num_workers: int,
        attempt: int,
        generation: int,
        peers: Peers,
        rule: Rule,
        may_commit: Callable[[], None],
        at: Callable[[str, int], None] = lambda phase, step: None,
        done: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_workers = num_workers
        self._attempt = attempt
        self._generation = generation
        self._peers = peers
        self._rule = rule
        self._may_commit = may_commit
        self._at = at
        self._done = done
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._in_flight: Snapshot | None = None
        self._free: list[Images] = []
        self._made = 0
        self._closed = False
        self._hurry = threading.Event()  # somebody waits for the save in flight
        store.files.pace = self._pace
        self._known: dict[str, Part] = {}  # of the newest durable state, by `Slice.key`
        self._shards: dict[str, Shard] = {}  # that those parts lie in
        self._swept = False
        self._thread: threading.Thread | None = None

    def knows(self, manifest: Manifest) -> None:
        """What is already durable, from the checkpoint that was restored: need not be written
        again.
        """
        self._known = _parts_by_key(manifest.tensors)
        self._shards = {shard.path: shard for shard in manifest.shards}

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._in_flight is not None

    def images(self, slices: Sequence[Slice]) -> Images:
        """Host buffers for a snapshot, reused; a snapshot that still waits gives its own up and
        counts as skipped.
        """
        skipped: Snapshot | None = None
        with self._changed:
            if self._waiting is not None:
                skipped, self._waiting = self._waiting, None
                self._free.append(skipped.images)
            images = self._free.pop() if self._free else None
        if skipped is not None:
            self._peers.post(_key("save", skipped), None)
            self._done(Outcome(kind="skipped", step=skipped.step))
        wanted = tuple(slices)
        if images is not None and tuple(s for image in images for s in image.slices) == wanted:
            return images
        return [Image(part) for part in group(wanted, MAX_SHARD_BYTES)]

    def submit(self, snapshot: Snapshot) -> None:
        """Hands a filled snapshot over; returns at once."""
        with self._changed:
            self._waiting = snapshot
            if self._in_flight is not None:
                self._hurry.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raytf-save", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until everything that was handed over is durable or has failed; False if that has
        not come to pass in time.
        """
        with self._changed:
            self._hurry.set()
            return self._changed.wait_for(
                lambda: self._waiting is None and self._in_flight is None, timeout_s
            )

    def close(self) -> None:
        """Ends the thread; what waits is not written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._closed:
                    return
                snapshot, self._waiting = self._waiting, None
                self._in_flight = snapshot
            if snapshot is None:
                continue
            try:
                self._done(self._save(snapshot))
            except Exception:  # of the listener: the thread must outlive it, or nobody saves
                logger.exception("what was to be told of step %d got lost", snapshot.step)
            with self._changed:
                if self._waiting is None:
                    self._hurry.clear()
                self._in_flight = None
                self._free.append(snapshot.images)
                self._changed.notify_all()

    def _pace(self, seconds: float) -> None:
        """Leaves the processor to training between two pieces of a file, unless somebody waits."""
        self._hurry.wait(min(_PAUSE * seconds, _MAX_PAUSE_S))

    def _save(self, snapshot: Snapshot) -> Outcome:
        began = time.monotonic()
        try:
            entry = self._write(snapshot)
        except Exception as error:  # whatever a store raises: told to all ranks, then to the user
            logger.debug(
                "rank %d could not write step %d", self._rank, snapshot.step, exc_info=True
            )
            entry = {"error": f"rank {self._rank}: {error}"}
        try:
            return self._agree(snapshot, entry, began)
        except RaytfError as error:
            # The group is ending (its failure is reported where it happened), or the store is.
            return Outcome(kind="failed", step=snapshot.step, error=str(error))

    def _write(self, snapshot: Snapshot) -> dict[str, Any]:
        """Writes what has changed; returns this rank's entry for the manifest."""
        sizes = {path: shard.nbytes for path, shard in self._shards.items()}
        parts, files, pieces = list[Any](), list[Any](), list[Any]()
        for index, image in enumerate(snapshot.images):
            digests = image.digests()
            kept = plan_reuse(image.slices, digests, self._known, sizes)
            parts += [told(s, p) for s, p in zip(image.slices, kept, strict=True) if p is not None]
            changed = [i for i, part in enumerate(kept) if part is None]
            if not changed:
                continue
            whole = len(changed) == len(image.slices)
            piece = image if whole else image.subset(changed)
            path = self._store.shard_path(
                snapshot.step,
                self._attempt,
                self._generation,
                self._rank,
                self._num_workers,
                index,
            )
            files.append((path, piece))
            pieces.append((piece, [digests[i] for i in changed]))
        shards = self._store.write_shards(files)
        for shard, (piece, digests) in zip(shards, pieces, strict=True):
            for s, offset, digest in zip(piece.slices, piece.offsets, digests, strict=True):
                part = Part(
                    start=s.start,
                    stop=s.stop,
                    shard=shard.path,
                    offset=offset,
                    nbytes=s.nbytes,
                    xxh3=digest,
                )
                parts.append(told(s, part))
        self._at("write", snapshot.step)
        return {
            "parts": parts,
            "shards": [[s.path, s.nbytes, s.xxh3] for s in shards],
            "own": dict(snapshot.own),
        }

    def _agree(self, snapshot: Snapshot, entry: dict[str, Any], began: float) -> Outcome:
        step = snapshot.step
        entries = self._peers.share(_key("save", snapshot), entry)
        if any(e is None for e in entries):
            return Outcome(kind="skipped", step=step)
        errors = [e["error"] for e in entries if "error" in e]
        result: dict[str, Any] = {"error": "; ".join(errors)} if errors else {}
        tensors = () if errors else _joined(entries)
        shards = {} if errors else self._used_shards(entries, tensors)
        if self._rank == 0 and not errors:
            result = self._commit(snapshot, entries, tensors, shards)
        # All learn whether it exists: it decides what need not be written again.
        result = self._peers.share(_key("commit", snapshot), result)[0]
        if result.get("error"):
            kind = "superseded" if result.get("superseded") else "failed"
            return Outcome(kind=kind, step=step, error=result["error"])
        if result["is_new"]:
            self._known, self._shards = _parts_by_key(tensors), shards
        else:  # the step was there: what was just written for it is gone
            self._known, self._shards = {}, {}
        mine = sum(n for _, n, _ in entry["shards"])
        return Outcome(
            kind="committed",
            step=step,
            seconds=time.monotonic() - began,
            written_bytes=mine,
            deleted=tuple(result.get("deleted", ())),
        )

    def _used_shards(
        self, entries: list[dict[str, Any]], tensors: tuple[TensorEntry, ...]
    ) -> dict[str, Shard]:
        new = [Shard(path=p, nbytes=n, xxh3=x) for e in entries for p, n, x in e["shards"]]
        there = self._shards | {shard.path: shard for shard in new}
        used = {part.shard for tensor in tensors for part in tensor.parts}
        return {path: shard for path, shard in there.items() if path in used}

    def _commit(
        self,
        snapshot: Snapshot,
        entries: list[dict[str, Any]],
        tensors: tuple[TensorEntry, ...],
        shards: Mapping[str, Shard],
    ) -> dict[str, Any]:
        own = [e["own"] for e in entries]
        distinct: list[Any] = []
        for state in own:
            if state not in distinct:
                distinct.append(state)
        fields: dict[str, Any] = dict(snapshot.head)
        fields["tensors"] = tensors
        fields["shards"] = tuple(shards.values())
        fields["state"] = {
            **fields["state"],
            "own": distinct,
            "own_of_rank": [distinct.index(state) for state in own],
        }
        manifest = Manifest(**fields)
        try:
            self._at("commit", snapshot.step)
            is_new = self._store.commit(manifest, self._may_commit)
        except SupersededError as error:
            return {"error": error.message, "superseded": True}
        except RaytfError as error:
            return {"error": f"rank 0: {error}"}
        return {"deleted": self._tidy(), "is_new": is_new}

    def _tidy(self) -> list[int]:
        """Deletes what the rule does not keep; trouble with it never fails a save."""
        try:
            deleted = self._store.retain(self._rule, self._may_commit)
            if not self._swept:
                self._store.sweep(self._attempt, self._generation)
                self._swept = True
        except RaytfError as error:
            logger.warning("old checkpoints could not be deleted: %s", error)
            return []
        return deleted


def _key(what: str, snapshot: Snapshot) -> str:
    return f"{what}/{snapshot.number}/{snapshot.step}"


def told(piece: Slice, part: Part) -> dict[str, Any]:
    """A part and its tensor as plain data, for the other ranks."""
    return {
        "name": piece.tensor.name,
        "shape": list(piece.tensor.shape),
        "dtype": piece.tensor.dtype,
        "part": [part.start, part.stop, part.shard, part.offset, part.nbytes, part.xxh3],
    }


def _joined(entries: Sequence[Mapping[str, Any]]) -> tuple[TensorEntry, ...]:
    """All ranks' parts, by tensor."""
    found: dict[str, tuple[Any, list[Part]]] = {}
    for told in (part for entry in entries for part in entry["parts"]):
        start, stop, shard, offset, nbytes, xxh3 = told["part"]
        part = Part(start=start, stop=stop, shard=shard, offset=offset, nbytes=nbytes, xxh3=xxh3)
        found.setdefault(told["name"], (told, []))[1].append(part)
    return tuple(
        TensorEntry(
            name=name,
            shape=tuple(told["shape"]),
            dtype=told["dtype"],
            parts=tuple(sorted(parts, key=lambda p: p.start)),
        )
        for name, (told, parts) in found.items()
    )


def _parts_by_key(tensors: Sequence[TensorEntry]) -> dict[str, Part]:
    known: dict[str, Part] = {}
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        for part in tensor.parts:
            whole = part.start == 0 and part.stop == rows
            known[tensor.name if whole else f"{tensor.name}[{part.start}:{part.stop}]"] = part
    return known
