"""Ports and addresses, and what a rank does when its port is gone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

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
