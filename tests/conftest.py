"""What all tests share: an explicit environment, order and limits by mark, nothing left running.

Every process that a test file starts inherits a token in its environment, so what is left behind
is found even after its parent died and other Rays on the machine are not mistaken for ours.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

TOKEN = "RAYTF_TEST_FILE"
LIMIT_S = {"ray": 180.0, "tf": 60.0}  # one test; pure ones have pyproject's limit
GONE_WITHIN_S = 10.0  # Ray's own processes take about a second after shutdown

# Before any test imports TensorFlow or Ray; a value that is already set wins.
for _name, _value in {
    "RAY_AUTH_MODE": "disabled",  # unset would mean a token, written to the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}.items():
    os.environ.setdefault(_name, _value)
for _name in ("TF_CONFIG", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND", "RAY_ADDRESS"):
    os.environ.pop(_name, None)  # a shell's leftovers must not choose what is tested


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives marked tests their time limit, and runs the quick floors first."""

    def cost(item: pytest.Item) -> int:
        marks = {mark.name for mark in item.iter_markers()}
        return 2 if "ray" in marks else 1 if "tf" in marks else 0

    for item in items:
        limits = [LIMIT_S[m.name] for m in item.iter_markers() if m.name in LIMIT_S]
        if limits and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(limits)))
    items.sort(key=cost)


def processes_with(token: str) -> list[psutil.Process]:
    """All processes but this one that were started with `token` in their environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            dead = process.status() == psutil.STATUS_ZOMBIE
            if process.pid != os.getpid() and not dead and process.environ().get(TOKEN) == token:
                found.append(process)
    return found


def wait_until_gone(token: str, within_s: float) -> list[psutil.Process]:
    """The processes with `token` that are still there after `within_s`."""
    deadline = time.monotonic() + within_s
    left = processes_with(token)
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
        left = processes_with(token)
    return left


@pytest.fixture(autouse=True, scope="module")
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test file whose processes, Ray's included, outlive it; ends them in any case."""
    token = uuid.uuid4().hex
    os.environ[TOKEN] = token
    try:
        yield
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            ray.shutdown()
        left = wait_until_gone(token, GONE_WITHIN_S)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(f"{process.pid} {' '.join(process.cmdline()).strip()[:160]}")
                process.kill()
        if names:
            pytest.fail(f"{request.path.name} left running:\n" + "\n".join(names))
    finally:
        os.environ.pop(TOKEN, None)


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """`free_ports(n)`: n different loopback ports that nobody listens on now."""

    def pick(count: int) -> list[int]:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for held in sockets:
                held.bind(("127.0.0.1", 0))
            return [held.getsockname()[1] for held in sockets]

    return pick
