"""Drills: what can be written, and that each kill fires once per run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytf.errors import ConfigError, RaytfError
from raytf.faults.drill import PHASES, Injector, Strike, parse_drill


def test_grammar() -> None:
    assert parse_drill("kill rank=1 step=30") == (Strike(1, 30, "step", 0),)
    text = " kill rank=1  step=30 phase=copy ;kill step=0 rank=0;"
    assert parse_drill(text) == (Strike(1, 30, "copy", 0), Strike(0, 0, "step", 1))
    for phase in PHASES:
        assert parse_drill(f"kill phase={phase} rank=2 step=5")[0].phase == phase


def test_equal_kills_have_different_names() -> None:
    ids = [kill.id for kill in parse_drill("kill rank=1 step=30; kill rank=1 step=30")]
    assert ids == ["kill-0-rank1-step30-step", "kill-1-rank1-step30-step"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no kill"),
        (" ; ", "no kill"),
        ("pause rank=1 step=2", "'pause' is no fault; faults are kill, stop, raise"),
        ("kill every=50 steps step=3", "step= and every= are at odds"),
        ("kill rank=1 step=2 steps", "'steps' is none of"),
        ("kill every=0", "every must be an integer >= 1"),
        ("kill rank=1 step=2 for_s=2", "'for_s=2' is none of"),
        ("stop rank=1 step=2 for_s=0", "for_s is seconds > 0"),
        ("slow rank=1 step=2", "for_s= is missing"),
        ("nan rank=1 step=2 phase=write", "nan strikes a batch"),
        ("exit rank=1 step=2 code=x", "code must be an integer >= 0"),
        ("kill rank=1", "step= is missing"),
        ("kill step=1", "rank= is missing"),
        ("kill rank=-1 step=1", "rank must be an integer >= 0, received '-1'"),
        ("kill rank=1 step=x", "step must be an integer >= 0, received 'x'"),
        ("kill rank=1 step=", "received ''"),
        ("kill rank=1 step=1.5", "received '1.5'"),
        ("kill rank=1 step=1 phase=save", "phase must be one of data, step, copy"),
        ("kill rank=1 step=1 step=2", "step is given twice"),
        ("kill rank=1 step=1 when=now", "'when=now' is none of"),
        ("kill rank=1 step=1, kill rank=0 step=2", "'kill' is none of"),
        ("kill rank 1 step 2", "'rank' is none of"),
    ],
)
def test_what_cannot_be_read_teaches(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_drill(text)
    assert why in str(error.value)
    assert 'drill="kill rank=1 step=30' in str(error.value)


def test_a_rank_that_does_not_exist() -> None:
    assert parse_drill("kill rank=1 step=2", num_workers=2)
    with pytest.raises(ConfigError, match="no rank of 2 workers"):
        parse_drill("kill rank=2 step=2", num_workers=2)


class Marks:
    def __init__(self) -> None:
        self.marks: list[str] = []
        self.log: list[str] = []
        self.asked = 0

    def injector(self, text: str, rank: int) -> Injector:
        return Injector(
            parse_drill(text), rank, self.has_fired, self.mark, lambda: self.log.append("dead")
        )

    def has_fired(self, name: str) -> bool:
        self.asked += 1
        return name in self.marks

    def mark(self, name: str) -> None:
        self.marks.append(name)
        self.log.append(name)


def test_marks_before_it_kills_and_fires_at_the_first_call_at_or_behind_the_step() -> None:
    marks = Marks()
    injector = marks.injector("kill rank=0 step=30 phase=copy", 0)
    for step in (0, 20, 29):
        injector.at("copy", step)
    injector.at("step", 100)
    assert marks.log == []
    assert injector.pending("copy")
    assert not injector.pending("step")
    injector.at("copy", 40)
    assert marks.log == ["kill-0-rank0-step30-copy", "dead"]
    injector.at("copy", 50)
    assert len(marks.log) == 2
    assert not injector.pending("copy")


def test_once_per_run_over_restarts_and_equal_kills_twice() -> None:
    marks = Marks()
    text = "kill rank=0 step=3; kill rank=1 step=3; kill rank=0 step=3"
    for _ in range(4):  # restarts
        marks.injector(text, 0).at("step", 3)
    assert marks.log == [
        *("kill-0-rank0-step3-step", "dead"),
        *("kill-2-rank0-step3-step", "dead"),
    ]


def test_one_call_fires_one_kill() -> None:
    marks = Marks()
    marks.injector("kill rank=0 step=9; kill rank=0 step=2", 0).at("step", 10)
    assert marks.marks == ["kill-1-rank0-step2-step"]  # the earlier step first


def test_nothing_left_asks_nobody() -> None:
    marks = Marks()
    injector = marks.injector("kill rank=1 step=1", 0)
    assert marks.asked == 0
    for step in range(100):
        injector.at("step", step)
    assert marks.asked == 0
    assert marks.log == []


def test_a_mark_that_fails_is_loud_and_kills_nothing() -> None:
    def fails(name: str) -> None:
        raise OSError("disk full")

    def kill() -> None:
        pytest.fail("killed without a mark")

    injector = Injector(parse_drill("kill rank=0 step=1"), 0, lambda name: False, fails, kill)
    with pytest.raises(OSError, match="disk full"):
        injector.at("step", 1)
    assert injector.pending("step")


_SCRIPT = """
import pathlib, sys
from raytf.faults.drill import Injector, parse_drill
at = pathlib.Path(sys.argv[1])
injector = Injector(
    parse_drill("kill rank=0 step=2; kill rank=0 step=4"), 0,
    lambda name: (at / name).exists(), lambda name: (at / name).touch(),
)
try:
    for step in range(6):
        print(step, flush=True)
        injector.at("step", step)
finally:
    print("cleaned up", flush=True)
"""


def test_a_real_process_dies_at_once_and_once_per_kill(tmp_path: Path) -> None:
    ends = []
    for _ in range(3):
        command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        ends.append((run.returncode, run.stdout.split("\n")[-2]))
    killed = -signal.SIGKILL
    assert ends == [(killed, "2"), (killed, "4"), (0, "cleaned up")]


class TestVerbs:
    """Everything but killing; what a fault does is seen in a real process."""

    def test_grammar(self) -> None:
        text = (
            "stop rank=1 step=2 for_s=0.5; slow rank=0 step=3 phase=data for_s=2 times=4; "
            "exit rank=0 step=4 code=3; nan rank=1 step=5; raise rank=1 step=6 phase=callback"
        )
        assert parse_drill(text, 2) == (
            Strike(1, 2, "step", 0, "stop", for_s=0.5),
            Strike(0, 3, "data", 1, "slow", for_s=2.0, times=4),
            Strike(0, 4, "step", 2, "exit", code=3),
            Strike(1, 5, "data", 3, "nan"),
            Strike(1, 6, "callback", 4, "raise"),
        )

    def test_what_is_taught_is_done_once(self) -> None:
        marks = Marks()
        injector = marks.injector("nan rank=0 step=2", 0)
        assert injector.wants("nan")
        injector.teach("nan", lambda strike: marks.log.append(f"poisoned at {strike.step}"))
        for step in range(5):
            injector.at("data", step)
        assert marks.log == ["nan-0-rank0-step2-data", "poisoned at 2"]
        assert not injector.wants("nan")

    def test_what_nobody_has_taught_is_loud(self) -> None:
        with pytest.raises(RaytfError, match="nobody here can do 'nan'"):
            Marks().injector("nan rank=0 step=0", 0).at("data", 0)

    def test_slow_goes_on_for_some_calls_and_is_marked_once(self) -> None:
        marks = Marks()
        injector = marks.injector("slow rank=0 step=1 for_s=9 times=3", 0)
        injector.teach("slow", lambda strike: marks.log.append("slept"))
        for step in range(10):
            injector.at("step", step)
        assert marks.log == ["slow-0-rank0-step1-step", "slept", "slept", "slept"]

    def test_sudden_ones_and_others_can_be_asked_for_alone(self) -> None:
        marks = Marks()
        injector = marks.injector("kill rank=0 step=0; raise rank=0 step=0", 0)
        with pytest.raises(RuntimeError, match="drill: raised at step 0 in phase step"):
            injector.at("step", 0, sudden=False)
        assert "dead" not in marks.log
        injector.at("step", 0, sudden=True)
        assert marks.log[-1] == "dead"

    @pytest.mark.parametrize(
        ("drill", "code", "last"),
        [
            ("exit rank=0 step=1 code=7", 7, "cleaned up"),
            ("raise rank=0 step=1", 1, "cleaned up"),
            ("segfault rank=0 step=1", -signal.SIGSEGV, "1"),
            ("slow rank=0 step=1 for_s=0.1", 0, "cleaned up"),
            ("stop rank=0 step=1 for_s=0.2", 0, "cleaned up"),
        ],
    )
    def test_real_processes(self, tmp_path: Path, drill: str, code: int, last: str) -> None:
        script = re.sub(r'parse_drill\(".*?"\)', f'parse_drill("{drill}")', _SCRIPT)
        command = [sys.executable, "-c", script, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        assert (run.returncode, run.stdout.split("\n")[-2]) == (code, last), run.stderr

    def test_stop_stops(self, tmp_path: Path) -> None:
        script = re.sub(r'parse_drill\(".*?"\)', 'parse_drill("stop rank=0 step=1")', _SCRIPT)
        with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) as process:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert os.WSTOPSIG(status) == signal.SIGSTOP
            process.kill()


class TestSeries:
    """`every=`: seeded, and alike in every process."""

    def struck(self, marks: Marks, text: str, rank: int, steps: int, workers: int = 3) -> list[int]:
        """Steps at which a run of some attempts is killed."""
        found: list[int] = []
        step = 0
        while step < steps:  # attempts
            injector = Injector(
                parse_drill(text), rank, marks.has_fired, marks.mark, workers_died, workers
            )
            try:
                while step < steps:
                    injector.at("step", step)
                    step += 1
            except Died:
                found.append(step)
        return found

    def test_kills_again_and_again_and_each_once(self) -> None:
        marks = Marks()
        every = [self.struck(marks, "kill every=50 steps seed=3", r, 3000) for r in range(3)]
        steps = sorted(step for mine in every for step in mine)
        assert len(marks.marks) == len(set(marks.marks)) == len(steps)
        gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
        assert all(25 <= gap <= 75 for gap in gaps)
        assert 45 <= sum(gaps) / len(gaps) <= 55
        assert all(every)
        again = [self.struck(Marks(), "kill every=50 seed=3", r, 3000) for r in range(3)]
        assert again == every
        other = [self.struck(Marks(), "kill every=50 seed=4", r, 3000) for r in range(3)]
        assert other != every

    def test_of_one_rank(self) -> None:
        text = "kill every=10 steps rank=1"
        assert self.struck(Marks(), text, 0, 200) == []
        assert 13 <= len(self.struck(Marks(), text, 1, 200)) <= 39


class Died(Exception):
    pass


def workers_died() -> None:
    raise Died
