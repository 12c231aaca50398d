"""How ranks are named to people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed_ranks"]


def listed_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`, `ranks 0-7`: short for people."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
