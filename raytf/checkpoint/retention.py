"""Which checkpoints are kept. A pure rule: no clock, no files.

Owns the decision only; deleting, and telling what is pinned or being read, is the store's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raytf.errors import ConfigError

__all__ = ["Record", "Rule", "best_steps", "to_delete"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What survives is the union of what each part keeps; with no part set, everything does.

    Attributes:
        keep_last: the newest so many.
        keep_best: name of a metric: the checkpoints with its best values.
        best_mode: which values are best.
        num_best: how many of these.
        keep_every: every step that is a multiple of this.
    """

    keep_last: int | None = None
    keep_best: str | None = None
    best_mode: Literal["min", "max"] = "min"
    num_best: int = 1
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, or None. Received: {value}.")
        if self.num_best < 1:
            raise ConfigError(f"num_best must be at least 1. Received: {self.num_best}.")
        if self.best_mode not in ("min", "max"):
            raise ConfigError(f"best_mode must be 'min' or 'max'. Received: {self.best_mode!r}.")

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None and self.keep_best is None and self.keep_every is None


@dataclass(frozen=True, kw_only=True)
class Record:
    """A committed checkpoint as the rule sees it."""

    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pinned: bool = False
    reading: bool = False


def best_steps(records: Sequence[Record], metric: str, mode: str, number: int = 1) -> list[int]:
    """The steps with the best values of `metric`, best first; of equal ones the earlier first.

    NaN is never best, and neither is a checkpoint without the metric. Fewer than `number`, or none,
    if there are no more with a value.
    """
    sign = -1.0 if mode == "max" else 1.0
    found: list[tuple[float, int]] = []
    for record in records:
        value = record.metrics.get(metric)
        if isinstance(value, int | float) and not math.isnan(value):
            found.append((sign * value, record.step))
    return [step for _, step in sorted(found)[:number]]


def to_delete(kept: Sequence[Record], rule: Rule) -> list[int]:
    """The steps that may go, ascending.

    The newest never does, nor one that is pinned or being read. With only `keep_best` or only
    `keep_every`, those and the newest stay.
    """
    if rule.keeps_all or not kept:
        return []
    ordered = sorted(kept, key=lambda record: record.step)
    stay = {ordered[-1].step}
    stay.update(record.step for record in ordered if record.pinned or record.reading)
    if rule.keep_last is not None:
        stay.update(record.step for record in ordered[-rule.keep_last :])
    if rule.keep_best is not None:
        stay.update(best_steps(ordered, rule.keep_best, rule.best_mode, rule.num_best))
    if rule.keep_every is not None:
        stay.update(record.step for record in ordered if record.step % rule.keep_every == 0)
    return [record.step for record in ordered if record.step not in stay]
