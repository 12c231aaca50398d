"""`raytf runs`, `status`, `events`, `report`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raytf.checkpoint.storage import resolve
from raytf.cli import main
from raytf.cli.runs import status_lines
from raytf.faults.events import from_line, to_line
from raytf.status import Facts, status
from tests.faults import logs


def raytf(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def data(*arguments: Any) -> Any:
    ran = raytf(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("killed", "nan"):
        logs.lay_down(tmp_path / name, logs.ALL[name]())
    return tmp_path


def test_runs(runs: Path) -> None:
    ran = raytf("runs", runs)
    assert ran.exit_code == 0 and ran.stderr == ""
    head, first, second = ran.stdout.splitlines()
    assert head.split()[0] == "state" and head.split()[-1] == "run"
    assert first.split() == ["FINISHED", "200/200", "4/4", "200", "1", "33%", "-", "killed"]
    assert second.split()[0] == "ERRORED" and second.split()[-1] == "nan"
    assert [told["name"] for told in data("runs", runs)] == ["killed", "nan"]


def test_one_that_cannot_be_read_does_not_hide_the_others(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytf import status as module
    from raytf.errors import StorageError

    real = module.read_facts

    def read(storage: Any) -> Facts:
        if storage.path.endswith("nan"):
            raise StorageError("the store is away")
        return real(storage)

    monkeypatch.setattr(module, "read_facts", read)
    told = data("runs", runs)
    assert [t["state"] for t in told] == ["FINISHED", "UNKNOWN"]
    assert told[1]["note"] == "the store is away"
    assert "UNKNOWN" in raytf("runs", runs).stdout


def test_status(runs: Path) -> None:
    told = data("status", runs / "killed")
    assert (told["state"], told["step"], told["lost_steps"]) == ("FINISHED", 200, 12)
    text = raytf("status", runs / "killed").stdout
    for part in ("FINISHED", "200/200", "1,152 examples/s", "12 steps lost", "killed rank 1"):
        assert part in text
    assert "NaN" in raytf("status", runs / "nan", "--json").stdout.replace("nan", "NaN")


def test_status_of_a_run_that_goes_on() -> None:
    log = logs.Log().begin(1).train(60)
    excluded = {"max_faults": 2, "half_life_s": 1.0, "probation_s": 1.0}
    nodes = {**excluded, "nodes": {"bad": {"excluded_until": log.now + 1200}}}
    lines = status_lines(status(Facts(name="r", url="/r", events=log.events, nodes=nodes), log.now))
    text = "\n".join(lines)
    for part in ("RUNNING", "60/200", "2/4", "left       8 s", "node bad (for 20 min)", "0 s ago"):
        assert part in text
    silent = status(Facts(name="r", url="/r", events=log.events), log.now + 812)
    assert status_lines(silent)[0] == "state      UNKNOWN (no sign of life for 812 s)"


def test_events_as_lines_and_as_data(runs: Path) -> None:
    log = logs.killed()
    ran = raytf("events", runs / "killed")
    assert ran.exit_code == 0 and len(ran.stdout.splitlines()) == len(log.events)
    assert "22:13:34Z #1 worker_killed rank=1 node=node-1 step=137" in ran.stdout
    found = [
        from_line(line) for line in raytf("events", runs / "killed", "--json").stdout.splitlines()
    ]
    assert [e.kind for e in found] == [e.kind for e in log.events]


def test_events_of_some_kinds(runs: Path) -> None:
    asked = ("--kind", "worker_killed", "--kind", "decision")
    ran = raytf("events", runs / "killed", *asked)
    assert [line.split()[2] for line in ran.stdout.splitlines()] == ["worker_killed", "decision"]
    wrong = raytf("events", runs / "killed", "--kind", "nonsense")
    assert wrong.exit_code == 2 and "worker_killed" in wrong.stderr


def test_lines_that_cannot_be_read_are_told_of(runs: Path) -> None:
    with open(next((runs / "killed" / "events").iterdir()), "a") as file:
        file.write('{"time":1,')
    ran = raytf("events", runs / "killed", "--json")
    assert ran.exit_code == 0 and "1 lines could not be read" in ran.stderr


def test_follow_shows_what_comes_and_ends_quietly(tmp_path: Path) -> None:
    log = logs.Log().begin(1).train(10)
    directory = logs.lay_down(tmp_path / "a", log)
    before = len(log.events)
    line = [sys.executable, "-m", "raytf", "events", str(directory), "--follow", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        timer = threading.Timer(40, ran.kill)
        timer.start()
        assert ran.stdout is not None and ran.stderr is not None
        shown = [ran.stdout.readline() for _ in range(before)]
        assert [from_line(text).kind for text in shown] == [e.kind for e in log.events]
        log.train(15)
        with open(directory / "events" / "attempt-0001-run_actor.jsonl", "a") as file:
            file.write(to_line(log.events[-1]) + "\n")
        assert from_line(ran.stdout.readline()).step == 15
        ran.send_signal(2)
        assert ran.wait(30) == 0
        assert ran.stderr.read() == ""
        timer.cancel()


def test_report(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "ü" / "report.html"
    path.parent.mkdir()
    ran = raytf("report", runs / "killed", "-o", path)
    assert ran.exit_code == 0 and ran.stdout == "" and str(path) in ran.stderr
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert raytf("report", runs / "killed", "-o", "-").stdout.startswith("<!DOCTYPE html>")
    told = data("report", runs / "killed", "-o", path)
    assert told["path"] == str(path) and told["bytes"] == len(path.read_bytes())
    assert raytf("report", runs / "killed", "-o", "-", "--json").exit_code == 2


@pytest.mark.parametrize("verb", ["runs", "status", "events", "report"])
def test_nothing_there_is_exit_code_4(tmp_path: Path, verb: str) -> None:
    (tmp_path / "other").mkdir()
    for where in ("none", "other"):
        ran = raytf(verb, tmp_path / where)
        assert ran.exit_code == 4 and ran.stdout == ""
        assert "no run" in ran.stderr and where in ran.stderr
    assert not list(tmp_path.glob("*.html"))


def test_on_another_store(tmp_path: Path) -> None:
    here = logs.lay_down(tmp_path / "a", logs.killed())
    there = resolve(f"memory://raytf-{tmp_path.name}/runs/a")
    there.fs.put(str(here) + "/", there.path, recursive=True)
    assert data("runs", f"memory://raytf-{tmp_path.name}/runs")[0]["name"] == "a"
    assert data("status", there.url)["step"] == 200
    assert time.time() - data("status", there.url)["silent_s"] == pytest.approx(
        logs.killed().now, abs=5
    )
    assert len(raytf("events", there.url).stdout.splitlines()) == len(logs.killed().events)
