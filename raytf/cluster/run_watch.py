"""What the run actor needs to watch over a run: where its log and its memory of nodes lie, and its
limits.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Literal

from raytf.checkpoint.storage import Storage
from raytf.cluster.event_log import EventLog
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
    """

    storage: Storage
    run: str
    attempt: int
    limits: Limits
    hang_timeout_s: float | Literal["auto"] = "auto"

    def open_log(self) -> EventLog:
        """The run actor's own event log."""
        return EventLog(self.storage, self.run, self.attempt, "run_actor")

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
