"""What is done about a fault: one pure function of the fault, the past, the limits and the time.

Owns the budgets and the rules that end a run. Nothing here acts, waits or draws a random number.
Ray's numbers mean what Ray says: `max_failures` n retries n times, -1 without bound, preemptions
are counted apart. They bound from above: a run also stops where retrying cannot help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from raytf.config import RecoveryConfig, WatchConfig
from raytf.faults.decision import Action, Counted, Decision, History, Past
from raytf.faults.fault import Fault, FaultKind
from raytf.faults.nodes import NodeBook

__all__ = ["Action", "Decision", "History", "Limits", "Past", "decide", "limits_from"]

_HOPELESS = frozenset(
    {
        "ConfigError",
        "DataError",
        "ModelMismatchError",
        "NotFoundError",
        "ResourceError",
        "RunInUseError",
    }
)
_HAS_WORDS = frozenset({FaultKind.USER_ERROR, FaultKind.TENSORFLOW_ERROR})
# Ends of a process that the code in it can bring about by itself.
_SELF_MADE = frozenset({FaultKind.SEGFAULT, FaultKind.EXITED})
_POISONED = _SELF_MADE | {FaultKind.KILLED, FaultKind.OOM}
_PATIENT = frozenset({FaultKind.STARTUP, FaultKind.STORAGE})  # an immediate retry meets the same


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run allows. See `limits_from`.

    Attributes:
        mode: `RecoveryConfig.mode`.
        max_failures: retries after failures; -1 without bound; None: not given, then raytf's own
            rules bound them.
        max_preemption_failures: the same for preemptions.
        max_no_progress: attempts in a row that reached no new step, when max_failures is not given.
        max_startup_failures: failures to start in a row, whatever max_failures is.
        max_in_place: replacements in place before a fresh start (each leaks some memory).
        max_rollbacks: rollbacks and skipped batches over the whole run, for each cause.
        max_node_faults: see `NodeBook.max_faults`.
        on_nan, poison_batches: see `WatchConfig`.
        num_workers: places that the run needs.
        backoff_s, max_backoff_s: first and longest wait.
    """

    mode: Literal["auto", "survivor", "restart", "off"] = "auto"
    max_failures: int | None = None
    max_preemption_failures: int = -1
    max_no_progress: int = 3
    max_startup_failures: int = 3
    max_in_place: int = 20
    max_rollbacks: int = 3
    max_node_faults: int = 2
    on_nan: Literal["stop", "rollback", "ignore"] = "stop"
    poison_batches: Literal["stop", "skip"] = "stop"
    num_workers: int = 1
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0


def limits_from(
    recovery: RecoveryConfig,
    watch: WatchConfig,
    *,
    max_failures: int = 0,
    max_preemption_failures: int = -1,
    is_default: bool | None = None,
    num_workers: int = 1,
) -> Limits:
    """The limits of a run, from its configs and the numbers of Ray's FailureConfig.

    Args:
        is_default: whether the FailureConfig equals Ray's default, which counts as not given.
            None: judged by the two numbers.
    """
    if is_default is None:
        is_default = max_failures == 0 and max_preemption_failures == -1
    return Limits(
        mode=recovery.mode,
        max_failures=None if is_default else max_failures,
        max_preemption_failures=max_preemption_failures,
        max_in_place=recovery.max_in_place,
        max_node_faults=recovery.max_node_faults,
        on_nan=watch.on_nan,
        poison_batches=watch.poison_batches,
        num_workers=num_workers,
    )


def decide(
    fault: Fault,
    history: History,
    limits: Limits,
    now: float,
    *,
    reached: int | None = None,
    can_replace: bool = False,
    can_move: bool = False,
    jitter: float = 0.0,
    nodes: NodeBook | None = None,
    capacity: Mapping[str, int] | None = None,
) -> Decision:
    """The answer to a fault.

    Args:
        fault: as classified.
        history: the faults before it.
        limits: of the run.
        now: UTC seconds since the epoch.
        reached: steps completed in the run; None: the fault's own step.
        can_replace: whether survivors hold the state and could go on in place.
        can_move: whether a replacement could come up on another node than the culprit's. If not,
            leaving a node that lives takes a full start.
        jitter: in [0, 1), drawn by the caller.
        nodes: faults of nodes *before* this one; with it the answer says whether to avoid the
            culprit's node. The caller then makes the same `record` and `settle` its own.
        capacity: see `NodeBook.settle`.
    """
    at = reached if reached is not None else fault.step or 0
    if fault.kind is FaultKind.NAN and limits.on_nan == "ignore":
        reason = f'{fault.summary()}; WatchConfig(on_nan="ignore") goes on.'
        return Decision(action="continue", reason=reason)
    final = _final(fault, history, limits, at)
    if final is not None:
        return replace(final, root_text=fault.root_text)
    answer = _special(fault, history, limits)
    if answer is None:
        answer = _retry(fault, history, limits, can_replace)
    if answer.action == "stop":
        return replace(answer, root_text=fault.root_text)
    avoid = _node_to_avoid(fault, limits, now, nodes, capacity)
    if avoid is not None:
        answer = _moved(answer, fault, can_move)
    return replace(answer, delay_s=_delay_s(fault, history, limits, at, jitter), exclude_node=avoid)


def _moved(answer: Decision, fault: Fault, can_move: bool) -> Decision:
    reason = f"{answer.reason} Node {fault.node} is left out from now on."
    if answer.action != "replace" or can_move or fault.kind is FaultKind.NODE_LOST:
        return replace(answer, reason=reason)
    reason = f"{reason} A replacement would go back to it, so all workers start anew."
    return replace(answer, action="restart", reason=reason)


def _stop(reason: str) -> Decision:
    return Decision(action="stop", reason=reason)


def _final(fault: Fault, history: History, limits: Limits, reached: int) -> Decision | None:
    """Why the run must stop now, whatever its budget is."""
    said = fault.summary()
    if fault.kind is FaultKind.SUPERSEDED:
        return _stop("another attempt has taken this run over; this one stops.")
    if limits.mode == "off":
        return _stop(f'{said}; RecoveryConfig(mode="off") stops at the first fault.')
    if fault.kind in (FaultKind.PREEMPTED, FaultKind.NAN):
        return None
    if fault.error_type in _HOPELESS:
        return _stop(f"{said}: {fault.error_type} cannot heal by itself, so nothing is retried.")
    again = [p for p in history.past if p.fault.step == fault.step]
    at = f"step {fault.step}" if fault.step is not None else "the start"
    if fault.kind in _HAS_WORDS and any(p.fault.identity == fault.identity for p in again):
        return _stop(
            f"{said}: the same error came twice at {at}. Retrying cannot help; mend it and run "
            "again."
        )
    if fault.kind in _SELF_MADE and limits.poison_batches == "stop":
        if fault.step is not None and _same_rank(fault, again):
            return _stop(
                f"{said}: it ended in this way twice at {at}, so its code or its batch is at "
                'fault. WatchConfig(poison_batches="skip") would leave the batch out.'
            )
    if fault.kind is FaultKind.STARTUP:
        return _startup(fault, history, limits)
    stuck = history.stuck(reached)
    if limits.max_failures is None and stuck >= limits.max_no_progress:
        return _stop(
            f"{said}: {stuck} attempts in a row ended without a new step (furthest: "
            f"{max(history.best, reached)})."
        )
    return None


def _startup(fault: Fault, history: History, limits: Limits) -> Decision | None:
    in_a_row = 1
    for past in reversed(history.past):
        if past.fault.kind is not FaultKind.STARTUP:
            break
        in_a_row += 1
    if in_a_row < limits.max_startup_failures:
        return None
    return _stop(f"{fault.summary()}: {in_a_row} attempts in a row did not start.")


def _same_rank(fault: Fault, past: list[Past]) -> bool:
    return any(p.fault.rank == fault.rank and p.fault.kind in _POISONED for p in past)


def _special(fault: Fault, history: History, limits: Limits) -> Decision | None:
    """Faults that are not answered by trying the same again."""
    if fault.kind is FaultKind.NAN:
        return _nan(fault, history, limits)
    if fault.kind is FaultKind.DIVERGENCE:
        done = sum(p.fault.kind is FaultKind.DIVERGENCE for p in history.past)
        if done >= limits.max_rollbacks:
            return _stop(f"{fault.summary()}: it happened {done + 1} times.")
        over = _over_budget(fault, history, limits)
        reason = f"{fault.summary()}: all ranks go back to the newest good state."
        return over or Decision(action="rollback", reason=reason, counts_as="failure")
    if limits.poison_batches == "skip" and fault.kind in _POISONED and fault.step is not None:
        again = [p for p in history.past if p.fault.step == fault.step]
        if not _same_rank(fault, again):
            return None
        return _skip(fault, history, limits, "the batch of this step has ended a worker twice")
    return None


def _nan(fault: Fault, history: History, limits: Limits) -> Decision:
    said = fault.summary()
    if limits.on_nan == "stop":
        return _stop(
            f'{said}: WatchConfig(on_nan="stop") stops the run. The newest checkpoint is from '
            "before it."
        )
    return _skip(fault, history, limits, "the run goes back and leaves this batch out")


def _skip(fault: Fault, history: History, limits: Limits, why: str) -> Decision:
    said = fault.summary()
    is_nan = fault.kind is FaultKind.NAN
    back = [p for p in history.past if p.action in ("rollback", "skip_batch")]
    same_cause = [p for p in back if (p.fault.kind is FaultKind.NAN) == is_nan]
    if fault.step is not None and any(p.skip_step == fault.step for p in back):
        return _stop(f"{said}, though the batch of this step was left out: it is not the cause.")
    if len(same_cause) >= limits.max_rollbacks:
        return _stop(f"{said}: the run went back {len(same_cause)} times for this already.")
    if not is_nan and (over := _over_budget(fault, history, limits)) is not None:
        return over
    return Decision(
        action="skip_batch" if fault.step is not None else "rollback",
        reason=f"{said}: {why}.",
        counts_as="none" if is_nan else "failure",
        skip_step=fault.step,
    )


def _retry(fault: Fault, history: History, limits: Limits, can_replace: bool) -> Decision:
    over = _over_budget(fault, history, limits)
    if over is not None:
        return over
    counts = _counted(fault)
    budget = _budget(fault, limits)
    nth = history.count(counts) + 1
    of = "" if budget is None or budget == -1 else f" of {budget}"
    in_place = can_replace and limits.mode in ("auto", "survivor")
    in_place = in_place and history.acted("replace") < limits.max_in_place
    what = "survivors keep their state and go on" if in_place else "all workers start anew"
    return Decision(
        action="replace" if in_place else "restart",
        reason=f"{fault.summary()}; {counts} {nth}{of}: {what}.",
        counts_as=counts,
    )


def _counted(fault: Fault) -> Counted:
    return "preemption" if fault.kind is FaultKind.PREEMPTED else "failure"


def _budget(fault: Fault, limits: Limits) -> int | None:
    preempted = fault.kind is FaultKind.PREEMPTED
    return limits.max_preemption_failures if preempted else limits.max_failures


def _over_budget(fault: Fault, history: History, limits: Limits) -> Decision | None:
    budget, counts = _budget(fault, limits), _counted(fault)
    if budget is None or budget == -1 or history.count(counts) < budget:
        return None
    name = "max_preemption_failures" if counts == "preemption" else "max_failures"
    return _stop(f"{fault.summary()}: {name}={budget} allows {budget} retries, and all are used.")


def _delay_s(fault: Fault, history: History, limits: Limits, reached: int, jitter: float) -> float:
    """Nothing for a first fault after progress: training shall stand still for seconds only."""
    stuck = history.stuck(reached)
    if fault.kind is FaultKind.PREEMPTED:
        stuck = 1 + _preemptions_in_a_row(history, reached)
    if fault.kind in _PATIENT:
        stuck = max(stuck, 1) + 1
    if stuck < 2:
        return 0.0
    full = min(limits.backoff_s * 2.0 ** min(stuck - 2, 30), limits.max_backoff_s)
    return full * (0.5 + 0.5 * jitter)


def _preemptions_in_a_row(history: History, reached: int) -> int:
    count = 0
    for past in reversed(history.past):
        if past.counts_as != "preemption" or past.reached < reached:
            break
        count += 1
    return count


def _node_to_avoid(
    fault: Fault,
    limits: Limits,
    now: float,
    nodes: NodeBook | None,
    capacity: Mapping[str, int] | None,
) -> str | None:
    if nodes is None or fault.node is None or not fault.hardware_like:
        return None
    _, decisions = nodes.record(fault.node, now).settle(now, limits.num_workers, capacity)
    avoid = any(d.node == fault.node and d.action == "exclude" for d in decisions)
    return fault.node if avoid else None
