"""A seeded permutation of any number of rows that can be read at any position.

The permutation is a Feistel network over [0, a*b) with a*b just above the number of rows, on
numbers of base a and b instead of bits (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002), with cycle walking for the few results outside. Its round function is the murmur3 finaliser
with a 64-bit key; keys come from splitmix64.

Owns the numbers: a change to any of them changes the order of every run (see `order.py`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["CHUNK_ROWS", "MASK64", "MAX_ROWS", "fold", "mix64", "permute"]

Rows = npt.NDArray[np.int64]

MASK64 = (1 << 64) - 1
MAX_ROWS = 1 << 62  # so that a sum of two digits fits 32 bits
CHUNK_ROWS = 16384  # 64 KiB per 32-bit temporary: the working set stays in the L2 cache
_NUM_ROUNDS = 8
_NUM_ROUNDS_SMALL = 24  # few rows have few round inputs; this makes all permutations equally likely
_SMALL_ROWS = 1024


def _mix64(value: int) -> int:
    """The splitmix64 step: adds the golden gamma, then mixes. A bijection of 64-bit numbers."""
    z = (value + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def fold(*parts: int) -> int:
    """One 64-bit key from several numbers; their order matters."""
    key = 0
    for part in parts:
        key = _mix64(key ^ part)
    return key


@lru_cache(maxsize=256)
def _round_keys(key: int, num_rounds: int) -> tuple[tuple[np.uint32, np.uint32], ...]:
    words = [_mix64((key + i) & MASK64) for i in range(num_rounds)]
    return tuple((np.uint32(w & 0xFFFFFFFF), np.uint32(w >> 32)) for w in words)


def _digit(
    other: npt.NDArray[np.uint32], keys: tuple[np.uint32, np.uint32], base: int
) -> npt.NDArray[np.uint32]:
    """The round function: a keyed hash of the other digit, as a number in [0, base)."""
    x = other ^ keys[0]
    scratch = x >> np.uint32(16)
    x ^= scratch
    x *= np.uint32(0x85EBCA6B)
    np.right_shift(x, np.uint32(13), out=scratch)
    x ^= scratch
    x += keys[1]
    x *= np.uint32(0xC2B2AE35)
    np.right_shift(x, np.uint32(16), out=scratch)
    x ^= scratch
    wide = x.astype(np.uint64)
    wide *= np.uint64(base)
    wide >>= np.uint64(32)
    return wide.astype(np.uint32)


def _add_digit(
    digit: npt.NDArray[np.uint32], amount: npt.NDArray[np.uint32], base: int
) -> npt.NDArray[np.uint32]:
    digit += amount
    # On unsigned numbers this is d modulo base for d < 2 * base: d - base wraps when d < base.
    return np.minimum(digit, digit - np.uint32(base), out=digit)


def _encrypt(positions: npt.NDArray[np.uint64], key: int, size: int) -> npt.NDArray[np.uint64]:
    """One pass of the network: positions in [0, a*b) to numbers in [0, a*b), a bijection."""
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    high = positions // np.uint64(b)
    low = (positions - high * np.uint64(b)).astype(np.uint32)
    left = high.astype(np.uint32)
    num_rounds = _NUM_ROUNDS_SMALL if size < _SMALL_ROWS else _NUM_ROUNDS
    for i, keys in enumerate(_round_keys(key, num_rounds)):
        if i % 2 == 0:
            left = _add_digit(left, _digit(low, keys, a), a)
        else:
            low = _add_digit(low, _digit(left, keys, b), b)
    result = left.astype(np.uint64)
    result *= np.uint64(b)
    result += low
    return result


def permute(positions: Rows, key: int, size: int) -> Rows:
    """Maps positions in [0, size) to rows in [0, size) by the permutation that `key` names."""
    if size <= 1:
        return positions.copy()
    result = np.empty(len(positions), np.uint64)
    source = positions.astype(np.uint64)
    for start in range(0, len(positions), CHUNK_ROWS):
        part = _encrypt(source[start : start + CHUNK_ROWS], key, size)
        outside = np.flatnonzero(part >= np.uint64(size))
        while len(outside):
            part[outside] = _encrypt(part[outside], key, size)
            outside = outside[part[outside] >= np.uint64(size)]
        result[start : start + CHUNK_ROWS] = part
    return result.view(np.int64)


def mix64(values: Rows, key: int) -> npt.NDArray[np.uint64]:
    """Returns `_mix64` of each value under `key`: different values have different results."""
    z = values.astype(np.uint64) ^ np.uint64(key)
    z += np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
