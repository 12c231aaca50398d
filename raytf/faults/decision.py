"""What was decided, and the past of a run as far as decisions rest on it. Pure values.

Owns what counts as progress. The rules themselves belong to `policy`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from raytf.faults.fault import Fault

__all__ = ["Action", "Counted", "Decision", "History", "Past"]

Action = Literal["restart", "stop", "replace", "rollback", "skip_batch", "continue"]
Counted = Literal["failure", "preemption", "none"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do.

    Attributes:
        action: "restart": all workers anew; "replace": the survivors go on in place; "rollback":
            from the newest good state; "skip_batch": the same, without the batch `skip_step`;
            "stop"; "continue": nothing.
        reason: a sentence for people.
        delay_s: seconds to wait before it.
        counts_as: the budget that it is charged to.
        exclude_node: the culprit's node, if it is to be avoided from now on.
        skip_step: the step whose batch is left out.
        root_text: of the fault, where the run stops: shown before `reason`.
    """

    action: Action
    reason: str
    delay_s: float = 0.0
    counts_as: Counted = "none"
    exclude_node: str | None = None
    skip_step: int | None = None
    root_text: str = ""

    @property
    def message(self) -> str:
        """The reason, with what the culprit said before it."""
        return f"{self.root_text.rstrip()}\n\n{self.reason}" if self.root_text else self.reason


@dataclass(frozen=True, kw_only=True)
class Past:
    """A fault that was answered.

    Attributes:
        fault: the fault.
        reached: steps completed in the run when it happened.
        time: of it, in seconds.
        attempt: in which it happened.
        action, counts_as, skip_step: of the answer.
    """

    fault: Fault
    reached: int
    time: float
    attempt: int
    action: Action
    counts_as: Counted
    skip_step: int | None = None


@dataclass(frozen=True)
class History:
    """All answered faults of a run, oldest first. A value: `after` gives a new one."""

    past: tuple[Past, ...] = ()

    def after(
        self, fault: Fault, decision: Decision, *, reached: int, time: float, attempt: int
    ) -> History:
        """The history with one more fault and its answer."""
        entry = Past(
            fault=fault,
            reached=reached,
            time=time,
            attempt=attempt,
            action=decision.action,
            counts_as=decision.counts_as,
            skip_step=decision.skip_step,
        )
        return replace(self, past=(*self.past, entry))

    def count(self, counts_as: Counted) -> int:
        """How many were charged to a budget."""
        return sum(p.counts_as == counts_as for p in self.past)

    def acted(self, *actions: Action) -> int:
        """How many were answered by one of these actions."""
        return sum(p.action in actions for p in self.past)

    @property
    def best(self) -> int:
        """Most steps completed before any of the faults."""
        return max((p.reached for p in self.past), default=0)

    def stuck(self, reached: int) -> int:
        """Attempts in a row, the present one included, that reached no new step.

        Preemptions tell nothing about the run and are left out.
        """
        best, stuck = 0, 0
        for past in self.past:
            if past.counts_as == "preemption":
                continue
            stuck = 0 if past.reached > best else stuck + 1
            best = max(best, past.reached)
            if past.action in ("rollback", "skip_batch"):  # steps are taken again on purpose
                best, stuck = 0, 0
        stuck = 0 if reached > best else stuck + 1
        best = max(best, reached)
        # The attempt that came furthest is the first of those that ended there.
        return stuck + (1 if stuck and best > 0 else 0)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values; `from_json` reads them."""
        return [asdict(p) | {"fault": p.fault.to_json()} for p in self.past]

    @classmethod
    def from_json(cls, told: list[dict[str, Any]]) -> History:
        """Reads `to_json`'s values."""
        known = Past.__dataclass_fields__
        past: list[Past] = []
        for entry in told:
            values: dict[str, Any] = {k: v for k, v in entry.items() if k in known}
            values["fault"] = Fault.from_json(entry["fault"])
            past.append(Past(**values))
        return cls(tuple(past))
