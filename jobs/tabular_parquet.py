"""Writes a real table (392 cars) to Parquet and trains from it: what mileage a car has."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jobkit
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import real_data
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf

LABEL = "mpg"
VALIDATION_ROWS = 72


def write_table(folder: Path) -> tuple[str, str, dict[str, tuple[float, float]]]:
    """Writes `train.parquet` and `validation.parquet`; returns paths and column scales."""
    table = pa.table(real_data.auto_mpg())
    table = table.take(np.random.default_rng(0).permutation(table.num_rows))
    held, train = table.slice(0, VALIDATION_ROWS), table.slice(VALIDATION_ROWS)
    paths = [str(folder / name) for name in ("train.parquet", "validation.parquet")]
    for path, part in zip(paths, (train, held), strict=True):
        pq.write_table(part, path, row_group_size=64)
    columns = {name: train[name].to_numpy() for name in train.column_names if name != LABEL}
    return *paths, {name: (float(v.mean()), float(v.std())) for name, v in columns.items()}


def build_model(config: dict[str, Any]) -> Any:
    import keras  # on workers only

    inputs = {name: keras.layers.Input((), name=name) for name in config["columns"]}
    scaled = [(inputs[name] - mean) / std for name, (mean, std) in config["columns"].items()]
    x = keras.ops.stack(scaled, axis=1)
    for _ in range(2):
        x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(23.0))(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(config["learning_rate"]), "mse", metrics=["mae"])
    return model


def job(args: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.table) if args.table else Path(scratch)
        train, validation, columns = write_table(folder)
        trainer = raytf.KerasTrainer(
            build_model,
            train_data=raytf.ParquetSource(train, columns=list(columns), label=LABEL),
            validation_data=raytf.ParquetSource(validation, columns=list(columns), label=LABEL),
            global_batch_size=args.global_batch_size,
            epochs=args.epochs,
            seed=args.seed,
            config={"columns": columns, "learning_rate": 1e-2},
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(
                name=args.name,
                storage_path=args.storage,
                failure_config=FailureConfig(max_failures=args.max_failures),
            ),
            **jobkit.given(args),
        )
        result = trainer.fit()
    return {"data": "Auto MPG: 320 + 72 cars of 1970-82, from mlxtend", **jobkit.summary(result)}


if __name__ == "__main__":
    flags = jobkit.parser(__doc__, epochs=30, global_batch_size=32)
    flags.add_argument(
        "--table", metavar="DIR", help="where to leave the table; all nodes must reach it"
    )
    sys.exit(jobkit.run(job, flags))
