"""Which process holds a run: its name in the lease, and whether it is known to be dead.

Owns the content of `lease.json` and everything that asks the operating system about processes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import zlib
from dataclasses import asdict, dataclass
from typing import Any, cast

__all__ = ["Holder", "Process", "is_dead"]


@dataclass(frozen=True)
class Process:
    """Which process on which host.

    Attributes:
        host: its name.
        boot: id of this start of its kernel; None where there is none to read.
        space: in which process ids count (containers have their own); None where unknown.
        pid: its process id.
        started: when it started, in the kernel's ticks; None where unknown.
    """

    host: str
    boot: str | None
    space: str | None
    pid: int
    started: int | None

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        boot = _read_text("/proc/sys/kernel/random/boot_id")
        try:
            space = os.readlink("/proc/self/ns/pid")
        except OSError:  # no Linux
            space = None
        _, started = _look_up(pid)
        return cls(socket.gethostname(), boot, space, pid, started)


@dataclass(frozen=True)
class Holder(Process):
    """What `lease.json` says.

    Attributes:
        attempt: number of this attempt at the run, from 1.
        owner: random, new for each attempt.
        count: renewals by now.
        released: whether the owner has let go.
        since: when it was taken; `time`: last renewed. Both UTC, for people only.
    """

    attempt: int
    owner: str
    count: int
    released: bool
    since: str
    time: str

    @classmethod
    def of(cls, process: Process, *, attempt: int, owner: str, since: str) -> Holder:
        """The process as a holder that has just taken the run."""
        return cls(
            host=process.host,
            boot=process.boot,
            space=process.space,
            pid=process.pid,
            started=process.started,
            attempt=attempt,
            owner=owner,
            count=0,
            released=False,
            since=since,
            time=since,
        )

    def encode(self) -> bytes:
        fields = asdict(self)
        # The attempt first: the part of a torn file that is needed.
        return json.dumps({"attempt": fields.pop("attempt"), **fields}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder:
        """Reads it; a file that is torn, or not ours, becomes a holder that never moves and so
        expires.
        """
        try:
            fields = cast("dict[str, Any]", json.loads(data))
            return cls(
                host=str(fields["host"]),
                boot=fields["boot"],
                space=fields["space"],
                pid=int(fields["pid"]),
                started=fields["started"],
                attempt=int(fields["attempt"]),
                owner=str(fields["owner"]),
                count=int(fields["count"]),
                released=fields["released"] is True,
                since=str(fields["since"]),
                time=str(fields["time"]),
            )
        except (ValueError, TypeError, KeyError):
            attempt = re.search(rb'"attempt": ([0-9]+)', data)
            mark = f"unreadable-{zlib.crc32(data):08x}"
            number = int(attempt[1]) if attempt else 0
            return cls("unknown", None, None, 0, None, number, mark, 0, False, "unknown", "unknown")


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _look_up(pid: int) -> tuple[bool, int | None]:
    """Whether the process is there and alive, and when it started (None: cannot be known)."""
    text = _read_text(f"/proc/{pid}/stat")
    if text is not None:
        # The name, in brackets, may hold anything; the fields behind it are fixed. A zombie has
        # done its last deed.
        fields = text.rpartition(")")[2].split()
        return fields[0] not in "ZX", int(fields[19])
    if os.path.exists("/proc/self/stat"):
        return False, None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False, None
    except PermissionError:
        return True, None
    return True, None


def is_dead(holder: Process, here: Process) -> bool:
    """Whether the holder is known to be dead: it ran on this host, in the same space of process
    ids, and its process is gone, or another one has its number.
    """
    places = [(p.host, p.boot, p.space) for p in (holder, here)]
    if places[0] != places[1]:
        return False
    alive, started = _look_up(holder.pid)
    return not alive or (holder.started is not None and started != holder.started)
