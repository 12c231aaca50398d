"""Keras callbacks on several ranks: side effects on the chief, decisions once.

Logs are equal on all ranks, so a callback that only decides runs on every rank and decides alike;
what could still differ (clocks, files, random numbers) is settled by `Agreement`: rank 0's word on
stopping and on the learning rate is everyone's. Callbacks that write run on rank 0 alone.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.errors import ConfigError
from raytf.worker.phases import Phases

__all__ = ["Agreement", "is_chief_only", "make_callbacks", "save_on_chief_only", "wants_batches"]

logger = logging.getLogger("raytf")

_EXCHANGE_WORDS = 4 * 1024 * 1024  # of one collective: 16 MiB
_WRITERS = ("TensorBoard", "CSVLogger", "RemoteMonitor")
_REFUSED = {
    "BackupAndRestore": "raytf saves and restores runs itself (save=raytf.SaveConfig(...))",
    "ProgbarLogger": "progress is shown on the driver",
    "OrbaxCheckpoint": "it needs the JAX backend's arrays",
}


def make_callbacks(
    keras: Any,
    factory: Callable[[], list[Any]] | None,
    model: Any,
    is_chief: bool,
    saves_alone: bool,
    params: dict[str, Any],
) -> tuple[Any, list[Any]]:
    """A Keras CallbackList with History, as `model.fit` makes it, and all callbacks that the user
    gave.

    What depends on which callbacks there are must depend on the second, which is alike on all
    ranks.

    A callback runs on rank 0 alone if it is one of Keras's file writers or says `chief_only =
    True`.

    Args:
        keras: the Keras module in use (keras or tf_keras).
        factory: the user's `callbacks`.
        model: the model they are set on.
        is_chief: whether this is rank 0.
        saves_alone: whether one rank can save the model without the others (else ModelCheckpoint
            runs on all).
        params: Keras's `params` (verbose, epochs, steps).

    Raises:
        ConfigError: the factory gave no list of callbacks, or one that raytf cannot run.
    """
    given = [] if factory is None else factory()
    if not isinstance(given, list | tuple):
        raise ConfigError(f"callbacks() must return a list. Received: {type(given).__name__}.")
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigError(
                f"callbacks() must return Keras callbacks ({keras.__name__}.callbacks.Callback). "
                f"Received: {type(callback).__module__}.{type(callback).__qualname__}."
            )
        for name, reason in _REFUSED.items():
            if type(callback).__name__ == name:
                raise ConfigError(
                    f"callbacks: {name} cannot be used, because {reason}. Leave it out."
                )
    kept = [c for c in given if is_chief or not is_chief_only(keras, c, saves_alone)]
    callbacks = keras.callbacks.CallbackList(
        kept, add_history=True, add_progbar=False, model=model, **params
    )
    return callbacks, list(given)


def is_chief_only(keras: Any, callback: Any, saves_alone: bool) -> bool:
    """Whether a callback runs on rank 0 alone; see `make_callbacks`."""
    if hasattr(callback, "chief_only"):
        return bool(callback.chief_only)
    writers = (*_WRITERS, "ModelCheckpoint") if saves_alone else _WRITERS
    return isinstance(callback, tuple(getattr(keras.callbacks, name) for name in writers))


_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def wants_batches(keras: Any, callbacks: list[Any]) -> bool:
    """Whether any of these callbacks listens between the steps of an epoch; if none does, nothing
    is read for it.
    """
    hooks = _BATCH_HOOKS + _TEST_HOOKS
    silent = [getattr(keras.callbacks.Callback, hook) for hook in hooks]
    saver = keras.callbacks.ModelCheckpoint

    def listens(callback: Any, hook: str) -> bool:
        # Asked of the instance: LambdaCallback sets its hooks there.
        bound = getattr(callback, hook)
        function = getattr(bound, "__func__", bound)
        if function is getattr(saver, hook) and getattr(callback, "save_freq", None) == "epoch":
            return False  # it does nothing then
        return function not in silent

    return any(listens(callback, hook) for callback in callbacks for hook in hooks)


def save_on_chief_only(parts: list[Any], is_chief: bool, saves_alone: bool) -> None:
    """Makes `model.save` and its kind leave one copy, rank 0's, wherever they are called.

    Args:
        parts: the Keras model and the models in it.
        is_chief: whether this is rank 0.
        saves_alone: whether a save on one rank waits for nobody. If not, other ranks save as well,
            into a directory that is then removed.
    """
    if is_chief:
        return

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., None]:
        def save(filepath: Any, *args: Any, **kwargs: Any) -> None:
            logger.debug("model.%s(%r) is left to rank 0", name, filepath)
            if not saves_alone:
                with tempfile.TemporaryDirectory() as scratch:
                    original(
                        os.path.join(scratch, os.path.basename(str(filepath))), *args, **kwargs
                    )

        return save

    for model in parts:
        for name in ("save", "save_weights", "export"):
            if hasattr(model, name):
                object.__setattr__(model, name, replaced(name, getattr(model, name)))


class Agreement:
    """Rank 0's decisions, followed by all: one small reduction each time it is asked.

    Args:
        strategy: of the group.
        rank: this rank.
        sum_over_ranks: sums a tensor over ranks inside `strategy.run`.
        phases: told that this rank waits for the others.
    """

    def __init__(
        self,
        strategy: Any,
        rank: int,
        sum_over_ranks: Callable[[tf.Tensor], tf.Tensor],
        phases: Phases | None = None,
    ) -> None:
        self._phases = phases or Phases()
        self._alone = strategy.num_replicas_in_sync == 1
        self._rank = rank

        @tf.function  # traced once per length: a reduction wants a static shape
        @tf.autograph.experimental.do_not_convert
        def sums(values: tf.Tensor) -> tf.Tensor:
            return strategy.run(sum_over_ranks, args=(values,))

        @tf.function
        @tf.autograph.experimental.do_not_convert
        def words(values: tf.Tensor) -> tf.Tensor:
            return strategy.run(sum_over_ranks, args=(values,))

        self._sums = sums
        self._words = words

    def sum(self, values: list[float]) -> np.ndarray:
        """The sums over ranks of a few numbers (float64)."""
        if self._alone:
            return np.asarray(values, np.float64)
        with self._phases.during("wait"):
            return self._sums(tf.constant(values, tf.float64)).numpy()

    def exchange(self, words: np.ndarray) -> np.ndarray:
        """The sum over ranks of an int32 array (n,), of the same n on all; wraps around."""
        if self._alone:
            return words
        pieces = []
        for start in range(0, len(words), _EXCHANGE_WORDS):
            piece = words[start : start + _EXCHANGE_WORDS]
            full = np.zeros(_EXCHANGE_WORDS, np.int32)  # one shape, so one trace
            full[: len(piece)] = piece
            with self._phases.during("wait"):
                pieces.append(self._words(tf.constant(full)).numpy()[: len(piece)])
        return np.concatenate(pieces) if pieces else words

    def chief(self, values: list[float]) -> np.ndarray:
        """Rank 0's numbers, on every rank."""
        return self.sum(values if self._rank == 0 else [0.0] * len(values))
