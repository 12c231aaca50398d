"""A character-level transformer on Python's own help pages, trained on several Ray workers."""

from __future__ import annotations

import sys
from pydoc_data.topics import topics
from typing import Any

import jobkit
import numpy as np
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf

CONTEXT = 64  # characters the model sees


def build_model(config: dict[str, Any]) -> Any:
    import keras  # on workers only

    width, characters = config["width"], config["characters"]
    text = keras.layers.Input((CONTEXT,), dtype="int32")
    place = keras.ops.cumsum(keras.ops.ones_like(text), axis=1) - 1
    x = keras.layers.Embedding(characters, width)(text)
    x = x + keras.layers.Embedding(CONTEXT, width)(place)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = x + keras.layers.Dense(width)(y)
    logits = keras.layers.Dense(characters)(keras.layers.LayerNormalization()(x))
    model = keras.Model(text, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config["learning_rate"]), loss, metrics=["accuracy"])
    return model


class Windows:
    """Every `stride`-th window of the text, and the same one character later; cut when read."""

    def __init__(self, codes: np.ndarray, stride: int) -> None:
        self.codes, self.stride = codes, stride

    def __len__(self) -> int:
        return (len(self.codes) - CONTEXT - 1) // self.stride

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        window = self.codes[index * self.stride :][: CONTEXT + 1]
        return window[:-1], window[1:]


def sample(model: Any, alphabet: str, start: str, length: int, seed: int) -> str:
    """Continues `start`, one drawn character after the other."""
    rng, text = np.random.default_rng(seed), start
    for _ in range(length):
        seen = [alphabet.index(c) for c in text[-CONTEXT:]]
        padded = np.array([seen + [0] * (CONTEXT - len(seen))], "int32")
        logits = np.asarray(model(padded))[0, len(seen) - 1].astype("float64")
        odds = np.exp((logits - logits.max()) / 0.7)
        text += alphabet[rng.choice(len(alphabet), p=odds / odds.sum())]
    return text


def job(args: Any) -> dict[str, Any]:
    text = "\n".join(topics[name] for name in sorted(topics))[: args.characters]
    alphabet = "".join(sorted(set(text)))
    codes = np.array([alphabet.index(c) for c in text], "int32")
    trainer = raytf.KerasTrainer(
        build_model,
        train_data=Windows(codes, args.stride),
        global_batch_size=args.global_batch_size,
        epochs=args.epochs,
        seed=args.seed,
        config={"characters": len(alphabet), "width": args.width, "learning_rate": 2e-3},
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
        **jobkit.given(args),
    )
    result = trainer.fit()
    said = sample(result.load_model(), alphabet, "The ", args.sample, args.seed)
    return {
        "data": f"{len(text)} characters of pydoc_data.topics",
        **jobkit.summary(result),
        "sample": said,
    }


if __name__ == "__main__":
    flags = jobkit.parser(__doc__, epochs=3, global_batch_size=64)
    flags.add_argument(
        "--characters", type=int, default=1_000_000, metavar="N", help="of the text, at most"
    )
    flags.add_argument(
        "--stride", type=int, default=32, metavar="N", help="characters from window to window"
    )
    flags.add_argument(
        "--width", type=int, default=64, metavar="N", help="of the model, a multiple of 4"
    )
    flags.add_argument(
        "--sample", type=int, default=200, metavar="N", help="characters to write at the end"
    )
    sys.exit(jobkit.run(job, flags))
