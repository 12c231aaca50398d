"""Who has joined, which generation, who is missing: the rules by which ranks form a group.

Pure: no clock (time is an argument, in seconds), no Ray, no waiting. The run actor holds one
`Rendezvous`, asks it and waits; this module only answers with values.

Words: a *group* is one set of worker processes that Ray started together; Ray replaces all of them
after a failure. An *attempt* counts, within a group, the tries to bind ports. A *generation* is one
formed set of addresses and never comes twice in a run, over all groups and attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raytf.cluster.ranks import listed_ranks

__all__ = ["Rendezvous", "Verdict", "first_difference", "mismatch_text"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rank that asked has to do.

    Attributes:
        kind: "wait" (ask again when something changed), "formed" (go on with `generation` and
            `addresses`), "ready" (every rank has reported well), "again" (join with a new address)
            or "failed" (`error` says why).
        generation: of the formed group; 0 when there is none.
        addresses: `addresses[rank]` is that rank's `host:port`.
        error: type name, message and context of a raytf error, as plain data.
    """

    kind: Literal["wait", "formed", "ready", "again", "failed"]
    generation: int = 0
    addresses: tuple[str, ...] = ()
    error: dict[str, Any] | None = None


WAIT = Verdict(kind="wait")


def _failed(kind: str, message: str, **context: Any) -> Verdict:
    return Verdict(kind="failed", error={"type": kind, "message": message, "context": context})


@dataclass
class _Formed:
    """One generation: its addresses, who reported what, and since when it waits for reports."""

    generation: int
    attempt: int
    addresses: tuple[str, ...]
    since: float
    holds: dict[int, str | None] = field(default_factory=dict)  # rank -> None, or its trouble
    servers: dict[int, str | None] = field(default_factory=dict)  # rank -> None, or its trouble

    def held(self) -> bool:
        return len(self.holds) == len(self.addresses) and not any(self.holds.values())

    def up(self) -> bool:
        return len(self.servers) == len(self.addresses) and not any(self.servers.values())


@dataclass(kw_only=True)
class Rendezvous:
    """State of the start-up of one run.

    Args:
        num_workers: ranks in the group.
        startup_timeout_s: from the first rank that joined to the last, and again from the formed
            generation to the last server that is up.
        max_port_attempts: attempts of one group before its start-up counts as failed.
    """

    num_workers: int
    startup_timeout_s: float = 120.0
    max_port_attempts: int = 3
    group: str | None = None
    generation: int = 0
    attempt: int = 1
    _past: set[str] = field(default_factory=set)
    _joined: dict[int, str] = field(default_factory=dict)
    _since: float | None = None  # first join of this attempt
    _current: _Formed | None = None
    _formed: dict[int, _Formed] = field(default_factory=dict)  # of this group, by attempt

    def begin(self, group: str, now: float) -> None:
        """A new set of processes: forgets the old one, whose late calls are refused from now on."""
        if self.group is not None and self.group != group:
            self._past.add(self.group)
        self.group = group
        self.attempt = 1
        self._joined = {}
        self._since = now
        self._current = None
        self._formed = {}

    def is_new(self, group: str) -> bool:
        """Whether nothing has been heard of this group yet."""
        return group != self.group and group not in self._past

    def join(self, rank: int, group: str, attempt: int, address: str, now: float) -> Verdict:
        """Takes a rank's address for an attempt. The first join of an unknown group begins it."""
        if group in self._past:
            return self._superseded(rank)
        if group != self.group:
            self.begin(group, now)
        if not 0 <= rank < self.num_workers:
            return _failed(
                "RaytfError",
                f"rank {rank} joined a group of {self.num_workers}; a raytf bug.",
                rank=rank,
            )
        if attempt > self.attempt:
            self.attempt, self._joined, self._current = attempt, {}, None
        if attempt == self.attempt and self._current is None:
            if not self._joined:  # the limit runs from the first rank, not from process start
                self._since = now
            self._joined[rank] = address
            if len(self._joined) == self.num_workers:
                self._form(now)
        return self.joined(rank, group, attempt, now)

    def _form(self, now: float) -> None:
        self.generation += 1
        addresses = tuple(self._joined[r] for r in range(self.num_workers))
        self._current = _Formed(self.generation, self.attempt, addresses, now)
        self._formed[self.attempt] = self._current

    def joined(self, rank: int, group: str, attempt: int, now: float) -> Verdict:
        """What a rank that has joined does next."""
        if group != self.group:
            return self._superseded(rank)
        formed = self._formed.get(attempt)
        if formed is not None:  # also of an attempt that is over: its `reported` then says "again"
            return Verdict(kind="formed", generation=formed.generation, addresses=formed.addresses)
        if attempt < self.attempt:
            return _failed(
                "RaytfError",
                f"rank {rank} joined attempt {attempt} while the group is at {self.attempt}; a "
                "raytf bug.",
                rank=rank,
            )
        return self.overdue(now) or WAIT

    def hold(
        self, rank: int, group: str, generation: int, error: str | None, now: float
    ) -> Verdict:
        """Takes a rank's word, before any server starts, that its port is still its own."""
        formed = self._of(group, generation)
        if formed is not None:
            formed.holds[rank] = error
            if formed.held():
                formed.since = now  # the servers get the whole limit
        return self.held(rank, group, generation, now)

    def held(self, rank: int, group: str, generation: int, now: float) -> Verdict:
        """What a rank that has reported its port does next."""
        formed = self._of(group, generation)
        if formed is None:
            return self._again_or_superseded(rank, group)
        if any(error is not None for error in formed.holds.values()):
            if formed.attempt >= self.max_port_attempts:
                return self._ports_used_up(formed)
            return Verdict(kind="again")
        if formed.held():
            return Verdict(kind="ready", generation=generation, addresses=formed.addresses)
        return self.overdue(now) or WAIT

    def report(
        self, rank: int, group: str, generation: int, error: str | None, now: float
    ) -> Verdict:
        """Takes a rank's word that its server is up (error None) or why it is not."""
        formed = self._of(group, generation)
        if formed is not None:
            formed.servers[rank] = error
        return self.reported(rank, group, generation, now)

    def reported(self, rank: int, group: str, generation: int, now: float) -> Verdict:
        """What a rank that has reported its server does next."""
        formed = self._of(group, generation)
        if formed is None:
            return self._again_or_superseded(rank, group)
        broken = {r: e for r, e in sorted(formed.servers.items()) if e is not None}
        if broken:
            return self._broken_servers(formed, broken)
        if formed.up():
            return Verdict(kind="ready", generation=generation, addresses=formed.addresses)
        return self.overdue(now) or WAIT

    def _of(self, group: str, generation: int) -> _Formed | None:
        formed = self._current
        if group != self.group or formed is None or formed.generation != generation:
            return None
        return formed

    def _again_or_superseded(self, rank: int, group: str) -> Verdict:
        return self._superseded(rank) if group != self.group else Verdict(kind="again")

    def deadline(self) -> float | None:
        """When the current wait ends in an error; None while nothing is awaited."""
        formed = self._current
        if formed is None:
            return None if self._since is None else self._since + self.startup_timeout_s
        return None if formed.up() else formed.since + self.startup_timeout_s

    def overdue(self, now: float) -> Verdict | None:
        """The start-up error once the limit has passed, naming who is missing; None before that.

        Asked by the ranks that wait and by the driver: ranks whose thread is stuck inside
        TensorFlow never ask.
        """
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return None
        return self._missing_joins() if self._current is None else self._missing_servers()

    def _superseded(self, rank: int) -> Verdict:
        return _failed(
            "StartupError",
            f"rank {rank} belongs to a worker group that has been replaced; this process should "
            "have ended.",
            rank=rank,
            superseded=True,
        )

    def _missing_joins(self) -> Verdict:
        missing = [r for r in range(self.num_workers) if r not in self._joined]
        known = ", ".join(f"rank {r} at {a}" for r, a in sorted(self._joined.items())) or "nobody"
        return _failed(
            "StartupError",
            f"{listed_ranks(missing)} of {self.num_workers} did not join within "
            f"{self.startup_timeout_s:g} s. Joined: {known}. Look at the log of the missing "
            "process (`ray logs`), or raise CommunicationConfig(startup_timeout_s=...) if its "
            "machine is just slow.",
            missing_ranks=missing,
            addresses=dict(self._joined),
        )

    def _missing_servers(self) -> Verdict:
        formed = self._current
        if formed is None:
            return self._missing_joins()
        reports = formed.servers if formed.held() else formed.holds
        missing = [r for r in range(self.num_workers) if r not in reports]
        where = ", ".join(f"rank {r} at {formed.addresses[r]}" for r in missing)
        return _failed(
            "StartupError",
            f"The server of {where} did not come up within {self.startup_timeout_s:g} s "
            f"(addresses: {', '.join(formed.addresses)}). Check that the workers reach each other "
            "at these addresses (firewall, several network interfaces), or raise "
            "CommunicationConfig(startup_timeout_s=...).",
            missing_ranks=missing,
            addresses=dict(enumerate(formed.addresses)),
        )

    def _broken_servers(self, formed: _Formed, broken: dict[int, str]) -> Verdict:
        texts = "; ".join(f"rank {r} at {formed.addresses[r]}: {e}" for r, e in broken.items())
        return _failed(
            "StartupError",
            f"A server could not start: {texts}.",
            ranks=list(broken),
            addresses=dict(enumerate(formed.addresses)),
        )

    def _ports_used_up(self, formed: _Formed) -> Verdict:
        errors = {r: e for r, e in sorted(formed.holds.items()) if e is not None}
        texts = "; ".join(f"rank {r} at {formed.addresses[r]}: {e}" for r, e in errors.items())
        return _failed(
            "StartupError",
            f"The workers found no free ports in {formed.attempt} attempts. Last: {texts}. "
            "Something on these hosts takes ports as fast as raytf finds them; raise "
            "CommunicationConfig(max_port_attempts=...).",
            ranks=list(errors),
            addresses=dict(enumerate(formed.addresses)),
        )


_NOTHING = "nothing"


def first_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """First place where two signatures differ: (path, value in a, value in b).

    A signature is made of nested dicts, lists and plain values. A dict that has a "path" (or
    "name") entry is named by it, so that a variable is called by its own path rather than by its
    number.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            found = first_difference(
                a.get(key, _NOTHING), b.get(key, _NOTHING), _joined_path(path, key)
            )
            if found:
                return found
        return None
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for i in range(max(len(a), len(b))):
            left = a[i] if i < len(a) else _NOTHING
            right = b[i] if i < len(b) else _NOTHING
            if left != right:
                label = _label(left) or _label(right)
                if label is not None and _label(left) != _label(right):
                    return _joined_path(path, str(i)), left, right
                if label is None and not (
                    isinstance(left, dict | list | tuple) and isinstance(right, type(left))
                ):
                    return path or str(i), a, b  # a plain list such as a shape is shown whole
                return first_difference(
                    left, right, _joined_path(path, label if label is not None else i)
                )
        return None
    return None if a == b else (path, a, b)


def _label(value: Any) -> str | None:
    if isinstance(value, dict):
        for key in ("path", "name"):
            if isinstance(value.get(key), str):
                return value[key]
    return None


def _joined_path(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def mismatch_text(signatures: dict[int, Any]) -> str | None:
    """What to tell about ranks whose signatures differ from rank 0's; None when all are equal."""
    ranks = sorted(signatures)
    for rank in ranks[1:]:
        found = first_difference(signatures[ranks[0]], signatures[rank])
        if found:
            path, ours, theirs = found
            others = [r for r in ranks[1:] if signatures[r] != signatures[ranks[0]]]
            return (
                f"build_model gave different models: at {path!r} rank {ranks[0]} has "
                f"{_short(ours)} and rank {rank} has {_short(theirs)} ({listed_ranks(others)} of "
                f"{len(ranks)} differ from rank {ranks[0]}). build_model must give the same model "
                "on every worker: take sizes and vocabularies from `config`, not from files, "
                "environment or random numbers of one machine."
            )
    return None


def _short(value: Any, limit: int = 200) -> str:
    text = str(value) if value == _NOTHING else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
