"""KerasTrainer: joins the worker side and the cluster side behind Ray's own trainer interface.

Owns the arguments and their checks on the driver, the run's name and place, and what `fit`,
`evaluate` and `predict` return. How a worker group runs is `cluster.group`; what a worker does is
`raytf.worker`.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from ray.train import CheckpointConfig, LoggingConfig, RunConfig, ScalingConfig

from raytf.checkpoint.storage import FINAL, Storage, resolve
from raytf.cluster.arguments import check_scaling, check_spec, make_spec
from raytf.cluster.group import GroupRun, GroupTrainer
from raytf.cluster.in_loop import run_in_loop
from raytf.cluster.rows import in_row_order
from raytf.cluster.worker import Session
from raytf.config import TrainSpec
from raytf.errors import ConfigError, NotFoundError
from raytf.progress import Display
from raytf.result import RunResult
from raytf.worker.links import Job

__all__ = ["KerasTrainer", "fit"]

_RAY_DEFAULT_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
_log = logging.getLogger("raytf")


class KerasTrainer(GroupTrainer):
    """Trains a Keras model on several Ray workers; is a `ray.train.tensorflow.TensorflowTrainer`.

    Example:
        >>> trainer = raytf.KerasTrainer(
        ...     build_model, train_data=raytf.ArraySource(x, y), global_batch_size=64, epochs=5,
        ...     scaling_config=ScalingConfig(num_workers=2),
        ... )
        >>> result = trainer.fit()

    Args:
        build_model: `build_model(config)` -> a compiled model; see `raytf.config.TrainSpec`.
        train_data: `ArraySource`, `ParquetSource`, any random-access sequence, or `f(ctx) ->
            tf.data.Dataset`; see `raytf.config.TrainSpec`.
        resume_from: not built yet.
        resume_strict: of `resume_from`.
        scaling_config: Ray's; `num_workers` workers, elastic tuples not yet.
        run_config: Ray's; `name` and `storage_path` say where the run lies, `failure_config` goes
            to Ray.
        save: not built yet.
        recovery: not built yet.
        watch: not built yet.
        drill: not built yet.
        **arguments: `validation_data`, `validation_freq`, `global_batch_size`, `epochs`,
            `initial_epoch`, `seed`, `shuffle`, `drop_remainder`, `transform`, `callbacks`,
            `class_weight`, `verbose`, `config`, `strategy`, `legacy_keras`, `deterministic`,
            `communication`. What each means and why it has its default is written with the fields
            of `raytf.config.TrainSpec` (`help(raytf.config.TrainSpec)`).

    Raises:
        ConfigError: an argument cannot work, or is not built yet. Nothing has been started then.
        DataError: the data cannot be used. Nothing has been started then.
    """

    _session: Session | None = None  # what workers run; tests put a stand-in here

    def __init__(
        self,
        build_model: Callable[..., Any],
        train_data: Any,
        *,
        save: Any = None,
        recovery: Any = None,
        watch: Any = None,
        drill: str | None = None,
        resume_from: str | None = None,
        resume_strict: bool = True,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **arguments: Any,
    ) -> None:
        arguments |= {
            "save": save,
            "recovery": recovery,
            "watch": watch,
            "drill": drill,
            "resume_from": resume_from,
            "resume_strict": resume_strict,
        }
        spec = make_spec(build_model, train_data, arguments)
        scaling = check_scaling(scaling_config)
        self.spec = spec = check_spec(spec, scaling.max_workers)
        self.storage, run = _place(run_config)
        super().__init__(
            legacy_keras=spec.legacy_keras,
            communication=spec.communication,
            scaling_config=scaling,
            run_config=run,
            session=type(self)._session,
        )

    def fit(self) -> RunResult:
        """Trains to the end.

        Returns:
            Metrics, history and where the trained model lies.

        Raises:
            TrainingError: user code or TensorFlow raised on a worker, or a worker process died; the
                message holds the traceback.
            ConfigError: the built model or its callbacks cannot be trained on several workers; the
                message names what and why.
            ModelMismatchError: `build_model` gave different models on different workers.
            DataError: reading showed what could not be known before (a NaN target in a file, a
                sample of another shape, factories that end at different steps).
            StartupError: the worker group did not come up.
            ResourceError: the cluster can never hold the workers.
        """
        if self._has_model():
            _log.warning(
                "%s holds a finished run. Resuming is not built yet: training starts anew, and its "
                "model will replace the old one.",
                self.storage.url,
            )
        job = Job(spec=self.spec, output=(self.storage.fs, self.storage.join(FINAL).path))
        run = self._shown(self, job)
        return RunResult.from_run(
            run.result, run.outcome, self.storage, self.spec.config, run.generations
        )

    def evaluate(self, data: Any, *, global_batch_size: int | None = None) -> dict[str, float]:
        """Evaluates the trained model on a fresh worker group.

        Args:
            data: as `train_data`, with targets. Every row counts once; `transform` and
                `class_weight` are of the training and not used.
            global_batch_size: the training's by default.

        Returns:
            Keras's metric names and values.

        Raises:
            NotFoundError: nothing has been trained yet.
            RaytfError: as from `fit`.
        """
        run = self._with_weights("evaluate", data, global_batch_size)
        return {name: float(value) for name, value in run.outcome["metrics"].items()}

    def predict(self, data: Any, *, global_batch_size: int | None = None) -> Any:
        """Predicts with the trained model on a fresh worker group.

        Args:
            data: as `train_data`, but no factory; targets are ignored.
            global_batch_size: the training's by default.

        Returns:
            NumPy arrays in the structure of the model's outputs, one row for each row of `data`, in
            its order.

        Raises:
            NotFoundError: nothing has been trained yet.
            RaytfError: as from `fit`.
        """
        run = self._with_weights("predict", data, global_batch_size, collect="rows")
        return in_row_order(run.delivered)

    def _has_model(self) -> bool:
        return self.storage.exists(FINAL, "final.json")  # written last by worker.export

    def _with_weights(
        self, mode: str, data: Any, batch: int | None, collect: str | None = None
    ) -> GroupRun:
        if not self._has_model():
            raise NotFoundError(
                f"{self.storage.url} holds no trained model. Call fit() first.",
                path=self.storage.url,
            )
        spec = dataclasses.replace(
            self.spec,
            train_data=data,
            validation_data=None,
            transform=None,
            class_weight=None,
            shuffle=False,
            drop_remainder=False,
            global_batch_size=batch or self.spec.global_batch_size,
        )
        spec = check_spec(spec, self.scaling_config.max_workers)
        job = Job(
            spec=spec,
            mode=mode,  # pyright: ignore[reportArgumentType]
            weights=(self.storage.fs, self.storage.join(FINAL).path),
        )
        # A Ray run of its own below the training run: Ray keeps state by name, and the two must not
        # meet.
        place = self.storage.join(f".{mode}-{secrets.token_hex(4)}")
        parent = self.storage.for_ray()
        sub = GroupTrainer(
            legacy_keras=spec.legacy_keras,
            communication=spec.communication,
            scaling_config=self.scaling_config,
            run_config=dataclasses.replace(
                self.run_config,
                name=place.path.rsplit("/", 1)[-1],
                storage_path=parent[0],
                storage_filesystem=parent[1],
            ),
            session=type(self)._session,
        )
        try:
            return self._shown(sub, job, collect)
        finally:
            place.remove()

    @staticmethod
    def _shown(trainer: GroupTrainer, job: Job, collect: str | None = None) -> GroupRun:
        with Display(job.spec.verbose) as display:
            return trainer.run_job(
                job, lambda records: display.update(records, time.monotonic()), collect
            )


def fit(build_model: Callable[..., Any], train_data: Any, **arguments: Any) -> dict[str, Any]:
    """Trains inside your own `train_loop_per_worker`, under any Ray Train trainer.

    Every rank must call it, once, before anything else uses TensorFlow in its process. The trained
    model is written to `final/` in the run's storage. A failure is handled as Ray's FailureConfig
    says; there is no recovery within a group.

    Args:
        build_model: as for `KerasTrainer`.
        train_data: as for `KerasTrainer`.
        **arguments: as for `KerasTrainer`, except `scaling_config` and `run_config`, which belong
            to the trainer that runs the loop.

    Returns:
        A dict, equal on all ranks: `history` (metric name -> one value per epoch), `metrics` (the
        last epoch's), `steps`, `epochs` (both as trained), `weights_sha256` (over
        `model.get_weights()`), `threads` (of TensorFlow, per worker), `generation` (1 if the group
        formed at once).

    Raises:
        ConfigError: wrong arguments, not called from a Ray Train worker, or too late.
        RaytfError: as from `KerasTrainer.fit`.
    """
    display: list[Display] = []

    def show(spec: TrainSpec, record: dict[str, Any]) -> None:
        # Lines, not a bar: Ray carries this process's standard error to the driver line by line.
        if not display:
            display.append(Display(spec.verbose, sys.stderr))
        display[0].update([record], time.monotonic())

    return run_in_loop(build_model, train_data, arguments, show)


def _place(run_config: RunConfig | None) -> tuple[Storage, RunConfig]:
    """Where the run lies, and the RunConfig that makes Ray use the same place."""
    given = run_config if run_config is not None else RunConfig()
    if not isinstance(given, RunConfig):
        raise ConfigError(
            f"run_config must be a ray.train.RunConfig. Received: {type(given).__name__}."
        )
    if given.checkpoint_config != CheckpointConfig():
        raise ConfigError(
            "RunConfig(checkpoint_config=...): checkpoints while training are not built yet in "
            "this version. Leave it out."
        )
    root = resolve(given.storage_path, given.storage_filesystem)
    if root.is_process_local:
        raise ConfigError(
            f"storage_path={given.storage_path!r} lives in the memory of one process; the workers "
            "are others. Use a directory or an object store that all nodes reach."
        )
    name = str(given.name)
    if _RAY_DEFAULT_NAME.fullmatch(name):  # Ray fills one in that two runs of the same second share
        name = f"raytf-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    if name in (".", "..") or "/" in name or name != name.strip():
        raise ConfigError(f"RunConfig(name={given.name!r}): a run's name is one directory name.")
    path, filesystem = root.for_ray()
    run = dataclasses.replace(given, name=name, storage_path=path, storage_filesystem=filesystem)
    if given.logging_config == LoggingConfig():
        # What Ray tells about a run, raytf tells in its own words: progress, restarts, the error.
        run.logging_config = LoggingConfig(log_level="WARNING")
    return root.join(name), run
