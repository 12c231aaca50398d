"""What the benchmarks share; the benchmarks themselves are run by hand, on a quiet machine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize("name", ["step_time", "startup", "input"])
def test_benchmarks_say_what_they_do(name: str) -> None:
    import subprocess

    command = [sys.executable, str(BENCH / f"{name}.py"), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert "--blocks" in ran.stdout
