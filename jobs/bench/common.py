"""What the benchmarks share: ranks on loopback, interleaved blocks, aims, one JSON line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Aim", "environment", "finish", "interleave", "medians", "run_ranks", "say"]

Aim = tuple[str, float, float]  # what it says, the ratio measured, the ratio aimed at (at least)


def say(text: str) -> None:
    """Talk goes to stderr; stdout holds the result."""
    print(text, file=sys.stderr, flush=True)


def environment() -> dict[str, Any]:
    """Where the numbers come from."""
    cpu = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text()
        cpu = text.split("model name")[1].split(":", 1)[1].split("\n", 1)[0].strip()
    packages = ("ray", "tensorflow", "keras", "tf-keras", "numpy")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def interleave(arms: dict[str, Callable[[], float]], blocks: int) -> dict[str, list[float]]:
    """Runs all arms `blocks` times, so that a slow moment of the machine hits all.

    The order changes from block to block, since an arm can leave work to the next one; all ranks
    have the same.
    """
    measured: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks):
        for name in random.Random(block).sample(list(arms), len(arms)):
            measured[name].append(arms[name]())
    return measured


def medians(measured: dict[str, list[float]], digits: int = 3) -> dict[str, float]:
    return {name: round(statistics.median(values), digits) for name, values in measured.items()}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def run_ranks(
    script: str, arguments: list[str], ranks: int = 2, limit_s: float = 900.0
) -> dict[str, Any]:
    """Runs `script --rank R ...` as `ranks` processes under one TF_CONFIG cluster.

    Returns:
        The JSON object that rank 0 printed as its last line.

    Raises:
        RuntimeError: a rank failed or the limit was passed; nothing is left running.
    """
    workers = [f"127.0.0.1:{port}" for port in _free_ports(ranks)]
    started = []
    for rank in range(ranks):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        env = {**os.environ, "TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "3"}
        env.pop("TF_USE_LEGACY_KERAS", None)
        command = [sys.executable, script, "--rank", str(rank), *arguments]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        started.append(subprocess.Popen(command, env=env, stdout=out, text=True))
    try:
        deadline = time.monotonic() + limit_s
        out, _ = started[0].communicate(timeout=limit_s)
        for process in started:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script} did not finish within {limit_s:g} s") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if codes := [process.returncode for process in started if process.returncode]:
        raise RuntimeError(f"{script}: a rank ended with exit code {codes[0]}")
    return json.loads(out.splitlines()[-1])


def finish(
    name: str, result: dict[str, Any], aims: list[Aim], missing: list[str] | None = None
) -> int:
    """Prints the aims, and one JSON object as the last line; 1 if an aim was not met."""
    for text, ratio, aim in aims:
        say(f"{'ok    ' if ratio >= aim else 'MISSED'}  {text}: {ratio:.3f} (at least {aim:.3g})")
    for text in missing or []:
        say(f"MISSED  {text}: not measured")
    met = not missing and all(ratio >= aim for _, ratio, aim in aims)
    report = {
        "benchmark": name,
        "met": met,
        "aims": [{"what": t, "ratio": round(r, 3), "aim": a, "met": r >= a} for t, r, a in aims],
        "missing": missing or [],
        **result,
        "environment": environment(),
    }
    print(json.dumps(report), flush=True)
    return 0 if met else 1
