"""This rank's part of every batch, as tf.data: which rows is `raytf.data.order`'s business, reading
them the source's.

Batches of one kind have one static shape on a rank: full batches come from one endless dataset (so
that reading goes on over the end of an epoch), the smaller last batch of each epoch from another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.data import ArraySpec, Order, Plan, Source, map_leaves, named_leaves, sample_keys, share
from raytf.errors import ConfigError

__all__ = ["Feed", "Part", "count_parameters", "pack"]

_CHUNK_ROWS = 4096  # rows whose numbers are computed in one call into Python
_PREFETCH = 4  # batches read ahead


@dataclass(frozen=True)
class Part:
    """This rank's part of one kind of batch.

    Attributes:
        start: first row of the part within the batch.
        rows: rows the rank reads; 1 if its part is empty (a stand-in that counts for nothing).
        weight: part of the batch's rows that are this rank's; 0.0 for a stand-in.
    """

    start: int
    rows: int
    weight: float

    @classmethod
    def of(cls, batch_rows: int, num_workers: int, rank: int) -> Part:
        start, stop = share(batch_rows, num_workers, rank)
        if start == stop:
            return cls(0, 1, 0.0)
        return cls(start, stop - start, (stop - start) / batch_rows)


def pack(x: Any, y: Any, sample_weight: Any) -> Any:
    """One batch as Keras's `train_step` takes it: (x,), (x, y) or (x, y, sample_weight)."""
    if sample_weight is not None:
        return x, y, sample_weight
    return (x,) if y is None else (x, y)


def count_parameters(function: Callable[..., Any]) -> int:
    """Number of positional parameters; decides whether a transform wants the per-sample key."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(function).parameters.values())


class Feed:
    """One source, in order, cut into this rank's parts of global batches.

    Args:
        source: where rows come from.
        global_batch_size: rows of a full batch over all ranks.
        num_workers: ranks that share a batch.
        rank: this rank.
        seed: of the order and of the per-sample keys.
        shuffle: a new seeded permutation in each epoch.
        drop_remainder: leave out the smaller last batch.
        transform: per-sample tf.data map function `(x, y[, key]) -> (x, y)`; `key` has shape (2,),
            int64, and is a function of (seed, epoch, row).
        class_weight: weight per class number, turned into sample weights.
        floatx: Keras's float type; 64-bit floats become that, as in `model.fit`.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch_size: int,
        num_workers: int,
        rank: int,
        seed: int = 0,
        shuffle: bool = False,
        drop_remainder: bool = False,
        transform: Callable[..., Any] | None = None,
        class_weight: Mapping[int, float] | None = None,
        floatx: str = "float32",
    ) -> None:
        self.source = source
        self.plan = Plan(len(source), global_batch_size, drop_remainder)
        blocks = source.blocks() if shuffle else None
        self.order = (
            Order(len(source), seed, shuffle, blocks=blocks[0], window_rows=blocks[1])
            if blocks
            else Order(len(source), seed, shuffle)
        )
        self.full = Part.of(global_batch_size, num_workers, rank)
        self.tail = Part.of(self.plan.tail_rows, num_workers, rank) if self.plan.tail_rows else None
        self._seed = seed
        self._floatx = tf.as_dtype(floatx)
        self._transform = transform
        self._class_weight = class_weight
        if class_weight and self.source.spec()[2] is not None:
            raise ConfigError(
                "class_weight and sample_weight cannot be used at the same time. Multiply them "
                "into one sample_weight."
            )
        self._arrays = self._in_memory()

    def full_batches(
        self, epoch: int = 0, step: int = 0, left_out: Collection[tuple[int, int]] = ()
    ) -> tf.data.Dataset:
        """All full batches from a position on, epoch after epoch, without end.

        Args:
            epoch, step: of the first one.
            left_out: (epoch, step) of batches that are not there: nothing of them is read.
        """
        per_epoch = self.plan.full_steps
        gaps = [e * per_epoch + s for e, s in left_out if s < per_epoch]
        numbered = _numbering(epoch * per_epoch + step, gaps)
        return self._batches(self.full, lambda number: divmod(numbered(number), per_epoch))

    def tail_batches(
        self, epoch: int = 0, left_out: Collection[tuple[int, int]] = ()
    ) -> tf.data.Dataset:
        """The smaller last batch of each epoch from `epoch` on, without end."""
        if self.tail is None:
            raise ConfigError("this data has no smaller last batch; a raytf bug.")
        last = self.plan.full_steps
        numbered = _numbering(epoch, [e for e, s in left_out if s == last])
        return self._batches(self.tail, lambda number: (numbered(number), last))

    def rows(self, epoch: int, step: int) -> np.ndarray:
        """Row numbers of one global batch, shape (rows,)."""
        size = self.plan.global_batch_size
        rows = size if step < self.plan.full_steps else self.plan.tail_rows
        return self.order.rows(epoch, step * size, step * size + rows)

    def spec(self) -> Any:
        """One full batch of this rank as `tf.TensorSpec`s, packed for Keras."""
        part = self.full if self.plan.full_steps else self.tail
        dataset = self._batches(part or self.full, lambda number: (0, 0))
        return dataset.element_spec

    def _batches(self, part: Part, position: Callable[[int], tuple[int, int]]) -> tf.data.Dataset:
        batch, order = self.plan.global_batch_size, self.order
        per_chunk = max(1, _CHUNK_ROWS // part.rows)

        def rows_of(chunk: np.ndarray) -> Any:
            places = [position(int(chunk) * per_chunk + i) for i in range(per_chunk)]
            starts = [(epoch, step * batch + part.start) for epoch, step in places]
            rows = np.stack([order.rows(e, at, at + part.rows) for e, at in starts])
            return rows, np.array([e for e, _ in starts], np.int64)

        def numbers(chunk: tf.Tensor) -> Any:
            rows, epochs = tf.numpy_function(rows_of, [chunk], [tf.int64, tf.int64], stateful=False)
            rows.set_shape((per_chunk, part.rows))
            epochs.set_shape((per_chunk,))
            return rows, epochs

        plain = tf.autograph.experimental.do_not_convert  # only the user's code may need rewriting
        dataset = tf.data.Dataset.range(np.iinfo(np.int64).max).map(plain(numbers))
        dataset = dataset.prefetch(1).unbatch()
        if self._transform is None:
            # One stage; in its own thread only where rows are read: a gather takes microseconds.
            parallel = None if self._arrays is not None else 2
            dataset = dataset.map(
                plain(lambda rows, epoch: self._finish(self._read(rows, epoch))),
                num_parallel_calls=parallel,
                deterministic=None if parallel is None else True,
            )
        else:
            dataset = self._augmented(dataset.map(plain(self._read), 2, True), part, plain)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        options.autotune.enabled = False
        return dataset.prefetch(_PREFETCH).with_options(options)

    def _augmented(self, dataset: tf.data.Dataset, part: Part, plain: Any) -> tf.data.Dataset:
        # Order is kept although samples are augmented in parallel.
        dataset = dataset.unbatch().map(self._augment, num_parallel_calls=2, deterministic=True)
        spec: Any = dataset.element_spec
        self._check_pair(spec["pair"])
        dataset = dataset.map(plain(self._unpair)).batch(part.rows, drop_remainder=True)
        return dataset.map(plain(self._finish))

    def _in_memory(self) -> Any:
        arrays = self.source.in_memory()
        return None if arrays is None else map_leaves(self._tensor, arrays)

    def _tensor(self, array: Any) -> tf.Tensor:
        with tf.device("CPU:0"):  # where tf.data reads it
            tensor = tf.convert_to_tensor(array)
        return tf.cast(tensor, self._floatx) if tensor.dtype == tf.float64 else tensor

    def _read(self, rows: tf.Tensor, epoch: tf.Tensor) -> Any:
        if self._arrays is not None:
            x, y, weight = map_leaves(lambda array: tf.gather(array, rows), self._arrays)
        else:
            x, y, weight = self._read_rows(rows)
        return self._with_keys(x, y, weight, rows, epoch)

    def _read_rows(self, rows: tf.Tensor) -> Any:
        spec = self.source.spec()
        leaves: list[ArraySpec] = [leaf for _, leaf in named_leaves(spec, "")]

        def read(numbers: np.ndarray) -> Any:
            return [array for _, array in named_leaves(self.source.read(numbers), "")]

        types = [_tf_dtype(leaf) for leaf in leaves]
        flat = iter(tf.numpy_function(read, [rows], types, stateful=False))

        def restore(leaf: ArraySpec) -> tf.Tensor:
            tensor = next(flat)
            tensor.set_shape((rows.shape[0], *leaf.shape))
            return tf.cast(tensor, self._floatx) if tensor.dtype == tf.float64 else tensor

        return map_leaves(restore, spec)

    def _with_keys(self, x: Any, y: Any, weight: Any, rows: tf.Tensor, epoch: tf.Tensor) -> Any:
        element = {"x": x}
        if y is not None:
            element["y"] = y
        if weight is not None:
            element["weight"] = weight
        if self._transform is not None and count_parameters(self._transform) >= 3:
            seed = self._seed
            keys = tf.numpy_function(
                lambda e, r: sample_keys(seed, int(e), r), [epoch, rows], tf.int64, stateful=False
            )
            keys.set_shape((rows.shape[0], 2))
            element["key"] = keys
        return element

    def _augment(self, element: dict[str, Any]) -> dict[str, Any]:
        arguments = (element["x"], element.get("y"))
        if "key" in element:
            arguments += (element["key"],)
        out = {"pair": self._transform(*arguments)}  # type: ignore[misc]
        if "weight" in element:
            out["weight"] = element["weight"]
        return out

    @staticmethod
    def _check_pair(pair: Any) -> None:
        if not isinstance(pair, tuple) or len(pair) != 2:
            what = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else type(pair).__name__
            raise ConfigError(f"transform must return a pair (x, y). Received: {what}.")

    @staticmethod
    def _unpair(element: dict[str, Any]) -> dict[str, Any]:
        x, y = element["pair"]
        out = {"x": x} if y is None else {"x": x, "y": y}
        return out | ({"weight": element["weight"]} if "weight" in element else {})

    def _finish(self, element: dict[str, Any]) -> Any:
        x, y, weight = element["x"], element.get("y"), element.get("weight")
        if self._class_weight:
            weight = _class_weights(y, self._class_weight)
        return pack(x, y, weight)


def _numbering(first: int, gaps: Collection[int]) -> Callable[[int], int]:
    """The n-th number from `first` on, gaps left out."""
    ahead = sorted(gap for gap in set(gaps) if gap >= first)

    def numbered(n: int) -> int:
        found = first + n
        for gap in ahead:
            if gap > found:
                break
            found += 1
        return found

    return numbered


def _tf_dtype(leaf: ArraySpec) -> tf.DType:
    return tf.string if leaf.dtype in ("str", "bytes") else tf.as_dtype(leaf.dtype)


def _class_weights(y: Any, class_weight: Mapping[int, float]) -> tf.Tensor:
    """Weights of rows by class: y is class numbers, shape (n,) or (n, 1), or one-hot, shape (n,
    classes).
    """
    if not tf.is_tensor(y):
        raise ConfigError("class_weight needs targets y that are one array of classes.")
    if y.shape.rank >= 2:
        y = tf.argmax(y, axis=-1) if y.shape[-1] > 1 else tf.squeeze(y, axis=-1)
    y = tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int64)
    table = np.ones(max(class_weight) + 1, np.float32)
    for label, weight in class_weight.items():
        table[label] = weight
    inside = (y >= 0) & (y < len(table))
    return tf.where(inside, tf.gather(table, tf.where(inside, y, 0)), 1.0)
