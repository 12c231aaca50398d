"""A real Keras 3 model on real workers, from KerasTrainer's arguments to files on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cloudpickle import register_pickle_by_value
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.errors import TrainingError

pytestmark = [
    pytest.mark.ray,
    # Ray 2.60 warns about its own defaults, and Keras 3.15 uses NumPy's old __array__ protocol.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

ROWS = 130  # not divisible by the batch


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int64)


def build_model(config: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu")])
    model.add(keras.layers.Dense(2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config["lr"]), loss, metrics=["accuracy"])
    return model


def broken_model(config: Any) -> Any:
    raise ValueError("units must be positive")


def trainer(path: Path, **arguments: Any) -> raytf.KerasTrainer:
    x, y = data()
    given = {
        "build_model": build_model,
        "train_data": raytf.ArraySource(x, y),
        "validation_data": raytf.ArraySource(x[:33], y[:33]),
        "global_batch_size": 32,
        "epochs": 6,
        "config": {"lr": 0.05},
        "scaling_config": ScalingConfig(num_workers=2),
        "run_config": RunConfig(name="run", storage_path=str(path)),
        "verbose": 0,
    }
    return raytf.KerasTrainer(**(given | arguments))


def test_train_evaluate_predict_load_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data()
    loaded = set(sys.modules)
    made = trainer(tmp_path)
    result = made.fit()
    assert result.steps == 6 * 5
    assert set(result.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert len(result.history["loss"]) == 6
    assert result.history["loss"][-1] < result.history["loss"][0]
    assert len(result.weights_sha256) == 64
    assert "tensorflow" not in set(sys.modules) - loaded

    metrics = made.evaluate(raytf.ArraySource(x[:33], y[:33]))
    assert metrics["accuracy"] == pytest.approx(result.metrics["val_accuracy"], abs=1e-6)
    assert metrics["loss"] == pytest.approx(result.metrics["val_loss"], rel=1e-5)

    predicted = made.predict(raytf.ArraySource(x))
    assert predicted.shape == (ROWS, 2)
    model = result.load_model()
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)

    result.export(str(tmp_path / "m.keras"))
    result.export(str(tmp_path / "served"), "saved_model")
    assert (tmp_path / "m.keras").stat().st_size > 1000
    assert (tmp_path / "served" / "saved_model.pb").exists()

    assert "is finished" not in caplog.text
    again = trainer(tmp_path, epochs=1).fit()
    assert "is finished, with epochs=6; epochs=1 asks for less" in caplog.text
    assert (again.steps, again.weights_sha256) == (result.steps, result.weights_sha256)
    assert os.listdir(tmp_path / "run" / "final")


def test_an_error_in_build_model(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        trainer(tmp_path, build_model=broken_model).fit()
    text = str(caught.value)
    assert "failed: ValueError: units must be positive" in text.splitlines()[0]
    assert "in broken_model" in text
