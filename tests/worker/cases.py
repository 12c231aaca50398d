"""The models of the conformance suite: small, and each there for one thing that several workers can
get wrong.

Functions here run in worker processes (`worker`) and in a process with plain, unmended Keras
(`reference`).
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOAT32 = (1e-5, 1e-6)  # relative to the largest entry of a tensor, absolute
HALF = (2e-2, 2e-2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its data.

    Attributes:
        build: `build(keras) -> compiled model`.
        data: `data(rng) -> (x, y, sample_weight)`.
        batch: global batch size; 24 rows make 3 batches of 8, and 29 a last one of 5.
        tolerance: (relative, absolute) per tensor, against one process.
        loss_only_after: steps after which only the loss is compared (sign-taking optimizers).
        equal_to_one_process: False where several workers differ by nature; ranks must be equal all
            the same.
    """

    build: Callable[[Any], Any]
    data: Callable[[np.random.Generator], tuple[Any, Any, Any]]
    batch: int = 8
    epochs: int = 2
    tolerance: tuple[float, float] = FLOAT32
    class_weight: dict[int, float] | None = None
    equal_to_one_process: bool = True
    loss_tolerance: float | None = None
    validate: bool = False


ROWS = 24
UNEVEN = 29


def table(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    return rng.normal(size=(n, 6)).astype("float32"), rng.integers(0, 3, n), None


def weighted_table(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    x, y, _ = table(rng, n)
    return x, y, rng.uniform(0.1, 3.0, n).astype("float32")


def images(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    return rng.normal(size=(n, 8, 8, 2)).astype("float32"), rng.integers(0, 3, n), None


def series(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    return rng.normal(size=(n, 5, 4)).astype("float32"), rng.integers(0, 3, n), None


def words(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    return rng.integers(0, 12, (n, 6)), rng.integers(0, 3, n), None


def one_hot(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    x, y, _ = table(rng, n)
    return x, np.eye(3, dtype="float32")[y], None


def rare_words(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    return rng.integers(0, 200, (n, 6)), rng.integers(0, 3, n), None


def padded_words(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    x = rng.integers(1, 12, (n, 6))
    x[np.arange(6) >= rng.integers(1, 7, (n, 1))] = 0
    return x, rng.integers(0, 3, (n, 6)), None


def binary(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    x, _, _ = table(rng, n)
    return x, (x[:, :1] > 0).astype("float32"), None


def two_outputs(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    x, y, _ = table(rng, n)
    value = rng.normal(size=(n, 1)).astype("float32")
    return {"a": x, "b": x[:, :3].copy()}, {"kind": y, "value": value}, None


def rows(number: int, make: Callable[..., Any] = table) -> Callable[..., Any]:
    return lambda rng: make(rng, number)


def classifier(
    *layers: Callable[[Any], Any],
    shape: tuple[int, ...] = (6,),
    optimizer: Callable[[Any], Any] = lambda keras: keras.optimizers.Adam(1e-2),
    metrics: Callable[[Any], list[Any]] = lambda keras: ["accuracy"],
    dtype: str = "float32",
    loss: Callable[[Any], Any] | None = None,
    **compile_arguments: Any,
) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        made = [layer(keras) for layer in layers]
        model = keras.Sequential(
            [keras.layers.Input(shape, dtype=dtype), *made, keras.layers.Dense(3, dtype="float32")]
        )
        given = loss or (lambda k: k.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.compile(
            optimizer(keras),
            given(keras),
            metrics=metrics(keras),
            jit_compile=False,
            **compile_arguments,
        )
        return model

    return build


def dense(keras: Any) -> Any:
    return keras.layers.Dense(8, activation="tanh")


def functional(keras: Any) -> Any:
    a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
    h = keras.layers.Concatenate()([keras.layers.Dense(8, activation="tanh")(a), b])
    kind = keras.layers.Dense(3, name="kind")(h)
    value = keras.layers.Dense(1, name="value")(h)
    model = keras.Model({"a": a, "b": b}, {"kind": kind, "value": value})
    model.compile(
        keras.optimizers.SGD(0.05),
        {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"},
        loss_weights={"kind": 1.0, "value": 0.3},
        metrics={"kind": ["accuracy"], "value": ["mae"]},
        jit_compile=False,
    )
    return model


def subclassed(keras: Any, train_step: Callable[..., Any] | None = None) -> Any:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.out = keras.layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            h = self.hidden(x)
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(h)))
            return self.out(h)

    if train_step is not None:
        Net.train_step = train_step
    model = Net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = None if train_step in UNMETERED else ["accuracy"]  # Keras wants them used
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=metrics, jit_compile=False)
    return model


def own_train_step(self: Any, data: Any) -> Any:
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
    grads = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
    for metric in self.metrics:
        if metric.name == "loss":
            metric.update_state(loss)
        else:
            metric.update_state(y, y_pred)
    return {m.name: m.result() for m in self.metrics}


def plain_train_step(self: Any, data: Any) -> Any:
    """As people write it for one process: an own mean, and numbers that are no metrics."""
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        logits = self(x, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss = tf.reduce_mean(each)
    grads = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply(grads, self.trainable_weights)
    return {
        "own_loss": loss,
        "largest_is_zero": tf.reduce_mean(tf.cast(tf.argmax(logits, -1) == 0, tf.float32)),
    }


def mixed_logs_train_step(self: Any, data: Any) -> Any:
    """Logs the loss itself, which no metric tracks here, beside a number of its own."""
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
    grads = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
    return {"loss": loss, "extra": 2.0 * loss}


def adversaries(keras: Any) -> Any:
    """Two parts, two optimizers, no call: the second update sees the first."""
    import tensorflow as tf

    class Adversaries(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layers = keras.layers
            self.maker = keras.Sequential([layers.Input((6,)), layers.Dense(6)])
            self.judge = keras.Sequential([layers.Input((6,)), dense(keras), layers.Dense(1)])

        def compile(self, judge: Any, maker: Any) -> None:
            super().compile(jit_compile=False)
            self.judge_optimizer, self.maker_optimizer = judge, maker
            self.judge_loss = keras.metrics.Mean(name="judge_loss")
            self.maker_loss = keras.metrics.Mean(name="maker_loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.judge_loss, self.maker_loss]

        def train_step(self, data: Any) -> Any:
            x = data[0]
            with tf.GradientTape() as tape:
                real, made = self.judge(x), self.judge(self.maker(x))
                loss = tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(made))
            weights = self.judge.trainable_weights
            self.judge_optimizer.apply(tape.gradient(loss, weights), weights)
            with tf.GradientTape() as tape:
                fooled = tf.reduce_mean(tf.nn.softplus(-self.judge(self.maker(x))))
            weights = self.maker.trainable_weights
            self.maker_optimizer.apply(tape.gradient(fooled, weights), weights)
            self.judge_loss.update_state(loss)
            self.maker_loss.update_state(fooled)
            return {"judge_loss": self.judge_loss.result(), "maker_loss": self.maker_loss.result()}

    model = Adversaries()
    model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.SGD(0.05))
    return model


def halving(keras: Any) -> Any:
    """An optimizer that does something of its own around Keras's apply."""

    class Half(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply([0.5 * g for g in grads], trainable_variables)

    return Half(0.1)


def unserializable_schedule(keras: Any) -> Any:
    class Own(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    return keras.optimizers.SGD(Own())


UNMETERED = (plain_train_step, mixed_logs_train_step)


def two_updates(keras: Any) -> Any:
    """A train_step that reads weights after it has updated them (as GANs and moving targets do)."""
    import tensorflow as tf

    class Twin(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.fast, self.slow = keras.layers.Dense(3), keras.layers.Dense(3, trainable=False)

        def call(self, x: Any) -> Any:
            return self.fast(x) + self.slow(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x))
            weights = self.fast.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            for slow, fast in zip(self.slow.weights, self.fast.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return {"loss": loss}

    model = Twin()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    return model


def attention(keras: Any) -> Any:
    x = keras.Input((5, 4))
    h = keras.layers.MultiHeadAttention(2, 4)(x, x)
    h = keras.layers.LayerNormalization()(h + x)
    y = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(h))
    model = keras.Model(x, y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not Adam: the key's bias has no effect, its gradient is rounding, and Adam would blow that up
    # to full size.
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], jit_compile=False)
    return model


def masked(keras: Any) -> Any:
    x = keras.Input((6,), dtype="int32")
    h = keras.layers.Embedding(12, 4, mask_zero=True)(x)
    y = keras.layers.Dense(3)(keras.layers.LSTM(5, return_sequences=True)(h))
    model = keras.Model(x, y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], jit_compile=False)
    return model


def mixed(policy: str) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        before = keras.mixed_precision.global_policy()
        keras.mixed_precision.set_global_policy(policy)
        try:
            return classifier(dense)(keras)
        finally:
            keras.mixed_precision.set_global_policy(before)

    return build


def overflowing(keras: Any) -> Any:
    """One row of each epoch overflows float16: all ranks skip that step, with the scale halved."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(1e-2), initial_scale=2.0**10, dynamic_growth_steps=4
        )
        return classifier(dense, optimizer=lambda k: optimizer)(keras)
    finally:
        keras.mixed_precision.set_global_policy(before)


def one_huge_weight(rng: np.random.Generator, n: int = ROWS) -> tuple[Any, Any, Any]:
    x, y, _ = table(rng, n)
    weight = np.ones(n, "float32")
    weight[3] = 1e7  # far beyond float16 in any part of the batch, not at its edge
    return x, y, weight


def frozen(keras: Any) -> Any:
    model = classifier(dense, lambda k: k.layers.Dense(8, trainable=False))(keras)
    return model


def multi_optimizer(keras: Any) -> Any:
    model = classifier(dense)(keras)
    pick = keras.optimizers.OptimizerMap(keras.optimizers.Adam(1e-2))
    pick[".*bias"] = keras.optimizers.SGD(0.1)
    model.compile(
        keras.optimizers.MultiOptimizer(pick), model.loss, metrics=["accuracy"], jit_compile=False
    )
    return model


def _opt(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda keras: getattr(keras.optimizers, name)(*args, **kwargs)


def _cosine(keras: Any) -> Any:
    return keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(1e-2, 8), weight_decay=0.01
    )


def _norm(synchronized: bool) -> Callable[[Any], Any]:
    return lambda keras: keras.layers.BatchNormalization(synchronized=synchronized)


def _loss(reduction: str) -> Callable[[Any], Any]:
    return lambda k: k.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _scalar_metric(keras: Any) -> list[Any]:
    def share_of_zero(y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.cast(keras.ops.equal(y, 0), "float32"))

    return ["accuracy", share_of_zero]


CASES: dict[str, Case] = {
    "dense": Case(validate=True, build=classifier(dense), data=rows(UNEVEN, table)),
    "conv2d": Case(
        build=classifier(
            lambda k: k.layers.Conv2D(4, 3, activation="relu"),
            lambda k: k.layers.Flatten(),
            shape=(8, 8, 2),
        ),
        data=rows(UNEVEN, images),
    ),
    "lstm": Case(
        build=classifier(lambda k: k.layers.LSTM(5), shape=(5, 4)), data=rows(UNEVEN, series)
    ),
    "attention": Case(build=attention, data=series),
    "embedding_adam": Case(
        build=classifier(
            lambda k: k.layers.Embedding(12, 4),
            lambda k: k.layers.Flatten(),
            shape=(6,),
            dtype="int32",
        ),
        data=rows(UNEVEN, words),
    ),
    "embedding_sgd": Case(
        build=classifier(
            lambda k: k.layers.Embedding(12, 4),
            lambda k: k.layers.Flatten(),
            dtype="int32",
            optimizer=_opt("SGD", 0.1),
        ),
        data=words,
    ),
    "embedding_of_many_rows": Case(
        build=classifier(
            lambda k: k.layers.Embedding(5000, 4), lambda k: k.layers.Flatten(), dtype="int32"
        ),
        data=rare_words,
    ),
    "embedding_of_untouched_rows": Case(
        build=classifier(
            lambda k: k.layers.Embedding(200, 4), lambda k: k.layers.Flatten(), dtype="int32"
        ),
        data=rare_words,
        batch=16,
    ),
    "masked_sequence": Case(validate=True, build=masked, data=rows(UNEVEN, padded_words)),
    "batchnorm": Case(
        validate=True,
        build=classifier(dense, _norm(False)),
        data=rows(UNEVEN, table),
        equal_to_one_process=False,
    ),
    "batchnorm_synchronized": Case(build=classifier(dense, _norm(True)), data=rows(UNEVEN, table)),
    "dropout": Case(
        build=classifier(dense, lambda k: k.layers.Dropout(0.4)),
        data=rows(UNEVEN, table),
        equal_to_one_process=False,
    ),
    "l2": Case(
        build=classifier(lambda k: k.layers.Dense(8, kernel_regularizer=k.regularizers.L2(0.05))),
        data=table,
    ),
    "functional_two_outputs": Case(validate=True, build=functional, data=rows(UNEVEN, two_outputs)),
    "subclassed": Case(build=subclassed, data=table),
    "own_train_step": Case(
        validate=True, build=lambda k: subclassed(k, own_train_step), data=rows(UNEVEN, table)
    ),
    "plain_train_step": Case(
        build=lambda k: subclassed(k, plain_train_step), data=rows(UNEVEN, table)
    ),
    "mixed_logs_train_step": Case(build=lambda k: subclassed(k, mixed_logs_train_step), data=table),
    "adversaries": Case(build=adversaries, data=table),
    "own_optimizer": Case(build=classifier(dense, optimizer=halving), data=table),
    "unserializable_schedule": Case(
        build=classifier(dense, optimizer=unserializable_schedule), data=table
    ),
    "vector_metric": Case(
        build=classifier(
            dense,
            metrics=lambda k: [k.metrics.F1Score()],
            loss=lambda k: k.losses.MeanSquaredError(),
        ),
        data=one_hot,
        validate=True,
    ),
    "reads_after_update": Case(build=two_updates, data=table),
    "sample_weight": Case(validate=True, build=classifier(dense), data=weighted_table),
    "weighted_metrics": Case(
        build=classifier(dense, weighted_metrics=["accuracy"]), data=weighted_table
    ),
    "class_weight": Case(build=classifier(dense), data=table, class_weight={0: 0.3, 2: 2.0}),
    "mean_with_sample_weight": Case(
        build=classifier(dense, loss=_loss("mean_with_sample_weight")),
        data=rows(UNEVEN, weighted_table),
    ),
    "sum_reduction": Case(
        build=classifier(dense, loss=_loss("sum"), optimizer=_opt("SGD", 0.01)),
        data=rows(UNEVEN, table),
    ),
    "auc": Case(validate=True, build=lambda k: _binary(k), data=rows(UNEVEN, binary)),
    "top_k": Case(
        build=classifier(dense, metrics=lambda k: [k.metrics.SparseTopKCategoricalAccuracy(2)]),
        data=table,
    ),
    "scalar_metric": Case(
        validate=True, build=classifier(dense, metrics=_scalar_metric), data=rows(UNEVEN, table)
    ),
    "adamw_cosine": Case(build=classifier(dense, optimizer=_cosine), data=table),
    "sgd_momentum": Case(
        build=classifier(dense, optimizer=_opt("SGD", 0.1, momentum=0.9, nesterov=True)), data=table
    ),
    "lion": Case(build=classifier(dense, optimizer=_opt("Lion", 1e-3)), data=table, epochs=1),
    "lion_longer": Case(
        build=classifier(dense, optimizer=_opt("Lion", 1e-3)),
        data=table,
        epochs=3,
        loss_tolerance=1e-3,
    ),
    "rmsprop": Case(build=classifier(dense, optimizer=_opt("RMSprop", 1e-3)), data=table),
    "ema": Case(
        build=classifier(dense, optimizer=_opt("Adam", 1e-2, use_ema=True, ema_momentum=0.8)),
        data=table,
    ),
    "ema_overwrite": Case(
        build=classifier(
            dense,
            optimizer=_opt("SGD", 0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        ),
        data=table,
    ),
    "clipnorm": Case(
        build=classifier(dense, optimizer=_opt("SGD", 0.5, clipnorm=0.05)), data=table
    ),
    "clipvalue": Case(
        build=classifier(dense, optimizer=_opt("SGD", 0.5, clipvalue=0.01)), data=table
    ),
    "global_clipnorm": Case(
        build=classifier(dense, optimizer=_opt("SGD", 0.5, global_clipnorm=0.05)), data=table
    ),
    "accumulation": Case(
        build=classifier(dense, optimizer=_opt("Adam", 1e-2, gradient_accumulation_steps=3)),
        data=rows(UNEVEN, table),
    ),
    "accumulation_clip": Case(
        build=classifier(
            dense, optimizer=_opt("SGD", 0.5, gradient_accumulation_steps=2, global_clipnorm=0.05)
        ),
        data=table,
    ),
    "weight_constraint": Case(
        build=classifier(lambda k: k.layers.Dense(8, kernel_constraint=k.constraints.MaxNorm(0.5))),
        data=table,
    ),
    "mixed_bfloat16": Case(build=mixed("mixed_bfloat16"), data=rows(20), tolerance=HALF, batch=4),
    "mixed_float16": Case(build=mixed("mixed_float16"), data=rows(20), tolerance=HALF, batch=4),
    "float16_overflow": Case(
        build=overflowing, data=rows(20, one_huge_weight), tolerance=HALF, batch=4
    ),
    "steps_per_execution": Case(build=classifier(dense, steps_per_execution=2), data=table),
    "steps_per_execution_many": Case(
        validate=True, build=classifier(dense, steps_per_execution=10), data=rows(UNEVEN, table)
    ),
    "frozen": Case(build=frozen, data=table),
    "multi_optimizer": Case(build=multi_optimizer, data=table),
    "last_batch_of_one_row": Case(validate=True, build=classifier(dense), data=rows(17)),
    "last_batch_of_two_rows": Case(build=classifier(dense), data=rows(18)),
    "tail_synchronized_norm": Case(build=classifier(dense, _norm(True)), data=rows(17)),
    "tail_weighted": Case(build=classifier(dense), data=rows(17, weighted_table)),
    "less_than_a_batch": Case(build=classifier(dense), data=rows(5)),
}


def _binary(keras: Any) -> Any:
    model = keras.Sequential(
        [keras.layers.Input((6,)), dense(keras), keras.layers.Dense(1, activation="sigmoid")]
    )
    metrics = [
        keras.metrics.AUC(num_thresholds=20),
        keras.metrics.Precision(),
        keras.metrics.Recall(),
    ]
    model.compile(
        keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=metrics, jit_compile=False
    )
    return model


SEED = 5


def source(case: Case) -> Any:
    from raytf.data import ArraySource

    x, y, weight = case.data(np.random.default_rng(1))
    return ArraySource(x, y, weight)


def _outcome(model: Any, history: dict[str, Any]) -> dict[str, Any]:
    def values(variables: Any) -> list[tuple[str, np.ndarray]]:
        return [(v.path, np.array(v._value.numpy())) for v in variables]

    optimizer = model.optimizer
    everything = [*model.variables, *optimizer.variables]
    everything += [v for m in model.metrics for v in m.variables]
    digest = hashlib.sha256(b"".join(v._value.numpy().tobytes() for v in everything)).hexdigest()
    return {
        "history": {k: [np.asarray(v).tolist() for v in vs] for k, vs in history.items()},
        "weights": values(model.weights),
        "optimizer": values(optimizer.variables),
        "digest": digest,
    }


def worker(links: Any, strategy: Any, names: list[str]) -> dict[str, Any]:
    """Trains cases on one rank of a group, with raytf."""
    from raytf.config import TrainSpec
    from raytf.worker.engine import engine_for
    from raytf.worker.session import Trainee

    engine = engine_for(False)
    outcomes = {}
    for name in names:
        case = CASES[name]

        def build(config: Any, case: Case = case) -> Any:
            return case.build(engine.keras)

        data = source(case)
        spec = TrainSpec(
            build_model=build,
            train_data=data,
            validation_data=source(case) if case.validate else None,
            global_batch_size=case.batch,
            epochs=case.epochs,
            seed=SEED,
            class_weight=case.class_weight,
        )
        try:
            trainee = Trainee(spec, links, strategy, engine)
            result = trainee.train()
            outcomes[name] = _outcome(trainee.model, result["history"])
        except Exception:
            outcomes[name] = {"error": traceback.format_exc()}
            if strategy.num_replicas_in_sync > 1:
                raise  # the other ranks may be waiting for this one
    return outcomes


def reference(links: Any, strategy: Any, names: list[str]) -> dict[str, Any]:
    """Trains cases with plain Keras's own fit over the same batches, in this process."""
    import keras
    import tensorflow as tf

    from raytf.data import Order, Plan

    outcomes = {}
    for name in names:
        case = CASES[name]
        data = source(case)
        plan = Plan(len(data), case.batch)

        def batches(
            epochs: int, shuffle: bool, data: Any = data, plan: Plan = plan
        ) -> list[tuple[Any, ...]]:
            order = Order(len(data), SEED, shuffle)
            made = []
            for epoch in range(epochs):
                for step in range(plan.steps_per_epoch):
                    x, y, weight = data.read(order.rows(epoch, *plan.batch(step)))
                    made.append((x, y) if weight is None else (x, y, weight))
            return made

        def dataset(elements: list[tuple[Any, ...]]) -> Any:
            spec = tf.nest.map_structure(
                lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), elements[0]
            )
            return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)

        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(SEED)
        model = case.build(keras)
        model.steps_per_execution = 1  # several per call must equal this
        history = model.fit(
            dataset(batches(case.epochs, shuffle=True)),
            epochs=case.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            validation_data=dataset(batches(1, shuffle=False)) if case.validate else None,
            # Without it Keras counts a step that finds the data ended in metrics that look at no
            # data.
            validation_steps=plan.steps_per_epoch if case.validate else None,
            class_weight=case.class_weight,
            verbose=0,
        )
        outcomes[name] = _outcome(model, history.history)
    return outcomes
