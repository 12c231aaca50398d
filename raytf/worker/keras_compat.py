"""Keras 3 under MultiWorkerMirroredStrategy: every use of Keras's and TensorFlow's internals is
here.

Stock Keras 3 cannot train under MultiWorkerMirroredStrategy. raytf keeps Keras's own `train_step`,
layers, losses, metrics and optimizers, and runs them inside a `StepScope`: a Keras StatelessScope
in which a step changes nothing but notes what it would change. The step (`worker.step`) then
reduces over ranks and writes. Code that runs in the scope is written as for one process: a loss is
the mean over the rows the rank sees, and the mean over ranks weighted by rows (`share`) is the loss
of the whole batch.

`mend()` replaces a dozen functions of Keras for this process; outside a StepScope each calls the
original. Read in Keras 3.15.1 and TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.losses import loss as keras_loss
from keras.src.metrics import reduction_metrics
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer
from keras.src.random import seed_generator
from keras.src.utils import naming
from tensorflow.python.distribute import distribute_lib

from raytf.config import SUPPORTED_KERAS
from raytf.errors import ConfigError
from raytf.worker.scope import OptimizerNotBuilt, current_scope

__all__ = [
    "adopt_global_seed_generator",
    "all_variables",
    "build_layers",
    "build_step_state",
    "check_keras_version",
    "has_call",
    "has_unbuilt_optimizers",
    "layers",
    "localize",
    "mend",
    "models",
    "named_variables",
    "one_process",
    "reset_names",
    "scales_loss",
    "serialized",
    "settable_learning_rate",
]

_originals: dict[str, Any] = {}


def check_keras_version(version: str | None = None) -> None:
    """Raises ConfigError if the installed Keras is not one that `mend` was written for."""
    found = version or importlib.metadata.version("keras")
    low, high = SUPPORTED_KERAS
    if not low <= tuple(int(part) for part in found.split(".")[:2]) < high:
        raise ConfigError(
            f"Keras {found} is installed; this version of raytf mends Keras >= {low[0]}.{low[1]}, "
            f"< {high[0]}.{high[1]} for training on several workers. Install a Keras in that range."
        )


_shared: list[Any] = []


def adopt_global_seed_generator() -> None:
    """Makes this thread's global seed generator the one of all threads; call it once the model is
    built.
    """
    _shared[:] = [seed_generator.global_seed_generator()]


def _shared_generator() -> Any:
    if not _shared:
        adopt_global_seed_generator()
    return _shared[0]


def _global_seed_generator() -> Any:
    # strategy.run traces on a thread of its own, and Keras keeps its generator per thread.
    return _originals["global_generator"]() if current_scope() is None else _shared_generator()


# --- Losses: a local loss is such that the mean over ranks, weighted by rows, is the loss of the
# whole batch.


def _scale_loss(value: Any) -> Any:
    return value if current_scope() else _originals["scale_loss"](value)


def _unscale_loss(value: Any) -> Any:
    return value if current_scope() else _originals["unscale_loss"](value)


def _reduce_values(
    values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
) -> Any:
    scope = current_scope()
    weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
    if scope is None or not (weighted or reduction == "sum") or tuple(values.shape) in ((), (0,)):
        return _originals["reduce_values"](values, sample_weight, reduction)
    total = tf.reduce_sum(values)
    if weighted:
        weights: Any = sample_weight
        weights = tf.cast(tf.reduce_sum(weights), total.dtype)
        total = tf.math.divide_no_nan(total, scope.sum_over_ranks(weights))
    return scope.counts_whole(total)


def _apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
    scope = current_scope()
    if scope is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return _originals["apply_mask"](sample_weight, mask, dtype, reduction)
    # One process divides by the valid entries of the whole batch, so a rank must know them all.
    mask = tf.cast(mask, dtype)
    counts = tf.stack([tf.cast(tf.size(mask), dtype), tf.reduce_sum(mask)])
    total, valid = tf.unstack(scope.sum_over_ranks(counts))
    weight = tf.where(mask != 0, tf.math.divide_no_nan(total, valid), tf.zeros((), dtype))
    if sample_weight is None:
        return weight
    return _originals["apply_mask"](sample_weight, weight, dtype, "sum")


# --- Metrics


def _mean_update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
    scope = current_scope()
    if scope is not None and not tf.is_tensor(sample_weight):
        is_number = len(tf.convert_to_tensor(values).shape) == 0
        # A number per step, not per row: over all ranks it counts once. An int is CompileLoss's
        # static batch size, which Keras's own fit does not know (None): each of its steps counts
        # once, the smaller last one too.
        if is_number and (sample_weight is None or isinstance(sample_weight, int)):
            sample_weight = scope.share
    return _originals["mean_update_state"](self, values, sample_weight)


# --- Random numbers


def _next_seed(self: Any, ordered: bool = True) -> Any:
    value = _originals["next_seed"](self, ordered)
    scope = current_scope()
    if scope is None:
        return value
    scope.seeds.add(id(self.state))
    if scope.rank == 0:
        return value
    # fold(seed, seat): the state counts alike on all ranks, the noise drawn from it differs; seat 0
    # draws what one process would. Any fixed odd mixing constant does; this one is the 64-bit
    # golden ratio.
    fold = (scope.rank * 0x9E3779B97F4A7C15) % 2**31
    return tf.bitwise.bitwise_xor(value, tf.constant([fold, 0], value.dtype))


# --- Synchronized BatchNormalization


def _moments_sync(x: tf.Tensor, axes: Any, keepdims: bool) -> tuple[tf.Tensor, tf.Tensor]:
    scope = current_scope()
    if scope is None:
        return _originals["moments_sync"](x, axes, keepdims)

    @tf.custom_gradient
    def sums(packed: tf.Tensor) -> Any:
        def grad(upstream: tf.Tensor) -> tf.Tensor:
            # The loss is the mean over ranks weighted by share. Where that weight is applied to
            # gradients later, what comes from other ranks must carry theirs and not ours.
            if scope.weighted:
                return scope.all_reduce(upstream)
            total = scope.all_reduce(upstream * tf.cast(scope.share, upstream.dtype))
            return scope.counts_whole(total)

        return scope.all_reduce(tf.zeros_like(packed) if scope.has_no_rows() else packed), grad

    local = tf.reduce_sum(x, axis=axes, keepdims=True)
    squared = tf.reduce_sum(tf.square(x), axis=axes, keepdims=True)
    count = tf.cast(tf.size(x) // tf.size(local), x.dtype)  # one number: all channels have as many
    packed = sums(tf.concat([tf.reshape(local, [-1]), tf.reshape(squared, [-1]), [count]], axis=0))
    size = tf.size(local)
    mean = tf.math.divide_no_nan(tf.reshape(packed[:size], tf.shape(local)), packed[-1])
    square_mean = tf.reshape(packed[size : 2 * size], tf.shape(local)) / packed[-1]
    variance = tf.maximum(square_mean - tf.square(mean), 0.0)
    mean.set_shape(local.shape)
    variance.set_shape(local.shape)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _batch_norm_moments(self: Any, inputs: Any, mask: Any) -> Any:
    if current_scope() is not None and self.synchronized and mask is not None:
        raise ConfigError(
            f"layer {self.name!r}: Keras's BatchNormalization(synchronized=True) does not "
            "synchronize inputs with a mask. Use synchronized=False, or remove the mask before it."
        )
    return _originals["batch_norm_moments"](self, inputs, mask)


# --- Optimizers


def _intercept_apply(name: str) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        scope = current_scope()
        if scope is None or len(grads) == 0:
            return _originals[name](self, grads, trainable_variables)
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if not self.built:
            raise OptimizerNotBuilt(self, list(variables))
        return scope.apply(self, _originals[name], list(grads), list(variables))

    return apply


def _intercept_scale_loss(name: str) -> Callable[..., Any]:
    def scale_loss(self: Any, loss: Any) -> Any:
        scope = current_scope()
        if scope is not None:
            # Weighted before the backward pass, not after: float16 must overflow where one process
            # would, whose gradients are those of the whole batch's mean.
            scope.weighted.add(id(self))
            if not (isinstance(scope.share, float) and scope.share == 1.0):
                loss = loss * tf.cast(scope.share, loss.dtype)
        return _originals[name](self, loss)

    return scale_loss


def mend() -> None:
    """Puts raytf's versions of a dozen Keras functions in place, for this process. Idempotent."""
    if _originals:
        return
    check_keras_version()
    patches = {
        "scale_loss": (keras_loss, "scale_loss_for_distribution", _scale_loss),
        "unscale_loss": (keras_loss, "unscale_loss_for_distribution", _unscale_loss),
        "reduce_values": (keras_loss, "reduce_values", _reduce_values),
        "apply_mask": (keras_loss, "apply_mask", _apply_mask),
        "mean_update_state": (reduction_metrics.Mean, "update_state", _mean_update_state),
        "next_seed": (seed_generator.SeedGenerator, "next", _next_seed),
        "global_generator": (seed_generator, "global_seed_generator", _global_seed_generator),
        "batch_norm_moments": (keras.layers.BatchNormalization, "_moments", _batch_norm_moments),
        "moments_sync": (keras_nn, "_compute_moments_sync", _moments_sync),
        "apply": (BaseOptimizer, "apply", _intercept_apply("apply")),
        "loss_scale_apply": (LossScaleOptimizer, "apply", _intercept_apply("loss_scale_apply")),
        "scale": (BaseOptimizer, "scale_loss", _intercept_scale_loss("scale")),
        "loss_scale": (LossScaleOptimizer, "scale_loss", _intercept_scale_loss("loss_scale")),
        "multi_apply": (MultiOptimizer, "apply", _intercept_apply("multi_apply")),
    }
    for key, (owner, attribute, replacement) in patches.items():
        _originals[key] = getattr(owner, attribute)
        setattr(owner, attribute, replacement)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Inside `strategy.run`, runs code as if there were no strategy: Keras optimizers take their
    plain path.

    Gradients are reduced before, and variables are plain (`localize`); merge calls, which cannot be
    traced inside a cond (gradient accumulation, loss scaling), do not arise.
    """
    mode = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def localize(model: Any, strategy: tf.distribute.Strategy) -> list[Any]:
    """Replaces each variable's distributed container by this worker's own copy.

    Reading or saving then needs no other rank, so a save on one rank cannot deadlock. Ranks stay
    equal because each step writes equal values everywhere.

    Returns:
        The containers, which must be kept: optimizers look variables up by them.
    """
    containers = []
    for variable in all_variables(model):
        if not isinstance(variable._value, tf.distribute.DistributedValues):
            continue
        containers.append(variable._value)
        variable._value = strategy.experimental_local_results(variable._value)[0]
    for optimizer in _optimizers(model):
        optimizer._distribution_strategy = tf.distribute.get_strategy()
    # Callbacks that call predict or evaluate, of a part of the model too, do so on their own rank.
    for part in models(model):
        part._distribute_strategy = None
    return containers


def _optimizers(model: Any) -> list[Any]:
    found: list[Any] = []
    candidates = [model.optimizer, *(v for v in vars(model).values())]
    while candidates:
        candidate = candidates.pop()
        if isinstance(candidate, BaseOptimizer) and all(candidate is not other for other in found):
            found.append(candidate)
            candidates.append(getattr(candidate, "inner_optimizer", None))
            candidates.extend(getattr(candidate, "optimizers", ()))
    return found


def scales_loss(optimizer: Any) -> bool:
    """Whether an optimizer tests its gradients and leaves out steps in which they overflow."""
    return isinstance(optimizer, LossScaleOptimizer)


def has_unbuilt_optimizers(model: Any) -> bool:
    """Whether an own `train_step` still has to build an optimizer."""
    return any(not optimizer.built for optimizer in _optimizers(model))


def all_variables(model: Any) -> list[Any]:
    """Every Keras variable a step can touch: weights, seed states, metrics, optimizers, the global
    seed generator.
    """
    seen: dict[int, Any] = {}
    groups = [model.variables, *(o.variables for o in _optimizers(model))]
    groups.append([v for metric in model.metrics for v in metric.variables])
    groups.append([_shared_generator().state])
    for group in groups:
        for variable in group:
            seen.setdefault(id(variable), variable)
    return list(seen.values())


def named_variables(model: Any) -> dict[str, Any]:
    """Every variable of `all_variables` by a name that is the same in every process that builds
    this model: its Keras path, with `#2` and so on where paths repeat.
    """
    named: dict[str, Any] = {}
    for variable in all_variables(model):
        name, number = variable.path, 1
        while name in named:
            number += 1
            name = f"{variable.path}#{number}"
        named[name] = variable
    return named


def serialized(model: Any) -> dict[str, Any]:
    """Keras's own config of a compiled model as JSON (`config`), or why there is none
    (`config_error`); `names` of all variables in order, for a model rebuilt from the config, whose
    layers Keras may name otherwise.
    """
    names = list(named_variables(model))
    try:
        config = keras.saving.serialize_keras_object(model)
        return {"config": json.loads(json.dumps(config)), "names": names}
    except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        return {"config": None, "config_error": reason, "names": names}


def layers(model: Any) -> list[Any]:
    """The model and all layers in it, nested ones too."""
    return list(model._flatten_layers())


def models(model: Any) -> list[Any]:
    """The model and all models in it."""
    return [layer for layer in layers(model) if isinstance(layer, keras.Model)]


def has_call(model: Any) -> bool:
    """Whether the model itself maps inputs to outputs; GANs and the like only have parts."""
    return type(model).call is not keras.Model.call


def build_layers(model: Any, x: Any) -> None:
    """Creates the weights of a model that has none yet, from a batch of specs.

    Raises:
        ConfigError: a model without `call` has parts without weights.
    """
    if not has_call(model):
        unbuilt = [part.name for part in layers(model) if part is not model and not part.built]
        if unbuilt:
            raise ConfigError(
                f"{type(model).__name__} has no call(), so its parts must have their weights when "
                f"build_model returns it. Without weights: {', '.join(unbuilt)}. Give them a "
                "keras.Input or call build()."
            )
        model.built = True
    elif not all(layer.built for layer in layers(model)):
        backend.compute_output_spec(model, x, training=False)


def settable_learning_rate(optimizer: Any) -> Any:
    """The variable behind `optimizer.learning_rate`, or None if a schedule decides."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    rate = getattr(inner, "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def build_step_state(model: Any, batch: Any) -> None:
    """Creates metric, loss and optimizer state from a batch of specs, as `model.fit` does at its
    start.
    """
    if has_call(model):
        model._symbolic_build(data_batch=batch)


def reset_names() -> None:
    """Makes the next model's automatic layer names start from the beginning."""
    naming.reset_uids()
