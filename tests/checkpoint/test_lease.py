"""One driver per run: pure judgement, a clock of our own, real processes that die and sleep."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from raytf.checkpoint import lease as module
from raytf.checkpoint.holder import Holder, Process, is_dead
from raytf.checkpoint.lease import LEASE, Lease, check_attempt, judge, read_holder
from raytf.checkpoint.storage import Storage, resolve
from raytf.errors import RunInUseError, StorageError, SupersededError

HERE = Process("here", "boot-1", "space-1", 100, 7)
THERE = Process("there", "boot-2", "space-2", 200, 8)


def holder(process: Process = THERE, attempt: int = 1, owner: str = "other", **more: Any) -> Holder:
    made = Holder.of(process, attempt=attempt, owner=owner, since="2026-01-01T00:00:00Z")
    return replace(made, **more)


# --- judge


OTHER = holder()
RENEWED = replace(OTHER, count=1)


@pytest.mark.parametrize(
    ("seen", "previous", "unseen_s", "waited_s", "dead", "verdict"),
    [
        (None, None, 0, 0, False, "take"),
        (replace(OTHER, released=True), OTHER, 0, 0, False, "take"),
        (OTHER, OTHER, 0, 0, True, "take"),
        (replace(OTHER, owner="me"), OTHER, 0, 0, False, "take"),
        (OTHER, OTHER, 0, 0, False, "wait"),
        (OTHER, OTHER, 14.9, 14.9, False, "wait"),
        (OTHER, OTHER, 15, 15, False, "take"),
        (RENEWED, OTHER, 1, 19.9, False, "wait"),
        (RENEWED, OTHER, 1, 20, False, "refuse"),
        (RENEWED, OTHER, 15, 16, False, "take"),  # it was renewed, and then fell silent
        (OTHER, OTHER, 3, 20, False, "wait"),  # a store that answers late: nothing was seen of it
        (OTHER, None, 5, 20, False, "refuse"),  # came while we waited
        (replace(OTHER, owner="third"), OTHER, 3, 20, False, "refuse"),
    ],
)
def test_judge(
    seen: Holder | None,
    previous: Holder | None,
    unseen_s: float,
    waited_s: float,
    dead: bool,
    verdict: str,
) -> None:
    assert judge("me", seen, previous, unseen_s, waited_s, dead) == verdict


# --- who is dead


def test_only_a_process_of_the_same_host_boot_and_space_can_be_known_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = replace(Process.this(), pid=child.pid, started=1)
    here = Process.this()
    assert is_dead(gone, here)
    for other in ("host", "boot", "space"):
        assert not is_dead(replace(gone, **{other: "another"}), here)


def test_a_living_process_and_a_reused_number() -> None:
    here = Process.this()
    assert not is_dead(here, here)
    assert here.started is not None
    assert is_dead(replace(here, started=here.started - 1), here)
    assert not is_dead(replace(here, started=None), here)


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = replace(Process.this(), pid=child.pid, started=None)
    assert not is_dead(process, Process.this())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert is_dead(process, Process.this())
    child.communicate()


# --- the file


def test_holder_round_trips_and_a_person_can_read_it(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    lease = acquire(storage)
    on_disk = json.loads((tmp_path / LEASE).read_text())
    assert (on_disk["owner"], on_disk["attempt"], on_disk["count"]) == (lease.owner, 1, 0)
    assert on_disk["host"] == "here"
    assert on_disk["released"] is False
    found = read_holder(storage)
    assert found is not None
    assert Holder.decode(found.encode()) == found


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"attempt": 1}', b"\xff\xfe"])
def test_an_unreadable_file_is_a_holder_that_expires(tmp_path: Path, data: bytes) -> None:
    storage = resolve(tmp_path)
    storage.write_bytes(data, LEASE)
    time_ = FakeTime()
    lease = acquire(storage, time_)
    assert 15 <= time_.now < 17
    assert lease.attempt >= 1


def test_a_torn_file_keeps_its_attempt(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    storage.write_bytes(holder(attempt=41).encode()[:60], LEASE)
    assert acquire(storage).attempt == 42


# --- acquire, on a clock of its own


class FakeTime:
    """`sleep` advances it, and does then what is planned for that moment."""

    def __init__(self, *plan: tuple[float, Callable[[], None]]) -> None:
        self.now = 0.0
        self.plan = sorted(plan, key=lambda item: item[0])
        self.said: list[str] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.plan and self.plan[0][0] <= self.now:
            self.plan.pop(0)[1]()


def acquire(storage: Storage, time_: FakeTime | None = None, **more: Any) -> Lease:
    time_ = time_ or FakeTime()
    more.setdefault("here", HERE)
    return Lease.acquire(
        storage, clock=time_.clock, sleep=time_.sleep, say=time_.said.append, **more
    )


def test_no_lease_is_taken_at_once(tmp_path: Path) -> None:
    time_ = FakeTime()
    lease = acquire(resolve(tmp_path / "not there yet"), time_)
    assert lease.attempt == 1
    assert time_.now < 1
    assert time_.said == []
    assert acquire(resolve(tmp_path / "b"), least_attempt=5).attempt == 5


def test_a_released_one_is_taken_at_once_and_attempts_count(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    attempts, owners = [], set()
    for _ in range(3):
        time_ = FakeTime()
        lease = acquire(storage, time_)
        attempts.append(lease.attempt)
        owners.add(lease.owner)
        lease.release()
        assert time_.now < 1
        assert time_.said == []
    assert attempts == [1, 2, 3]
    assert len(owners) == 3


def test_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    storage.write_bytes(holder().encode(), LEASE)
    time_ = FakeTime()
    assert acquire(storage, time_, is_dead=lambda seen, here: seen.pid == 200).attempt == 2
    assert time_.now < 1
    assert time_.said == []


def test_a_silent_one_expires_after_15_s_of_our_clock(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    storage.write_bytes(holder(time="2099-01-01T00:00:00Z").encode(), LEASE)  # clocks do not matter
    time_ = FakeTime()
    lease = acquire(storage, time_)
    assert 15 <= time_.now < 16.5
    assert lease.attempt == 2
    (said,) = time_.said
    for word in ("process 200 on there", "attempt 1", "since 2026-01-01T00:00:00Z", "20 s"):
        assert word in said


def test_one_that_falls_silent_meanwhile_is_taken(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    storage.write_bytes(holder().encode(), LEASE)
    renewed = holder(count=1).encode()
    time_ = FakeTime((3.0, lambda: storage.write_bytes(renewed, LEASE)))
    assert acquire(storage, time_).attempt == 2
    assert 18 <= time_.now < 19.5


def test_one_released_meanwhile_is_taken(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    storage.write_bytes(holder().encode(), LEASE)
    released = holder(count=3, released=True).encode()
    time_ = FakeTime((9.0, lambda: storage.write_bytes(released, LEASE)))
    acquire(storage, time_)
    assert 9 <= time_.now < 10.5


def test_a_living_one_is_refused_after_20_s(tmp_path: Path) -> None:
    storage = resolve(tmp_path)

    def renew(count: int) -> Callable[[], None]:
        return lambda: storage.write_bytes(holder(count=count).encode(), LEASE)

    renew(0)()
    time_ = FakeTime(*[(3.0 * n, renew(n)) for n in range(1, 20)])
    with pytest.raises(RunInUseError) as error:
        acquire(storage, time_)
    assert 20 <= time_.now < 21
    for word in ("process 200 on there", "attempt 1", "give this run another name", storage.url):
        assert word in str(error.value)
    assert error.value.context["host"] == "there"
    assert len(time_.said) == 1
    found = read_holder(storage)
    assert found is not None
    assert found.owner == "other"  # untouched


def test_two_takers_at_once_one_wins_the_other_waits_on(tmp_path: Path) -> None:
    storage = resolve(tmp_path)

    def faster() -> None:  # writes between our writing and our reading back
        storage.write_bytes(holder(attempt=1, owner="faster").encode(), LEASE)

    def renew(count: int) -> Callable[[], None]:
        made = holder(attempt=1, owner="faster", count=count).encode()
        return lambda: storage.write_bytes(made, LEASE)

    time_ = FakeTime((0.1, faster), *[(3.0 * n, renew(n)) for n in range(1, 20)])
    with pytest.raises(RunInUseError):
        acquire(storage, time_)
    assert len(time_.said) == 1
    found = read_holder(storage)
    assert found is not None
    assert found.owner == "faster"


def test_a_store_that_answers_late_makes_nobody_look_silent(tmp_path: Path) -> None:
    """Each read takes 16 s and tells what was true at its start; the holder lives."""
    time_ = FakeTime()
    count = [0]

    class Late:
        fs = None
        path = url = "late"

        def read_bytes(self, *parts: str) -> bytes:
            told = holder(count=int(time_.now / 3)).encode()
            time_.now += 16
            count[0] += 1
            return told

        def write_bytes(self, data: bytes, *parts: str) -> None:
            pytest.fail("taken from a living holder")

    with pytest.raises(RunInUseError):
        acquire(Late(), time_)  # type: ignore[arg-type]
    assert count[0] <= 3


def test_threads_that_take_at_once_have_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.1)
    storage = resolve(tmp_path)
    gate = threading.Barrier(4)
    results: list[Lease | RunInUseError] = []

    def one() -> None:
        # Our own clock runs ten times as fast as the waits are.
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += 10 * seconds
            time.sleep(seconds)

        gate.wait()
        try:
            got = Lease.acquire(
                storage, clock=lambda: now[0], sleep=sleep, say=lambda text: None, here=HERE,
                is_dead=lambda seen, here: False,
            )  # fmt: skip
            got.start()
            results.append(got)
        except RunInUseError as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    held = [lease for lease in results if isinstance(lease, Lease)]
    assert len(results) == 4
    owners = []
    for lease in held:
        with contextlib.suppress(SupersededError):
            lease.check()
            owners.append(lease.owner)
        lease.release()
    assert len(owners) == 1


# --- holding it


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.01)


def eventually(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.005)


@pytest.mark.usefixtures("quick")
def test_renews_until_released(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    lease = acquire(storage)
    lease.start()

    def count() -> int:
        found = read_holder(storage)
        return found.count if found else 0

    eventually(lambda: count() >= 3)
    lease.check()
    check_attempt(storage, lease.attempt, lease.owner)
    lease.release()
    found = read_holder(storage)
    assert found is not None
    assert found.released
    assert found.owner == lease.owner
    assert found.count >= 3
    assert not lease.lost
    assert not [t for t in threading.enumerate() if t.name == "raytf-lease"]


@pytest.mark.usefixtures("quick")
def test_one_that_is_taken_over_knows_it_and_touches_nothing(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    lease = acquire(storage)
    taken = acquire(storage, is_dead=lambda seen, here: True)
    assert taken.attempt == lease.attempt + 1
    for check in (lease.check, lambda: check_attempt(storage, lease.attempt, lease.owner)):
        with pytest.raises(SupersededError, match=r"Attempt 2 \(process 100 on here\) has taken"):
            check()
    assert not lease.lost
    lease.start()
    eventually(lambda: lease.lost)
    lease.release()
    found = read_holder(storage)
    assert found is not None
    assert (found.owner, found.released, found.count) == (taken.owner, False, 0)
    taken.check()


@pytest.mark.usefixtures("quick")
def test_a_sleeper_that_overwrites_its_successor_does_not_get_the_run_back(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    old = acquire(storage)
    before = read_holder(storage)
    assert before is not None
    new = acquire(storage, is_dead=lambda seen, here: True)
    storage.write_bytes(before.encode(), LEASE)  # the second half of a renewal of long ago
    new.check()
    new.start()
    eventually(lambda: (found := read_holder(storage)) is not None and found.owner == new.owner)
    with pytest.raises(SupersededError):
        old.check()
    assert not new.lost
    new.release()


class Flaky:
    """A storage of which reading fails while `broken`."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.broken, self.failures = storage, False, 0
        self.url, self.join = storage.url, storage.join

    def read_bytes(self, *parts: str) -> bytes:
        if self.broken:
            self.failures += 1
            raise OSError("no route")
        return self.storage.read_bytes(*parts)

    def write_bytes(self, data: bytes, *parts: str) -> None:
        self.storage.write_bytes(data, *parts)


@pytest.mark.usefixtures("quick")
def test_a_store_that_fails_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flaky = Flaky(resolve(tmp_path))
    lease = acquire(flaky)  # type: ignore[arg-type]
    lease.start()
    flaky.broken = True
    eventually(lambda: flaky.failures >= 5)
    with pytest.raises(StorageError, match=r"lease\.json, cannot be read: no route"):
        lease.check()
    with pytest.raises(StorageError):
        check_attempt(flaky, 1, lease.owner)  # type: ignore[arg-type]
    found = read_holder(flaky.storage)
    assert found is not None
    flaky.broken = False
    eventually(lambda: (now := read_holder(flaky.storage)) is not None and now.count > found.count)
    assert not lease.lost
    assert len([r for r in caplog.records if "no route" in r.message]) == 1
    flaky.broken = True
    caplog.clear()
    lease.release()  # no error: it expires
    assert "has to expire" in caplog.text


def test_a_store_that_does_not_answer_refuses_acquire(tmp_path: Path) -> None:
    flaky = Flaky(resolve(tmp_path))
    flaky.broken = True
    with pytest.raises(StorageError, match="no route"):
        acquire(flaky)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be"):
        acquire(resolve(tmp_path / "file" / "run"))


def test_a_store_that_forgets_what_was_written(tmp_path: Path) -> None:
    storage = resolve(tmp_path)
    time_ = FakeTime((0.1, lambda: os.remove(tmp_path / LEASE)))
    with pytest.raises(StorageError, match="not there when it is read back"):
        acquire(storage, time_)


def test_other_stores() -> None:
    storage = resolve("memory://raytf-lease/run")
    try:
        lease = acquire(storage)
        lease.check()
        lease.release()
        assert acquire(storage).attempt == 2
    finally:
        storage.remove()


# --- real processes


_HOLDER = """
import sys
from raytf.checkpoint.lease import Lease
from raytf.checkpoint.storage import resolve
lease = Lease.acquire(resolve(sys.argv[1]), say=print)
lease.start()
print("holds", lease.attempt, flush=True)
input()
lease.release()
"""


@dataclass
class Child:
    process: subprocess.Popen[str]

    def held(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("holds")


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        Child(child).held()
        yield child
    finally:
        child.kill()
        child.communicate()


def real(tmp_path: Path, said: list[str]) -> tuple[Lease, float]:
    began = time.monotonic()
    lease = Lease.acquire(resolve(tmp_path), say=said.append)
    return lease, time.monotonic() - began


def test_a_killed_holder_is_taken_over_at_once(
    tmp_path: Path, holding: subprocess.Popen[str]
) -> None:
    holding.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holding.pid, os.WEXITED | os.WNOWAIT)
    said: list[str] = []
    lease, seconds = real(tmp_path, said)
    assert lease.attempt == 2
    assert seconds < 3
    assert said == []


def test_a_holder_that_ends_well_lets_go(tmp_path: Path, holding: subprocess.Popen[str]) -> None:
    holding.communicate("\n", timeout=20)
    lease, seconds = real(tmp_path, [])
    assert lease.attempt == 2
    assert seconds < 3


def test_a_stopped_holder_expires_and_then_knows_it(
    tmp_path: Path, holding: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    holding.send_signal(signal.SIGSTOP)
    said: list[str] = []
    lease, seconds = real(tmp_path, said)
    assert lease.attempt == 2
    assert 14 <= seconds < 25
    assert f"process {holding.pid} on" in said[0]
    holding.send_signal(signal.SIGCONT)
    holding.communicate("\n", timeout=20)  # releases nothing that is not its own
    lease.check()


def test_a_living_holder_is_refused(tmp_path: Path, holding: subprocess.Popen[str]) -> None:
    said: list[str] = []
    with pytest.raises(RunInUseError, match=f"process {holding.pid} on"):
        real(tmp_path, said)
    assert len(said) == 1
    assert logging.getLogger("raytf").handlers == []
