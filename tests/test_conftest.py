"""The safety net itself: leftovers are found, ports differ."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

INNER = """
import subprocess, sys
def test_leaves_a_child():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


def test_a_process_left_behind_fails_its_file(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = (here / "conftest.py").read_text().replace("GONE_WITHIN_S = 10.0", "GONE_WITHIN_S = 0.5")
    (tmp_path / "conftest.py").write_text(code)
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1, ran.stdout
    assert "test_inner.py left running:" in ran.stdout
    pid = int(re.search(r"left running:\n\D*(\d+) ", ran.stdout)[1])
    with contextlib.suppress(psutil.NoSuchProcess):  # killed; a zombie where nobody reaps orphans
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_free_ports_differ(free_ports: Callable[[int], list[int]]) -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 < port < 65536 for port in ports)
