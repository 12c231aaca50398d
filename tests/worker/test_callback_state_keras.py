"""Keras's own callbacks: broken at every point and resumed elsewhere, they end as unbroken ones.

Their hooks are called in the loop's order; a "step" moves the weights by a known amount, so a whole
run takes milliseconds and each break point can be tried.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.worker.callback_state import CallbackStates

pytestmark = [
    pytest.mark.tf,
    # Keras 3.15 itself, wherever a callback reads the learning rate (NumPy 2's copy keyword).
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

EPOCHS, STEPS = 7, 3
LOSSES = [0.9, 0.7, float("nan"), 0.5, 0.6, 0.55, 0.58]
Point = tuple[int, int]  # (epoch, completed steps of it); (epoch, STEPS + 1): after on_epoch_end


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    return importlib.import_module(request.param)


def make_model(keras: Any, **optimizer: Any) -> Any:
    model = keras.Sequential([keras.layers.Dense(40)])
    model.build((None, 40))
    model.compile(keras.optimizers.SGD(0.5, **optimizer), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


class Run:
    """One process's share of a run."""

    def __init__(self, keras: Any, make: Callable[[Path], list[Any]], at: Path) -> None:
        self.model = make_model(keras)
        self.model.set_weights([np.zeros_like(w) for w in self.model.get_weights()])
        self.list = keras.callbacks.CallbackList(
            make(at), add_history=True, model=self.model, epochs=EPOCHS, steps=STEPS, verbose=0
        )
        self.states = CallbackStates(self.list.callbacks, lambda c: "CSV" not in type(c).__name__)
        self.lr: list[float] = []
        self.stopped_at: int | None = None

    def begin(self, saved: dict[str, Any] | None = None) -> list[str]:
        self.states.before_train_begin(saved and saved["state"])
        self.model.stop_training = False
        self.list.on_train_begin()
        self.states.began()
        if saved is None:
            return []
        self.model.set_weights(saved["weights"])
        self.model.optimizer.learning_rate.assign(saved["rate"])
        self.lr = list(saved["lr"])
        return self.states.restore(saved["state"], saved["arrays"])

    def save(self) -> dict[str, Any]:
        state, shared, chief = self.states.capture()
        state = json.loads(json.dumps(state, allow_nan=False, sort_keys=True))
        arrays = {name: array.copy() for name, array in {**shared, **chief}.items()}
        return {
            "state": state,
            "arrays": arrays,
            "weights": [w.copy() for w in self.model.get_weights()],
            "rate": self.rate(),
            "lr": list(self.lr),
        }

    def rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def logs(self, epoch: int) -> dict[str, float]:
        return {"loss": LOSSES[epoch], "val_loss": LOSSES[epoch] * 2, "val_mae": 0.1 + epoch / 3}

    def points(self, start: Point = (0, 0)) -> Iterator[Point]:
        """Goes on, and pauses wherever a checkpoint could be taken."""
        first, done = start
        if done > STEPS:
            first, done = first + 1, 0
            is_open = False
        else:
            is_open = start != (0, 0)
        for epoch in range(first, EPOCHS):
            if not is_open:
                self.list.on_epoch_begin(epoch)
            for step in range(done, STEPS):
                self.list.on_train_batch_begin(step)
                self.model.set_weights([w + self.rate() for w in self.model.get_weights()])
                self.list.on_train_batch_end(step, {"loss": LOSSES[epoch]})
                yield epoch, step + 1
            self.list.on_test_begin()
            self.list.on_test_batch_begin(0)
            self.list.on_test_batch_end(0, {})
            self.list.on_test_end({"loss": LOSSES[epoch] * 2})
            self.list.on_epoch_end(epoch, self.logs(epoch))
            self.lr.append(self.rate())
            done, is_open = 0, False
            if self.model.stop_training:
                self.stopped_at = epoch
                return
            yield epoch, STEPS + 1

    def die(self) -> None:
        for callback in self.list.callbacks:
            if "csv_file" in vars(callback):
                callback.csv_file.close()

    def end(self) -> dict[str, Any]:
        self.list.on_train_end({})
        skipped = ("_model", "model", "params", "csv_file", "append", "append_header")
        seen = {}
        for callback in self.list.callbacks:
            kept = {
                k: v
                for k, v in vars(callback).items()
                if isinstance(v, int | float | str | list | dict | tuple | type(None))
                and k not in skipped
                and not k.endswith(("_dir", "_path", "filepath", "filename", "_writers"))
            }
            seen[type(callback).__name__] = kept
        return {
            "weights": [w.tobytes() for w in self.model.get_weights()],
            "lr": self.lr,
            "stopped": self.stopped_at,
            "vars": seen,
        }


def repr_exact(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes()!r}"
    if isinstance(value, dict):
        return repr([(k, repr_exact(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return f"{type(value)}{[repr_exact(v) for v in value]}"
    return f"{type(value)}{value!r}"


def files(at: Path) -> dict[str, bytes]:
    return {str(p.relative_to(at)): p.read_bytes() for p in sorted(at.rglob("*.csv"))}


def unbroken(keras: Any, make: Callable[[Path], list[Any]], at: Path) -> tuple[Any, list[Point]]:
    at.mkdir()
    run = Run(keras, make, at)
    run.begin()
    points = list(run.points())
    return {**run.end(), "files": files(at)}, points


def broken(
    keras: Any, make: Callable[[Path], list[Any]], at: Path, breaks: list[Point], new_node: bool
) -> Any:
    """Saves at each break, goes on for a while, dies, and is resumed from there."""
    at.mkdir()
    saved, start = None, (0, 0)
    for point in breaks:
        run = Run(keras, make, at)
        assert run.begin(saved) == []
        going = run.points(start)
        while next(going) != point:
            pass
        saved, start = run.save(), point
        for _ in range(STEPS + 2):  # what is lost with the process
            next(going, None)
        run.die()
        if new_node:
            shutil.rmtree(at)
            at.mkdir()
    run = Run(keras, make, at)
    assert run.begin(saved) == []
    for _ in run.points(start):
        pass
    return {**run.end(), "files": files(at)}


def check(keras: Any, make: Callable[[Path], list[Any]], tmp_path: Path) -> Any:
    expected, points = unbroken(keras, make, tmp_path / "unbroken")
    # The last point may end the run without anything left to do; that is a point as well.
    for number, point in enumerate(points):
        got = broken(keras, make, tmp_path / f"broken{number}", [point], new_node=number % 2 == 1)
        assert repr_exact(got) == repr_exact(expected), point
    some = [points[2], points[5], points[-1]]
    got = broken(keras, make, tmp_path / "thrice", some, new_node=True)
    assert repr_exact(got) == repr_exact(expected)
    return expected


def test_history(keras: Any, tmp_path: Path) -> None:
    expected = check(keras, lambda at: [], tmp_path)
    history = expected["vars"]["History"]
    assert history["epoch"] == list(range(EPOCHS))
    assert len(history["history"]["loss"]) == EPOCHS


@pytest.mark.parametrize("restore", [True, False])
def test_early_stopping(keras: Any, tmp_path: Path, restore: bool) -> None:
    def make(at: Path) -> list[Any]:
        return [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=2, min_delta=0.01, mode="min", restore_best_weights=restore
            )
        ]

    expected = check(keras, make, tmp_path)
    assert expected["stopped"] == 5
    assert expected["vars"]["EarlyStopping"]["best_epoch"] == 3


def test_early_stopping_takes_a_new_patience(keras: Any, tmp_path: Path) -> None:
    def make(patience: int, min_delta: float) -> Callable[[Path], list[Any]]:
        return lambda at: [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=patience, min_delta=min_delta, mode="min"
            )
        ]

    run = Run(keras, make(2, 0.01), tmp_path)
    run.begin()
    going = run.points()
    while next(going) != (4, STEPS + 1):
        pass
    saved = run.save()
    again = Run(keras, make(3, 0.2), tmp_path)
    again.begin(saved)
    (stopper,) = (c for c in again.list.callbacks if hasattr(c, "patience"))
    assert (stopper.patience, stopper.wait, stopper.best_epoch) == (3, 1, 3)
    list(again.points((4, STEPS + 1)))
    assert again.stopped_at == 6  # not 5
    assert abs(stopper.min_delta) == 0.2
    assert stopper.monitor_op(1.0, 2.0)


@pytest.mark.parametrize("cooldown", [0, 1])
def test_reduce_lr_on_plateau(keras: Any, tmp_path: Path, cooldown: int) -> None:
    def make(at: Path) -> list[Any]:
        return [
            keras.callbacks.ReduceLROnPlateau(
                "val_loss", factor=0.5, patience=1, cooldown=cooldown, mode="min", min_delta=0.01
            )
        ]

    expected = check(keras, make, tmp_path)
    assert len(set(expected["lr"])) >= 2


@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_model_checkpoint_saves_at_the_same_places(
    keras: Any, tmp_path: Path, save_freq: Any
) -> None:
    def make(at: Path) -> list[Any]:
        class Recording(keras.callbacks.ModelCheckpoint):
            """Notes where it saves; writing the file is Keras's own business."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.saved: list[Any] = []

            def _save_model(self, epoch: int, batch: Any, logs: Any) -> None:
                self.saved.append([epoch, batch, self.best])
                super()._save_model(epoch, batch, logs)

        return [
            Recording(
                str(at / "best.weights.h5"), "loss", save_best_only=True, save_weights_only=True,
                mode="min", save_freq=save_freq,
            )
        ]  # fmt: skip

    expected = check(keras, make, tmp_path)
    recorded = expected["vars"]["Recording"]
    assert recorded["best"] == 0.5
    assert len(recorded["saved"]) == (EPOCHS if save_freq == "epoch" else EPOCHS * STEPS // 4)


@pytest.mark.parametrize("append", [False, True])
def test_csv_logger_is_byte_identical(keras: Any, tmp_path: Path, append: bool) -> None:
    def make(at: Path) -> list[Any]:
        return [keras.callbacks.CSVLogger(str(at / "log.csv"), append=append)]

    expected = check(keras, make, tmp_path)
    lines = expected["files"]["log.csv"].decode().split("\r\n")
    assert lines[0] == "epoch,loss,val_loss,val_mae"
    assert len(lines) == EPOCHS + 2


def test_csv_logger_goes_on_appending_to_what_was_there(keras: Any, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("of another run\r\n")

    def make(at: Path) -> list[Any]:
        return [keras.callbacks.CSVLogger(str(at / "log.csv"), append=True)]

    run = Run(keras, make, tmp_path)
    run.begin()
    going = run.points()
    while next(going) != (1, 2):
        pass
    saved = run.save()
    list(going)
    run.die()
    again = Run(keras, make, tmp_path)
    again.begin(saved)
    list(again.points((1, 2)))
    again.end()
    lines = (tmp_path / "log.csv").read_bytes().split(b"\r\n")
    assert lines[0] == b"of another run"
    assert [line[:2] for line in lines[1:-1]] == [b"%d," % n for n in range(EPOCHS)]


def test_all_together(keras: Any, tmp_path: Path) -> None:
    k = keras.callbacks

    class Own(k.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, Any] = {}
            self.rng = np.random.default_rng(3)
            self.drawn: list[float] = []

        def on_train_begin(self, logs: Any = None) -> None:
            self.began = self.drawn

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.drawn = [*self.drawn, float(self.rng.normal())]
            self.seen[batch] = np.float32(len(self.drawn))

    def make(at: Path) -> list[Any]:
        return [
            k.ReduceLROnPlateau("loss", factor=0.5, patience=1, mode="min"),
            k.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            Own(),
            k.EarlyStopping("val_loss", patience=3, mode="min", restore_best_weights=True),
            k.EarlyStopping("val_mae", patience=4, mode="min"),
            k.CSVLogger(str(at / "a.csv")),
            k.TerminateOnNaN() if keras.__name__ == "never" else k.CSVLogger(str(at / "b.csv")),
            k.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        ]

    expected = check(keras, make, tmp_path)
    assert len(expected["vars"]["Own"]["drawn"]) == len(expected["lr"]) * STEPS
    assert expected["files"]["a.csv"] == expected["files"]["b.csv"]


@pytest.mark.parametrize("update_freq", ["epoch", 1])
def test_tensorboard_counts_on(
    keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_freq: Any
) -> None:
    written: list[tuple[str, int]] = []

    def scalar(name: str, data: Any, step: Any, description: Any = None) -> None:
        written.append((name, int(step)))

    # What TensorFlow calls to write one; the package itself need not be installed.
    for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.v2"):
        fake = types.ModuleType(name)
        fake.scalar = scalar  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, fake)

    def make(at: Path) -> list[Any]:
        return [
            keras.callbacks.TensorBoard(
                str(at), update_freq=update_freq, write_graph=False, write_steps_per_second=True
            )
        ]

    at = (2, 1)
    run = Run(keras, make, tmp_path)
    run.begin()
    going = run.points()
    while next(going) != at:
        pass
    saved, before = run.save(), len(written)
    (board,) = (c for c in run.list.callbacks if hasattr(c, "log_dir"))
    again = Run(keras, make, tmp_path)
    assert again.begin(saved) == []
    (other,) = (c for c in again.list.callbacks if hasattr(c, "log_dir"))
    for name in ("_global_train_batch", "_global_test_batch", "_epoch_start_time"):
        assert getattr(other, name, None) == getattr(board, name, None), name
    old, new = board._previous_epoch_iterations, other._previous_epoch_iterations
    assert type(old) is type(new)
    assert float(old) == float(new)
    assert len(written) == before
    list(again.points(at))
    again.end()
    resumed = written[before:]
    del written[before:]
    list(going)
    run.end()
    assert resumed == written[before:]
    assert ("epoch_loss", EPOCHS - 1) in resumed
    if keras.__name__ == "keras":
        assert [s for n, s in resumed if n == "batch_loss"][0] == at[0] * STEPS + at[1] + 1


def test_swap_ema_weights(tmp_path: Path) -> None:
    import keras

    def make() -> tuple[Any, Any, CallbackStates]:
        model = make_model(keras, use_ema=True)
        callback = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        listed = keras.callbacks.CallbackList(
            [callback], add_history=True, model=model, epochs=3, steps=1
        )
        return model, listed, CallbackStates(listed.callbacks, lambda c: True)

    def variables(model: Any) -> list[np.ndarray]:
        return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    def epoch(model: Any, listed: Any, number: int) -> None:
        listed.on_epoch_begin(number)
        for v in model.trainable_variables:
            v.assign_add(np.full(v.shape, 1 + number, "float32"))
        listed.on_epoch_end(number, {})

    model, listed, states = make()
    listed.on_train_begin()
    states.began()
    epoch(model, listed, 0)
    state, arrays, _ = states.capture()
    kept = [v.copy() for v in variables(model)]
    other, other_list, other_states = make()
    other_list.on_train_begin()
    other_states.began()
    for variable, value in zip((*other.variables, *other.optimizer.variables), kept, strict=True):
        variable.assign(value)
    assert other_states.restore(json.loads(json.dumps(state)), arrays) == []
    assert other_list.callbacks[0]._ema_weights_in_model is True
    for one, its in ((model, listed), (other, other_list)):
        for number in (1, 2):
            epoch(one, its, number)
    for a, b in zip(variables(model), variables(other), strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_models_own_variables_are_not_a_callbacks_state(keras: Any) -> None:
    import tensorflow as tf

    class Watching(keras.callbacks.Callback):
        def set_model(self, model: Any) -> None:
            super().set_model(model)
            self.kernel = model.trainable_variables[0]
            self.rate = model.optimizer.learning_rate
            self.total = tf.Variable(0.0)
            self.mean = keras.metrics.Mean()
            self.layer = model.layers[0]
            self.last = None

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.total.assign_add(2.0)
            self.mean.update_state([1.0, 5.0])
            self.last = tf.constant([1.0, float(epoch)])

    run = Run(keras, lambda at: [Watching()], Path())
    run.begin()
    going = run.points()
    while next(going) != (1, 1):
        pass
    run.model.optimizer.learning_rate.assign(0.25)
    saved = run.save()
    assert set(saved["state"]["callbacks"]["Watching"]["attributes"]) == {"total", "mean", "last"}
    again = Run(keras, lambda at: [Watching()], Path())
    assert again.begin(saved) == []
    callback = again.list.callbacks[0]
    assert float(callback.total) == 2.0
    assert float(callback.mean.result()) == 3.0
    assert isinstance(callback.last, tf.Tensor)
    assert callback.last.numpy().tolist() == [1.0, 0.0]


def test_a_metric_of_another_shape_is_named(keras: Any) -> None:
    class Holding(keras.callbacks.Callback):
        def __init__(self, buckets: int) -> None:
            super().__init__()
            self.metric = keras.metrics.AUC(num_thresholds=buckets)

    one, two = Holding(10), Holding(20)
    states = CallbackStates([one], lambda c: True)
    states.began()
    one.metric.update_state([0, 1], [0.2, 0.7])
    state, arrays, _ = states.capture()
    (message,) = CallbackStates([two], lambda c: True).restore(state, arrays)
    assert message.startswith("Holding.metric was a AUC")
