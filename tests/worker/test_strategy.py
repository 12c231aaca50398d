"""Ports and addresses, and what a rank does when its port is gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from raytf.config import CommunicationConfig
from raytf.errors import StartupError
from raytf.worker import links, strategy
from raytf.worker.links import Formation
from tests.worker.group import loopback_links

pytestmark = pytest.mark.tf


def test_ipv6_hosts_get_brackets() -> None:
    assert links.host_port("fe80::1", 80) == "[fe80::1]:80"
    assert links.host_port("10.0.0.1", 80) == "10.0.0.1:80"


def test_a_reserved_port_is_nobody_elses() -> None:
    with strategy.reserve_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("", port))
        assert strategy.port_problem(port, "127.0.0.1") is None
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", port))  # and free again afterwards


def test_a_reserved_ipv6_port() -> None:
    with strategy.reserve_port("::1") as port:
        assert strategy.port_problem(port, "::1") is None


def test_a_taken_port_is_a_problem() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        assert str(port) in (strategy.port_problem(port, "127.0.0.1") or "")


def test_a_lost_race_is_tried_again_with_a_new_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the first picked port at once: the group joins again and no user sees it."""
    taken: list[socket.socket] = []
    joined: list[str] = []

    @contextlib.contextmanager
    def steal_first(host: str) -> Iterator[int]:
        thief = socket.socket()
        thief.bind(("", 0))
        port = thief.getsockname()[1]
        if taken:
            thief.close()
        else:
            thief.listen()
            taken.append(thief)
        yield port

    def join(address: str, attempt: int) -> Formation:
        joined.append(address)
        return Formation(generation=attempt, addresses=(address,))

    made: list[Formation] = []
    monkeypatch.setattr(
        strategy, "_strategy", lambda formation, links, config: made.append(formation)
    )
    links = loopback_links(0, ("unused",), join=join, hold=lambda generation, error: error is None)
    strategy.form_strategy(links, CommunicationConfig(), steal_first)
    taken[0].close()
    assert len(joined) == 2 and joined[0] != joined[1]
    assert made[0].generation == 2


def test_ports_that_are_always_taken_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    links = loopback_links(1, ("a", "b"), hold=lambda generation, error: False)
    with pytest.raises(StartupError, match="rank 1 found no usable port in 2 attempts"):
        strategy.form_strategy(links, CommunicationConfig(max_port_attempts=2))


class FakeConfig:
    """Stands for tf.config: there is no GPU here."""

    def __init__(self, gpus: list[str]) -> None:
        self.gpus = gpus
        self.calls: list[tuple[Any, ...]] = []
        self.threading = self
        self.experimental = self

    def list_physical_devices(self, kind: str) -> list[str]:
        return self.gpus

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


def configured(monkeypatch: pytest.MonkeyPatch, gpus: list[str], *args: Any) -> Any:
    fake = FakeConfig(gpus)
    monkeypatch.setattr(strategy.tf, "config", fake)
    threads = strategy.configure(*args)
    return threads, fake.calls


def test_threads_follow_the_cpu_share(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, calls = configured(monkeypatch, [], 3.0, 0, True)
    assert threads == 3
    assert ("set_intra_op_parallelism_threads", 3) in calls
    assert configured(monkeypatch, [], 0.5, 0, True)[0] == 1


def test_a_cpu_worker_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = configured(monkeypatch, ["gpu0"], 1, 0, True)
    assert ("set_visible_devices", [], "GPU") in calls
    assert not any(name == "set_memory_growth" for name, *_ in calls)


def test_a_gpu_grows_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = configured(monkeypatch, ["gpu0", "gpu1"], 1, 2, True)
    assert ("set_memory_growth", "gpu0", True) in calls
    assert ("set_memory_growth", "gpu1", True) in calls
    assert ("enable_op_determinism",) in calls
    assert ("enable_op_determinism",) not in configured(monkeypatch, ["g"], 1, 1, False)[1]


def test_a_gpu_that_tensorflow_cannot_see_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="TensorFlow .* sees none"):
        configured(monkeypatch, [], 1, 1, True)


@pytest.mark.parametrize(
    ("given", "num_gpus", "expected"),
    [("auto", 0, "RING"), ("auto", 1, "NCCL"), ("ring", 1, "RING"), ("nccl", 0, "NCCL")],
)
def test_collectives_are_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: Any, num_gpus: int, expected: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        strategy.tf.distribute,
        "MultiWorkerMirroredStrategy",
        lambda communication_options: made.append(communication_options),
    )
    monkeypatch.setenv("TF_CONFIG", "")
    seat = loopback_links(1, ("a:1", "b:2"), num_gpus=float(num_gpus))
    config = CommunicationConfig(implementation=given, bytes_per_pack=77, timeout_s=5)
    strategy._strategy(Formation(generation=1, addresses=("a:1", "b:2")), seat, config)
    assert made[0].implementation.name == expected
    assert (made[0].bytes_per_pack, made[0].timeout_seconds) == (77, 5)
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "worker", "index": 1},
    }
