"""One round of reductions: tensors of all kinds, packed into as few collectives as their types and
sizes allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["Reducer", "plan_packs"]


def plan_packs(sizes: Sequence[tuple[str, int]], bytes_per_pack: int) -> list[list[int]]:
    """Groups tensors by dtype, in order, into packs of at most `bytes_per_pack` (a larger tensor
    goes alone).

    Args:
        sizes: (dtype name, bytes) per tensor.
        bytes_per_pack: upper bound of a pack of several tensors.

    Returns:
        Lists of indices into `sizes`.
    """
    packs: list[list[int]] = []
    open_packs: dict[str, tuple[list[int], int]] = {}
    for index, (dtype, size) in enumerate(sizes):
        members, filled = open_packs.get(dtype, ([], 0))
        if not members or filled + size > bytes_per_pack:
            members, filled = [], 0
            packs.append(members)
        members.append(index)
        open_packs[dtype] = (members, filled + size)
    return packs


class Reducer:
    """Sums tensors over the ranks of a strategy; used inside `strategy.run`.

    Args:
        strategy: a MultiWorkerMirroredStrategy with one replica per worker.
        bytes_per_pack: see `plan_packs`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, bytes_per_pack: int) -> None:
        self.num_ranks = strategy.num_replicas_in_sync
        self._bytes_per_pack = bytes_per_pack
        # Packing is done here, once for all dtypes and kinds; 1 keeps TensorFlow from packing the
        # packs again.
        self._options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of one tensor over ranks, at once."""
        if self.num_ranks == 1:
            return tensor
        replica = tf.distribute.get_replica_context()
        # identity: an argument of a tf.function has no device, and the reduction looks for one.
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor), self._options)

    def sum_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The ranks' slices one after the other, which as IndexedSlices is their sum."""
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, slices, self._options)

    def sum_all(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        """The sums over ranks, and the packs they came in; none is usable before all have arrived
        (all or nothing).

        Tensors need static shapes, equal on all ranks.
        """
        if self.num_ranks == 1 or not tensors:
            return list(tensors), tensors
        sizes = [(t.dtype.name, t.shape.num_elements() * t.dtype.size) for t in tensors]
        packs = plan_packs(sizes, self._bytes_per_pack)
        flat = [tf.concat([tf.reshape(tensors[i], [-1]) for i in pack], axis=0) for pack in packs]
        replica = tf.distribute.get_replica_context()
        summed = replica.all_reduce(tf.distribute.ReduceOp.SUM, flat, self._options)
        result: list[tf.Tensor] = [None] * len(tensors)  # type: ignore[list-item]
        vectors = tf.tuple(summed)
        for pack, vector in zip(packs, vectors, strict=True):
            counts = [tensors[i].shape.num_elements() for i in pack]
            for i, part in zip(pack, tf.split(vector, counts), strict=True):
                result[i] = tf.reshape(part, tensors[i].shape)
        return result, vectors
