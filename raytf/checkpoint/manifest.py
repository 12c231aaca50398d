"""What one checkpoint consists of: the document that makes it exist once it is committed.

Owns the file format of `manifest.json`, its digest and its checks. Pure: bytes in, bytes out; who
writes and reads them is the store's business. The document is JSON that a person can read: one
tensor and one shard a line. JSON knows no NaN and no infinity, so such a float is written
`{"$float": "nan"}`.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import xxhash

from raytf.checkpoint.dtypes import ITEMSIZE
from raytf.errors import CheckpointDamagedError, ConfigError

__all__ = ["FORMAT", "MANIFEST", "Manifest", "Part", "Shard", "TensorEntry"]
__all__ += ["parse_step", "step_name"]

FORMAT = 1  # raised by one when an older reader would misread what is written
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-([0-9]{10,})")
_FLOAT, _DICT = "$float", "$dict"


def step_name(step: int) -> str:
    """The directory of step `step`, of fixed width so that listings are in order for people."""
    if step < 0:
        raise ConfigError(f"A step is counted from 0. Received: {step}.")
    return f"step-{step:010d}"


def parse_step(name: str) -> int | None:
    """The step of a directory's name; None if it is no step directory's."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where rows [start, stop) of one tensor lie.

    Attributes:
        start, stop: rows, that is indices of the first axis; a scalar is row 0 of 1.
        shard: file, relative to the checkpoints directory.
        offset: first byte, counted from the start of the file.
        nbytes: bytes.
        xxh3: xxh3_64 of these bytes, 16 hex digits.
    """

    start: int
    stop: int
    shard: str
    offset: int
    nbytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor; `parts` cover its rows once, in order. `dtype` is a safetensors code."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: path relative to the checkpoints directory, bytes, xxh3_64 of all of them."""

    path: str
    nbytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All there is to know about one checkpoint.

    Attributes:
        run: identity of the run, equal over all its attempts.
        attempt, generation: who wrote it: the attempt counts relaunches, the generation counts
            worker groups within one.
        step, epoch: optimizer steps done, and the epoch they ended in, both from 0.
        position: where in the data the next step begins (JSON).
        world_size: number of workers that wrote it.
        time: UTC, seconds since 1970.
        metrics: name to float; NaN and infinities survive.
        best: `{"metric": ..., "mode": "min" | "max"}` of the run's `keep_best`, or None.
        versions: library name to version.
        fingerprint: what a resumed run is compared with (JSON).
        threads: TensorFlow threads per worker.
        model: description of the model (JSON).
        tensors: every tensor of the state.
        shards: every file that a part lies in, files of earlier steps included.
        state: the rest of the state (any JSON).
    """

    run: str
    attempt: int
    generation: int
    step: int
    epoch: int
    position: dict[str, Any]
    world_size: int
    time: float
    metrics: dict[str, float]
    best: dict[str, str] | None = None
    versions: dict[str, Any] = field(default_factory=dict[str, Any])
    fingerprint: dict[str, Any] = field(default_factory=dict[str, Any])
    threads: int = 1
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: tuple[TensorEntry, ...] = ()
    shards: tuple[Shard, ...] = ()
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def faults(self) -> list[str]:
        """What does not fit together, in words; empty if all does."""
        return _faults(self)

    def to_bytes(self) -> bytes:
        """The file's bytes: UTF-8 JSON with a digest over all else.

        Raises:
            ConfigError: `state` or another field holds what JSON cannot.
        """
        document = {name: _plain(getattr(self, name), name) for name in _PLAIN_FIELDS}
        document["tensors"] = [_tensor_json(tensor) for tensor in self.tensors]
        document["shards"] = [
            {"path": s.path, "bytes": s.nbytes, "xxh3": s.xxh3} for s in self.shards
        ]
        document["format"] = FORMAT
        document["digest"] = _digest(document)
        return _pretty(document)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Reads and checks what `to_bytes` wrote.

        Args:
            data: the whole file.
            path: where it came from, for messages.

        Raises:
            CheckpointDamagedError: not the bytes that were written.
            ConfigError: written by a later version of raytf in a newer format.
        """
        document = _checked_document(data, path)
        if document["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {document['format']}; this raytf reads format {FORMAT}. "
                "It was written by a newer raytf: use that version or a later one.",
                path=path,
            )
        try:
            manifest = _from_document(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(
                path, f"has a field that is missing or of a wrong kind ({error!r})"
            ) from error
        if faults := manifest.faults():
            raise _damaged(path, f"contradicts itself: {faults[0]}")
        return manifest


_PLAIN_FIELDS = (
    "run",
    "attempt",
    "generation",
    "step",
    "epoch",
    "position",
    "world_size",
    "time",
    "metrics",
    "best",
    "versions",
    "fingerprint",
    "threads",
    "model",
    "state",
)
_ORDER = ("format", "digest", *_PLAIN_FIELDS[:-2], "shards", "tensors", *_PLAIN_FIELDS[-2:])


def _damaged(path: str, what: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{path} {what}.", path=path)


def _tensor_json(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "parts": [
            {
                "rows": [part.start, part.stop],
                "shard": part.shard,
                "offset": part.offset,
                "bytes": part.nbytes,
                "xxh3": part.xxh3,
            }
            for part in tensor.parts
        ],
    }


def _from_document(document: dict[str, Any]) -> Manifest:
    fields = {name: _restored(document[name]) for name in _PLAIN_FIELDS}
    tensors = tuple(
        TensorEntry(
            name=t["name"],
            shape=tuple(t["shape"]),
            dtype=t["dtype"],
            parts=tuple(
                Part(
                    start=p["rows"][0],
                    stop=p["rows"][1],
                    shard=p["shard"],
                    offset=p["offset"],
                    nbytes=p["bytes"],
                    xxh3=p["xxh3"],
                )
                for p in t["parts"]
            ),
        )
        for t in document["tensors"]
    )
    shards = tuple(
        Shard(path=s["path"], nbytes=s["bytes"], xxh3=s["xxh3"]) for s in document["shards"]
    )
    return Manifest(**fields, tensors=tensors, shards=shards)


def _plain(value: Any, where: str) -> Any:
    """`value` as JSON that reads back equal (tuples become lists).

    Keys that are no text are refused: JSON would silently make text of them, and a resumed run
    would look for the number in vain.
    """
    if isinstance(value, np.generic):
        value = cast("Any", value.item())
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        if wrong := [key for key in items if not isinstance(key, str)]:
            raise ConfigError(f"{where} has a key that is no text, which JSON needs: {wrong[0]!r}.")
        plain = {key: _plain(item, f"{where}.{key}") for key, item in items.items()}
        return {_DICT: plain} if len(plain) == 1 and (_FLOAT in plain or _DICT in plain) else plain
    if isinstance(value, list | tuple):
        sequence = cast("Sequence[Any]", value)
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(sequence)]
    raise ConfigError(
        f"{where} is of type {type(value).__qualname__}, which JSON does not have. Store numbers, "
        "text, lists and dictionaries, or a tensor."
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    items = cast("dict[str, Any]", value)
    if len(items) == 1 and _FLOAT in items:
        return float(items[_FLOAT])
    if len(items) == 1 and _DICT in items:
        items = cast("dict[str, Any]", items[_DICT])
    return {key: _restored(item) for key, item in items.items()}


def _digest(document: dict[str, Any]) -> str:
    """xxh3_64 of all but the digest, in one canonical spelling. The same for all formats, so that
    a newer format is told from damage.
    """
    rest = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_64_hexdigest(text.encode())


def _pretty(document: dict[str, Any]) -> bytes:
    lines: list[str] = []
    for key in _ORDER:
        value: Any = document[key]
        if key in ("tensors", "shards") and value:
            rows = ",\n".join("    " + _json(row) for row in cast("list[Any]", value))
            text = f"[\n{rows}\n  ]"
        else:
            text = _json(value, indent=2).replace("\n", "\n  ")
        lines.append(f"  {json.dumps(key)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8", "surrogatepass")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _checked_document(data: bytes, path: str) -> dict[str, Any]:
    try:
        document = json.loads(data.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"({len(data)} bytes) is no valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise _damaged(path, "holds no JSON object")
    document = cast("dict[str, Any]", document)
    try:
        digest = _digest(document)
    except ValueError as error:  # a number such as 1e999 is read as infinity
        raise _damaged(path, f"holds a number that was never written ({error})") from error
    if document.get("digest") != digest or not isinstance(document.get("format"), int):
        raise _damaged(
            path, f"has digest {document.get('digest')!r} where its content gives {digest!r}"
        )
    return document


def _faults(manifest: Manifest) -> list[str]:
    faults: list[str] = []
    sizes = {shard.path: shard.nbytes for shard in manifest.shards}
    for path in sizes:
        if posixpath.normpath(path) != path or path.startswith(("/", "..")):
            faults.append(f"shard {path!r} lies outside the checkpoints directory")
    if len(sizes) != len(manifest.shards):
        faults.append("a shard is listed twice")
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) != len(names):
        faults.append("two tensors have one name")
    for tensor in manifest.tensors:
        if fault := _tensor_fault(tensor, sizes):
            faults.append(f"tensor {tensor.name!r} {fault}")
    return faults


def _tensor_fault(tensor: TensorEntry, sizes: dict[str, int]) -> str | None:
    if tensor.dtype not in ITEMSIZE:
        return f"has the unknown type {tensor.dtype!r}"
    if any(size < 0 for size in tensor.shape):
        return f"has the impossible shape {tensor.shape}"
    row_bytes = tensor.nbytes // tensor.rows if tensor.rows else 0
    row = 0
    for part in tensor.parts:
        if part.start != row or part.stop < part.start:
            return f"has no part that begins at row {row}"
        row = part.stop
        if part.nbytes != (part.stop - part.start) * row_bytes:
            return f"has a part of {part.nbytes} bytes for rows {part.start} to {part.stop}"
        if part.shard not in sizes:
            return f"lies in {part.shard!r}, which is not among the shards"
        if part.offset < 0 or part.offset + part.nbytes > sizes[part.shard]:
            return f"lies past the end of {part.shard!r}"
    if row != tensor.rows:
        return f"has parts for {row} of {tensor.rows} rows"
    return None
