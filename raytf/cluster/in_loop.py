"""The cluster half of `raytf.fit`: the same training in anyone's `train_loop_per_worker`.

There is no raytf driver and no backend of raytf's here: rank 0 starts the run actor, whose name
reaches the others through Ray Train, and what Ray's TensorflowTrainer has put into the environment
(TF_CONFIG, TF_USE_LEGACY_KERAS=1) is overridden. From there on it is the code of KerasTrainer's
workers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import ray
import ray.train
import ray.train.collective

from raytf.checkpoint.storage import FINAL, Storage, resolve
from raytf.cluster.arguments import make_spec, with_sources
from raytf.cluster.backend import set_worker_env
from raytf.cluster.failures import describe, to_error
from raytf.cluster.keras_choice import check_process
from raytf.cluster.origins import resolve_origin
from raytf.cluster.run_actor import NAMESPACE, create_run_actor, new_run_actor_name
from raytf.cluster.run_options import RunOptions, take_options
from raytf.cluster.run_place import OpenRun, open_run
from raytf.cluster.worker import RunLine, Session, make_links, run_session
from raytf.config import TrainSpec
from raytf.errors import ConfigError, RaytfError
from raytf.worker.links import Job

__all__ = ["run_in_loop"]

_session: Session | None = None  # what a rank runs; tests put a stand-in here


def run_in_loop(
    build_model: Callable[..., Any],
    train_data: Any,
    arguments: dict[str, Any],
    show: Callable[[TrainSpec, dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs one training on every rank of the Ray Train run that this is called in.

    Args:
        build_model: as for `raytf.KerasTrainer`.
        train_data: as for `raytf.KerasTrainer`.
        arguments: the others of `raytf.fit`.
        show: gets rank 0's progress records, in its process.

    Returns:
        The session's dict, on each rank.
    """
    for name in ("scaling_config", "run_config"):
        if name in arguments:
            raise ConfigError(f"{name} belongs to the trainer that runs your loop, not to fit().")
    context = _context()
    rank, num_workers = context.get_world_rank(), context.get_world_size()
    options, rest = take_options(arguments, num_workers)
    spec = with_sources(make_spec(build_model, train_data, rest), num_workers)
    check_process(spec.legacy_keras, sys.modules)
    set_worker_env(legacy_keras=spec.legacy_keras)
    name, actor = _shared_run_actor(spec, rank, num_workers, context.get_experiment_name())
    line = RunLine(actor, rank, name, lambda record: show(spec, record))
    line.hello()
    storage = _run_storage(context)
    final = storage.join(FINAL)
    with contextlib.ExitStack() as stack:
        mine = _held(stack, storage, spec, options) if rank == 0 else None
        held: Any = ray.train.collective.broadcast_from_rank_zero(mine)
        if isinstance(held, dict):  # an error record: all ranks raise it
            raise to_error(held)
        if held.finished is not None:
            outcome = held.finished.result
        else:
            job = Job(spec=spec, output=(final.fs, final.path), place=held.place)
            outcome = run_session(
                lambda: job, lambda: make_links(line, num_workers), line, _session
            )
        # Rank 0's process holds run actor and lease: until the last rank has said its last word.
        ray.train.collective.barrier()
    if rank == 0:
        ray.kill(actor)
    return outcome


def _held(
    stack: contextlib.ExitStack, storage: Storage, spec: TrainSpec, options: RunOptions
) -> OpenRun | dict[str, Any]:
    """Takes the run for rank 0's process, or gives the record of why that cannot be."""
    origin = options.resume_from
    try:
        return stack.enter_context(
            open_run(
                storage,
                spec,
                options.save,
                num_best=options.num_best,
                watch=options.watch,
                kills=options.kills,
                origin=None if origin is None else resolve_origin(origin, options.resume_strict),
            )
        )
    except RaytfError as error:
        return describe(error, 0)


def _context() -> Any:
    try:
        context = ray.train.get_context()
        context.get_storage()  # Ray's local mode (num_workers=0) has none, and no actors either
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "raytf.fit runs inside train_loop_per_worker of a Ray Train trainer with at least one "
            "worker. Outside, use raytf.KerasTrainer(...).fit()."
        ) from error
    return context


def _shared_run_actor(spec: TrainSpec, rank: int, num_workers: int, run: str) -> tuple[str, Any]:
    name, actor = "", None
    if rank == 0:
        name = new_run_actor_name(run)
        actor = create_run_actor(
            name,
            num_workers,
            startup_timeout_s=spec.communication.startup_timeout_s,
            max_port_attempts=spec.communication.max_port_attempts,
        )
    name = ray.train.collective.broadcast_from_rank_zero(name)
    return name, actor if actor is not None else ray.get_actor(name, namespace=NAMESPACE)


def _run_storage(context: Any) -> Storage:
    # `get_storage` is Ray's developer API; read in Ray 2.60.
    storage = context.get_storage()
    return resolve(storage.experiment_fs_path, storage.storage_filesystem)
