"""What the run actor needs to watch over a run: its limits, and what it keeps in the run's storage:
the event log, TensorBoard's files, its memory of nodes, and the batches that are left out.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raytf.checkpoint.storage import SKIPS, Storage, read_skips
from raytf.cluster.event_log import EventLog, events_of
from raytf.faults.board import TENSORBOARD, Board
from raytf.faults.events import Event
from raytf.faults.nodes import NodeBook
from raytf.faults.policy import Limits

__all__ = ["NODES", "RunWatch"]

NODES = "nodes.json"
_log = logging.getLogger("raytf")


@dataclass(frozen=True, kw_only=True)
class RunWatch:
    """See the module.

    Attributes:
        storage: the run's directory.
        run: its name.
        attempt: of the run.
        limits: of its retries.
        hang_timeout_s: of the watchdog.
        config: shown in TensorBoard.
    """

    storage: Storage
    run: str
    attempt: int
    limits: Limits
    hang_timeout_s: float | Literal["auto"] = "auto"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def open_log(self) -> EventLog:
        """The run actor's own event log."""
        return EventLog(self.storage, self.run, self.attempt, "run_actor")

    def open_board(self) -> Board:
        """TensorBoard's files; on other than local storage they are written here and uploaded."""
        place = self.storage.join(TENSORBOARD)
        past = self._past()
        if self.storage.is_local:
            return Board(place.path, attempt=self.attempt, past=past, config=self.config)
        directory = tempfile.mkdtemp(prefix="raytf-tensorboard-")

        def upload(path: str) -> None:
            with open(path, "rb") as file:
                place.write_bytes(file.read(), os.path.basename(path))

        return Board(directory, attempt=self.attempt, past=past, config=self.config, sync=upload)

    def _past(self) -> Iterator[Event]:
        yield from events_of(self.storage)  # in the board's thread, when it first asks

    def read_skips(self) -> list[list[int]]:
        """(epoch, step) of the batches that are left out."""
        return read_skips(self.storage)

    def write_skips(self, skips: list[list[int]]) -> None:
        """Keeps them for the next group's workers, which must see them: raises if it cannot."""
        self.storage.write_bytes(json.dumps(skips).encode(), SKIPS)

    def read_nodes(self) -> NodeBook:
        """What earlier drivers have learnt about nodes; an unreadable memory is none."""
        try:
            told = json.loads(self.storage.read_bytes(NODES))
            return NodeBook.from_json(told)
        except FileNotFoundError:
            pass
        except Exception as error:  # a store raises what it likes; training does not hang on this
            _log.warning("%s cannot be read: %s", self.storage.join(NODES).url, error)
        return NodeBook(max_faults=self.limits.max_node_faults)

    def write_nodes(self, book: NodeBook) -> None:
        """Keeps it for later drivers; trouble is logged, never raised."""
        try:
            self.storage.write_bytes(json.dumps(book.to_json()).encode(), NODES)
        except Exception as error:
            _log.warning("%s cannot be written: %s", self.storage.join(NODES).url, error)
