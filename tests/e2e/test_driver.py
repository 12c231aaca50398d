"""Drivers as a user has them, processes with a command line: killed, started twice, asked again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import TOKEN, processes_with, wait_until_gone

pytestmark = pytest.mark.ray
JOB = Path(__file__).parents[2] / "jobs" / "mnist.py"
GONE_WITHIN_S = 30.0
SEED = 20261202
SAME = ("run", "seconds")  # what two runs of the same training may differ in
COUNTS = ("restarts", "generations", "process_restarts", "lost_steps", "replayed_steps")


class Driver:
    """One process that runs jobs/mnist.py, and what it starts, found by a token of its own."""

    def __init__(self, path: Path, *flags: str, name: str = "run") -> None:
        self.token = uuid.uuid4().hex
        self.place = path / name
        self.stderr = path / f"{self.token}.stderr"
        fixed = "--data digits --epochs 2 --global-batch-size 16 --save-every-steps 20 --json"
        command = [sys.executable, str(JOB), *fixed.split(), "--storage", str(path), "--name", name]
        with open(self.stderr, "w") as stderr:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {TOKEN: self.token},
            )

    def said(self) -> str:
        return self.stderr.read_text()

    def steps(self) -> list[str]:
        """Committed checkpoints."""
        return sorted(p.parent.name for p in self.place.glob("checkpoints/*/manifest.json"))

    def until(self, true: Callable[[], Any], within_s: float = 90.0) -> Any:
        """Waits for something to be true while the driver lives."""
        deadline = time.monotonic() + within_s
        while not (found := true()):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        return found

    def workers(self) -> list[psutil.Process]:
        """Ray's worker processes, in no order."""
        found = []
        for process in processes_with(self.token):
            with contextlib.suppress(psutil.Error):
                if "KerasWorker" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def report(self, code: int = 0) -> dict[str, Any]:
        """Waits for the end; the JSON line, if there is to be one."""
        stdout, _ = self.process.communicate(timeout=170)
        assert self.process.returncode == code, self.said()
        return json.loads(stdout.splitlines()[-1]) if code == 0 else {}

    def end(self) -> None:
        self.process.kill()  # does nothing once it has been waited for
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        for process in wait_until_gone(self.token, GONE_WITHIN_S):
            process.kill()


Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*flags)` starts a driver; all are ended at the end of the test."""
    started: list[Driver] = []

    def begin(*flags: str, name: str = "run") -> Driver:
        started.append(Driver(tmp_path, *flags, name=name))
        return started[-1]

    yield begin
    for driver in started:
        driver.end()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    skipped = {*SAME, *COUNTS}
    return {k: v for k, v in one.items() if k not in skipped} == {
        k: v for k, v in other.items() if k not in skipped
    }


def test_a_killed_driver_and_the_same_command_again(start: Start) -> None:
    whole = start(name="whole").report()

    killed = start()
    killed.until(killed.steps)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.communicate()
    assert wait_until_gone(killed.token, GONE_WITHIN_S) == []
    assert not (killed.place / "final").exists()

    other = start("--seed", "1")
    other.report(code=3)
    assert "seed: 0 -> 1" in other.said()

    again = start()
    report = again.report()
    assert f"from {killed.place}/checkpoints/step-" in again.said()
    assert "resumed at step " in again.said()
    assert equal(report, whole)

    done = start()
    report = done.report()
    assert equal(report, whole)
    assert report["seconds"] < 10
    assert "resumed at step" not in done.said()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3))
def test_a_worker_killed_from_outside_at_a_random_moment(start: Start, number: int) -> None:
    rng = random.Random(SEED + number)
    whole = start("--epochs", "4", name="whole").report()
    driver = start("--epochs", "4")
    for _ in range(2):
        before = driver.steps()
        driver.until(lambda before=before: driver.steps() > before)
        time.sleep(rng.random())
        rng.choice(driver.until(driver.workers)).kill()
    report = driver.report()
    assert equal(report, whole)
    assert driver.said().count("Ray restarts the workers") in (1, 2)  # both may hit one group


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_driver_does_not_disturb_the_first(start: Start) -> None:
    whole = start("--epochs", "30", name="whole").report()
    first = start("--epochs", "30")
    first.until(first.steps)
    began = time.monotonic()
    second = start("--epochs", "30")
    second.report(code=3)
    assert 20 < time.monotonic() - began < 60
    assert f"process {first.process.pid} on " in second.said()
    assert "Waiting up to 20 s" in second.said()
    assert first.process.poll() is None, "the first was done before the second had waited"
    assert equal(first.report(), whole)
