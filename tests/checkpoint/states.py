"""Small states for the store's tests: tensors of all kinds, saved and compared byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from raytf.checkpoint.dtypes import dtype_code
from raytf.checkpoint.layout import Image, Slice, TensorInfo, divide, group
from raytf.checkpoint.manifest import Manifest, Part, Shard, TensorEntry
from raytf.checkpoint.store import CheckpointStore

State = dict[str, np.ndarray[Any, Any]]


def nothing() -> None:
    """A lease that is always held."""


def state(seed: int, rows: int = 7) -> State:
    """A state that differs from seed to seed but for `frozen`."""
    draw = np.random.default_rng(seed)
    return {
        "dense/kernel": draw.normal(size=(rows, 5)).astype(np.float32),
        "dense/bias [0:2] ü%#": draw.normal(size=5).astype(ml_dtypes.bfloat16),
        "iterations": np.asarray(seed, np.int64),
        "mask": draw.integers(0, 2, rows).astype(bool),
        "empty": np.zeros((0, 3), np.float16),
        "frozen": np.arange(12, dtype=np.float64).reshape(3, 4),
    }


def infos(tensors: Mapping[str, np.ndarray[Any, Any]]) -> list[TensorInfo]:
    return [
        TensorInfo(name, array.shape, dtype_code(array.dtype), stable=name == "frozen")
        for name, array in tensors.items()
    ]


def filled(slices: tuple[Slice, ...], tensors: State) -> Image:
    image = Image(slices)
    for piece, view in zip(image.slices, image.views, strict=True):
        data = np.frombuffer(tensors[piece.tensor.name].tobytes(), np.uint8)
        row = piece.tensor.row_bytes
        view[:] = data[piece.start * row : piece.stop * row]
    return image


def draft(
    store: CheckpointStore,
    tensors: State,
    step: int,
    *,
    attempt: int = 1,
    world: int = 2,
    max_bytes: int = 1 << 20,
    known: Manifest | None = None,
    **fields: Any,
) -> Manifest:
    """Writes the shards of all ranks and gives the manifest that names them, uncommitted.

    `frozen` is taken from `known` if that is given.
    """
    parts: dict[str, list[Part]] = {name: [] for name in tensors}
    shards: list[Shard] = []
    kept = {} if known is None else {t.name: t for t in known.tensors if t.name == "frozen"}
    for tensor in kept.values():
        parts[tensor.name] = list(tensor.parts)
        named = {part.shard for part in tensor.parts}
        shards += [shard for shard in known.shards if shard.path in named]
    for rank, share in enumerate(divide(infos(tensors), world)):
        fresh = tuple(piece for piece in share if piece.tensor.name not in kept)
        for index, slices in enumerate(group(fresh, max_bytes)):
            image = filled(slices, tensors)
            path = store.shard_path(step, attempt, 1, rank, world, index)
            shard = store.write_shards([(path, image)])[0]
            shards.append(shard)
            digests = image.digests()
            for piece, offset, xxh3 in zip(slices, image.offsets, digests, strict=True):
                part = Part(
                    start=piece.start,
                    stop=piece.stop,
                    shard=shard.path,
                    offset=offset,
                    nbytes=piece.nbytes,
                    xxh3=xxh3,
                )
                parts[piece.tensor.name].append(part)
    entries = tuple(
        TensorEntry(
            name=info.name,
            shape=info.shape,
            dtype=info.dtype,
            parts=tuple(sorted(parts[info.name], key=lambda part: (part.start, part.stop))),
        )
        for info in infos(tensors)
    )
    head: dict[str, Any] = {
        "run": "r",
        "generation": 1,
        "epoch": 0,
        "position": {"next": step},
        "time": 1.0,
        "metrics": {"loss": 1.0 / (step + 1)},
    }
    return Manifest(
        **{**head, **fields},
        attempt=attempt,
        step=step,
        world_size=world,
        tensors=entries,
        shards=tuple(shards),
    )


def save(
    store: CheckpointStore,
    tensors: State,
    step: int,
    may_commit: Callable[[], None] = nothing,
    **options: Any,
) -> Manifest:
    """A whole save."""
    manifest = draft(store, tensors, step, **options)
    store.commit(manifest, may_commit)
    return manifest


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Equal in names, shapes, types and every byte."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )
