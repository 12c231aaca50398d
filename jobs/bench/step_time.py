"""How long a training step takes on 2 workers: raytf, Keras's model.fit, a bare hand-written loop.

    python jobs/bench/step_time.py [--blocks 9] [--models mlp,transformer]

All arms run under one MultiWorkerMirroredStrategy in the same two processes, in interleaved blocks,
each with a model of its own. Medians over blocks, in ms per step, measured on rank 0:
    raytf_1, raytf_10      raytf's loop, 1 and 10 steps per call
    keras3_fit             Keras 3 model.fit, with the two functions mended that fail here
    tf_keras_fit           tf_keras model.fit
    bare_1, bare_10        a tf.function around strategy.run; gradients, metrics and update written
                           by hand; each rank's metrics are its own
    bare_equal_1, _10      the same, with the metrics summed over ranks in the step, packed with the
                           gradients
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

WARM_UP = 5  # steps of a model.fit call that are not timed: it makes an iterator at its start
Arm = Callable[[], float]  # runs a block of steps, answers with ms per step


def mlp(k: Any) -> Any:
    return k.Sequential(
        [k.layers.Input((784,)), k.layers.Dense(128, activation="relu"), k.layers.Dense(10)]
    )


def transformer(k: Any, width: int = 320, blocks: int = 4) -> Any:
    """An encoder of 5 million parameters over 16 places of 64 numbers."""
    inputs = k.layers.Input((16, 64))
    x = k.layers.Dense(width)(inputs)
    for _ in range(blocks):
        y = k.layers.LayerNormalization()(x)
        x = x + k.layers.MultiHeadAttention(4, width // 4)(y, y)
        y = k.layers.Dense(4 * width, activation="relu")(k.layers.LayerNormalization()(x))
        x = x + k.layers.Dense(width)(y)
    return k.Model(inputs, k.layers.Dense(10)(k.layers.GlobalAveragePooling1D()(x)))


MODELS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int, int]] = {
    # builder, shape of a row, global batch, steps per block
    "mlp": (mlp, (784,), 64, 100),
    "transformer": (transformer, (16, 64), 32, 10),
}


def rows(model: str) -> tuple[np.ndarray, np.ndarray]:
    """A block's worth."""
    rng = np.random.default_rng(0)
    _, shape, batch, steps = MODELS[model]
    x = rng.random((batch * steps, *shape), dtype="float32")
    return x, rng.integers(0, 10, len(x))


def compiled(k: Any, model: str, **options: Any) -> Any:
    built = MODELS[model][0](k)
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile("adam", loss, metrics=["accuracy"], **options)
    return built


def mend_keras3() -> None:
    """What makes Keras 3's model.fit work under this strategy (keras 3.15.1).

    It reduces a whole PerReplica batch over workers to learn its shapes, and asks for the mean over
    axis 0 of scalars.
    """
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer

    original = trainer.reduce_per_replica

    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if self._distribute_strategy is None:
            return
        if iterator is not None:
            _, _, batches = next(iter(iterator))
            first = self.distribute_strategy.experimental_local_results
            data_batch = tf.nest.map_structure(lambda v: first(v)[0], next(batches))
        with self.distribute_strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    def reduce(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction == "first" or not trainer._collective_all_reduce_multi_worker(strategy):
            return original(values, strategy, reduction)
        return tf.nest.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)

    trainer.TensorFlowTrainer._maybe_symbolic_build = build
    trainer.reduce_per_replica = reduce


def fit_arm(k: Any, strategy: Any, model: str) -> Arm:
    """model.fit as one writes it by hand, timed from step WARM_UP to the last."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices(rows(model)).repeat().batch(MODELS[model][2])
    data = data.prefetch(tf.data.AUTOTUNE).with_options(options)
    with strategy.scope():
        built = compiled(k, model)

    times: list[float] = []

    def timed(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(iterator: Any) -> Any:
            times.append(time.perf_counter())
            return inner(iterator)

        return call

    steps = MODELS[model][3]

    def run() -> float:
        # Around fit's own step function and not in a callback: a batch hook makes fit read its logs
        # on the host.
        times.clear()
        built.fit(data, epochs=1, steps_per_epoch=WARM_UP + steps + 1, verbose=0)
        if not times:  # the first fit made the function, this one is not timed
            built.train_function = timed(built.train_function)
            return 0.0
        return (times[-1] - times[WARM_UP]) / steps * 1000

    return run


def bare_arm(strategy: Any, model: str, steps_per_call: int, equal: bool) -> Arm:
    """A hand-written loop: static shapes, one packed reduction per step, no host reads."""
    import keras
    import tensorflow as tf

    class Adam(keras.optimizers.Adam):
        def _all_reduce_sum_gradients(self, pairs: Any) -> Any:
            return list(pairs)  # they are reduced in the step, together with the metrics

    global_batch, steps = MODELS[model][2:]
    with strategy.scope():
        built = MODELS[model][0](keras)
        optimizer = Adam()
        optimizer.build(built.trainable_variables)
    totals = tf.Variable(tf.zeros(3))  # loss, correct, rows

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = built(x, training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_sum(each) / global_batch
        variables = [v.value for v in built.trainable_variables]
        correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
        news = tf.stack([tf.reduce_sum(each), correct, tf.cast(tf.size(y), tf.float32)])
        local = [*tape.gradient(loss, variables), *([news] if equal else [])]
        reduced = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, local)
        totals.assign_add(reduced[len(variables)] if equal else news)
        optimizer.apply(reduced[: len(variables)], built.trainable_variables)

    @tf.function
    def call(iterator: Any) -> None:
        for _ in tf.range(steps_per_call):
            strategy.run(step, next(iterator))

    def dataset(context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(rows(model))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id).repeat()
        data = data.batch(global_batch // context.num_input_pipelines, drop_remainder=True)
        return data.prefetch(tf.data.AUTOTUNE)

    iterator = iter(strategy.distribute_datasets_from_function(dataset))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(steps // steps_per_call):
            call(iterator)
        return (time.perf_counter() - began) / steps * 1000

    return run


def raytf_arm(strategy: Any, model: str, steps_per_call: int, rank: int) -> Arm:
    """What a raytf worker runs, with its defaults (shuffled), in a thread: a block is an epoch."""
    import keras

    from raytf.config import TrainSpec
    from raytf.data import ArraySource
    from raytf.worker.engine import engine_for
    from raytf.worker.health import Health
    from raytf.worker.links import Links
    from raytf.worker.session import Trainee

    turn, took = threading.Semaphore(0), queue.SimpleQueue[float]()
    _, _, global_batch, steps = MODELS[model]

    class TakeTurns(keras.callbacks.Callback):  # asks for no batch hooks
        began = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            # From begin to begin: at its end an epoch still has a reduction, which must not meet
            # those of the next arm.
            if epoch:
                took.put((time.perf_counter() - self.began) / steps * 1000)
            turn.acquire()
            self.began = time.perf_counter()

    def nothing(*_: Any) -> None:
        """There is no run actor here."""

    own = {"num_cpus": 1, "num_gpus": 0, "host": "127.0.0.1"}
    calls = ("join", "hold", "ready", "compare", "share", "post", "restored", "progress", "deliver")
    ranks = strategy.num_replicas_in_sync
    links = Links(rank=rank, num_workers=ranks, **own, **dict.fromkeys(calls, nothing))
    spec = TrainSpec(
        build_model=lambda config: compiled(keras, model, steps_per_execution=steps_per_call),
        train_data=ArraySource(*rows(model)),
        global_batch_size=global_batch,
        epochs=10**6,  # the process ends first
        callbacks=lambda: [TakeTurns()],
    )

    def train() -> None:
        try:
            trainee = Trainee(spec, links, strategy, engine_for(legacy_keras=False))
            trainee.steps.health = Health()  # as every run looks for NaN
            trainee.train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=train, daemon=True).start()

    def run() -> float:
        turn.release()
        return took.get()

    run()  # nobody else builds a model meanwhile
    return run


def arms(strategy: Any, model: str, rank: int) -> dict[str, Arm]:
    import keras
    import tf_keras

    found: dict[str, Arm] = {}
    for steps in (1, 10):
        found[f"raytf_{steps}"] = raytf_arm(strategy, model, steps, rank)
    found["keras3_fit"] = fit_arm(keras, strategy, model)
    found["tf_keras_fit"] = fit_arm(tf_keras, strategy, model)
    for steps in (1, 10):
        found[f"bare_{steps}"] = bare_arm(strategy, model, steps, equal=False)
        found[f"bare_equal_{steps}"] = bare_arm(strategy, model, steps, equal=True)
    return found


def worker(rank: int, models: list[str], blocks: int, threads: int) -> None:
    """One of the two processes; rank 0 prints the medians."""
    import tensorflow as tf

    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    mend_keras3()
    result = {}
    for model in models:
        ready = arms(strategy, model, rank)
        common.interleave(ready, 2)  # traces and warms up
        measured = common.interleave(ready, blocks)
        result[model] = {name: [round(v, 3) for v in values] for name, values in measured.items()}
    if rank == 0:
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's collective threads do not end cleanly once a peer has gone


def aims(medians: dict[str, dict[str, float]]) -> tuple[list[common.Aim], list[str]]:
    """The ratios of issue and README, and what could not be judged."""
    wanted = [
        ("mlp", "raytf_1", "keras3_fit", 1.6),
        ("mlp", "raytf_1", "tf_keras_fit", 2.0),
        ("mlp", "raytf_10", "keras3_fit", 2.0),
        ("mlp", "raytf_10", "tf_keras_fit", 2.0),
    ]
    wanted += [(m, f"raytf_{n}", f"bare_equal_{n}", 0.95) for m in MODELS for n in (1, 10)]
    judged, missing = [], []
    for model, ours, theirs, aim in wanted:
        if model not in medians:
            continue
        text = f"{model}: {theirs} / {ours}"
        if ours in medians[model]:
            judged.append((text, medians[model][theirs] / medians[model][ours], aim))
        else:
            missing.append(text)
    return judged, missing


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--blocks", type=int, default=9, help="interleaved blocks per arm")
    flags.add_argument("--models", default=",".join(MODELS), help="which, comma separated")
    flags.add_argument(
        "--threads", type=int, default=1, help="TensorFlow threads per worker; 0: its default"
    )
    flags.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = flags.parse_args()
    models = args.models.split(",")
    if args.rank is not None:
        worker(args.rank, models, args.blocks, args.threads)
    script = str(Path(__file__).resolve())
    passed = ["--blocks", str(args.blocks), "--models", args.models, "--threads", str(args.threads)]
    measured = common.run_ranks(script, passed)
    medians = {model: common.medians(values) for model, values in measured.items()}
    for model, values in medians.items():
        common.say(f"{model}, global batch {MODELS[model][2]}, 2 workers: ms per step")
        for name, value in sorted(values.items(), key=lambda item: item[1]):
            common.say(f"  {name:<16}{value:8.2f}")
    judged, missing = aims(medians)
    result = {"unit": "ms per step", "median": medians, "blocks": measured, "threads": args.threads}
    return common.finish("step_time", result, judged, missing)


if __name__ == "__main__":
    sys.exit(main())
