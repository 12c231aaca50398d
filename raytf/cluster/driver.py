"""The driver's part of a run: starts Ray's controller, watches the run actor beside it, ends both.

Owns the loop in which `fit()` waits. It waits for two things at once: the controller, and the run
actor, which tells progress and start-up failures. The second matters because ranks that are stuck
inside TensorFlow cannot raise, and Ray's controller sees them as healthy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import ray
from ray._raylet import RAY_NODE_ID_KEY  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayActorError, RayError

# Read in Ray 2.60, `DataParallelTrainer._initialize_and_run_controller`: this module does the same
# without replacing the SIGINT handler, and with a controller of its own.
from ray.train.v2._internal.constants import get_env_vars_to_propagate

from raytf.cluster.controller import RunController
from raytf.cluster.failures import to_error
from raytf.errors import RaytfError

__all__ = ["close_run", "run_controller"]

_POLL_S = 1.0  # longest wait for the run actor, which answers at once when something happens
_ABORT_S = 20.0


def run_controller(
    controller_kwargs: dict[str, Any],
    run_actor: Any,
    on_poll: Callable[[dict[str, Any]], None],
) -> Any:
    """Runs Ray's controller to its end and returns Ray's result.

    Args:
        controller_kwargs: what Ray's trainer hands to its controller.
        run_actor: handle of the run actor.
        on_poll: gets each answer of `RunActor.poll`.

    Raises:
        StartupError: the group did not come up; the run has been aborted.
        KeyboardInterrupt: Ctrl-C; the run has been aborted.
    """
    controller = _start_controller(controller_kwargs)
    try:
        return _watch(controller, run_actor, on_poll)
    except BaseException:
        _abort(controller)
        raise


def _start_controller(kwargs: dict[str, Any]) -> Any:
    options: dict[str, Any] = {
        "num_cpus": 0,
        # On the driver's own node, as Ray does it: what ends the driver's node ends the run.
        "label_selector": {RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
    }
    propagated = get_env_vars_to_propagate()
    # a runtime_env makes Ray start a fresh process instead of taking an idle one: only if needed
    if propagated:
        options["runtime_env"] = {"env_vars": propagated}
    return ray.remote(**options)(RunController).remote(**kwargs)


def _watch(controller: Any, run_actor: Any, on_poll: Callable[[dict[str, Any]], None]) -> Any:
    run = controller.run.remote()
    cursor, poll = 0, run_actor.poll.remote(0, _POLL_S)
    while True:
        done, _ = ray.wait([run, poll], num_returns=1, timeout=5 * _POLL_S)
        if run in done:
            break
        if poll in done:
            answer: dict[str, Any] = cast("Any", ray.get(poll))
            cursor = answer["cursor"]
            on_poll(answer)
            if answer["overdue"] is not None:
                raise to_error(answer["overdue"])
            poll = run_actor.poll.remote(cursor, _POLL_S)
    on_poll(ray.get(run_actor.poll.remote(cursor, 0.0)))
    ray.get(run)
    return ray.get(controller.get_result.remote())


def _abort(controller: Any) -> None:
    """Ends the controller and its workers, whatever they are stuck in."""
    try:
        ray.get(controller.abort.remote(), timeout=_ABORT_S)
    except RayActorError:
        return  # how a successful abort looks: the controller leaves
    except RayError:
        logging.getLogger("raytf").debug("the controller did not abort in time", exc_info=True)
    ray.kill(controller)  # its workers are its children: they go with it


def close_run(run_actor: Any) -> None:
    """Removes what a run leaves in the cluster; called in every case."""
    try:
        groups = ray.get(run_actor.placement_groups.remote(), timeout=5)
    except RayError:
        groups = []  # the run actor is gone, then so is its node
    try:
        ray.get(run_actor.close.remote(), timeout=10)  # the event log's last lines
    except RayError:
        logging.getLogger("raytf").debug("the run actor did not close", exc_info=True)
    ray.kill(run_actor)
    _remove_placement_groups(groups)


def _remove_placement_groups(ids: list[str]) -> None:
    """Gives back what a controller that died could not; Ray would keep it until the job ends."""
    from ray._raylet import PlacementGroupID  # read in Ray 2.60
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for hex_id in ids:
        try:
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(hex_id)))
        except (ValueError, RaytfError, RayError):
            logging.getLogger("raytf").debug("placement group %s is gone", hex_id, exc_info=True)
