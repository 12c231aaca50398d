"""Which nodes a run stays away from: faults per node, fading with time; probation and return. Pure.

Owns the count and the rule. A `NodeBook` is a value: every change gives a new one, and it survives
a driver restart as JSON. Times are UTC seconds since the epoch, because they outlive processes.
Carrying an exclusion out (label selectors) is the cluster's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

__all__ = ["NodeBook", "NodeDecision", "NodeState"]

_MAX_PROBATION_FACTOR = 16  # each exclusion lasts twice as long as the one before, up to this


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What is remembered of one node.

    Attributes:
        score: its faults, each halved once per half-life, as of `at`.
        at: of the last change, in seconds.
        faults: all of them, never fading; for people.
        excluded_until: None: not excluded.
        probation_until: one more fault before that excludes it again. None: no probation.
        exclusions: how often it was excluded.
        is_open: whether it had a fault that no decision has answered yet.
    """

    score: float = 0.0
    at: float = 0.0
    faults: int = 0
    excluded_until: float | None = None
    probation_until: float | None = None
    exclusions: int = 0
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeDecision:
    """What to do about one node.

    Attributes:
        action: "exclude", "readmit", or "keep": it ought to be excluded but cannot be.
        node: its id.
        reason: a sentence for people.
        until: end of the exclusion, in seconds; None for the other actions.
    """

    action: Literal["exclude", "readmit", "keep"]
    node: str
    reason: str
    until: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeBook:
    """Faults of nodes and who is excluded.

    Attributes:
        max_faults: hardware-like faults close together after which a node is excluded
            (`RecoveryConfig.max_node_faults`); "close" is within about a half-life.
        half_life_s: seconds in which a fault's weight halves.
        probation_s: how long a first exclusion lasts, and the probation behind it.
        nodes: state by node id; nodes without faults are not in it.
    """

    max_faults: int = 2
    half_life_s: float = 3600.0
    probation_s: float = 3600.0
    nodes: Mapping[str, NodeState] = field(default_factory=dict[str, NodeState])

    def record(self, node: str, now: float) -> NodeBook:
        """The book with one more hardware-like fault of a node."""
        state = self.nodes.get(node, NodeState(at=now))
        state = replace(
            state,
            score=self.score(node, now) + 1.0,
            at=max(now, state.at),
            faults=state.faults + 1,
            is_open=True,
        )
        return self._with(node, state)

    def score(self, node: str, now: float) -> float:
        """Its faults, faded to `now`."""
        state = self.nodes.get(node)
        if state is None:
            return 0.0
        age = max(0.0, now - state.at)  # a clock set back makes nothing worse
        return state.score * 0.5 ** (age / self.half_life_s)

    def excluded(self) -> frozenset[str]:
        """Nodes to stay away from, as of the last `settle`."""
        return frozenset(n for n, s in self.nodes.items() if s.excluded_until is not None)

    def settle(
        self, now: float, num_workers: int, capacity: Mapping[str, int] | None = None
    ) -> tuple[NodeBook, tuple[NodeDecision, ...]]:
        """Decides about all nodes; the book after it, and what changed.

        Args:
            now: seconds.
            num_workers: places that the run needs.
            capacity: node id -> how many of this run's workers it could hold, excluded nodes
                included. None: not known, or nodes come on demand; then nothing keeps a node in.
        """
        book, decisions = self, list[NodeDecision]()
        for node, state in sorted(self.nodes.items()):
            if state.excluded_until is not None and now >= state.excluded_until:
                book, decision = book._readmitted(node, now, "its exclusion has ended")
                decisions.append(decision)
        book, needed = book._readmit_what_is_needed(now, num_workers, capacity)
        decisions += needed
        for node in sorted(n for n, s in book.nodes.items() if s.is_open):
            book, decision = book._judged(node, now, num_workers, capacity)
            if decision is not None:
                decisions.append(decision)
        return book, tuple(decisions)

    def _judged(
        self, node: str, now: float, num_workers: int, capacity: Mapping[str, int] | None
    ) -> tuple[NodeBook, NodeDecision | None]:
        state, score = self.nodes[node], self.score(node, now)
        if state.excluded_until is not None:  # the echo of what it was excluded for
            return self._with(node, replace(state, is_open=False)), None
        on_probation = state.probation_until is not None and now < state.probation_until
        # Half a fault of slack: of two faults, the first has faded by the time of the second.
        if not on_probation and score < self.max_faults - 0.5:
            return self._with(node, replace(state, is_open=False)), None
        why = f"{state.faults} hardware-like faults, {score:.1f} of them recent"
        if on_probation:
            why = f"a fault during its probation ({why})"
        left = self._places_without(self.excluded() | {node}, capacity)
        if left is not None and left < num_workers:
            reason = (
                f"node {node} has had {why}, but without it only {left} of {num_workers} workers "
                "would have a place: it stays in use"
            )
            kept = self._with(node, replace(state, is_open=False))
            return kept, NodeDecision(action="keep", node=node, reason=reason)
        length = self.probation_s * min(2**state.exclusions, _MAX_PROBATION_FACTOR)
        until = now + length
        excluded = replace(
            state,
            excluded_until=until,
            probation_until=None,
            exclusions=state.exclusions + 1,
            is_open=False,
        )
        reason = f"node {node} has had {why}: it is left out for {length / 60:.0f} minutes"
        decision = NodeDecision(action="exclude", node=node, reason=reason, until=until)
        return self._with(node, excluded), decision

    def _readmit_what_is_needed(
        self, now: float, num_workers: int, capacity: Mapping[str, int] | None
    ) -> tuple[NodeBook, list[NodeDecision]]:
        book, decisions = self, list[NodeDecision]()
        while True:
            left = book._places_without(book.excluded(), capacity)
            if left is None or left >= num_workers:
                return book, decisions
            present = [n for n in book.excluded() if (capacity or {}).get(n, 0) > 0]
            if not present:
                return book, decisions
            node = min(present, key=lambda n: (book.score(n, now), n))
            reason = f"only {left} of {num_workers} workers have a place elsewhere"
            book, decision = book._readmitted(node, now, reason)
            decisions.append(decision)

    def _readmitted(self, node: str, now: float, why: str) -> tuple[NodeBook, NodeDecision]:
        state = self.nodes[node]
        back = replace(
            state,
            score=self.score(node, now),
            at=max(now, state.at),
            excluded_until=None,
            probation_until=now + self.probation_s,
            is_open=False,
        )
        reason = f"node {node} may be used again, on probation: {why}"
        return self._with(node, back), NodeDecision(action="readmit", node=node, reason=reason)

    def _places_without(
        self, nodes: frozenset[str], capacity: Mapping[str, int] | None
    ) -> int | None:
        if capacity is None:
            return None
        return sum(places for node, places in capacity.items() if node not in nodes)

    def _with(self, node: str, state: NodeState) -> NodeBook:
        return replace(self, nodes={**self.nodes, node: state})

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them."""
        return {
            "max_faults": self.max_faults,
            "half_life_s": self.half_life_s,
            "probation_s": self.probation_s,
            "nodes": {node: asdict(state) for node, state in self.nodes.items()},
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> NodeBook:
        """Reads `to_json`'s values; what a newer version added is left out."""
        known = NodeState.__dataclass_fields__
        states: Mapping[str, Mapping[str, Any]] = told["nodes"]
        return cls(
            max_faults=told["max_faults"],
            half_life_s=told["half_life_s"],
            probation_s=told["probation_s"],
            nodes={
                node: NodeState(**{k: v for k, v in state.items() if k in known})
                for node, state in states.items()
            },
        )
