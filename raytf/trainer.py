"""KerasTrainer: joins the worker side and the cluster side behind Ray's own trainer interface.

Owns the arguments and their checks on the driver, the run's name and place, and what `fit`,
`evaluate` and `predict` return. How a worker group runs is `cluster.group`; what a worker does is
`raytf.worker`.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig

from raytf.checkpoint.storage import FINAL, Storage, resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.cluster.arguments import check_scaling, check_spec, make_spec
from raytf.cluster.group import GroupRun, GroupTrainer
from raytf.cluster.in_loop import run_in_loop
from raytf.cluster.origins import choose_step, resolve_origin
from raytf.cluster.rows import in_row_order
from raytf.cluster.run_options import take_options
from raytf.cluster.run_place import Finished, open_run
from raytf.cluster.run_watch import RunWatch
from raytf.cluster.worker import Session
from raytf.config import RecoveryConfig, SaveConfig, TrainSpec, WatchConfig
from raytf.errors import ConfigError, NotFoundError
from raytf.faults.policy import limits_from
from raytf.progress import Display
from raytf.result import RunResult
from raytf.worker.links import Job

__all__ = ["KerasTrainer", "export", "fit"]

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
        resume_from: a new run starts from an old state: the URL of a step directory, of a run
            (its newest checkpoint; `#best` and `#500` choose another), or of a `.keras` file,
            SavedModel or TensorFlow checkpoint (weights, and the optimizer where there is one).
            Epochs count on: `epochs` stays the number to stop before. Once the run has checkpoints
            of its own, those are used.
        resume_strict: False takes from `resume_from` the tensors whose name and shape fit, instead
            of refusing a model that differs.
        scaling_config: Ray's; `num_workers` workers, elastic tuples not yet.
        run_config: Ray's; `name` and `storage_path` say where the run lies: the same two are the
            same run, which goes on where it was. `failure_config` goes to Ray, `checkpoint_config`
            is honoured where `save` says nothing about what to keep.
        save: `raytf.SaveConfig`: when checkpoints are written and which are kept. None: as often as
            costs 2 % of the time, and the last 3 are kept.
        recovery: `raytf.RecoveryConfig`: `mode="off"` stops at the first failure; survivor mode and
            spares are not built yet.
        watch: `raytf.WatchConfig`: limits of the watchdog, what to do about NaN, how often ranks
            compare their state.
        drill: faults to inject, each once per run: `"kill rank=1 step=30 [phase=step]"`, several
            separated by `;`. Phases: data, step, copy, write, commit, validate, callback.
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
        save: SaveConfig | None = None,
        recovery: RecoveryConfig | None = None,
        watch: WatchConfig | None = None,
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
        scaling = check_scaling(scaling_config)
        given = _run_config(run_config)
        self.options, arguments = take_options(
            arguments, scaling.max_workers, given.checkpoint_config
        )
        spec = make_spec(build_model, train_data, arguments)
        self.spec = spec = check_spec(spec, scaling.max_workers)
        self.storage, run = _place(given)
        super().__init__(
            legacy_keras=spec.legacy_keras,
            communication=spec.communication,
            scaling_config=scaling,
            run_config=run,
            session=type(self)._session,
        )

    def fit(self) -> RunResult:
        """Trains to the end, from where the run was.

        A run is its name in its storage: called again, after whatever has died, training goes on
        from the newest good checkpoint; a finished run returns its result at once, or goes on if
        more epochs are asked for.

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
        options = self.options
        origin = None
        if options.resume_from is not None:
            origin = resolve_origin(options.resume_from, options.resume_strict)
        with open_run(
            self.storage,
            self.spec,
            options.save,
            num_best=options.num_best,
            watch=options.watch,
            kills=options.kills,
            origin=origin,
        ) as held:
            if held.finished is not None:
                return self._finished(held.finished)
            output = (self.storage.fs, self.storage.join(FINAL).path)
            job = Job(spec=self.spec, output=output, place=held.place)
            run = self._shown(self, job, watch=self._watch(held.place.attempt))
            return RunResult.from_run(
                run.result,
                run.outcome,
                self.storage,
                self.spec.config,
                run.generations,
                run.replayed_steps,
            )

    def _watch(self, attempt: int) -> RunWatch:
        failures = self.run_config.failure_config or FailureConfig()
        limits = limits_from(
            self.options.recovery,
            self.options.watch,
            max_failures=failures.max_failures,
            max_preemption_failures=failures.max_preemption_failures,
            is_default=failures == FailureConfig(),
            num_workers=self.scaling_config.max_workers,
        )
        return RunWatch(
            storage=self.storage,
            run=str(self.run_config.name),
            attempt=attempt,
            limits=limits,
            hang_timeout_s=self.options.watch.hang_timeout_s,
            config={
                "epochs": self.spec.epochs,
                "global_batch_size": self.spec.global_batch_size,
                "seed": self.spec.seed,
                "workers": self.scaling_config.max_workers,
                **{f"config.{name}": value for name, value in self.spec.config.items()},
            },
        )

    def _finished(self, done: Finished) -> RunResult:
        reached = int(done.result.get("epochs", 0))
        if self.spec.epochs < done.epochs_asked:
            _log.warning(
                "%s is finished, with epochs=%d; epochs=%d asks for less. This is its result.",
                self.storage.url,
                done.epochs_asked,
                self.spec.epochs,
            )
        else:
            _log.info("%s is finished (%d epochs)", self.storage.url, reached)
        return RunResult.of_finished(done.result, self.storage, self.spec.config)

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
    def _shown(
        trainer: GroupTrainer,
        job: Job,
        collect: str | None = None,
        watch: RunWatch | None = None,
    ) -> GroupRun:
        with Display(job.spec.verbose) as display:
            return trainer.run_job(
                job, lambda records: display.update(records, time.monotonic()), collect, watch
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


def _run_config(run_config: RunConfig | None) -> RunConfig:
    given = run_config if run_config is not None else RunConfig()
    if not isinstance(given, RunConfig):
        raise ConfigError(
            f"run_config must be a ray.train.RunConfig. Received: {type(given).__name__}."
        )
    return given


def _place(given: RunConfig) -> tuple[Storage, RunConfig]:
    """Where the run lies, and the RunConfig that makes Ray use the same place."""
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
    run = dataclasses.replace(
        given,
        name=name,
        storage_path=path,
        storage_filesystem=filesystem,
        # raytf keeps checkpoints itself: Ray's manager deletes directories that it was told of, and
        # refuses to start when one of them is gone.
        checkpoint_config=CheckpointConfig(),
    )
    if given.logging_config == LoggingConfig():
        # What Ray tells about a run, raytf tells in its own words: progress, restarts, the error.
        run.logging_config = LoggingConfig(log_level="WARNING")
    return root.join(name), run


def export(
    url: str | os.PathLike[str] | Storage,
    step: int | str,
    path: str,
    format: Literal["keras", "saved_model", "weights"] = "keras",
    build_model: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Writes one checkpoint of a run as a model, in this process; imports TensorFlow.

    Args:
        url: the run's directory, as in `result.url`.
        step: a committed step, "latest" or "best".
        path: local path or fsspec URL: a file that ends in `.keras` or `.weights.h5`, or a
            directory (`saved_model`).
        format: "keras" (a `.keras` file, with the optimizer's state), "saved_model" (served by
            `tf.saved_model.load`) or "weights".
        build_model: needed only if Keras cannot rebuild the model from its own config (the error
            says so).
        config: handed to `build_model`.

    Returns:
        Where it was written, absolute.

    Raises:
        NotFoundError: there is no such checkpoint.
        CheckpointDamagedError: its bytes are bad and there is no other copy.
        ConfigError: `format` and `path` do not fit, `build_model` is needed, or it gives another
            model.
        StorageError: the store cannot be reached.
    """
    from raytf.worker.export_step import export_step

    store = CheckpointStore(url)
    chosen = choose_step(store, str(step))
    return export_step(store, chosen, path, format, build_model, config)
