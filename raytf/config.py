"""What a run is asked to do: frozen, keyword-only, checked when it is made.

Owns every rule about arguments that needs no cluster, no TensorFlow and no data bytes. Durations
end in `_s`, sizes in `_bytes`. A capability that is not built yet is refused by name
(`refuse_unbuilt`), never ignored.
"""

from __future__ import annotations

# Users are not type checkers: what they pass may be anything.
# pyright: reportUnnecessaryIsInstance=false
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raytf.errors import ConfigError

__all__ = [
    "CommunicationConfig",
    "RecoveryConfig",
    "SUPPORTED_KERAS",
    "SaveConfig",
    "TrainSpec",
    "WatchConfig",
    "refuse_unbuilt",
]

# From, below: the versions whose internals worker/keras_compat.py was written for.
SUPPORTED_KERAS = ((3, 15), (3, 16))
STRATEGIES = ("auto", "multi_worker", "mirrored", "parameter_server", "tpu")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int) -> None:
    if not _is_int(value):
        raise ConfigError(
            f"{name} must be an integer >= {low}. Received: {value!r} ({type(value).__name__})."
        )
    if value < low:
        raise ConfigError(f"{name} must be an integer >= {low}. Received: {value}.")


def _check_optional_int(name: str, value: Any, low: int) -> None:
    if value is not None:
        _check_int(name, value, low)


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is a duration in seconds and must be > 0. Received: {value!r}.")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}. Received: {value!r}.")


def _check_callable(name: str, value: Any, hint: str) -> None:
    if not callable(value):
        raise ConfigError(f"{name} must be a function: {hint}. Received: {type(value).__name__}.")


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """When checkpoints are written, which are kept, and how long training goes on without any.

    Any of `every_steps`, `every_s`, `every_epochs` may be combined; what is due first saves. With
    none of them it is as if `cadence` were "auto". A run also saves at its end, and at the end of
    each epoch in which `keep_best` has a value. What is due at an epoch's last step waits for the
    end of that epoch, so that its metrics and callbacks are in it.

    Attributes:
        every_steps: steps of the run between saves, counted from its start.
        every_s: seconds between saves, by rank 0's clock.
        every_epochs: epochs between saves.
        cadence: "auto" measures what a save costs and saves as often as `max_overhead` allows, from
            every 10 s to every 10 minutes.
        max_overhead: share of wall time that cadence="auto" may spend on saving, in (0, 1).
        keep_last: newest checkpoints to keep. None: 3, unless another rule, or
            `RunConfig.checkpoint_config`, says what to keep.
        keep_best: name of a metric, as in the history (`val_accuracy`); its best checkpoint is
            kept.
        best_mode: whether lower ("min") or higher ("max") is better.
        keep_every: checkpoints whose step is a multiple of it are kept for good.
        max_stale_saves: saves in a row that may fail before the run stops.
        max_stale_s: age of the newest durable state, in seconds, at which a run whose saves fail
            stops.
    """

    every_steps: int | None = None
    every_s: float | None = None
    every_epochs: int | None = None
    cadence: Literal["fixed", "auto"] = "fixed"
    max_overhead: float = 0.02
    keep_last: int | None = None
    keep_best: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_every: int | None = None
    max_stale_saves: int = 10
    max_stale_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs", "keep_last", "keep_every"):
            _check_optional_int(f"SaveConfig.{name}", getattr(self, name), 1)
        if self.every_s is not None:
            _check_seconds("SaveConfig.every_s", self.every_s)
        _check_choice("SaveConfig.cadence", self.cadence, ("fixed", "auto"))
        _check_choice("SaveConfig.best_mode", self.best_mode, ("min", "max"))
        _check_seconds("SaveConfig.max_overhead", self.max_overhead)
        if self.max_overhead >= 1:
            raise ConfigError(
                f"SaveConfig.max_overhead is a share of wall time, below 1. Received: "
                f"{self.max_overhead}."
            )
        if self.keep_best is not None and (
            not isinstance(self.keep_best, str) or not self.keep_best
        ):
            raise ConfigError(
                f"SaveConfig.keep_best is a metric's name. Received: {self.keep_best!r}."
            )
        _check_int("SaveConfig.max_stale_saves", self.max_stale_saves, 1)
        _check_seconds("SaveConfig.max_stale_s", self.max_stale_s)

    @property
    def is_auto(self) -> bool:
        """Whether raytf measures how often to save."""
        fixed = (self.every_steps, self.every_s, self.every_epochs)
        return self.cadence == "auto" or all(value is None for value in fixed)

    @property
    def says_what_to_keep(self) -> bool:
        """Whether any retention rule is given."""
        return any(v is not None for v in (self.keep_last, self.keep_best, self.keep_every))


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How a run goes on after a failure."""

    mode: Literal["auto", "survivor", "restart", "off"] = "auto"
    spares: int = 0
    shrink_after_s: float = 30.0
    memory_every_steps: int | Literal["auto"] = "auto"
    max_in_place: int = 20
    max_node_faults: int = 2

    def __post_init__(self) -> None:
        _check_choice("RecoveryConfig.mode", self.mode, ("auto", "survivor", "restart", "off"))
        _check_int("RecoveryConfig.spares", self.spares, 0)
        _check_seconds("RecoveryConfig.shrink_after_s", self.shrink_after_s)


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What counts as a fault while a run is alive."""

    hang_timeout_s: float | Literal["auto"] = "auto"
    on_nan: Literal["stop", "rollback", "ignore"] = "stop"
    poison_batches: Literal["stop", "skip"] = "stop"
    agree_every_steps: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.hang_timeout_s != "auto":
            _check_seconds("WatchConfig.hang_timeout_s", self.hang_timeout_s)
        _check_choice("WatchConfig.on_nan", self.on_nan, ("stop", "rollback", "ignore"))


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """How ranks start up together and reduce.

    Attributes:
        implementation: of the collectives. "auto" is NCCL when workers have GPUs, else ring.
        bytes_per_pack: bound of one collective: tensors of one dtype are packed into vectors of up
            to that size; a larger tensor goes alone.
        timeout_s: limit of one collective. None: TensorFlow's own check of its peers only, because
            a limit that is right for one model ends the training of a larger one.
        startup_timeout_s: from the first rank that joins to the last, and again from there to the
            last server that is up. On a slow machine the import of TensorFlow alone can take 30 s.
        max_port_attempts: tries of the whole group, with new ports each time, when somebody else
            has taken a port.
    """

    implementation: Literal["auto", "ring", "nccl"] = "auto"
    bytes_per_pack: int = 16 * 1024 * 1024
    timeout_s: float | None = None
    startup_timeout_s: float = 120.0
    max_port_attempts: int = 3

    def __post_init__(self) -> None:
        _check_choice(
            "CommunicationConfig.implementation", self.implementation, ("auto", "ring", "nccl")
        )
        _check_int("CommunicationConfig.bytes_per_pack", self.bytes_per_pack, 1)
        if self.timeout_s is not None:
            _check_seconds("CommunicationConfig.timeout_s", self.timeout_s)
        _check_seconds("CommunicationConfig.startup_timeout_s", self.startup_timeout_s)
        _check_int("CommunicationConfig.max_port_attempts", self.max_port_attempts, 1)


def refuse_unbuilt(recovery: RecoveryConfig) -> None:
    """Refuses what is not built yet.

    Raises:
        ConfigError: a capability is asked for that this version does not have.
    """
    default = RecoveryConfig()
    asked = {
        "mode": recovery.mode if recovery.mode == "survivor" else None,
        "spares": recovery.spares or None,
        "shrink_after_s": _unlike(recovery.shrink_after_s, default.shrink_after_s),
        "memory_every_steps": _unlike(recovery.memory_every_steps, default.memory_every_steps),
        "max_in_place": _unlike(recovery.max_in_place, default.max_in_place),
    }
    for name, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"RecoveryConfig({name}={value!r}): recovery within a living worker group is not "
                "built yet in this version; workers are restarted together. Leave it out."
            )


def _unlike(value: Any, default: Any) -> Any:
    return None if value == default else value


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything one run does, apart from where it runs.

    These are the arguments of `raytf.KerasTrainer` and `raytf.fit`. Those that `model.fit` has too
    mean the same here; only `callbacks` is a function instead of a list.

    Attributes:
        build_model: `build_model(config)`, or `build_model()`, -> a compiled model. Runs on each
            worker, more than once: first to compare the workers' models, then inside
            `strategy.scope()`. So no side effects, and the same model every time.
        train_data: `ArraySource`, `ParquetSource`, any random-access sequence of samples, or a
            factory `f(ctx) -> tf.data.Dataset` of this worker's batches (`ctx`: `rank`,
            `num_workers`, `batch_size`, `global_batch_size`, `seed`, `epoch`). A factory makes a
            fresh dataset for each epoch, with the same number of batches on all workers; it
            shuffles, augments and weights by itself, and steps run one per call.
        validation_data: the same kinds, or None: no validation. Each row counts once.
        validation_freq: epochs from one validation to the next.
        global_batch_size: rows of a batch over all workers. Their shares differ by at most one
            row. The smaller last batch of an epoch counts by its rows, as it does in one process.
        epochs: number of the epoch to stop before, counted from 0; not a count from
            `initial_epoch`.
        initial_epoch: number of the first epoch; at or above `epochs` nothing is trained.
        seed: of initial weights, order, sample keys, dropout and other noise, in [0, 2**32). It
            has a value by default, so that every run can be repeated.
        shuffle: a new seeded permutation of the training rows in each epoch, the same for any
            number of workers. True, as in Keras. No effect on a factory, which orders its own rows.
        drop_remainder: leave out the smaller last training batch. False: every row is trained on.
            Refused for a factory.
        transform: `transform(x, y[, key]) -> (x, y)` of TensorFlow ops, run by tf.data on each
            sample (no batch dimension) of the training data, and of nothing else: validation,
            `evaluate` and `predict` see the rows as they are. So it is for augmentation;
            preprocessing that never changes belongs into the model or the source. `key`, shape
            (2,), int64, is a function of (seed, epoch, row), to be used as the seed of
            `tf.image.stateless_*` and `tf.random.stateless_*`. Refused for a factory.
        callbacks: a function that returns a list of Keras callbacks, called on each worker. A
            function, because callbacks hold a model. Keras's TensorBoard, CSVLogger, RemoteMonitor
            and ModelCheckpoint run on rank 0 alone, as does any callback with an attribute
            `chief_only = True`; all others run on every rank, with equal logs. `stop_training` and
            the learning rate are rank 0's. With tf_keras, ModelCheckpoint runs on every rank, and
            rank 0's file stays.
        class_weight: class number -> weight in the loss; classes that are not named weigh 1. For
            models with one output whose targets, after `transform`, are class numbers or one-hot
            rows. Refused together with sample weights, and for a factory.
        verbose: 0: nothing. 1: a bar on a terminal or in a notebook, elsewhere a line every 10 s
            and one per epoch. 2: a line per epoch. "auto" is 1.
        config: values handed to `build_model`; they travel to the workers by pickle.
        strategy: "multi_worker" is MultiWorkerMirroredStrategy, and what "auto" chooses in this
            version.
        legacy_keras: train with tf_keras (extra `legacy-keras`) instead of Keras 3.
        deterministic: deterministic kernels on GPUs, which are slower; True, because a run that
            cannot be repeated cannot be checked. Without effect on CPUs, whose runs are bit-equal
            from one to the next anyway, for the same number of workers, threads per worker and type
            of processor.
        communication: how workers start together and reduce.

    Raises:
        ConfigError: a value cannot work; names the field, what was received and what to do.
    """

    build_model: Callable[..., Any]
    train_data: Any
    validation_data: Any = None
    validation_freq: int = 1
    global_batch_size: int = 32
    epochs: int = 1
    initial_epoch: int = 0
    seed: int = 0
    shuffle: bool = True
    drop_remainder: bool = False
    transform: Callable[..., Any] | None = None
    callbacks: Callable[[], list[Any]] | None = None
    class_weight: Mapping[int, float] | None = None
    verbose: Literal["auto", 0, 1, 2] = "auto"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strategy: str = "auto"
    legacy_keras: bool = False
    deterministic: bool = True
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)

    def __post_init__(self) -> None:
        _check_callable("build_model", self.build_model, "build_model(config) -> a compiled model")
        if self.train_data is None:
            raise ConfigError(
                "train_data is None. Give a source, for example raytf.ArraySource(x, y)."
            )
        _check_int("global_batch_size", self.global_batch_size, 1)
        _check_int("initial_epoch", self.initial_epoch, 0)
        _check_int("epochs", self.epochs, 1)
        _check_int("validation_freq", self.validation_freq, 1)
        _check_int("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ConfigError(f"seed must be below 2**32. Received: {self.seed}.")
        for name in ("shuffle", "drop_remainder", "legacy_keras", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} must be True or False. Received: {getattr(self, name)!r}."
                )
        if self.transform is not None:
            _check_callable(
                "transform", self.transform, "transform(x, y[, key]) -> (x, y), of TensorFlow ops"
            )
        if isinstance(self.callbacks, list | tuple):
            raise ConfigError(
                "callbacks must be a function that makes them on each worker, because Keras "
                "callbacks hold a model. Write callbacks=lambda: [...]. Received: a list."
            )
        if self.callbacks is not None:
            _check_callable("callbacks", self.callbacks, "callbacks() -> list of Keras callbacks")
        if self.class_weight is not None:
            self._check_class_weight()
        if self.verbose not in ("auto", 0, 1, 2):
            raise ConfigError(f'verbose must be "auto", 0, 1 or 2. Received: {self.verbose!r}.')
        if not isinstance(self.config, Mapping):
            raise ConfigError(
                "config must be a mapping handed to build_model. Received: "
                f"{type(self.config).__name__}."
            )
        if not isinstance(self.communication, CommunicationConfig):
            raise ConfigError("communication must be a raytf.CommunicationConfig.")
        _check_choice("strategy", self.strategy, STRATEGIES)
        if self.strategy in ("mirrored", "parameter_server", "tpu"):
            raise ConfigError(
                f'strategy="{self.strategy}" is not built yet in this version. Use "auto" or '
                '"multi_worker".'
            )

    def _check_class_weight(self) -> None:
        weights = self.class_weight
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigError(
                f"class_weight must map class numbers to weights. Received: {weights!r}."
            )
        for label, weight in weights.items():
            if (
                not _is_int(label)
                or label < 0
                or isinstance(weight, bool)
                or not isinstance(weight, numbers.Real)
            ):
                raise ConfigError(
                    f"class_weight must map class numbers to weights. Received: {label!r}: "
                    f"{weight!r}."
                )
