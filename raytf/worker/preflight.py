"""Whether the store is one place that every rank can write, list and read, tried before anything is
built on it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from raytf.checkpoint.storage import Storage
from raytf.errors import StorageError
from raytf.worker.links import Links

__all__ = ["check_space", "check_store"]

_MIB = 1024 * 1024


def check_store(storage: Storage, links: Links) -> None:
    """Every rank writes a file and reads everybody's.

    Args:
        storage: the run's directory.
        links: of this rank.

    Raises:
        StorageError: on every rank, naming the ranks that cannot and why.
    """
    name = f"rank-{links.rank}-{secrets.token_hex(4)}"
    trouble = _try(lambda: storage.write_bytes(name.encode(), ".preflight", name), "write")
    written = links.share("preflight/written", {"name": name, "trouble": trouble})
    if trouble is None:
        names = {rank: w["name"] for rank, w in enumerate(written) if w["trouble"] is None}
        trouble = _read_all(storage, names)
    troubles = links.share("preflight/read", trouble)
    cleared = _try(storage.join(".preflight").remove, "delete") if links.is_chief else None
    troubles[0] = troubles[0] or links.share("preflight/cleared", cleared)[0]
    bad = {rank: text for rank, text in enumerate(troubles) if text is not None}
    if bad:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
        raise StorageError(
            f"{storage.url} cannot hold this run's checkpoints: {told}. All workers must write to "
            "and read from one place: a directory on a file system that all nodes mount, or an "
            "object store with credentials on every node.",
            path=storage.url,
            ranks=sorted(bad),
        )


def _read_all(storage: Storage, names: dict[int, str]) -> str | None:
    place = storage.join(".preflight")

    def read() -> None:
        storage.fs.invalidate_cache()
        listed = {str(p).rstrip("/").rsplit("/", 1)[-1] for p in storage.fs.ls(place.path, False)}
        for rank, name in names.items():
            if name not in listed:
                raise FileNotFoundError(f"what rank {rank} wrote is not there")
            if place.read_bytes(name) != name.encode():
                raise OSError(f"what rank {rank} wrote reads differently")

    return _try(read, "read")


def _try(action: Callable[[], None], verb: str) -> str | None:
    try:
        action()
    except Exception as error:  # a store raises what it likes; all of it means "cannot"
        return f"cannot {verb}: {type(error).__name__}: {error}"
    return None


def check_space(free_bytes: int | None, state_bytes: int, url: str, links: Links) -> None:
    """Refuses a disk without room for two checkpoints.

    Args:
        free_bytes: as this rank sees it; None: the store does not say.
        state_bytes: of one checkpoint.
        url: of the store.
        links: of this rank.

    Raises:
        StorageError: on every rank, naming the first rank without room.
    """
    needed = 2 * state_bytes
    for rank, free in enumerate(links.share("preflight/space", free_bytes)):
        if free is not None and free < needed:
            raise StorageError(
                f"{url} has {free / _MIB:,.0f} MiB free on rank {rank}'s node; two checkpoints of "
                f"this model need {needed / _MIB:,.0f} MiB. Free some space, or set storage_path "
                "to a larger place.",
                path=url,
                rank=rank,
            )
