from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raytf
from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import CheckpointDamagedError, ConfigError, NotFoundError
from raytf.worker.export_step import load_step
from tests.checkpoint.states import save

pytestmark = [
    pytest.mark.tf,
    # Keras 3.15 itself, wherever it writes a variable to HDF5 (NumPy 2's copy keyword).
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :1] * 2


def dense(config: dict[str, Any] | None = None, width: int = 3, half: bool = False) -> Any:
    import keras

    policy = "mixed_float16" if half else "float32"
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(width, "relu", dtype=policy),
            keras.layers.BatchNormalization(dtype=policy),
            keras.layers.Dropout(0.2, dtype=policy),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    adam = keras.optimizers.Adam((config or {}).get("lr", 0.01))
    model.compile(
        keras.optimizers.LossScaleOptimizer(adam) if half else adam, loss="mse", metrics=["mae"]
    )
    return model


def subclassed(config: dict[str, Any]) -> Any:
    """A model that Keras has no config of."""
    import keras

    class Own(keras.Model):
        def __init__(self, layer: Any, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = layer, scale

        def call(self, x: Any) -> Any:
            return self.layer(x) * self.scale

    model = Own(keras.layers.Dense(1), config["scale"])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model(X[:1])
    return model


def trained(build: Callable[[], Any]) -> Any:
    """As a worker builds it: names count from the beginning."""
    import keras

    from raytf.worker import keras_compat

    keras_compat.reset_names()
    keras.utils.set_random_seed(3)
    model = build()
    model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    return model


def stored(
    url: Any, model: Any, step: int = 8, description: dict[str, Any] | None = None, **options: Any
) -> CheckpointStore:
    from raytf.worker import keras_compat

    tensors = {n: np.asarray(v.numpy()) for n, v in keras_compat.named_variables(model).items()}
    tensors |= {"step": np.asarray(step, np.int64), "callback/0/best": np.zeros(3, np.float32)}
    head = {
        "class": type(model).__name__,
        "optimizer": type(model.optimizer).__name__,
        "legacy_keras": False,
        "names": list(keras_compat.named_variables(model)),
        **keras_compat.serialized(model),
    }
    store = CheckpointStore(url)
    save(store, tensors, step, model=head | (description or {}), **options)
    return store


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(left, right, strict=True)
    )


def of_optimizer(model: Any) -> list[Any]:
    return [v.numpy() for v in model.optimizer.variables]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed_float16"])
def test_a_keras_file_holds_weights_and_optimizer(tmp_path: Path, half: bool) -> None:
    import keras

    model = trained(lambda: dense(half=half))
    store = stored(tmp_path / "run", model)
    dense(width=9)  # names go on in this process: the export must not depend on them
    written = raytf.export(store.url, 8, str(tmp_path / "new" / "m.keras"))
    assert written == str(tmp_path / "new" / "m.keras")
    assert os.listdir(tmp_path / "new") == ["m.keras"]
    loaded = keras.models.load_model(written)
    assert same(loaded.get_weights(), model.get_weights())
    assert same(of_optimizer(loaded), of_optimizer(model))
    assert int(loaded.optimizer.iterations.numpy()) > 0
    assert type(loaded.optimizer) is type(model.optimizer)


def test_a_loaded_step_goes_on_as_the_original(tmp_path: Path) -> None:
    import keras

    model = trained(dense)
    store = stored(tmp_path / "run", model)
    keras.utils.set_random_seed(5)
    draws = [keras.random.uniform((2,)) for _ in range(2)]
    keras.utils.set_random_seed(5)
    first = keras.random.uniform((2,))
    loaded = load_step(store, 8)
    assert same([first, keras.random.uniform((2,))], draws)  # this process draws as without it
    for each in (model, loaded):
        each.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert same(loaded.get_weights(), model.get_weights())
    assert same(of_optimizer(loaded), of_optimizer(model))


def test_a_saved_model_answers_as_the_model(tmp_path: Path, capfd: Any) -> None:
    import tensorflow as tf

    model = trained(dense)
    store = stored(tmp_path / "run", model)
    assert store.export("latest", str(tmp_path / "served"), "saved_model")
    assert capfd.readouterr().out == ""
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(X), model(X, training=False), rtol=1e-5, atol=1e-6)


def test_weights(tmp_path: Path) -> None:
    model = trained(dense)
    store = stored(tmp_path / "run", model)
    store.export(8, str(tmp_path / "w.weights.h5"), "weights")
    other = dense()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "w.weights.h5")
    assert same(other.get_weights(), model.get_weights())


@pytest.mark.parametrize(("format", "name"), [("keras", "m.keras"), ("saved_model", "m")])
def test_to_a_url(tmp_path: Path, format: str, name: str) -> None:
    url = f"memory://export-{tmp_path.name}"
    store = stored(f"{url}/run", trained(dense))
    assert store.export(8, f"{url}/out/{name}", format) == f"{url}/out/{name}"
    out = resolve(f"{url}/out")
    if format == "keras":
        assert out.read_bytes("m.keras")[:2] == b"PK"
    else:
        found = {path.split("/out/")[1] for path in out.fs.find(out.path)}
        assert {"m/saved_model.pb", "m/variables/variables.index"} <= found
        store.export(8, f"{url}/out/{name}", format)  # once more into the same place
        assert {path.split("/out/")[1] for path in out.fs.find(out.path)} == found


def test_latest_best_and_unknown_steps(tmp_path: Path) -> None:
    model = trained(dense)
    best = {"metric": "loss", "mode": "max"}  # the helper's loss falls: the first is best
    stored(tmp_path / "run", model, 8, best=best)
    first = model.get_weights()
    model.fit(X, Y, verbose=0)
    store = stored(tmp_path / "run", model, 9, best=best)
    import keras

    for step, weights in (("best", first), ("latest", model.get_weights()), ("8", first)):
        path = store.export(step, str(tmp_path / f"{step}.keras"))
        assert same(keras.models.load_model(path).get_weights(), weights)
    with pytest.raises(NotFoundError, match="nearest of 2: 8, 9"):
        store.export(7, str(tmp_path / "x.keras"))


def test_build_model_where_keras_has_no_config(tmp_path: Path) -> None:
    model = trained(lambda: subclassed({"scale": 2.0}))
    store = stored(tmp_path / "run", model, description={"config": None, "config_error": "No!"})
    path = str(tmp_path / "w.weights.h5")
    with pytest.raises(ConfigError, match=r"\(No!\).*Give build_model="):
        store.export(8, path, "weights")
    assert not os.path.exists(path)
    store.export(8, path, "weights", build_model=subclassed, config={"scale": 2.0})
    other = subclassed({"scale": 2.0})
    other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    assert same(other.get_weights(), model.get_weights())


def test_a_class_that_is_not_registered(tmp_path: Path) -> None:
    model = trained(lambda: subclassed({"scale": 2.0}))
    store = stored(tmp_path / "run", model)
    with pytest.raises(ConfigError, match="build_model=") as caught:
        store.export(8, str(tmp_path / "m.keras"))
    assert "step-0000000008" in str(caught.value)


def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    store = stored(tmp_path / "run", trained(dense))

    def deeper() -> Any:
        import keras

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(1)])
        model.compile("adam", loss="mse")
        return model

    with pytest.raises(ConfigError) as caught:
        store.export(8, str(tmp_path / "m.keras"), build_model=deeper)
    text = str(caught.value)
    assert "~ sequential/dense/kernel: model [4, 5], checkpoint [4, 3]" in text
    assert "- sequential/batch_normalization/gamma [3] is in the checkpoint only" in text
    assert "mean_metric" not in text and "callback" not in text

    def with_sgd(config: dict[str, Any]) -> Any:
        model = dense(config)
        model.compile("sgd", loss="mse")
        return model

    with pytest.raises(ConfigError, match=r"optimizer Adam.*\n.*\+ sgd/iteration"):
        store.export(8, str(tmp_path / "m.keras"), build_model=with_sgd)


@pytest.mark.parametrize("made", [None, "keras"])
def test_build_model_that_gives_no_model(tmp_path: Path, made: Any) -> None:
    store = stored(tmp_path / "run", trained(dense))
    with pytest.raises(ConfigError, match=r"It must return a keras\.Model"):
        store.export(8, str(tmp_path / "m.keras"), build_model=lambda: made)


def test_a_model_without_weights(tmp_path: Path) -> None:
    import keras

    def unbuilt() -> Any:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", loss="mse")
        return model

    store = stored(tmp_path / "run", trained(dense), description={"config": None})
    with pytest.raises(ConfigError, match="no weights before it sees a batch"):
        store.export(8, str(tmp_path / "m.keras"), build_model=unbuilt)


@pytest.mark.parametrize(
    ("format", "name", "match"),
    [("keras", "m.h5", r"ends in \.keras"), ("onnx", "m", "format must be one of")],
)
def test_formats_and_endings_before_anything_is_read(
    tmp_path: Path, format: str, name: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        stored(tmp_path / "run", trained(dense)).export(8, str(tmp_path / name), format)


def test_damaged_bytes_are_never_exported(tmp_path: Path) -> None:
    store = stored(tmp_path / "run", trained(dense))
    for shard in (tmp_path / "run").rglob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        for place in range(len(data) // 2, len(data)):
            data[place] ^= 1
        shard.write_bytes(data)
    with pytest.raises(CheckpointDamagedError):
        store.export(8, str(tmp_path / "m.keras"))
    assert not os.path.exists(tmp_path / "m.keras")


def test_the_step_cannot_be_deleted_meanwhile(tmp_path: Path) -> None:
    store = stored(tmp_path / "run", trained(dense))
    stored(tmp_path / "run", trained(dense), 9)

    def build(config: dict[str, Any]) -> Any:
        with pytest.raises(ConfigError, match="being read"):
            store.delete(8)
        return dense(config)

    store.export(8, str(tmp_path / "m.keras"), build_model=build)
    store.delete(8)


def legacy(config: dict[str, Any] | None = None) -> Any:
    import tf_keras

    layers = tf_keras.layers
    model = tf_keras.Sequential(
        [tf_keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile(tf_keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def legacy_store(url: Path) -> tuple[Any, CheckpointStore]:
    """Statistics as two ranks had them for themselves."""
    import tensorflow as tf
    import tf_keras

    from raytf.worker.legacy import LegacyEngine

    tf_keras.backend.reset_uids()
    model = legacy()
    model.optimizer.build(model.trainable_variables)  # as a worker does; it decides their names
    model.fit(X, Y, batch_size=8, verbose=0)
    engine = LegacyEngine()
    engine._strategy = tf.distribute.get_strategy()
    tensors = {c.name: np.asarray(c.variable.numpy()) for c in engine.cells(model)}
    for name in [name for name in tensors if "moving" in name]:
        value = tensors.pop(name)
        tensors[f"{name}@0"], tensors[f"{name}@1"] = value - 0.25, value + 0.25
    description = {
        "class": "Sequential",
        "optimizer": "Adam",
        "legacy_keras": True,
        **engine.described(model),
    }
    store = CheckpointStore(url)
    save(store, tensors, 4, model=description)
    return model, store


def test_tf_keras(tmp_path: Path, caplog: Any) -> None:
    import tf_keras

    model, store = legacy_store(tmp_path / "run")
    legacy()
    path = store.export(4, str(tmp_path / "m.keras"), build_model=legacy)
    loaded = tf_keras.models.load_model(path)
    for got, want in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert same(of_optimizer(loaded), of_optimizer(model))
    assert not caplog.records
    # Its own config has the layers only.
    path = store.export(4, str(tmp_path / "n.keras"))
    assert "optimizer's state is left out" in caplog.text
    for got, want in zip(
        tf_keras.models.load_model(path, compile=False).get_weights(),
        model.get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_tf_keras_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = legacy_store(tmp_path / "run")
    import sys

    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(ConfigError, match=r"raytf\[legacy-keras\]"):
        store.export(4, str(tmp_path / "m.keras"))


def nested() -> Any:
    """Its inner layers are made in another order by `from_config`, and so named otherwise."""
    import keras

    inner = [keras.layers.Dense(4), keras.layers.Dropout(0.1)]
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.Sequential(inner),
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dropout(0.2)]),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    return model


def lazy() -> Any:
    """Without weights before it sees a batch."""
    import keras

    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.1)])
    model.compile("adam", loss="mse")
    return model


@pytest.mark.parametrize("build", [dense, nested, lazy])
@pytest.mark.parametrize("by_function", [False, True])
def test_other_shapes_of_models(tmp_path: Path, build: Any, by_function: bool) -> None:
    import keras

    from raytf.worker import keras_compat

    keras_compat.reset_names()
    model = build()
    keras_compat.build_layers(model, keras.KerasTensor((8, 4)))  # as a worker does
    model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, batch_size=8, verbose=0)
    store = stored(tmp_path / "run", model)
    loaded = load_step(store, 8, build if by_function else None)
    assert same([v.numpy() for v in loaded.variables], [v.numpy() for v in model.variables])
    assert same(of_optimizer(loaded), of_optimizer(model))


@pytest.mark.parametrize(("build", "fits"), [(dense, True), (nested, False)])
def test_without_the_order_of_names(tmp_path: Path, build: Any, fits: bool) -> None:
    model = trained(build)
    store = stored(tmp_path / "run", model, description={"names": None})
    if fits:
        assert same(load_step(store, 8).get_weights(), model.get_weights())
        return
    with pytest.raises(ConfigError, match="not the one of"):
        load_step(store, 8)
    assert same(load_step(store, 8, build).get_weights(), model.get_weights())
