"""The checkpoints of one run, on any fsspec URL.

Owns the commit: shards first, each under a name of its own, then the announcement, then the
manifest, whose appearance is the one moment at which a checkpoint begins to exist. Nothing is
overwritten in place. Listing is `catalog`'s, reading and repair `reading`'s, deleting `pruning`'s.

    {run}/checkpoints/recent.json
    {run}/checkpoints/step-0000000100/a0001-g0002-r00000-of-00002-0.safetensors
    {run}/checkpoints/step-0000000100/manifest.json
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from raytf.checkpoint.catalog import Catalog, manifest_path
from raytf.checkpoint.files import Files, RetryConfig
from raytf.checkpoint.manifest import Manifest, Part, Shard, step_name
from raytf.checkpoint.pruning import PINNED, READING, Pruner, shard_name
from raytf.checkpoint.reading import Problem, Reader
from raytf.checkpoint.retention import Record, Rule, best_steps
from raytf.checkpoint.storage import Storage, resolve
from raytf.errors import (
    CheckpointDamagedError,
    ConfigError,
    NotFoundError,
    RaytfError,
    StorageError,
)

__all__ = ["CHECKPOINTS", "CheckpointStore", "Problem", "ShardBytes"]

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # directory below a run's directory


class ShardBytes(Protocol):
    """What `write_shards` takes: an `Image` or a subset of one."""

    @property
    def nbytes(self) -> int: ...

    @property
    def xxh3(self) -> str: ...

    def pieces(self) -> list[memoryview]: ...


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        url: the run's directory or the `checkpoints` directory in it: an fsspec URL, a local path
            or a `Storage`. Nothing is opened before it is used.
        storage_filesystem: fsspec or pyarrow filesystem; `url` is then a path on it.
        retry: bounds of the retries.
        clock: seconds since 1970.

    Every verb raises `StorageError` if the store cannot be reached, listed, read or written.

    Example:
        >>> store = CheckpointStore("s3://bucket/runs/mnist")
        >>> arrays = store.read(store.latest())
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Storage,
        *,
        storage_filesystem: Any = None,
        retry: RetryConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if isinstance(url, Storage):
            self.storage = url
        else:
            self.storage = resolve(url, storage_filesystem)
        itself = posixpath.basename(self.storage.path) == CHECKPOINTS
        self.root = self.storage if itself else self.storage.join(CHECKPOINTS)
        self.url = self.storage.url
        self.files = Files(self.root, retry)
        self._clock = clock
        self._catalog = Catalog(self.files)
        self._reader = Reader(self.files, self._catalog)
        self._pruner = Pruner(self.files, self._catalog, lambda step: not self.verify(step), clock)

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self._catalog.steps()

    def latest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return self._catalog.latest()

    def best(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """The step with the best value of a metric; None if there is none with a value.

        Args:
            metric: as in the logs; None: the run's own `keep_best`, with its mode.
            mode: "min" or "max"; may be left out for the run's own metric.

        Raises:
            ConfigError: `mode` is missing for another metric, or neither "min" nor "max".
        """
        survey = self._catalog.survey()
        found = [survey.manifests[manifest_path(step)] for step in survey.committed]
        manifests = [manifest for manifest in found if manifest is not None]
        if not manifests:
            return None
        own = manifests[-1].best or {}
        metric = metric or own.get("metric")
        if metric is None:
            return None
        mode = mode or (own.get("mode") if metric == own.get("metric") else None)
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max' for {metric!r}. Received: {mode!r}.")
        records = [Record(step=m.step, metrics=m.metrics) for m in manifests]
        return next(iter(best_steps(records, metric, mode)), None)

    def path(self, step: int) -> str:
        """A step's directory, absolute on the filesystem."""
        return self.files.absolute(step_name(step))

    def step_url(self, step: int) -> str:
        """A step's directory as a URL; a plain path for local files."""
        return self.root.join(step_name(step)).url

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed step.

        Raises:
            NotFoundError: the step is not committed.
            CheckpointDamagedError: the manifest is not what was written.
            ConfigError: a newer raytf wrote it.
        """
        return self._catalog.manifest(step)

    def verify(self, step: int) -> list[Problem]:
        """Reads every byte of a step; what is not as it was written, or [].

        Raises:
            NotFoundError: the step is not committed.
        """
        try:
            manifest = self.manifest(step)
        except CheckpointDamagedError as error:
            return [Problem(self.files.absolute(manifest_path(step)), str(error))]
        return self._reader.verify(manifest)

    def read(
        self,
        step: int,
        names: Iterable[str] | None = None,
        problems: list[Problem] | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Whole tensors by name, verified, repaired where it is possible; all if `names` is None.

        Raises:
            NotFoundError: the step is not committed, or has no tensor of a name.
            CheckpointDamagedError: bytes are bad and there is no other copy.
        """
        return self._reader.tensors(self.manifest(step), names, problems)

    def read_part(self, part: Part, problems: list[Problem] | None = None) -> bytes:
        """The bytes of one part, verified.

        A bad, missing or short shard is read once more, then another place that holds the same
        bytes is looked for in all manifests, quarantined ones too; `problems` is told.

        Raises:
            CheckpointDamagedError: bad, and no other copy is good.
        """
        return self._reader.part(part, problems).tobytes()

    def read_parts(
        self,
        parts: Sequence[Part],
        problems: list[Problem] | None = None,
        into: Sequence[np.ndarray[Any, np.dtype[np.uint8]]] | None = None,
    ) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """`read_part` for many at once, as uint8 arrays in their order: neighbours in a file are
        read together, several files at once. `into` gives memory for each.
        """
        return self._reader.parts(parts, problems, into)

    def export(self, step: int | str, path: str, format: str = "keras", **options: Any) -> str:
        """`raytf.export` of this run: one checkpoint as a model; imports TensorFlow and Ray."""
        # Looked up when it is used: the function lives floors above this one.
        public: Any = sys.modules[__name__.partition(".")[0]]
        return public.export(self.storage, step, path, format, **options)

    def delete(self, step: int) -> None:
        """Deletes one step; shards that other steps use stay.

        Raises:
            NotFoundError: the step is not committed.
            ConfigError: it is the newest, pinned, or being read.
        """
        self._pruner.delete(step)

    def pin(self, step: int, pinned: bool = True) -> None:
        """Keeps a step from retention, or no longer.

        Raises:
            NotFoundError: the step is not committed.
        """
        path = posixpath.join(step_name(step), PINNED)
        if not pinned:
            self.files.delete(path)
            return
        self._must_exist(step)
        if not self.files.exists(path):
            self.files.write(path, [memoryview(b"kept by hand\n")])

    def pinned(self) -> set[int]:
        """The committed steps that are pinned."""
        steps = self.steps()
        marks = self.files.map(
            lambda step: self.files.exists(posixpath.join(step_name(step), PINNED)), steps
        )
        return {step for step, marked in zip(steps, marks, strict=True) if marked}

    @contextlib.contextmanager
    def reading(self, step: int) -> Generator[None]:
        """Keeps retention from deleting a step while it is read, for an hour at most.

        A store that cannot be written is read without that protection.

        Raises:
            NotFoundError: the step is not committed.
        """
        self._must_exist(step)
        name = f"{READING}{int(self._clock())}-{uuid.uuid4().hex}"
        path = posixpath.join(step_name(step), name)
        marked = False
        try:
            self.files.write(path, [memoryview(b"being read\n")])
            marked = True
        except StorageError as error:
            _log.debug("Reading step %d without a marker: %s", step, error)
        try:
            self._must_exist(step)  # it may have gone before the marker was there
            yield
        finally:
            if marked:
                self._unmark(path)

    def shard_path(
        self, step: int, attempt: int, generation: int, rank: int, world: int, index: int
    ) -> str:
        """The name of one shard, relative to the checkpoints directory."""
        name = shard_name(attempt, generation, rank, world, index)
        return posixpath.join(step_name(step), name)

    def write_shards(self, items: Sequence[tuple[str, ShardBytes]]) -> list[Shard]:
        """Writes shards and makes them durable; several at once where the store gains by it.

        If a shard of that name is there already, it is used if it has the same bytes. Otherwise
        the new one gets another name, so parts must refer to the path that is returned.

        Args:
            items: path from `shard_path`, and the file's bytes, which must not change meanwhile.
        """
        return self.files.map(lambda item: self._write_shard(*item), items)

    def commit(self, manifest: Manifest, may_commit: Callable[[], None]) -> bool:
        """Makes a checkpoint exist.

        If the step is committed already, it is verified. Good: nothing is done. Damaged: its
        manifest is kept as `manifest.bad-<attempt>.json` and replaced.

        Args:
            manifest: names shards that `write_shards` has returned, or older ones.
            may_commit: called last before the manifest is written; raises `SupersededError`.

        Returns:
            Whether it was written: False if the step was there and is good.

        Raises:
            SupersededError: another attempt has taken over.
            CheckpointDamagedError: a shard is missing or has another size, or the manifest reads
                back otherwise than it was written.
        """
        step, path = manifest.step, manifest_path(manifest.step)
        if self._settled(manifest):
            return False
        if faults := manifest.faults():
            raise RaytfError(f"The manifest of step {step} is wrong, a bug in raytf: {faults[0]}.")
        data = manifest.to_bytes()
        self._check_shards(manifest)
        self._catalog.announce(step)
        may_commit()
        self.files.write_small_atomic(path, data)
        self._catalog.forget(path)
        absolute = self.files.absolute(path)
        if self._content(path) != data:
            raise CheckpointDamagedError(
                f"{absolute} does not read back as it was written.", path=absolute, step=step
            )
        self._pruner.trust(step)
        return True

    def quarantine(self, step: int, attempt: int, problems: Sequence[Problem] = ()) -> None:
        """Takes a damaged checkpoint out: its manifest becomes `manifest.bad-<attempt>.json`.

        Its shards stay as long as a manifest names them, this one included. Nothing happens if the
        step is not committed (any more).
        """
        path = manifest_path(step)
        data = self._content(path)
        if data is None:
            _log.debug("Step %d is not committed: nothing to quarantine.", step)
            return
        target, there = self._catalog.bad_path(step, attempt, data)
        if there:  # an earlier call was cut off between copy and deletion
            self.files.delete(path)
        else:
            try:
                self.files.rename(path, target)
            except FileNotFoundError:
                _log.debug("Step %d was quarantined or deleted by another process.", step)
                return
        self._catalog.forget(path)
        self._pruner.distrust(step)
        _log.warning(
            "Checkpoint of step %d is damaged and was set aside as %s: %s",
            step,
            self.files.absolute(target),
            "; ".join(f"{p.path} {p.what}" for p in problems) or "no details",
        )

    def retain(self, rule: Rule, may_delete: Callable[[], None]) -> list[int]:
        """Deletes what the rule does not keep and returns those steps.

        Never the newest good one or a newer one, one that is pinned or being read, or a shard that
        any manifest names. A deletion that fails is logged and tried again at the next call.

        Args:
            may_delete: called before each deletion; raises `SupersededError`.
        """
        return self._pruner.retain(rule, may_delete)

    def sweep(self, attempt: int, generation: int) -> list[str]:
        """Deletes what earlier attempts and generations left behind and no manifest names; returns
        the paths. Only for the attempt that holds the run.
        """
        return self._pruner.sweep(attempt, generation)

    def _must_exist(self, step: int) -> None:
        if not self._catalog.exists(step):
            raise NotFoundError(
                f"There is no checkpoint of step {step} in {self.root.url}. "
                "`raytf checkpoints list` shows which there are.",
                step=step,
                path=self.path(step),
            )

    def _unmark(self, path: str) -> None:
        try:
            self.files.delete(path)
        except StorageError as error:
            _log.warning("A reader's marker stays for an hour: %s", error)

    def _write_shard(self, path: str, content: ShardBytes) -> Shard:
        digest = content.xxh3
        size = self.files.size(path)
        if size is not None:
            present = self._content(path) if size == content.nbytes else None
            if present is not None and xxhash.xxh3_64_hexdigest(present) == digest:
                return Shard(path=path, nbytes=size, xxh3=digest)
            path = self._free_name(path)
        self.files.write(path, content.pieces())
        return Shard(path=path, nbytes=content.nbytes, xxh3=digest)

    def _content(self, path: str) -> bytes | None:
        try:
            return self.files.read(path)
        except FileNotFoundError:
            return None

    def _free_name(self, path: str) -> str:
        stem, extension = posixpath.splitext(path)
        number = 2
        while self.files.exists(f"{stem}-{number}{extension}"):
            number += 1
        return f"{stem}-{number}{extension}"

    def _settled(self, manifest: Manifest) -> bool:
        """Whether the step is committed and good; a damaged one's manifest is kept aside."""
        step, path = manifest.step, manifest_path(manifest.step)
        present = self._content(path)
        if present is None:
            return False
        problems = self.verify(step)
        if not problems:
            self._pruner.trust(step)
            return True
        target, copied = self._catalog.bad_path(step, manifest.attempt, present)
        if not copied:
            self.files.write_small_atomic(target, present)
        _log.warning(
            "Step %d is there but damaged (%s); its manifest is kept as %s and replaced.",
            step,
            "; ".join(f"{p.path} {p.what}" for p in problems),
            self.files.absolute(target),
        )
        return False

    def _check_shards(self, manifest: Manifest) -> None:
        shards = manifest.shards
        sizes = self.files.map(lambda shard: self.files.size(shard.path), shards)
        for shard, size in zip(shards, sizes, strict=True):
            if size != shard.nbytes:
                path = self.files.absolute(shard.path)
                found = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointDamagedError(
                    f"Step {manifest.step} is not committed: {path} {found} where {shard.nbytes} "
                    "bytes were written.",
                    path=path,
                    step=manifest.step,
                )
