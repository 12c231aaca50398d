"""Whether data is the data that a run began with, told without reading all of it.

Pure apart from the reading. Stored with every checkpoint, so its values are frozen: a change to
them would make old runs look as if their data had changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from raytf.data.arrays import named_leaves
from raytf.data.sources import Source

__all__ = ["SAMPLED_ROWS", "describe", "sampled_rows"]

SAMPLED_ROWS = 64
_RUN = 8  # neighbours that are read together: files give rows by groups


def sampled_rows(num_rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Row numbers that stand for all: up to 64 in 8 runs over the whole data; (n,), int64."""
    if num_rows <= SAMPLED_ROWS:
        return np.arange(num_rows, dtype=np.int64)
    last = num_rows - _RUN
    starts = [last * i // (SAMPLED_ROWS // _RUN - 1) for i in range(SAMPLED_ROWS // _RUN)]
    return np.unique(np.concatenate([np.arange(s, s + _RUN, dtype=np.int64) for s in starts]))


def describe(source: Source) -> dict[str, Any]:
    """What identifies the data of a source, as JSON: `rows`, `element`, `content`."""
    num_rows = len(source)
    digest = xxhash.xxh3_64()
    for name, array in named_leaves(source.read(sampled_rows(num_rows)), ""):
        digest.update(name.encode())
        values: Any = np.asarray(array)
        if values.dtype.kind in "OUS":  # strings: their lengths keep neighbours apart
            for value in values.reshape(-1).tolist():
                text = value if isinstance(value, bytes) else str(value).encode()
                digest.update(len(text).to_bytes(8, "little") + text)
        else:
            digest.update(np.ascontiguousarray(values).tobytes())
    element = {
        name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(source.spec(), "")
    }
    return {"rows": num_rows, "element": element, "content": digest.hexdigest()}
