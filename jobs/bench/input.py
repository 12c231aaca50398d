"""How many examples per second raytf reads: ArraySource and ParquetSource against plain tf.data.

    python jobs/bench/input.py [--blocks 7]

All read the same 40,000 rows (784 float32 and a label), shuffled over the whole epoch, one rank,
everything in memory once read; plain is
`from_tensor_slices(...).shuffle(rows).repeat().batch(...).prefetch(AUTOTUNE)`. Medians over
interleaved blocks in one process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import common
import numpy as np

ROWS, WIDTH = 40_000, 784
BATCHES = (64, 1024)
ROWS_PER_BLOCK = 40_960


def write_parquet(folder: str, x: np.ndarray, y: np.ndarray) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH)
    path = str(Path(folder) / "rows.parquet")
    pq.write_table(pa.table({"image": images, "label": y}), path, row_group_size=4096)
    return path


def datasets(folder: str, batch: int) -> dict[str, Any]:
    """The three, endless and shuffled."""
    import tensorflow as tf

    import raytf
    from raytf.worker.pipeline import Feed

    rng = np.random.default_rng(0)
    x, y = rng.random((ROWS, WIDTH), dtype="float32"), rng.integers(0, 10, ROWS)
    plain = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).repeat()
    sources = {
        "array": raytf.ArraySource(x, y),
        "parquet": raytf.ParquetSource(write_parquet(folder, x, y), columns="image", label="label"),
    }
    made = {"plain": plain.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)}
    for name, source in sources.items():
        feed = Feed(source, global_batch_size=batch, num_workers=1, rank=0, seed=0, shuffle=True)
        made[name] = feed.full_batches()
    return made


def reader(dataset: Any, batch: int) -> Callable[[], float]:
    """Examples per second of the next block, read without leaving the graph."""
    import tensorflow as tf

    iterator = iter(dataset)

    @tf.function
    def read(number: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0)
        for _ in tf.range(number):
            element = next(iterator)
            total += tf.shape(element[0])[0]
        return total

    def block(number: int = ROWS_PER_BLOCK // batch) -> float:
        began = time.perf_counter()
        rows = int(read(tf.constant(number)))
        return rows / (time.perf_counter() - began)

    block()  # fills shuffle buffer and cache, traces
    return block


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--blocks", type=int, default=7, help="interleaved blocks of each")
    args = flags.parse_args()
    result: dict[str, dict[str, float]] = {}
    aims: list[common.Aim] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in BATCHES:
            arms = {
                name: reader(dataset, batch) for name, dataset in datasets(folder, batch).items()
            }
            medians = common.medians(common.interleave(arms, args.blocks), digits=0)
            result[f"batch_{batch}"] = medians
            for name, value in medians.items():
                common.say(f"batch {batch:>4}  {name:<8}{value:>12,.0f} examples/s")
            for name in ("array", "parquet"):
                text = f"batch {batch}: {name} / plain"
                aims.append((text, medians[name] / medians["plain"], 1.0))
    return common.finish("input", {"unit": "examples per second", "median": result}, aims)


if __name__ == "__main__":
    sys.exit(main())
