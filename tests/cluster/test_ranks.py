from __future__ import annotations

import pytest

from raytf.cluster.ranks import listed_ranks
from raytf.worker.links import host_port


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([1, 3], "ranks 1, 3"),
        ([0, 1, 2], "ranks 0, 1, 2"),
        (list(range(8)), "ranks 0-7"),
        ([0, 1, 2, 4], "ranks 0, 1, 2, 4"),
    ],
)
def test_listed(ranks: list[int], text: str) -> None:
    assert listed_ranks(ranks) == text


@pytest.mark.parametrize(
    ("host", "text"),
    [("10.0.0.1", "10.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("node-7", "node-7:5")],
)
def test_host_port(host: str, text: str) -> None:
    assert host_port(host, 5) == text
