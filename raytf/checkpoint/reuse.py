"""Which bytes of a save need not be written again, because an older shard holds them.

Pure. A part of an old shard is named by the new manifest only if most of that shard is still in
use: a few small tensors that never change must not keep a large file of dead bytes alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytf.checkpoint.layout import Slice
from raytf.checkpoint.manifest import Part

__all__ = ["LEAST_IN_USE", "plan_reuse"]

LEAST_IN_USE = 0.5  # of an old shard's bytes, for it to be named again


def plan_reuse(
    slices: Sequence[Slice],
    digests: Sequence[str],
    known: Mapping[str, Part],
    shard_bytes: Mapping[str, int],
) -> list[Part | None]:
    """For each slice the part that already holds its bytes, or None: it has to be written.

    Args:
        slices: of one shard file that would be written.
        digests: of the slices' bytes.
        known: parts of the newest durable state, by `Slice.key`.
        shard_bytes: sizes of the shards that these parts lie in.
    """
    same: list[Part | None] = []
    in_use: dict[str, int] = {}
    for piece, digest in zip(slices, digests, strict=True):
        part = known.get(piece.key)
        if part is None or part.xxh3 != digest or part.nbytes != piece.nbytes:
            same.append(None)
            continue
        same.append(part)
        in_use[part.shard] = in_use.get(part.shard, 0) + part.nbytes
    worth = {
        shard
        for shard, used in in_use.items()
        if shard in shard_bytes and used >= LEAST_IN_USE * shard_bytes[shard]
    }
    return [part if part is not None and part.shard in worth else None for part in same]
