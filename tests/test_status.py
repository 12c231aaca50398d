"""What `raytf status` says of a run, from its storage alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint.holder import Holder, Process
from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import NotFoundError
from raytf.faults.events import Kind
from raytf.faults.nodes import NodeBook
from raytf.status import Facts, history_of, read_facts, run_names, status
from tests.checkpoint.states import save
from tests.faults import logs
from tests.faults.logs import Log


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def holder(renewed: float, *, released: bool = False, attempt: int = 1) -> Holder:
    process = Process(host="h", boot="b", space="s", pid=7, started=1)
    made = Holder.of(process, attempt=attempt, owner="o", since=stamp(renewed))
    return replace(made, released=released)


def facts(log: Log | None = None, **given: Any) -> Facts:
    return Facts(name="r", url="/r", events=log.events if log else (), **given)


def state(log: Log | None, after_s: float = 5.0, **given: Any) -> tuple[str, str]:
    now = (log.now if log else 0.0) + after_s
    told = status(facts(log, **given), now)
    return told["state"], told["note"]


def test_running_and_what_is_told_of_it() -> None:
    log = Log().begin(1).train(60)
    told = status(facts(log, holder=holder(log.now)), log.now + 5)
    assert (told["state"], told["note"], told["silent_s"]) == ("RUNNING", "", 5.0)
    assert (told["attempt"], told["step"], told["num_steps"]) == (1, 60, 200)
    assert (told["epoch"], told["epochs"], told["faults"]) == (1, 4, [])
    assert told["metrics"]["loss"] == pytest.approx(log.loss()) and "val_loss" in told["metrics"]
    assert told["eta_s"] == pytest.approx(140 * 64 / told["examples_per_s"])
    assert told["last_save"] == {"step": 50, "age_s": pytest.approx(5.5, abs=0.1), "seconds": 0.4}
    assert told["holder"]["host"] == "h" and not told["holder"]["released"]
    assert 0 < told["goodput"] < 1
    json.dumps(told)


def test_before_the_first_step() -> None:
    assert state(Log().begin(1)) == ("INITIALIZING", "")


def test_between_fault_and_first_step() -> None:
    log = logs.hang(is_over=False)
    assert state(log) == ("RESTARTING", "rank 0 on node node-0 hung")


@pytest.mark.parametrize("name", ["unbroken", "killed", "hang", "driver_death"])
def test_finished(name: str) -> None:
    log = logs.ALL[name]()
    assert state(log, 1e6) == ("FINISHED", "")
    assert state(log, 1e6, holder=holder(log.now, released=True, attempt=9)) == ("FINISHED", "")
    # the driver is about to let go
    assert state(log, holder=holder(log.now, attempt=log.attempt)) == ("FINISHED", "")


def test_finished_as_the_model_says() -> None:
    final = {"result": {"steps": 200, "metrics": {"loss": 0.5}}}
    told = status(facts(None, final=final, holder=holder(0.0, released=True)), 1e6)
    assert (told["state"], told["step"], told["metrics"]) == ("FINISHED", 200, {"loss": 0.5})


def test_a_finished_run_that_goes_on_is_not_finished() -> None:
    log = logs.unbroken().begin(2, 200, 60.0)
    final = {"result": {"steps": 200}}
    assert state(log, final=final, holder=holder(log.now, attempt=2))[0] == "INITIALIZING"
    assert state(log, 900, final=final, holder=holder(log.now, attempt=2))[0] == "UNKNOWN"


def test_errored_with_the_reason() -> None:
    assert state(logs.nan(), 1e6) == (
        "ERRORED",
        "TrainingError: the loss is no number at step 43",
    )
    again = logs.nan().begin(2, 25, 60.0).train(50)
    assert state(again, holder=holder(again.now, attempt=2)) == ("RUNNING", "")


def test_stopped_by_hand_is_aborted() -> None:
    assert state(Log().begin(1).train(20).finish("KeyboardInterrupt"))[0] == "ABORTED"
    log = Log().begin(1).train(20)
    assert state(log, 9e3, holder=holder(log.now, released=True))[0] == "ABORTED"


def test_silence_is_called_silence() -> None:
    log = Log().begin(1).train(20)
    given = {"holder": holder(log.now)}
    assert state(log, 812.0, **given) == ("UNKNOWN", "no sign of life for 812 s")
    assert state(log, 20.0, **given)[0] == "RUNNING"  # the lease is renewed every 3 s
    assert state(log, 812.0)[0] == "UNKNOWN"
    # events stopped (the log's store is slow), the lease did not
    assert state(log, 812.0, holder=holder(log.now + 810.0))[0] == "RUNNING"
    told = status(facts(log, holder=holder(log.now)), log.now + 812)
    assert told["eta_s"] is None
    assert told["wall_s"] == pytest.approx(log.now - log.events[0].time)  # not 812 s more


def test_a_driver_that_is_known_to_be_dead() -> None:
    log = Log().begin(1).train(20)
    found = state(log, 2.0, holder=holder(log.now), holder_is_dead=True)
    assert found == ("UNKNOWN", "its driver is gone; no sign of life for 2 s")


def test_a_clock_behind_ours_is_not_in_the_future() -> None:
    log = Log().begin(1).train(20)
    assert status(facts(log), log.now - 100)["silent_s"] == 0.0


def test_nothing_known() -> None:
    told = status(facts(), 0.0)
    assert told["state"] == "UNKNOWN" and told["step"] is None and told["last_save"] is None


def test_excluded_nodes() -> None:
    book = NodeBook(max_faults=2)
    for now in (1000.0, 1001.0):
        book = book.record("bad", now)
    book, _ = book.settle(1001.0, 2)
    told = status(facts(nodes=book.to_json()), 1101.0)["excluded_nodes"]
    assert told == [{"node": "bad", "left_s": 3500.0}]
    assert status(facts(nodes=book.to_json()), 1e6)["excluded_nodes"] == []
    log = Log().begin(1).add(Kind.NODE_EXCLUDED, node="bad", until=logs.START + 100, text="x")
    log.add(Kind.NODE_EXCLUDED, node="back").add(Kind.NODE_READMITTED, node="back")
    torn: Any = {"nodes": 3}
    for nodes in (None, torn):
        told = status(facts(log, nodes=nodes), logs.START + 40)["excluded_nodes"]
        assert told == [{"node": "bad", "left_s": 60.0}]


def test_read_from_storage(tmp_path: Path) -> None:
    log = logs.killed()
    directory = logs.lay_down(tmp_path / "runs" / "a", log)
    logs.lease(directory, released=True)
    save(CheckpointStore(directory), {"w": np.zeros(3, np.float32)}, 200, time=log.now - 3)
    found = read_facts(resolve(directory))
    assert list(found.events) == [e.with_fields(seq=i) for i, e in enumerate(log.events)]
    told = status(found, log.now)
    assert (told["state"], told["name"], told["url"]) == ("FINISHED", "a", str(directory))
    assert told["last_save"]["step"] == 200 and told["last_save"]["age_s"] == pytest.approx(3)
    assert [row["kind"] for row in told["faults"]] == ["killed"]
    assert found.run["fingerprint"]["seed"] == 7


def test_the_process_of_the_holder_is_looked_for_on_this_host(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    directory = logs.lay_down(tmp_path / "a", Log().begin(1).train(20))
    here = Process.this()
    logs.lease(directory, host=here.host, boot=here.boot, space=here.space, pid=gone.pid, started=1)
    assert read_facts(resolve(directory)).holder_is_dead
    assert here.host == socket.gethostname() and here.pid == os.getpid()


def test_torn_files_are_no_trouble(tmp_path: Path) -> None:
    directory = logs.lay_down(tmp_path / "a", logs.killed())
    for name in ("run.json", "lease.json", "nodes.json"):
        (directory / name).write_text('{"attempt": 3,')
    (directory / "final").mkdir()
    (directory / "final" / "final.json").write_text("[]")
    with open(next((directory / "events").iterdir()), "a") as file:
        file.write('{"time": 1,')
    told = status(read_facts(resolve(directory)), time.time())
    assert told["attempt"] == 3 and told["step"] == 200


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for path in ("none", "other"):
        with pytest.raises(NotFoundError, match="no run"):
            read_facts(resolve(tmp_path / path))


def test_runs_below_a_storage_path(tmp_path: Path) -> None:
    logs.lay_down(tmp_path / "b", logs.unbroken())
    logs.lay_down(tmp_path / "a", logs.unbroken())
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / ".hidden").mkdir()
    assert run_names(resolve(tmp_path)) == ["a", "b"]
    assert run_names(resolve(tmp_path / "none")) == []


def test_history() -> None:
    history = history_of(facts(logs.killed()))
    assert sorted(history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert all(len(values) == 4 for values in history.values())
    final = {"result": {"history": {"loss": [3.0]}}}
    assert history_of(facts(logs.killed(), final=final)) == {"loss": [3.0]}
    assert history_of(facts()) == {}
