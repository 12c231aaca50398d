"""Who may write to a run: a lease in its directory keeps two drivers off it.

Owns `lease.json`. Clocks of two hosts are never compared: whether a holder lives is judged by
whether its counter moves while our own clock runs. Not every store can swap a file atomically, so
for a moment two could believe that they hold it; therefore who commits reads it again first
(`Lease.check`, `check_attempt`), and of two attempts the higher one holds, whoever wrote last: a
process that slept through its own expiry in the middle of a renewal cannot take the run back.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from raytf.checkpoint.holder import Holder, Process, is_dead
from raytf.checkpoint.storage import Storage
from raytf.errors import NotFoundError, RaytfError, RunInUseError, StorageError, SupersededError

__all__ = [
    "EXPIRES_S",
    "LEASE",
    "RENEW_S",
    "WAIT_S",
    "Lease",
    "check_attempt",
    "judge",
    "read_holder",
]

logger = logging.getLogger("raytf")

LEASE = "lease.json"
RENEW_S = 3.0
EXPIRES_S = 15.0
WAIT_S = 20.0
_POLL_S = 0.5
_SETTLE_S = 0.3  # from writing to reading back: two takers at once see each other


def judge(
    mine: str,
    seen: Holder | None,
    previous: Holder | None,
    unseen_s: float,
    waited_s: float,
    is_dead: bool,
) -> Literal["take", "wait", "refuse"]:
    """What somebody who wants the run does next.

    Args:
        mine: our own id.
        seen: the lease as it is now; None: there is none.
        previous: as it was when we began to wait; None: we have not waited yet, or there was none.
        unseen_s: seconds, by our own clock, since its owner or count last changed.
        waited_s: seconds since we began to wait.
        is_dead: whether its process is known to be gone.
    """
    if seen is None or seen.released or seen.owner == mine or is_dead:
        return "take"
    if unseen_s >= EXPIRES_S:
        return "take"
    renewed = _state(seen) != _state(previous)
    return "refuse" if waited_s >= WAIT_S and renewed else "wait"


def read_holder(storage: Storage) -> Holder | None:
    """Who holds the run in `storage`, or held it last; None: nobody ever did.

    Raises:
        StorageError: the store does not answer.
    """
    try:
        return Holder.decode(storage.read_bytes(LEASE))
    except (FileNotFoundError, NotFoundError):
        return None
    except RaytfError:
        raise
    except Exception as error:
        path = storage.join(LEASE).url
        raise StorageError(
            f"The lease of the run, {path}, cannot be read: {error}. Check that the storage can be "
            "reached.",
            path=path,
        ) from error


def check_attempt(storage: Storage, attempt: int, owner: str) -> None:
    """Makes sure that the run is still this attempt's; for processes that have no Lease object.

    Raises:
        SupersededError: another attempt has taken the run over.
        StorageError: the store does not answer.
    """
    seen = read_holder(storage)
    if seen is not None and _beats(seen, attempt, owner):
        raise SupersededError(
            f"Attempt {seen.attempt} (process {seen.pid} on {seen.host}) has taken over the run in "
            f"{storage.url}; this is attempt {attempt}, which must not write there any more. If "
            "both were started on purpose, give them different names.",
            path=storage.url,
            attempt=attempt,
            by=seen.attempt,
        )


def _beats(seen: Holder, attempt: int, owner: str) -> bool:
    return seen.owner != owner and seen.attempt >= attempt


def _write(storage: Storage, holder: Holder) -> None:
    try:
        storage.write_bytes(holder.encode(), LEASE)
    except RaytfError:
        raise
    except Exception as error:
        path = storage.join(LEASE).url
        raise StorageError(
            f"The lease of the run, {path}, cannot be written: {error}. Check permissions and "
            "space.",
            path=path,
        ) from error


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Lease:
    """The lease of a run, held by this process. Made by `acquire`.

    Attributes:
        attempt: number of this attempt, from 1.
        owner: its random id.
    """

    def __init__(self, storage: Storage, holder: Holder) -> None:
        self._storage = storage
        self._holder = holder
        self._lock = threading.Lock()  # a renewal under way must not undo a release
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False
        self._complained = False

    @property
    def attempt(self) -> int:
        return self._holder.attempt

    @property
    def owner(self) -> str:
        return self._holder.owner

    @property
    def lost(self) -> bool:
        """Whether a renewal has found another attempt in possession."""
        return self._lost

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        say: Callable[[str], object],
        here: Process | None = None,
        is_dead: Callable[[Process, Process], bool] = is_dead,
        least_attempt: int = 1,
    ) -> Lease:
        """Takes the run in `storage`, waiting for its holder to go, at most about 20 s.

        Args:
            storage: the run's directory.
            clock: monotonic seconds.
            sleep: waits that many seconds.
            say: told once who holds the run, if there is a wait.
            here: this process.
            is_dead: `(holder, here)`: whether the holder is known to be gone.
            least_attempt: for a run whose lease was deleted: attempts below it were used.

        Raises:
            RunInUseError: its holder is alive.
            StorageError: the store does not answer.
        """
        here = here or Process.this()
        mine, began = uuid.uuid4().hex, clock()
        first = last = seen = read_holder(storage)
        asked = changed = clock()
        said = False
        while True:
            # Counted from the end of the first read to the start of this one: a store that answers
            # late must not make a holder look silent.
            if _state(seen) != _state(last):
                last, changed = seen, clock()
            dead = seen is not None and is_dead(seen, here)
            verdict = judge(mine, seen, first, asked - changed, asked - began, dead)
            if seen is None or verdict == "take":
                attempt = max((seen.attempt if seen else 0) + 1, least_attempt)
                holder = Holder.of(here, attempt=attempt, owner=mine, since=_utc())
                _write(storage, holder)
                sleep(_SETTLE_S)
                seen = read_holder(storage)
                if seen is not None and seen.owner == mine:
                    return cls(storage, holder)
                if seen is None:
                    raise _vanished(storage)
                # Another taker wrote as well, after us: it is the holder now.
                last, asked, changed = seen, clock(), clock()
                continue
            if verdict == "refuse":
                raise _in_use(storage, seen)
            if not said:
                said = True
                say(_held(storage, seen))
            sleep(_POLL_S)
            asked = clock()
            seen = read_holder(storage)

    def start(self) -> None:
        """Renews from now on, in a thread, until released or lost."""
        self._thread = threading.Thread(target=self._renew_until_stopped, name="raytf-lease")
        self._thread.daemon = True
        self._thread.start()

    def check(self) -> None:
        """Makes sure, by reading it now, that the run is still ours.

        Raises:
            SupersededError: another attempt has taken it over.
            StorageError: the store does not answer.
        """
        check_attempt(self._storage, self.attempt, self.owner)

    def release(self) -> None:
        """Stops renewing and lets go, if it is still ours.

        A store that does not answer is logged and no error: the lease then expires.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(RENEW_S)  # it may hang in a store that does not answer
            self._thread = None
        if not self._lock.acquire(timeout=RENEW_S):
            logger.warning("The lease of %s was not released: its store hangs", self._storage.url)
            return
        try:
            seen = read_holder(self._storage)
            if seen is not None and seen.owner == self.owner:
                _write(self._storage, replace(self._holder, released=True, time=_utc()))
        except RaytfError as error:
            logger.warning("The lease was not released, so it has to expire: %s", error)
        finally:
            self._lock.release()

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                self._renew()
            except RaytfError as error:
                if not self._complained:
                    logger.warning("Tried again every %g s: %s", RENEW_S, error)
                self._complained = True
            if self._lost:
                return

    def _renew(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            seen = read_holder(self._storage)
            if seen is not None and _beats(seen, self.attempt, self.owner):
                self._lost = True
                logger.error(
                    "Attempt %d (process %d on %s) has taken over the run in %s",
                    *(seen.attempt, seen.pid, seen.host, self._storage.url),
                )
                return
            renewed = replace(self._holder, count=self._holder.count + 1, time=_utc())
            _write(self._storage, renewed)
            self._holder = renewed
            self._complained = False


def _state(holder: Holder | None) -> tuple[str, int] | None:
    return None if holder is None else (holder.owner, holder.count)


def _held(storage: Storage, seen: Holder) -> str:
    return (
        f"The run in {storage.url} is held by process {seen.pid} on {seen.host} (attempt "
        f"{seen.attempt}, since {seen.since}). Waiting up to {WAIT_S:.0f} s: if that process is "
        f"gone, its lease expires {EXPIRES_S:.0f} s after the last renewal that was seen."
    )


def _vanished(storage: Storage) -> StorageError:
    path = storage.join(LEASE).url
    return StorageError(
        f"The lease of the run, {path}, was written and is not there when it is read back. Every "
        "process must see one and the same storage, and nobody else may delete in it.",
        path=path,
    )


def _in_use(storage: Storage, seen: Holder) -> RunInUseError:
    return RunInUseError(
        f"The run in {storage.url} is in use: process {seen.pid} on {seen.host} (attempt "
        f"{seen.attempt}, since {seen.since}) is alive and has renewed its lease within the last "
        f"{WAIT_S:.0f} s. Wait until it is done, end it, or give this run another name.",
        path=storage.url,
        host=seen.host,
        pid=seen.pid,
        attempt=seen.attempt,
    )
