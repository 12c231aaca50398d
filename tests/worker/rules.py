"""Functions that worker processes run for test_rules."""

from __future__ import annotations

from typing import Any

import numpy as np


def _train(links: Any, strategy: Any, build: Any, data: Any, **arguments: Any) -> Any:
    from raytf.config import TrainSpec
    from raytf.worker.engine import engine_for
    from raytf.worker.session import Trainee

    legacy = arguments.pop("legacy_keras", False)
    given: dict[str, Any] = {"global_batch_size": 8, "epochs": 1, "seed": 5, "shuffle": False}
    spec = TrainSpec(build_model=build, train_data=data, **(given | arguments))
    trainee = Trainee(spec, links, strategy, engine_for(legacy))
    return trainee, trainee.train()


def _data(rows: int = 24) -> Any:
    from raytf.data import ArraySource

    rng = np.random.default_rng(2)
    return ArraySource(rng.normal(2, 3, (rows, 4)).astype("float32"), rng.integers(0, 2, rows))


def masks(links: Any, strategy: Any, arg: Any) -> Any:
    """What a dropout layer lets through on this rank in each of three steps, and its seed state
    afterwards.
    """
    import keras
    import tensorflow as tf

    seen: list[np.ndarray] = []

    class Spy(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            tf.numpy_function(lambda v: seen.append(v.copy()), [x], [])
            return x

    def build(config: Any) -> Any:
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Lambda(lambda x: keras.ops.ones_like(x)),
                keras.layers.Dropout(0.5),
                Spy(),
                keras.layers.Dense(2),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        return model

    trainee, _ = _train(links, strategy, build, _data())
    state = trainee.model.layers[1].seed_generator.state.numpy()
    return [m != 0 for m in seen], state.tolist()


def statistics(links: Any, strategy: Any, rows: int) -> Any:
    """Moving statistics of a plain BatchNormalization after one step over all rows."""
    import keras

    def build(config: Any) -> Any:
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dense(2),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        return model

    trainee, _ = _train(links, strategy, build, _data(rows), global_batch_size=rows)
    norm = trainee.model.layers[0]
    x = _data(rows).in_memory()[0]
    return norm.moving_mean.numpy(), norm.moving_variance.numpy(), x


def small_model(config: Any) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], jit_compile=False)
    return model


def factory(links: Any, strategy: Any, batches: list[int]) -> Any:
    """Trains from a factory that gives this rank `batches[rank]` batches; returns the result or the
    error.
    """
    import tensorflow as tf

    from raytf.errors import RaytfError

    contexts = []

    def make(ctx: Any) -> Any:
        contexts.append((ctx.rank, ctx.num_workers, ctx.batch_size, ctx.epoch))
        x, y, _ = _data(64).in_memory()
        mine = tf.data.Dataset.from_tensor_slices((x[ctx.rank :: 2], y[ctx.rank :: 2]))
        return mine.batch(ctx.batch_size).take(batches[ctx.rank])

    try:
        trainee, result = _train(links, strategy, small_model, make, epochs=2)
    except RaytfError as error:
        return contexts, type(error).__name__, str(error)
    weights = [w.tolist() for w in trainee.model.get_weights()]
    return contexts, result, weights


def factory_of_uneven_rows(links: Any, strategy: Any, arg: Any) -> Any:
    """Ranks bring 3 and 5 rows per batch; and one process the same 8 in one batch."""
    import tensorflow as tf

    def make(ctx: Any) -> Any:
        x, y, _ = _data(24).in_memory()
        if ctx.num_workers == 1:
            return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        take = (slice(0, 3), slice(3, 8))[ctx.rank]
        mine = [(x[i : i + 8][take], y[i : i + 8][take]) for i in (0, 8, 16)]
        spec = (tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int64))
        return tf.data.Dataset.from_generator(lambda: iter(mine), output_signature=spec)

    trainee, result = _train(links, strategy, small_model, make)
    return result["history"], [w.tolist() for w in trainee.model.get_weights()]


def disagreeing_callbacks(links: Any, strategy: Any, arg: Any) -> Any:
    """Each rank wants something else; rank 0's word counts."""
    import keras

    class Own(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5 if links.rank == 0 else 0.01

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = (links.rank == 0 and epoch >= 1) or (
                links.rank == 1 and epoch == 0
            )

    trainee, result = _train(
        links, strategy, small_model, _data(), epochs=5, callbacks=lambda: [Own()]
    )
    return (
        result["epochs"],
        float(trainee.model.optimizer.learning_rate.numpy()),
        result["weights_sha256"],
    )


def callbacks_on_one_rank(links: Any, strategy: Any, arg: Any) -> Any:
    """Rank 0 alone has callbacks, some that set their hooks on themselves."""
    import keras

    seen: list[int] = []

    def remember(batch: int, logs: Any) -> None:
        seen.append(batch)

    def callbacks() -> list[Any]:
        return (
            [keras.callbacks.LambdaCallback(on_train_batch_end=remember)] if links.rank == 0 else []
        )

    _, result = _train(links, strategy, small_model, _data(), epochs=2, callbacks=callbacks)
    return seen, result["weights_sha256"]


def saving(links: Any, strategy: Any, directory: str) -> Any:
    """Saves from ModelCheckpoint and from an own callback on all ranks; returns the files and who
    wrote.
    """
    import os

    import keras

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.save(os.path.join(directory, f"own-{links.rank}.keras"))
            self.model.save_weights(os.path.join(directory, f"own-{links.rank}.weights.h5"))

    def build(config: Any) -> Any:
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        )
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
        )
        return model

    best = os.path.join(directory, f"best-{links.rank}.keras")
    callbacks = lambda: [keras.callbacks.ModelCheckpoint(best, monitor="loss"), Own()]  # noqa: E731
    _train(links, strategy, build, _data(), callbacks=callbacks)
    return True


def legacy(links: Any, strategy: Any, arg: Any) -> Any:
    """tf_keras on this group: history, weights, what tf.keras is, and the copy for saving."""
    import tensorflow as tf

    from raytf.worker.engine import engine_for

    engine_for(True)

    def build(config: Any) -> Any:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((4,)),
                tf.keras.layers.Dense(8, activation="tanh"),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.Dense(2),
            ]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    trainee, result = _train(
        links, strategy, build, _data(28), legacy_keras=True, epochs=3, validation_data=_data()
    )
    copy = trainee.engine.host_model(trainee.model)
    same = all(
        np.array_equal(a, b)
        for a, b in zip(copy.get_weights(), trainee.model.get_weights(), strict=True)
    )
    return result, tf.keras.Model.__module__, same


def refusals(links: Any, strategy: Any, arg: Any) -> dict[str, str]:
    """The message for each thing that build_model or callbacks may not give."""
    import keras

    def compiled(*layers: Any, **arguments: Any) -> Any:
        model = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=arguments.pop("jit_compile", False), **arguments)
        return model

    def rnn() -> Any:
        x = keras.Input((4,), batch_size=8)
        h = keras.layers.LSTM(2, stateful=True)(keras.layers.Reshape((4, 1))(x))
        model = keras.Model(x, keras.layers.Dense(2)(h))
        model.compile("sgd", "mse")
        return model

    class Branch(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), trainable=False, name="seen")

        def call(self, x: Any) -> Any:
            import tensorflow as tf

            def count() -> Any:
                self.seen.assign_add(1.0)
                return x

            return tf.cond(tf.reduce_sum(x) > -1e9, count, lambda: x)

    def masked_norm() -> Any:
        x = keras.Input((4,))
        h = keras.layers.Masking()(keras.layers.Reshape((2, 2))(x))
        h = keras.layers.BatchNormalization(synchronized=True)(h)
        model = keras.Model(x, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(h)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(), jit_compile=False)
        return model

    class Parts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.part = keras.layers.Dense(2)

        def train_step(self, data: Any) -> Any:
            return {}

    def parts() -> Any:
        model = Parts()
        model.compile("sgd")
        return model

    builds = {
        "masked norm": masked_norm,
        "parts": parts,
        "none": lambda: None,
        "not a model": lambda: 3,
        "uncompiled": lambda: keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)]),
        "eager": lambda: compiled(run_eagerly=True),
        "stateful": rnn,
        "branch": lambda: compiled(Branch()),
        "spectral": lambda: compiled(keras.layers.SpectralNormalization(keras.layers.Dense(4))),
    }
    factories = {
        "no list": lambda: keras.callbacks.History(),
        "no callback": lambda: [print],
        "backup": lambda: [keras.callbacks.BackupAndRestore("x")],
    }
    messages = {}
    for name, build in builds.items():
        try:
            _train(links, strategy, lambda config, build=build: build(), _data())
            messages[name] = "no error"
        except ValueError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    for name, factory in factories.items():
        try:
            _train(links, strategy, lambda config: compiled(), _data(), callbacks=factory)
            messages[name] = "no error"
        except ValueError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages
