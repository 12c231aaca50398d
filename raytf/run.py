"""A run that is there already, opened from its storage: `raytf.open_run`.

Owns what one can ask of it from Python. It reads, and never writes; the run may be going on, be
finished, or be of a cluster that is long gone. Neither Ray nor TensorFlow is loaded.
"""

from __future__ import annotations

import html
import os
import time
from typing import Any

from raytf.checkpoint.storage import Storage, resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.cluster.event_log import events_of
from raytf.faults.events import EventList
from raytf.faults.goodput import Ledger
from raytf.report.page import fragment, page
from raytf.status import history_of, read_facts, status

__all__ = ["Run", "open_run"]


class Run:
    """A run in its storage; every attribute is read anew when it is asked for.

    Args:
        storage: the run's directory.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.url = storage.url

    @property
    def events(self) -> EventList:
        """All events so far, oldest first."""
        return events_of(self._storage)

    def status(self) -> dict[str, Any]:
        """How it is: see `raytf.status.status`, or `raytf status --json`."""
        return status(read_facts(self._storage), time.time())

    @property
    def goodput(self) -> Ledger:
        """Where its wall time went, up to its end or its last event."""
        return Ledger.of(self.events)

    @property
    def store(self) -> CheckpointStore:
        """Its checkpoints."""
        return CheckpointStore(self._storage)

    @property
    def history(self) -> dict[str, list[float]]:
        """Metric name -> one value per epoch that has ended."""
        return history_of(read_facts(self._storage))

    def report(self) -> str:
        """The whole run as one page of HTML that needs nothing else."""
        return page(read_facts(self._storage), time.time())

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    def _repr_html_(self) -> str:
        try:
            return fragment(read_facts(self._storage), time.time())
        except Exception as error:  # a notebook must show the cell all the same
            return f"<code>{html.escape(f'{self!r}: {type(error).__name__}: {error}')}</code>"


def open_run(url: str | os.PathLike[str], *, storage_filesystem: Any = None) -> Run:
    """Opens a run for reading.

    Args:
        url: the run's directory, `{storage_path}/{name}`: a local path or an fsspec URL.
        storage_filesystem: fsspec or pyarrow filesystem; `url` is then a path on it.

    Raises:
        NotFoundError: there is no run.
        StorageError: the store does not answer.

    Example:
        >>> run = raytf.open_run("s3://bucket/runs/mnist")
        >>> run.status()["state"], run.goodput.line()
    """
    storage = resolve(url, storage_filesystem)
    read_facts(storage)
    return Run(storage)
