"""Bytes of a checkpoint, checked: every byte that is handed out has the digest it was written with.

Owns verification and repair. A part that is bad is read once more, then taken from any other place
that holds the same bytes. Trouble in reaching the store is never called damage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from raytf.checkpoint.catalog import Catalog
from raytf.checkpoint.dtypes import numpy_dtype
from raytf.checkpoint.files import Files
from raytf.checkpoint.manifest import Manifest, Part, Shard, TensorEntry
from raytf.errors import CheckpointDamagedError, NotFoundError

__all__ = ["Problem", "Reader"]

_log = logging.getLogger(__name__)
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_GAP_BYTES = 256 * 1024  # reading so much in vain costs less than another request
MAX_RUN_BYTES = 128 * 1024 * 1024
MIN_DIRECT_BYTES = 1024 * 1024  # so large a part of a local file is read to its place at once


@dataclass(frozen=True)
class Problem:
    """Something of a checkpoint that is not as it was written.

    Attributes:
        path: file, on the filesystem.
        what: in words.
        repaired: the bytes were found elsewhere.
    """

    path: str
    what: str
    repaired: bool = False


class Reader:
    """Reads parts and whole checkpoints."""

    def __init__(self, files: Files, catalog: Catalog) -> None:
        self._files = files
        self._catalog = catalog

    def verify(self, manifest: Manifest) -> list[Problem]:
        """Reads every byte and compares it with the manifest."""
        parts: dict[str, list[Part]] = {shard.path: [] for shard in manifest.shards}
        for tensor in manifest.tensors:
            for part in tensor.parts:
                parts[part.shard].append(part)
        found = self._files.map(lambda s: self._verify_shard(s, parts[s.path]), manifest.shards)
        return [problem for problems in found for problem in problems]

    def tensors(
        self,
        manifest: Manifest,
        names: Iterable[str] | None = None,
        problems: list[Problem] | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Whole tensors by name; all if `names` is None.

        Raises:
            NotFoundError: a name that the checkpoint does not have.
            CheckpointDamagedError: bytes are bad and there is no other copy.
        """
        there = {tensor.name: tensor for tensor in manifest.tensors}
        wanted = list(there) if names is None else list(names)
        if missing := [name for name in wanted if name not in there]:
            raise NotFoundError(
                f"The checkpoint of step {manifest.step} has no tensor {missing[0]!r}. "
                f"It has {len(there)}: {', '.join(sorted(there)[:20])}.",
                step=manifest.step,
            )
        entries = [there[name] for name in wanted]
        data = iter(self.parts([part for entry in entries for part in entry.parts], problems))
        return {
            entry.name: _assembled(entry, [next(data) for _ in entry.parts]) for entry in entries
        }

    def part(self, part: Part, problems: list[Problem] | None = None) -> _Bytes:
        """The bytes of one part, checked, or repaired from another copy.

        Raises:
            CheckpointDamagedError: bad, and no other copy is good.
        """
        data, what = self._attempt(part)
        if data is None:
            data, what = self._attempt(part)  # a bad transfer is bad only once
        if data is not None:
            return data
        path = self._files.absolute(part.shard)
        for other in self._copies(part):
            data, _ = self._attempt(other)
            if data is not None:
                _log.warning("%s %s; taken from %s", path, what, self._files.absolute(other.shard))
                if problems is not None:
                    problems.append(Problem(path, what, repaired=True))
                return data
        raise CheckpointDamagedError(
            f"{path} {what}, and no other shard holds the same bytes. Restore an earlier step.",
            path=path,
        )

    def parts(
        self,
        parts: Sequence[Part],
        problems: list[Problem] | None = None,
        into: Sequence[_Bytes] | None = None,
    ) -> list[_Bytes]:
        """The bytes of many parts, in their order; neighbours in a file are read together.

        Args:
            problems: takes what had to be repaired.
            into: memory of each part's size that its bytes are to lie in.

        Raises:
            CheckpointDamagedError: bad, and no other copy is good.
        """
        direct = into is not None and self._files.storage.is_local
        runs = _runs(parts, MIN_DIRECT_BYTES if direct else None)
        buffers = self._files.map(lambda run: self._read_run(parts, run, into), runs)
        result: list[_Bytes | None] = [None] * len(parts)
        for run, buffer in zip(runs, buffers, strict=True):
            base = parts[run[0]].offset
            for index in run:
                part = parts[index]
                data = buffer[part.offset - base : part.offset - base + part.nbytes]
                if data.size == part.nbytes and _digest(data) == part.xxh3:
                    result[index] = data
        found = [
            data if data is not None else self.part(parts[index], problems)
            for index, data in enumerate(result)
        ]
        if into is None:
            return found
        for data, place in zip(found, into, strict=True):
            if not np.may_share_memory(data, place):
                place[:] = data
        return list(into)

    def _read_run(
        self, parts: Sequence[Part], run: list[int], into: Sequence[_Bytes] | None
    ) -> _Bytes:
        start = parts[run[0]].offset
        stop = max(parts[index].offset + parts[index].nbytes for index in run)
        try:
            if into is not None and len(run) == 1:
                return self._files.read_range(parts[run[0]].shard, start, stop, into[run[0]])
            return self._files.read_range(parts[run[0]].shard, start, stop)
        except FileNotFoundError:
            return np.empty(0, np.uint8)  # each of its parts is then looked for on its own

    def _attempt(self, part: Part) -> tuple[_Bytes | None, str]:
        """A part's bytes, or None and what is wrong with them."""
        try:
            data = self._files.read_range(part.shard, part.offset, part.offset + part.nbytes)
        except FileNotFoundError:
            return None, "is missing"
        if data.size != part.nbytes:
            end = part.offset + part.nbytes
            return None, f"ends at byte {part.offset + data.size}, before byte {end}"
        if _digest(data) != part.xxh3:
            end = part.offset + part.nbytes
            return None, f"has other bytes from {part.offset} to {end} than were written"
        return data, ""

    def _copies(self, part: Part) -> list[Part]:
        """Every other place that is said to hold the same bytes."""
        found = {
            (other.shard, other.offset): other
            for manifest in self._catalog.survey(tensors=True).manifests.values()
            if manifest is not None
            for tensor in manifest.tensors
            for other in tensor.parts
            if (other.xxh3, other.nbytes) == (part.xxh3, part.nbytes)
        }
        found.pop((part.shard, part.offset), None)
        return list(found.values())

    def _verify_shard(self, shard: Shard, parts: list[Part]) -> list[Problem]:
        path = self._files.absolute(shard.path)
        try:
            data = self._files.read_range(shard.path, 0, shard.nbytes + 1)
        except FileNotFoundError:
            return [Problem(path, "is missing")]
        if data.size != shard.nbytes:
            size = self._files.size(shard.path)
            return [Problem(path, f"has {size} bytes where {shard.nbytes} were written")]
        problems: list[Problem] = []
        for part in parts:
            end = part.offset + part.nbytes
            if _digest(data[part.offset : end]) != part.xxh3:
                what = f"has other bytes from {part.offset} to {end} than were written"
                problems.append(Problem(path, what))
        if not problems and _digest(data) != shard.xxh3:
            problems.append(Problem(path, "has other bytes outside its tensors than were written"))
        return problems


def _digest(data: _Bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data.data)


def _runs(parts: Sequence[Part], alone_bytes: int | None = None) -> list[list[int]]:
    """Indices of parts to be read in one go, each list in the order of the file; parts of
    `alone_bytes` or more are alone.
    """
    order = sorted(range(len(parts)), key=lambda i: (parts[i].shard, parts[i].offset))
    runs: list[list[int]] = []
    shard, start, end = "", 0, 0
    for index in order:
        part = parts[index]
        stop = max(end, part.offset + part.nbytes)
        near = part.shard == shard and part.offset - end <= MAX_GAP_BYTES
        if alone_bytes is not None and part.nbytes >= alone_bytes:
            runs.append([index])
            shard = ""  # nothing is near it
        elif runs and near and stop - start <= MAX_RUN_BYTES:
            runs[-1].append(index)
            end = stop
        else:
            runs.append([index])
            shard, start, end = part.shard, part.offset, part.offset + part.nbytes
    return runs


def _assembled(entry: TensorEntry, data: list[_Bytes]) -> np.ndarray[Any, Any]:
    dtype = numpy_dtype(entry.dtype)
    if len(data) == 1:
        # no copy: the array stays part of the memory that was read into
        array = data[0].view(dtype).reshape(entry.shape)
        return array if array.flags.aligned else array.copy()
    joined = np.empty(entry.nbytes, np.uint8)
    position = 0
    for piece in data:
        joined[position : position + piece.size] = piece
        position += piece.size
    return joined.view(dtype).reshape(entry.shape)
