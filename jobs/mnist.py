"""TensorFlow's beginner tutorial on several Ray workers: a network that reads digits."""

from __future__ import annotations

import sys
from typing import Any

import jobkit
import real_data
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf


def build_model(config: dict[str, Any]) -> Any:
    import tensorflow as tf  # on workers only; tf.keras is Keras 3, or tf_keras with --legacy-keras

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((28, 28)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dropout(0.2),
            tf.keras.layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=loss, metrics=["accuracy"])
    return model


def job(args: Any) -> dict[str, Any]:
    (x, y), (held_x, held_y), description = real_data.digits(args.data)
    print(f"Data: {description}", file=sys.stderr)
    trainer = raytf.KerasTrainer(
        build_model,
        train_data=raytf.ArraySource(x, y),
        validation_data=raytf.ArraySource(held_x, held_y),
        global_batch_size=args.global_batch_size,
        epochs=args.epochs,
        seed=args.seed,
        legacy_keras=args.legacy_keras,
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
        **jobkit.given(args),
    )
    result = trainer.fit()
    return {"data": description, **jobkit.summary(result)}


if __name__ == "__main__":
    flags = jobkit.parser(__doc__, epochs=5, global_batch_size=64)
    flags.add_argument("--data", choices=("auto", "mnist", "digits", "synthetic"), default="auto")
    flags.add_argument(
        "--legacy-keras", action="store_true", help="use tf_keras instead of Keras 3"
    )
    sys.exit(jobkit.run(job, flags))
