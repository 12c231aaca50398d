"""Whether two runs ended in the same state, and where they first differ if not.

Pure but for reading the two stores. What must differ (who wrote it, when, in which attempt) is left
out; all else counts, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytf.checkpoint.manifest import Manifest
    from raytf.checkpoint.store import CheckpointStore

__all__ = ["first_difference", "of_reports", "of_stores"]

# Of a job's JSON line: what a run that was broken tells of that, and times and places.
_OWN = (
    "run",
    "seconds",
    "restarts",
    "generations",
    "process_restarts",
    "lost_steps",
    "replayed_steps",
)
_FIELDS = ("step", "epoch", "position", "world_size", "threads", "metrics", "best", "fingerprint")


def of_reports(unbroken: Mapping[str, Any], broken: Mapping[str, Any]) -> str | None:
    """The first difference between the JSON lines of two jobs; None if there is none."""
    mine, other = (
        {key: value for key, value in report.items() if key not in _OWN}
        for report in (unbroken, broken)
    )
    return first_difference(mine, other, "the job's JSON line: ")


def of_stores(unbroken: CheckpointStore, broken: CheckpointStore) -> str | None:
    """The first difference between the newest checkpoints of two runs; None if there is none.

    Raises:
        NotFoundError: a run has no checkpoint.
        CheckpointDamagedError: bytes are bad and there is no other copy.
    """
    from raytf.errors import NotFoundError

    steps = [store.latest() for store in (unbroken, broken)]
    for store, step in zip((unbroken, broken), steps, strict=True):
        if step is None:
            raise NotFoundError(f"{store.url} holds no checkpoint.", path=store.url)
    if steps[0] != steps[1]:
        return f"newest checkpoint: step {steps[0]} unbroken, step {steps[1]} broken"
    step = int(steps[0] or 0)
    found = _of_manifests(unbroken.manifest(step), broken.manifest(step))
    return found or _of_tensors(unbroken, broken, step)


def _of_manifests(mine: Manifest, other: Manifest) -> str | None:
    for name in _FIELDS:
        found = first_difference(getattr(mine, name), getattr(other, name), f"manifest.{name}")
        if found:
            return found
    return first_difference(_state(mine), _state(other), "manifest.state")


def _state(manifest: Manifest) -> dict[str, Any]:
    """The rest of the state, each rank's own in full."""
    state = dict(manifest.state)
    own, of_rank = state.pop("own", []), state.pop("own_of_rank", [])
    return state | {"rank": {str(rank): own[index] for rank, index in enumerate(of_rank)}}


def _of_tensors(unbroken: CheckpointStore, broken: CheckpointStore, step: int) -> str | None:
    kinds = [
        {t.name: f"{t.dtype}{list(t.shape)}" for t in store.manifest(step).tensors}
        for store in (unbroken, broken)
    ]
    found = first_difference(kinds[0], kinds[1], "tensors: ")
    if found:
        return found
    for name in sorted(kinds[0]):  # one at a time: two whole states may not fit into memory
        mine = unbroken.read(step, [name])[name]
        other = broken.read(step, [name])[name]
        if mine.tobytes() != other.tobytes():
            return f"tensor {name} {kinds[0][name]}: {_where(mine, other)}"
    return None


def _where(mine: Any, other: Any) -> str:
    """The first of the elements whose bytes differ, and how many do."""
    import numpy as np

    def rows(array: Any) -> Any:
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return raw.reshape(-1, array.dtype.itemsize)

    unequal = (rows(mine) != rows(other)).any(axis=1)
    index = int(unequal.argmax())
    place = [int(i) for i in np.unravel_index(index, mine.shape)]
    return (
        f"{int(unequal.sum())} of {unequal.size} elements differ; the first, {place}, is "
        f"{mine.reshape(-1)[index]!r} unbroken and {other.reshape(-1)[index]!r} broken"
    )


def first_difference(mine: Any, other: Any, path: str) -> str | None:
    """Where two JSON values first differ, as a path with both values; None if they do not.

    Types count, and so does the sign of zero; NaN equals NaN.
    """
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        for key in [*mine, *(k for k in other if k not in mine)]:
            deeper = f"{path}.{key}" if not path.endswith(" ") else f"{path}{key}"
            if key not in mine or key not in other:
                return _told(deeper, mine.get(key, "nothing"), other.get(key, "nothing"))
            found = first_difference(mine[key], other[key], deeper)
            if found:
                return found
        return None
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple):
        for index, (left, right) in enumerate(zip(mine, other, strict=False)):
            found = first_difference(left, right, f"{path}[{index}]")
            if found:
                return found
        if len(mine) != len(other):
            return _told(f"{path} has a length of", len(mine), len(other))
        return None
    return None if _same(mine, other) else _told(path, mine, other)


def _same(mine: Any, other: Any) -> bool:
    if type(mine) is not type(other):
        return False
    if isinstance(mine, float):
        if math.isnan(mine) or math.isnan(other):
            return math.isnan(mine) and math.isnan(other)
        return mine == other and math.copysign(1, mine) == math.copysign(1, other)
    return bool(mine == other)


def _told(path: str, mine: Any, other: Any) -> str:
    shown = [text if len(text := repr(v)) <= 200 else text[:200] + "..." for v in (mine, other)]
    return f"{path}: {shown[0]} unbroken, {shown[1]} broken"
