"""The jobs as a user runs them: a process, flags, an exit code and the last line on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobkit
import pytest

import raytf

JOBS = Path(__file__).parents[2] / "jobs"
KEYS = [
    "data",
    "run",
    "steps",
    "metrics",
    "weights_sha256",
    "restarts",
    "generations",
    "process_restarts",
    "lost_steps",
    "replayed_steps",
]


def run(job: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JOBS / job), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


def report(job: str, *flags: str) -> dict[str, Any]:
    """The JSON line of a run that must succeed."""
    ran = run(job, "--json", *flags)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("job", ["mnist.py", "text_generation.py", "tabular_parquet.py"])
def test_help(job: str) -> None:
    ran = run(job, "--help")
    assert ran.returncode == 0
    for flag in ("--workers", "--storage", "--recovery", "--spares", "--drill", "--json"):
        assert flag in ran.stdout


def test_usage_is_exit_code_2() -> None:
    assert run("mnist.py", "--data", "cats").returncode == 2


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", {}),
        ("--save-every-steps 10", {"save": raytf.SaveConfig(every_steps=10)}),
        ("--recovery survivor", {"recovery": raytf.RecoveryConfig(mode="survivor")}),
        ("--spares 1", {"recovery": raytf.RecoveryConfig(spares=1)}),
        ("--drill kill-rank-1", {"drill": "kill-rank-1"}),
    ],
)
def test_flags_that_are_given_reach_the_trainer(line: str, options: dict[str, Any]) -> None:
    args = jobkit.parser("", epochs=1, global_batch_size=64).parse_args(line.split())
    assert jobkit.given(args) == {"save": raytf.SaveConfig(every_steps=100), **options}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--drill", "burn rank=1 step=30"], "drill: 'burn rank=1 step=30'"),
        (["--recovery", "survivor"], "mode='survivor'"),
        (["--global-batch-size", "1"], "batch_size=1"),
    ],
)
def test_bad_config_is_one_line_and_exit_code_3(flags: list[str], named: str) -> None:
    ran = run("mnist.py", "--data", "synthetic", "--json", *flags)
    assert ran.returncode == 3
    assert ran.stdout == ""
    said = [line for line in ran.stderr.splitlines() if not line.startswith("Data: ")]
    assert len(said) == 1
    assert said[0].startswith("mnist.py: ")
    assert named in said[0]


@pytest.mark.ray
def test_mnist_learns_the_five_thousand_digits(tmp_path: Path) -> None:
    said = report("mnist.py", "--data", "digits", "--storage", str(tmp_path), "--name", "first")
    assert list(said) == [*KEYS, "seconds"]
    assert said["steps"] == 5 * 63  # 4,000 digits in batches of 64, the last one smaller
    assert said["metrics"]["val_accuracy"] >= 0.9
    assert set(said["metrics"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert said["run"].endswith("/first")
    assert len(said["weights_sha256"]) == 64
    counts = {"generations": 1, "restarts": 0, "process_restarts": 0}
    counts |= {"lost_steps": 0, "replayed_steps": 0}
    assert {key: said[key] for key in counts} == counts
    assert 0 < said["seconds"] < 170


@pytest.mark.ray
def test_mnist_on_synthetic_data_without_json(tmp_path: Path) -> None:
    ran = run("mnist.py", "--data", "synthetic", "--epochs", "1", "--storage", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "Data: 8,192 synthetic digits" in ran.stderr
    assert "steps  128" in ran.stdout


@pytest.mark.ray
def test_mnist_with_tf_keras(tmp_path: Path) -> None:
    flags = ["--legacy-keras", "--data", "synthetic", "--epochs", "1", "--storage", str(tmp_path)]
    said = report("mnist.py", *flags)
    assert said["steps"] == 128
    assert said["metrics"]["val_accuracy"] > 0.5


@pytest.mark.ray
def test_text_generation(tmp_path: Path) -> None:
    tiny = ["--characters", "20000", "--width", "16", "--epochs", "1", "--sample", "20"]
    said = report("text_generation.py", "--storage", str(tmp_path), *tiny)
    assert list(said) == [*KEYS, "sample", "seconds"]
    assert said["sample"].startswith("The ")
    assert len(said["sample"]) == 24
    assert said["steps"] == 10  # 623 windows in batches of 64


@pytest.mark.ray
def test_tabular_parquet(tmp_path: Path) -> None:
    said = report("tabular_parquet.py", "--storage", str(tmp_path), "--table", str(tmp_path))
    assert list(said) == [*KEYS, "seconds"]
    assert said["steps"] == 30 * 10
    assert (
        said["metrics"]["val_mae"] < 4
    )  # always answering the mean misses by 6.5 miles per gallon
    assert (tmp_path / "train.parquet").exists()
