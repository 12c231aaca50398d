"""The loop calls callbacks in `model.fit`'s order with `model.fit`'s arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tf

ROWS, BATCH, EPOCHS = 10, 4, 3


@pytest.fixture(autouse=True)
def the_choice_of_a_keras_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")  # put back afterwards, whoever changed it


def recorder(keras: Any, calls: list[Any], stop_after: int | None = None) -> Any:
    class Recorder(keras.callbacks.Callback):
        pass

    def hook(name: str) -> Any:
        def record(self: Any, *args: Any, **kwargs: Any) -> None:
            given = list(args) + list(kwargs.values())
            logs = (
                given.pop()
                if given and (given[-1] is None or isinstance(given[-1], dict))
                else None
            )
            calls.append((name, *given, sorted(logs or {})))
            if name == "on_train_begin":
                calls.append(("params", self.params["epochs"], self.params["steps"]))
            if name == "on_epoch_end" and stop_after is not None and given[0] >= stop_after:
                self.model.stop_training = True

        return record

    for scope in ("train", "epoch", "train_batch", "test", "test_batch"):
        for moment in ("begin", "end"):
            setattr(Recorder, f"on_{scope}_{moment}", hook(f"on_{scope}_{moment}"))
    return Recorder()


def make_model(keras: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 3)).astype("float32"), rng.normal(size=(ROWS, 1)).astype(
        "float32"
    )


def raytf_calls(calls: list[Any], **arguments: Any) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    from raytf.config import TrainSpec
    from raytf.data import ArraySource
    from raytf.worker.engine import engine_for
    from raytf.worker.session import Trainee
    from tests.worker.group import loopback_links

    x, y = data()
    stop = arguments.pop("stop_after", None)
    spec = TrainSpec(
        build_model=lambda config: make_model(keras),
        train_data=ArraySource(x, y),
        global_batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        callbacks=lambda: [recorder(keras, calls, stop)],
        **arguments,
    )
    links = loopback_links(0, ("127.0.0.1:0",))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # no TF_CONFIG: one worker
    return Trainee(spec, links, strategy, engine_for(False)).train()


def fit_calls(calls: list[Any], stop_after: int | None = None, **arguments: Any) -> Any:
    import keras

    x, y = data()
    model = make_model(keras)
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[recorder(keras, calls, stop_after)],
        **arguments,
    )


@pytest.mark.parametrize("validation_freq", [1, 2])
def test_order_and_arguments_are_those_of_fit(validation_freq: int) -> None:
    from raytf.data import ArraySource

    mine: list[Any] = []
    theirs: list[Any] = []
    x, y = data()
    result = raytf_calls(mine, validation_data=ArraySource(x, y), validation_freq=validation_freq)
    history = fit_calls(
        theirs, validation_data=(x, y), validation_batch_size=BATCH, validation_freq=validation_freq
    )
    assert mine == theirs
    assert set(result["history"]) == set(history.history)
    for name, values in history.history.items():
        np.testing.assert_allclose(result["history"][name], values, rtol=1e-5)


def test_stop_training_ends_after_the_epoch() -> None:
    mine: list[Any] = []
    theirs: list[Any] = []
    result = raytf_calls(mine, stop_after=1)
    fit_calls(theirs, stop_after=1)
    assert mine == theirs
    assert result["epochs"] == 2 and result["steps"] == 6


def test_initial_epoch_counts_as_in_fit() -> None:
    mine: list[Any] = []
    theirs: list[Any] = []
    result = raytf_calls(mine, initial_epoch=1)
    fit_calls(theirs, initial_epoch=1)
    assert mine == theirs
    assert result["epochs"] == EPOCHS - 1


def test_averaged_weights_come_before_on_train_end() -> None:
    """As in fit: a callback that restores weights at the end has the last word."""
    import keras
    import tensorflow as tf

    from raytf.config import TrainSpec
    from raytf.data import ArraySource
    from raytf.worker.engine import engine_for
    from raytf.worker.session import Trainee
    from tests.worker.group import loopback_links

    x, y = data()

    def build(config: Any = None) -> Any:
        model = make_model(keras)
        optimizer = keras.optimizers.Adam(0.5, use_ema=True)
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    def callbacks() -> list[Any]:
        return [keras.callbacks.EarlyStopping("loss", restore_best_weights=True, mode="max")]

    spec = TrainSpec(
        build_model=build,
        train_data=ArraySource(x, y),
        global_batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        callbacks=callbacks,
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    trainee = Trainee(spec, loopback_links(0, ("127.0.0.1:0",)), strategy, engine_for(False))
    trainee.train()
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks()
    )
    for mine, theirs in zip(trainee.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
