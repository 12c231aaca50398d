"""Where samples come from: the contract of a source, and what is accepted as one.

A source gives any rows, in any order, as often as asked: that is what makes a batch a function of
(seed, epoch, step) and lets any worker produce any batch. Owns telling sources, sequences and
factories apart, and naming the way out for everything else, without importing TensorFlow or Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from raytf.data.array_source import ArraySource
from raytf.data.arrays import Structure
from raytf.data.sequence_source import SequenceSource
from raytf.errors import ConfigError, DataError

__all__ = [
    "ArraySource",
    "Factory",
    "SequenceSource",
    "Source",
    "as_source",
    "check_batch",
    "is_factory",
]

Rows = npt.NDArray[np.int64]
Factory = Callable[[Any], Any]  # f(ctx) -> tf.data.Dataset


@runtime_checkable
class Source(Protocol):
    """Random access to samples. Must pickle; `read` may be called from several threads at once."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def spec(self) -> Structure:
        """Returns the element `(x, y, sample_weight)` with an `ArraySpec` for each array."""
        ...

    def read(self, rows: Rows) -> Structure:
        """Returns the element of numpy arrays, leading dimension n, for `rows` (n,) in any order.

        The arrays are new ones: the caller may write to them.
        """
        ...

    def in_memory(self) -> Structure | None:
        """Returns the element of all rows if they are (or fit) in memory, else None.

        May read everything, so it is for workers. The caller must not write to the arrays.
        """
        ...

    def blocks(self) -> tuple[tuple[int, ...], int] | None:
        """Returns (rows of each block, window_rows) if rows should be shuffled by blocks."""
        ...


_VERBS = ("__len__", "spec", "read", "in_memory", "blocks")


def as_source(data: Any, name: str) -> Source | Factory:
    """Returns what `train_data` or `validation_data` stands for: a Source, or a factory.

    A Source passes; a random-access sequence becomes a SequenceSource; a function is returned as it
    is (`is_factory` tells): it is `f(ctx) -> tf.data.Dataset` and runs on the workers.

    Args:
        data: what the user gave.
        name: the argument's name, for messages.

    Raises:
        ConfigError: it is none of these; the message says what to write instead.
        DataError: the sequence is empty, or its first sample cannot be used.
    """
    kind = type(data).__name__
    if isinstance(data, type):
        raise ConfigError(f"{name} is the class {data.__name__}. Give an instance of it.")
    if hasattr(data, "read") and hasattr(data, "spec"):
        missing = [verb for verb in _VERBS if not hasattr(data, verb)]
        if missing:
            raise ConfigError(
                f"{name} ({type(data).__name__}) looks like a source but lacks "
                f"{', '.join(missing)}. A source has {', '.join(_VERBS)}; in_memory and blocks may "
                "return None."
            )
        return cast("Source", data)
    _refuse_known(data, name)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return SequenceSource(data)
    if callable(data):
        return data
    if isinstance(data, Iterable):
        raise ConfigError(
            f"{name} is a {kind}, which has no random access: raytf reads any sample by its "
            "number, so that any worker can have any batch. Give raytf.ArraySource, "
            "raytf.ParquetSource, an object with __len__ and __getitem__, or a function "
            "f(ctx) -> tf.data.Dataset."
        )
    raise ConfigError(
        f"{name} must be a raytf source, a random-access sequence of (x, y), or a function "
        f"f(ctx) -> tf.data.Dataset. Received: {type(data).__name__}."
    )


def is_factory(data: Any) -> TypeGuard[Factory]:
    """Returns whether `data` (from `as_source`) is a function f(ctx) -> tf.data.Dataset."""
    return callable(data) and not isinstance(data, Source)


def check_batch(num_rows: int, global_batch_size: int, num_workers: int) -> None:
    """Refuses, on the driver, batches that cannot be shared between the workers.

    Raises:
        DataError: there are no rows.
        ConfigError: the global batch has fewer rows than there are workers.
    """
    if num_rows < 1:
        raise DataError("The data has 0 rows: there is nothing to train on.")
    if global_batch_size < num_workers:
        raise ConfigError(
            f"global_batch_size={global_batch_size} is less than num_workers={num_workers}: some "
            "workers would never get a sample. Use a larger global_batch_size or fewer workers."
        )


def _refuse_known(data: Any, name: str) -> None:
    """Refuses what would be misread as a sequence of samples, and names what to write instead."""
    # By the names of modules, because neither TensorFlow nor Ray may be imported here.
    kind = type(data).__name__
    bases = [(cls.__module__, cls.__name__) for cls in type(data).__mro__]
    if any(module.startswith("ray.data") for module, _ in bases):
        raise ConfigError(
            f"{name} is a ray.data {type(data).__name__}, which is not built yet in this version. "
            "Write it to Parquet and use raytf.ParquetSource, or use raytf.ArraySource."
        )
    if any(module.startswith("tensorflow") and "Dataset" in cls for module, cls in bases):
        raise ConfigError(
            f"{name} is a tf.data.Dataset, which cannot be sent to workers. Make it in a function: "
            f"def {name}(ctx): return dataset. It runs on each worker."
        )
    if any(cls == "PyDataset" or (cls == "Sequence" and "keras" in m) for m, cls in bases):
        raise ConfigError(
            f"{name} is a Keras {type(data).__name__}, whose items are whole batches. raytf makes "
            "the batches: give an object whose __getitem__(i) returns one sample (x, y)."
        )
    if isinstance(data, (str, bytes, os.PathLike)):
        raise ConfigError(
            f"{name} is a path or URL: {data!r}. For Parquet files write raytf.ParquetSource(url)."
        )
    is_table = any(
        module.partition(".")[0] in ("pandas", "polars", "pyarrow") for module, _ in bases
    )
    is_array = hasattr(data, "shape") and hasattr(data, "dtype")
    if is_table or is_array or isinstance(data, (tuple, Mapping)):
        raise ConfigError(
            f"{name} is a {kind}. Say which part is x and which is y: write "
            "raytf.ArraySource(x, y)."
        )
    if isinstance(data, list):
        samples = cast("list[Any]", data)
        if samples and not isinstance(samples[0], tuple):
            raise ConfigError(
                f"{name} is a list of {type(samples[0]).__name__}. A list must hold one tuple "
                "(x, y) per sample; for whole arrays write raytf.ArraySource(x, y)."
            )
