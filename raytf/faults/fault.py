"""One fault: its kind, its culprit, what it rests on. Pure values, which survive JSON.

Owns the taxonomy. How a fault is found in evidence belongs to `classify`, what is done about it to
`policy`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["SAID", "Fault", "FaultKind"]


class FaultKind(StrEnum):
    """What happened, from the most to the least telling."""

    SUPERSEDED = "superseded"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    DIVERGENCE = "divergence"
    NAN = "nan"
    OOM = "oom"
    SEGFAULT = "segfault"
    KILLED = "killed"
    EXITED = "exited"
    HANG = "hang"  # after deaths: who waits for a dead rank looks hung
    USER_ERROR = "user_error"
    TENSORFLOW_ERROR = "tensorflow_error"
    STORAGE = "storage"
    STARTUP = "startup"
    UNKNOWN = "unknown"
    COLLECTIVE = "collective"  # a victim only


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happened.
        rank: the culprit; None if there is none, or it cannot be known.
        ranks: all that failed in this way by themselves, the culprit included (node loss takes
            several).
        node, pid, step, phase: of the culprit, at that moment.
        hardware_like: whether the machine may be at fault: counted against its node.
        error_type: name of the error that was raised (`ValueError`, `ConfigError`).
        root_text: what the culprit said, its traceback if there is one.
        evidence: what the verdict rests on, for people.
        victims: ranks that only suffered.
    """

    kind: FaultKind
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    node: str | None = None
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    hardware_like: bool = False
    error_type: str | None = None
    root_text: str = ""
    evidence: tuple[str, ...] = ()
    victims: tuple[int, ...] = ()

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for two faults with the same root: kind, type of error, where it was raised."""
        frames = re.findall(r'^\s*File "([^"]+)", line (\d+)', self.root_text, re.MULTILINE)
        if frames:
            where = (*frames[0], *frames[-1])
        else:
            first = self.root_text.strip().splitlines()[:1]
            where = tuple(re.sub(r"0x[0-9a-fA-F]+|\d+", "#", line) for line in first)
        return str(self.kind), self.error_type or "", *where

    def summary(self) -> str:
        """`rank 1 on node ab12 was killed at step 30 (phase step)`."""
        who = "the run" if self.rank is None else f"rank {self.rank}"
        if len(self.ranks) > 1:
            who = f"ranks {', '.join(map(str, self.ranks))}"
        where = f" on node {self.node}" if self.node else ""
        at = f" at step {self.step}" if self.step is not None else ""
        phase = f" (phase {self.phase})" if self.phase else ""
        return f"{who}{where} {SAID[self.kind]}{at}{phase}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Fault:
        """Reads `to_json`'s values; a kind of a newer version is unknown."""
        values = {k: v for k, v in told.items() if k in cls.__dataclass_fields__}
        for name in ("ranks", "evidence", "victims"):
            values[name] = tuple(values.get(name) or ())
        kind = str(values.get("kind"))
        values["kind"] = FaultKind(kind) if kind in _KIND_NAMES else FaultKind.UNKNOWN
        return cls(**values)


_KIND_NAMES = frozenset(map(str, FaultKind))
SAID = {
    FaultKind.SUPERSEDED: "was superseded by another attempt",
    FaultKind.PREEMPTED: "was preempted",
    FaultKind.NODE_LOST: "was lost with its node",
    FaultKind.DIVERGENCE: "holds other weights than the rest",
    FaultKind.NAN: "computed a loss or gradient that is no number",
    FaultKind.HANG: "hung",
    FaultKind.OOM: "ran out of memory",
    FaultKind.SEGFAULT: "crashed",
    FaultKind.KILLED: "was killed",
    FaultKind.EXITED: "exited",
    FaultKind.USER_ERROR: "raised an error",
    FaultKind.TENSORFLOW_ERROR: "raised an error in TensorFlow",
    FaultKind.STORAGE: "could not use the store",
    FaultKind.STARTUP: "did not come up",
    FaultKind.UNKNOWN: "failed for an unknown reason",
    FaultKind.COLLECTIVE: "failed in a collective, and nobody is known to have caused it",
}
