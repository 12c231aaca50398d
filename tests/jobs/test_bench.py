"""What the benchmarks share; the benchmarks themselves are run by hand, on a quiet machine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "jobs" / "bench"


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_common", BENCH / "common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arms_take_turns(common: ModuleType) -> None:
    order: list[str] = []
    arms = {name: lambda name=name: float(order.append(name) or len(order)) for name in "abc"}
    measured = common.interleave(arms, 8)
    blocks = ["".join(order[i : i + 3]) for i in range(0, 24, 3)]
    assert {"".join(sorted(block)) for block in blocks} == {"abc"}
    assert len(set(blocks)) > 2
    assert measured["b"] == [float(i + 1) for i, name in enumerate(order) if name == "b"]
    again, order[:] = list(order), []
    common.interleave(arms, 8)
    assert order == again
    assert common.medians({"a": [1.0, 9.0, 2.0]}) == {"a": 2.0}


@pytest.mark.parametrize(
    ("ratio", "missing", "code"), [(1.0, [], 0), (0.99, [], 1), (1.0, ["something"], 1)]
)
def test_a_missed_aim_is_exit_code_1(
    common: ModuleType,
    capsys: pytest.CaptureFixture[str],
    ratio: float,
    missing: list[str],
    code: int,
) -> None:
    assert common.finish("x", {"unit": "s"}, [("a / b", ratio, 1.0)], missing) == code
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["met"] is (code == 0)
    assert said["aims"] == [{"what": "a / b", "ratio": ratio, "aim": 1.0, "met": ratio >= 1.0}]
    assert said["environment"]["cores"] >= 1


RANK = """
import json, os, sys, time
rank, mode = int(sys.argv[2]), sys.argv[3]
if mode == "hang":
    time.sleep(60)
if mode == "fail" and rank == 1:
    sys.exit(4)
print("talk")
print(json.dumps({"rank": rank, "task": json.loads(os.environ["TF_CONFIG"])}))
"""


def test_ranks_run_as_one_cluster(common: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    said = common.run_ranks(str(script), ["ok"])
    assert said["rank"] == 0
    assert len(set(said["task"]["cluster"]["worker"])) == 2
    with pytest.raises(RuntimeError, match="exit code 4"):
        common.run_ranks(str(script), ["fail"])
    with pytest.raises(RuntimeError, match="within 1 s"):
        common.run_ranks(str(script), ["hang"], limit_s=1.0)


@pytest.mark.parametrize("name", ["step_time", "startup", "input", "checkpoint"])
def test_benchmarks_say_what_they_do(name: str) -> None:
    command = [sys.executable, str(BENCH / f"{name}.py"), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert "--blocks" in ran.stdout


@pytest.fixture(scope="module")
def checkpoint(common: ModuleType) -> Iterator[ModuleType]:
    """The module, with its neighbours, which it imports by name."""
    names = ("common", "checkpoint_worker", "checkpoint")
    before = {name: sys.modules.get(name) for name in names}
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("checkpoint")
    finally:
        sys.path.remove(str(BENCH))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def told(rank: int) -> dict[str, Any]:
    """A rank's record of a first save and two more, each written from 10 to 13 seconds later."""
    return {
        "state_bytes": 100,
        "arms": {"bare_copy": [1.0 + rank, 1.0]},
        "record": {
            "stall": [9.0, 0.5, 0.5 + rank],
            "write": [[n, 10.0 * n, 10.0 * n + 2 + rank, 50 + rank] for n in (1, 2, 3)],
            "step": [[9.0, 9.5], [20.5, 22.5], [22.5, 24.0], [25.0, 26.0]],
        },
    }


def test_ranks_are_combined(checkpoint: ModuleType) -> None:
    arms, written = checkpoint.combine([told(0), told(1)])
    assert written == 1.01
    assert arms["bare_copy"] == [2.0, 1.0]
    assert arms["stall"] == [0.5, 1.5]  # without the first, which makes the buffers
    assert arms["write"] == [3.0, 3.0]
    assert arms["step_busy"] == [2.0]  # what overlaps a write in part counts for neither
    assert arms["step_idle"] == [1.0]


def test_what_could_not_be_judged_is_missing(checkpoint: ModuleType) -> None:
    median = {"bare_copy": 1.0, "stall": 1.0, "keras_save": 10.0, "step_idle": 1.0}
    median |= {"tf_restore": 2.0, "restore": 1.0}
    judged, missing = checkpoint.aims(median, 1.0)
    assert missing == ["step_idle / step_busy"]
    assert all(ratio >= aim for _, ratio, aim in judged)
    judged, missing = checkpoint.aims(median | {"step_busy": 1.31, "stall": 1.51}, 1.02)
    missed = [text for text, ratio, aim in judged if ratio < aim]
    assert missed == [
        "state / bytes written",
        "bare_copy / stall",
        "keras_save / stall",
        "step_idle / step_busy",
    ]
    assert missing == []


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_checkpoint_benchmark_runs() -> None:
    command = [sys.executable, str(BENCH / "checkpoint.py"), "--quick", "--blocks", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["aims"] == [] and said["met"]
    assert 1.0 <= said["written_to_state"] < 1.01
    arms = {"stall", "bare_copy", "write", "step_idle", "keras_save", "tf_save", "report"}
    assert arms | {"restore", "tf_restore"} <= set(said["median"])
    assert all(value > 0 for value in said["median"].values())
