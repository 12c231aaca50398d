"""The example of README.md runs as it is printed, and the paths README names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_paths_exist() -> None:
    named = set(re.findall(r"`((?:jobs|tests|raytf)/[\w/.]*)`", README))
    named |= set(re.findall(r"\]\((?!#)([^)]+)\)", README))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_example_is_short() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = [line for line in example.splitlines() if line.strip() and "import" not in line]
    assert len(code) <= 20


@pytest.mark.ray
def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    script = tmp_path / "example.py"
    script.write_text(example.replace('"/tmp/raytf"', repr(str(tmp_path / "runs"))))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    assert "'val_mae'" in ran.stdout
    assert "321" in ran.stdout  # 8 * 32 + 32 + 32 + 1 parameters
