"""What went wrong, as plain data: from a worker's exception to the one error of the driver.

Pure. An *error record* is a dict of plain values: `rank`, `type` (a raytf error's name), `message`,
`context`, `error_type` (the original exception's name), `headline`, `traceback` (text) and
`collateral`. Records cross processes in place of exceptions, so nothing that needs TensorFlow is
ever pickled. A *collateral* error is one that a rank reports because another one failed: it never
hides the root.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from raytf import errors
from raytf.cluster.ranks import listed_ranks
from raytf.errors import RaytfError, TrainingError

__all__ = [
    "describe",
    "from_ray",
    "is_collateral",
    "merged",
    "plain",
    "root_of",
    "said",
    "to_error",
    "with_decision",
]

_COLLATERAL_TYPES = {"AbortedError", "UnavailableError", "CancelledError", "DeadlineExceededError"}
# Texts of TensorFlow 2.21's collective runtime and of gRPC when a peer went away.
_COLLATERAL_TEXTS = (
    "collective ops is aborted",
    "collective op has been aborted",
    "connection reset by peer",
    "socket closed",
    "failed to connect to all addresses",
    "heartbeat",
    "peer health",
    "coordination service",
    "connection refused",
)
_HIDDEN_FRAMES = (
    f"{os.sep}raytf{os.sep}cluster{os.sep}",
    f"{os.sep}raytf{os.sep}worker{os.sep}",
    f"{os.sep}ray{os.sep}train{os.sep}",
    f"{os.sep}threading.py",
)
_HINT = "Mend it and run again; the worker's own output is in `ray logs`."


def is_collateral(error: BaseException) -> bool:
    """Whether an exception looks like the echo of another rank's failure.

    Decided by name and text: TensorFlow must not be imported to look at one of its errors.
    """
    if isinstance(error, RaytfError):
        return bool(error.context.get("collateral") or error.context.get("superseded"))
    if not type(error).__module__.startswith("tensorflow"):
        return False
    if type(error).__name__ in _COLLATERAL_TYPES:
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _COLLATERAL_TEXTS)


def plain(value: Any) -> Any:
    """A copy of plain containers in which everything that is not plain is replaced by its text."""
    if value is None or isinstance(value, bool | int | float | str):
        known = type(value) in (type(None), bool, int, float, str)
        return value if known else _to_plain_scalar(value)
    if isinstance(value, Mapping):
        return {k if isinstance(k, int | str) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and its other scalars
        return value.tolist()
    return str(value)


def _to_plain_scalar(value: Any) -> Any:
    for kind in (bool, int, float, str):  # NumPy's float64 is a float, an IntEnum is an int
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def describe(error: BaseException, rank: int, step: int | None = None) -> dict[str, Any]:
    """The record of an exception that left the user's code, TensorFlow or raytf on `rank`.

    Args:
        step: the last step that is known; an error that carries `raytf_step` knows better.
    """
    if isinstance(error, RaytfError):
        headline, text = error.message, ""
        kind, context = type(error).__name__, {**error.context}
        context.setdefault("rank", rank)
    else:
        step = getattr(error, "raytf_step", step)
        where = f" at step {step}" if step is not None else ""
        kind, text = "TrainingError", _traceback_text(error)
        headline = f"{type(error).__name__}{where}: {error}"
        context = {"rank": rank, "step": step, "error_type": _qualified(error), "traceback": text}
    return {
        "rank": rank,
        "type": kind if hasattr(errors, kind) else "RaytfError",
        "headline": headline,
        "traceback": text,
        "message": headline,
        "context": plain(context),
        "error_type": _qualified(error),
        "collateral": is_collateral(error),
    }


def _qualified(error: BaseException) -> str:
    kind = type(error)
    is_builtin = kind.__module__ == "builtins"
    return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"


def _traceback_text(error: BaseException) -> str:
    """The traceback without the frames of raytf and Ray that lead to the user's code."""
    seen = traceback.TracebackException.from_exception(error)
    frames = list(seen.stack)
    first = next(
        (i for i, f in enumerate(frames) if not any(h in f.filename for h in _HIDDEN_FRAMES)), 0
    )
    seen.stack = traceback.StackSummary.from_list(frames[first:])
    return "".join(seen.format()).rstrip()


def root_of(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The record that explains the others: the first that is no echo, else the first of all."""
    return next((r for r in records if not r["collateral"]), records[0] if records else None)


def to_error(record: dict[str, Any]) -> RaytfError:
    """The raytf error of one record."""
    kind = getattr(errors, record["type"], RaytfError)
    return kind(record["message"], **record["context"])


def merged(records: Sequence[dict[str, Any]]) -> RaytfError | None:
    """One error for several ranks: the root first, then who else failed and how.

    None without any record.
    """
    root = root_of(records)
    if root is None:
        return None
    same = sorted({r["rank"] for r in records if r["headline"] == root["headline"]})
    others = [r for r in records if r["headline"] != root["headline"]]
    kind = getattr(errors, root["type"], RaytfError)
    if issubclass(kind, TrainingError):
        message = f"{listed_ranks(same)} failed: {root['headline']}"
    else:
        message = root["headline"]
    if root["traceback"]:
        message += f"\n\n{root['traceback']}\n"
    for other in others:
        how = "followed" if other["collateral"] else "failed too"
        message += f"\nrank {other['rank']} {how}: {_first_line(other['headline'])}"
    if root["traceback"]:
        message += f"\n{_HINT}"
    return kind(message, **{**root["context"], "ranks": same})


def _first_line(text: str, limit: int = 200) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def from_ray(error: BaseException, records: Sequence[dict[str, Any]]) -> RaytfError:
    """The raytf error behind the error that Ray raised in the driver.

    A worker that was killed says nothing: its death is known from Ray only, and the others' aborted
    collectives are its echo.

    Args:
        error: WorkerGroupError, ControllerError or anything else that ended `fit()`; read by
            attribute, so that this module needs no Ray.
        records: what the workers of the last group reported.
    """
    known = list(records)
    reported = {r["rank"] for r in known}
    deaths: Mapping[int, BaseException] = getattr(error, "worker_failures", None) or {}
    for rank, death in sorted(deaths.items()):
        if rank not in reported:
            known.append(_death_record(rank, death))
    found = merged(known)
    if found is not None:
        return found
    cause = getattr(error, "controller_failure", None) or error
    return TrainingError(
        f"Ray ended the run: {_qualified(cause)}: {cause}",
        error_type=_qualified(cause),
        traceback=_traceback_text(cause),
    )


def said(fault: Mapping[str, Any]) -> str:
    """A fault and its answer in one line, ids of nodes shortened to what tells them apart."""
    summary, reason = str(fault["summary"]), str(fault["reason"])
    text = reason if reason.startswith(summary) else f"{summary}. {reason}"
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{48}\b", r"\1", text)


def with_decision(error: RaytfError, fault: Mapping[str, Any] | None) -> RaytfError:
    """The same error with what the run made of it: what failed in one line, why it stops."""
    if fault is None or fault["action"] != "stop":
        return error
    message = f"{error.message}\n\n{said(fault)}"
    return type(error)(message, **{**error.context, "fault": fault["kind"]})


def _death_record(rank: int, death: BaseException) -> dict[str, Any]:
    if isinstance(death, RaytfError):  # it left the worker but never reached the run actor
        return describe(death, rank)
    failure = getattr(death, "health_check_failure", None)
    if failure is None:  # raised outside of the session: Ray's or raytf's own code
        return describe(death, rank)
    headline = f"its process died. Ray says: {str(failure).strip()}"
    return {
        "rank": rank,
        "type": "TrainingError",
        "headline": headline,
        "traceback": "",
        "message": headline,
        "context": {"rank": rank, "error_type": _qualified(death)},
        "error_type": _qualified(death),
        "collateral": False,
    }
