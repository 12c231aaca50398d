from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint.storage import resolve
from raytf.cluster.origins import resolve_origin
from raytf.config import TrainSpec
from raytf.errors import ConfigError, NotFoundError, StorageError
from raytf.worker.foreign import load_foreign

pytestmark = [
    pytest.mark.tf,
    # Keras 3.15 itself, wherever it writes a variable to HDF5 (NumPy 2's copy keyword).
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :1] * 2


def dense(
    prefix: str = "", width: int = 3, optimizer: Any = None, rate: Any = 0.01, dtype: str = ""
) -> Any:
    import keras

    def name(layer: str) -> str | None:
        return f"{prefix}{layer}" if prefix else None

    policy = dtype or "float32"
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(width, "relu", name=name("one"), dtype=policy),
            keras.layers.BatchNormalization(name=name("norm"), dtype=policy),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1, name=name("two"), dtype=policy),
        ],
        name=name("all"),
    )
    model.compile(optimizer or keras.optimizers.Adam(rate), loss="mse", metrics=["mae"])
    return model


def trained(build: Callable[[], Any] = dense, seed: int = 1) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    model = build()
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def fresh(build: Callable[[], Any] = dense) -> Any:
    """As it is on a worker: named from the beginning, optimizer built."""
    import keras

    from raytf.worker import keras_compat

    keras_compat.reset_names()
    keras.utils.set_random_seed(9)
    model = build()
    model.optimizer.build(model.trainable_variables)
    return model


def load(path: Any, model: Any, build: Any = dense, strict: bool = True, keras: Any = None) -> str:
    """All that was said."""
    import keras as keras3

    spec = TrainSpec(build_model=build, train_data=X)
    origin = resolve_origin(str(path), strict)
    return "\n".join(load_foreign(origin, model, spec, keras or keras3))


def save(model: Any, kind: str, path: Path) -> Path:
    import tensorflow as tf

    if kind == "keras":
        model.save(path / "m.keras")
        return path / "m.keras"
    if kind == "saved_model":
        model.export(path / "served", verbose=False)
        return path / "served"
    if kind == "tf_checkpoint":
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(path / "tf" / "ck"))
    else:
        tf.train.Checkpoint(model).save(str(path / "tf" / "ck"))
    return path / "tf"


def weights(model: Any) -> list[Any]:
    return [v.numpy() for v in model.weights if "seed_generator" not in v.path]


def slots(model: Any) -> list[Any]:
    rate = model.optimizer._learning_rate
    return [v.numpy() for v in model.optimizer.variables if v is not rate]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(left, right, strict=True)
    )


KINDS = ("keras", "saved_model", "tf_checkpoint", "tf_root")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_optimizer(tmp_path: Path, kind: str) -> None:
    old = trained()
    path = save(old, kind, tmp_path)
    model = fresh()
    assert not same(weights(model), weights(old))
    said = load(path, model)
    assert same(weights(model), weights(old))
    assert "8 of 8 weights taken by" in said and str(path) in said
    if kind == "saved_model":
        assert "no optimizer state" in said
        assert int(model.optimizer.iterations.numpy()) == 0
    else:
        assert same(slots(model), slots(old))
        assert "state of Adam taken, which has done 4 steps" in said


@pytest.mark.parametrize("kind", KINDS)
def test_other_names_are_matched_by_order(tmp_path: Path, kind: str) -> None:
    old = trained(lambda: dense("old_"))
    path = save(old, kind, tmp_path)
    model = fresh(lambda: dense("new_"))
    said = load(path, model, lambda: dense("new_"))
    assert same(weights(model), weights(old))
    # A TensorFlow checkpoint knows places in the model, not names.
    assert f"taken by {'path' if kind.startswith('tf') else 'order'}" in said
    if kind != "saved_model":
        assert same(slots(model), slots(old))


def two(first: str, second: str) -> Any:
    import keras

    inputs = keras.Input((4,))
    layers = [keras.layers.Dense(4, name=name) for name in (first, second)]
    outputs = keras.layers.Dense(1, name="out")(layers[1](layers[0](inputs)))
    model = keras.Model(inputs, outputs, name="m")
    model.compile("adam", loss="mse")
    return model


def test_paths_win_over_order_for_slots_too(tmp_path: Path) -> None:
    old = trained(lambda: two("a", "b"))
    old.save(tmp_path / "m.keras")
    model = fresh(lambda: two("b", "a"))
    said = load(tmp_path / "m.keras", model, lambda: two("b", "a"))
    assert "6 of 6 weights taken by path" in said and "state of Adam taken" in said

    def named(model: Any) -> dict[str, Any]:
        slots = {v.path.split("/")[-1]: v.numpy() for v in model.optimizer.variables}
        return slots | {v.path: v.numpy() for v in model.weights}

    want, got = named(old), named(model)
    assert want.keys() == got.keys()
    assert all(same([want[name]], [got[name]]) for name in want)


@pytest.mark.parametrize("kind", ["keras", "saved_model"])
def test_another_model_is_refused_with_a_diff(tmp_path: Path, kind: str) -> None:
    path = save(trained(lambda: dense("x_")), kind, tmp_path)

    def wider() -> Any:
        return dense("x_", width=5)

    model = fresh(wider)
    before = weights(model)
    with pytest.raises(ConfigError) as caught:
        load(path, model, wider)
    text = str(caught.value)
    assert "~ x_one/kernel: model F32[4, 5], checkpoint F32[4, 3]" in text
    assert "x_two/bias" not in text and "resume_strict=False" in text
    assert same(weights(model), before)
    said = load(path, model, wider, strict=False)
    assert "1 of 8 weights taken by path" in said
    assert "not taken:\n  ~ x_norm/beta" in said
    if kind == "keras":
        assert "state of the file's Adam does not fit and starts anew" in said
        assert int(model.optimizer.iterations.numpy()) == 0


def test_nothing_fits(tmp_path: Path) -> None:
    import keras

    def other() -> Any:
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(6, use_bias=False)])
        model.compile("adam", loss="mse")
        return model

    trained().save(tmp_path / "m.keras")
    with pytest.raises(ConfigError, match=r"build_model it was made with\.$"):
        load(tmp_path / "m.keras", fresh(other), other, strict=False)


def test_a_tensorflow_checkpoint_of_another_model(tmp_path: Path) -> None:
    import tensorflow as tf

    path = save(trained(), "tf_checkpoint", tmp_path)
    with pytest.raises(ConfigError, match="does not fit build_model's model"):
        load(path, fresh(lambda: dense(width=5)), lambda: dense(width=5))
    tf.train.Checkpoint(x=tf.Variable([1.0])).save(str(tmp_path / "other" / "ck"))
    with pytest.raises(ConfigError, match=r"\+ .*dense/kernel F32\[4, 3\] is in the model only"):
        load(tmp_path / "other", fresh())


def test_a_tensorflow_checkpoint_without_optimizer(tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    old = keras.Sequential(trained().layers)
    old.build((None, 4))
    tf.train.Checkpoint(net=old).save(str(tmp_path / "ck"))
    model = fresh()
    said = load(tmp_path, model)
    assert same(weights(model), weights(old))
    assert "holds no optimizer state" in said


@pytest.mark.parametrize("kind", ["keras", "tf_checkpoint"])
def test_learning_rate_is_build_models(tmp_path: Path, kind: str) -> None:
    path = save(trained(lambda: dense(rate=0.5)), kind, tmp_path)
    model = fresh()
    said = load(path, model)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.01)
    assert "learning rate: 0.01, as build_model compiled it; the file's 0.5 is not taken" in said


def test_a_schedule_counts_on(tmp_path: Path) -> None:
    import keras

    def scheduled() -> Any:
        return dense(rate=keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5))

    path = save(trained(), "keras", tmp_path)
    model = fresh(scheduled)
    said = load(path, model, scheduled)
    assert "the schedule that build_model compiled" in said
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)  # after 4 steps


def test_another_optimizer_starts_anew(tmp_path: Path) -> None:
    path = save(trained(lambda: dense(optimizer="sgd")), "keras", tmp_path)
    model = fresh()
    said = load(path, model)
    assert "optimizer: the file's is SGD, build_model's Adam, which starts anew" in said
    assert not any(np.any(v) for v in slots(model))


def test_values_are_cast(tmp_path: Path) -> None:
    old = trained()
    path = save(old, "keras", tmp_path)
    model = fresh(lambda: dense(dtype="bfloat16"))
    load(path, model)
    assert model.weights[0].dtype == "bfloat16"
    got = [np.asarray(w, np.float32) for w in weights(model)]
    for have, want in zip(got, weights(old), strict=True):
        np.testing.assert_allclose(have, want, rtol=0.01, atol=0.01)


def own() -> Any:
    import keras

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.layer(x)

    model = Own()
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    return model


@pytest.mark.parametrize("kind", ["keras", "tf_checkpoint"])
def test_a_class_that_keras_does_not_know(tmp_path: Path, kind: str) -> None:
    """Neither is its shape known before it sees a batch."""
    old = trained(own)
    path = save(old, kind, tmp_path)

    def seen() -> Any:
        model = own()
        model(X[:1])
        return model

    model = fresh(seen)
    said = load(path, model, own)
    assert same(weights(model), weights(old)) and same(slots(model), slots(old))
    assert "2 of 2 weights" in said


def test_random_state_stays(tmp_path: Path) -> None:
    import tensorflow as tf

    path = save(trained(), "tf_checkpoint", tmp_path)
    model = fresh()

    def draws() -> list[Any]:
        return [random.random(), np.random.rand(), float(tf.random.uniform(()))]

    random.seed(1), np.random.seed(1), tf.random.set_seed(1)
    want = draws()
    random.seed(1), np.random.seed(1), tf.random.set_seed(1)
    load(path, model)
    assert draws() == want


@pytest.mark.parametrize("kind", KINDS[:3])
def test_from_a_url(tmp_path: Path, kind: str) -> None:
    old = trained()
    path = save(old, kind, tmp_path)
    url = f"memory://foreign-{tmp_path.name}/a b/{path.name}"
    target = resolve(url)
    if path.is_file():
        target.write_bytes(path.read_bytes())
    for file in (f for f in path.rglob("*") if f.is_file()):
        target.write_bytes(file.read_bytes(), file.relative_to(path).as_posix())
    model = fresh()
    load(url, model)
    assert same(weights(model), weights(old))


@pytest.mark.parametrize(
    ("error", "kind"), [(FileNotFoundError, NotFoundError), (PermissionError, StorageError)]
)
def test_a_url_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, kind: Any
) -> None:
    url = f"memory://foreign-{tmp_path.name}/m.keras"
    target = resolve(url)
    target.write_bytes(b"zip")

    def fail(*_: Any, **__: Any) -> None:
        raise error("no")

    monkeypatch.setattr(type(target.fs), "get_file", fail)
    with pytest.raises(kind, match=r"m\.keras"):
        load(url, fresh())


@pytest.mark.parametrize(
    ("name", "match"),
    [("m.keras", "neither be loaded as a model"), ("s/saved_model.pb", "cannot load the Saved")],
)
def test_no_such_file_inside(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / name).write_bytes(b"something else")
    path = tmp_path / name if name.endswith(".keras") else tmp_path / "s"
    with pytest.raises(ConfigError, match=match):
        load(path, fresh())


def test_a_saved_model_without_a_list_of_variables(tmp_path: Path) -> None:
    import tensorflow as tf

    class Bare(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable([1.0])

    tf.saved_model.save(Bare(), str(tmp_path / "bare"))
    with pytest.raises(ConfigError, match="does not list its variables"):
        load(tmp_path / "bare", fresh())


def legacy() -> Any:
    import tf_keras

    layers = tf_keras.layers
    model = tf_keras.Sequential(
        [tf_keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile(tf_keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("kind", ["keras", "saved_model", "tf_checkpoint"])
def test_tf_keras_in_a_strategy(tmp_path: Path, kind: str) -> None:
    import tensorflow as tf
    import tf_keras

    tf_keras.utils.set_random_seed(1)
    old = legacy()
    old.fit(X, Y, batch_size=8, verbose=0)
    if kind == "tf_checkpoint":
        path = save(old, kind, tmp_path)
    else:
        path = tmp_path / ("m.keras" if kind == "keras" else "served")
        old.save(path)
    tf_keras.backend.reset_uids()
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        model = legacy()
        model.optimizer.build(model.trainable_variables)
    said = load(path, model, legacy, keras=tf_keras)
    assert "8 of 8 weights taken" in said and "state of Adam taken" in said
    assert same(model.get_weights(), old.get_weights())
    assert same(slots(model), slots(old))


def test_tf_keras_saved_model_into_keras(tmp_path: Path) -> None:
    old = legacy()
    old.save(tmp_path / "served")
    model = fresh()
    said = load(tmp_path / "served", model)
    assert "8 of 8 weights taken by order" in said
    assert same(weights(model), old.get_weights())
    assert os.listdir(tmp_path) == ["served"]
