"""How a state becomes files: who writes which rows, which rows go into which file, and its bytes.

Owns the division of a state among workers, the grouping of a share into files, and the image of one
file in host memory. Pure apart from that memory: nothing is written here. Files are valid
safetensors: an 8-byte length, a JSON header padded so that data begins at a multiple of 8, data
without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from raytf.checkpoint.dtypes import ITEMSIZE
from raytf.errors import ConfigError

__all__ = ["Image", "Pieces", "Slice", "TensorInfo", "divide", "group"]

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's name, shape and safetensors type.

    Attributes:
        stable: it is not expected to change between saves (frozen weights), so it goes into files
            of its own which later checkpoints can refer to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stable: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows if self.rows else 0


@dataclass(frozen=True)
class Slice:
    """Rows [start, stop) of a tensor."""

    tensor: TensorInfo
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.tensor.row_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows; `()` for a scalar."""
        shape = self.tensor.shape
        return (self.stop - self.start, *shape[1:]) if shape else ()

    @property
    def key(self) -> str:
        """Name in the file: the tensor's, or `name[start:stop]` for a part of it."""
        if (self.start, self.stop) == (0, self.tensor.rows):
            return self.tensor.name
        return f"{self.tensor.name}[{self.start}:{self.stop}]"


def divide(tensors: Iterable[TensorInfo], num_shares: int) -> tuple[tuple[Slice, ...], ...]:
    """Divides a state among `num_shares` writers: every row once, equal bytes.

    All tensors are laid on one line, stable ones last, which is cut at multiples of total/N, each
    cut moved to the nearest boundary between two rows. So a share differs from total/N by one row
    at most, and both kinds are spread over all writers. Depends on its arguments only.

    Raises:
        ConfigError: `num_shares` is less than 1.
    """
    if num_shares < 1:
        raise ConfigError(f"num_shares must be at least 1. Received: {num_shares}.")
    everything = list(tensors)
    total = sum(tensor.nbytes for tensor in everything)
    targets = [total * k / num_shares for k in range(num_shares + 1)]
    shares: list[list[Slice]] = [[] for _ in range(num_shares)]
    for stable in (False, True):
        line = [tensor for tensor in everything if tensor.stable is stable]
        length = sum(tensor.nbytes for tensor in line)
        # What this line leaves over or under is made good by the next one.
        wanted = [targets[k] if stable else length * k / num_shares for k in range(num_shares + 1)]
        if stable:
            done = [0, *np.cumsum([sum(s.nbytes for s in share) for share in shares]).tolist()]
            wanted = [max(0.0, want - have) for want, have in zip(wanted, done, strict=True)]
        _cut(line, wanted, shares)
    return tuple(tuple(share) for share in shares)


def _cut(line: Sequence[TensorInfo], wanted: Sequence[float], shares: list[list[Slice]]) -> None:
    """Appends the tensors of `line`, cut near the offsets `wanted[1:-1]`, to `shares`."""
    begin, share, last = 0, 0, len(shares) - 1
    for tensor in line:
        row = 0
        while share < last and begin + tensor.nbytes > wanted[share + 1]:
            cut = round((wanted[share + 1] - begin) / max(tensor.row_bytes, 1))
            cut = min(max(cut, row), tensor.rows)
            if cut > row:
                shares[share].append(Slice(tensor, row, cut))
                row = cut
            if row == tensor.rows:
                break
            share += 1
        if row < tensor.rows or tensor.rows == 0:
            shares[share].append(Slice(tensor, row, tensor.rows))
        begin += tensor.nbytes


def group(slices: Iterable[Slice], max_bytes: int) -> tuple[tuple[Slice, ...], ...]:
    """Groups one share into files of at most `max_bytes` of data, stable ones apart from others.

    A slice larger than that is alone in its file. Order is kept.

    Raises:
        ConfigError: `max_bytes` is less than 1.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes must be at least 1. Received: {max_bytes}.")
    files: list[tuple[Slice, ...]] = []
    everything = list(slices)
    for stable in (False, True):
        present: list[Slice] = []
        size = 0
        for piece in everything:
            if piece.tensor.stable is not stable:
                continue
            if present and size + piece.nbytes > max_bytes:
                files.append(tuple(present))
                present, size = [], 0
            present.append(piece)
            size += piece.nbytes
        if present:
            files.append(tuple(present))
    return tuple(files)


def _header(slices: Sequence[Slice]) -> tuple[bytes, list[int]]:
    """The bytes before the data, and where each slice begins (in bytes from the file's start).

    Wider types come first, so that every tensor is aligned to its elements without gaps, which the
    format forbids.
    """
    order = sorted(range(len(slices)), key=lambda i: -ITEMSIZE[slices[i].tensor.dtype])
    entries: dict[str, Any] = {}
    offsets = [0] * len(slices)
    position = 0
    for index in order:
        piece = slices[index]
        key = piece.key
        while key in entries or key == "__metadata__":  # a tensor may be called "w[0:2]"
            key += "'"
        end = position + piece.nbytes
        entries[key] = {
            "dtype": piece.tensor.dtype,
            "shape": list(piece.shape),
            "data_offsets": [position, end],
        }
        offsets[index] = position
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]


class Pieces:
    """One file's bytes as a header and pieces of memory, ready to be written in one go.

    Attributes:
        slices: what is in it.
        offsets: of each slice, absolute in the file.
        nbytes: of the whole file.
    """

    def __init__(self, slices: Sequence[Slice], data: Sequence[_Bytes]) -> None:
        self.slices = tuple(slices)
        head, self.offsets = _header(self.slices)
        self._head = memoryview(head)
        self._data = tuple(data)
        self.nbytes = len(head) + sum(piece.nbytes for piece in self.slices)

    def pieces(self) -> list[memoryview]:
        """The file in order; the memory stays the image's and must not change meanwhile."""
        order = sorted(range(len(self.slices)), key=lambda i: (self.offsets[i], self._data[i].size))
        return [self._head, *(self._data[i].data for i in order if self._data[i].size)]

    def digests(self) -> list[str]:
        """xxh3_64 of each slice, in hex, as the memory is now."""
        return [xxhash.xxh3_64_hexdigest(data.data) for data in self._data]

    @property
    def xxh3(self) -> str:
        """xxh3_64 of the whole file, in hex, as the memory is now."""
        digest = xxhash.xxh3_64()
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()


class Image:
    """One file's bytes in a host buffer that is filled again at each save.

    Args:
        slices: what the file holds; at least one.

    Attributes:
        slices: the same.
        views: writable uint8 views, one per slice: the training thread copies into these.
        buffer: the whole file, uint8.
        offsets: of each slice, absolute in the file.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = tuple(slices)
        head, self.offsets = _header(self.slices)
        size = len(head) + sum(piece.nbytes for piece in self.slices)
        self.buffer: _Bytes = np.empty(size, np.uint8)
        self.buffer[: len(head)] = np.frombuffer(head, np.uint8)
        self.views: list[_Bytes] = [
            self.buffer[offset : offset + piece.nbytes]
            for offset, piece in zip(self.offsets, self.slices, strict=True)
        ]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return int(self.buffer.size)

    @property
    def xxh3(self) -> str:
        """xxh3_64 of the whole file, in hex, as the buffer is now."""
        return xxhash.xxh3_64_hexdigest(self.buffer.data)

    def pieces(self) -> list[memoryview]:
        """The file in order; the memory stays the image's and must not change meanwhile."""
        return [self.buffer.data]

    def digests(self) -> list[str]:
        """xxh3_64 of each slice, in hex, as the buffer is now."""
        return [xxhash.xxh3_64_hexdigest(view.data) for view in self.views]

    def subset(self, indices: Iterable[int]) -> Pieces:
        """A file of only these slices, sharing this image's memory."""
        chosen = list(indices)
        return Pieces([self.slices[i] for i in chosen], [self.views[i] for i in chosen])
