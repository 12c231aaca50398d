"""What a worker is told and handed from outside: plain data and plain callables, neither TensorFlow
nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from raytf.config import TrainSpec

__all__ = ["Formation", "Job", "Links", "host_port"]


def host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host as URLs and gRPC want them."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


@dataclass(frozen=True, kw_only=True)
class Formation:
    """One group of ranks that starts together; `addresses[rank]` is that rank's `host:port`."""

    generation: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of one worker group runs.

    Attributes:
        spec: the run.
        mode: "train" runs fit and exports; "evaluate" and "predict" load `weights` and read
            `spec.train_data`.
        output: fsspec filesystem and directory (no protocol) that the chief writes the trained
            model to; None: nowhere.
        weights: fsspec filesystem and path of the exported weights that evaluate and predict load.
    """

    spec: TrainSpec
    mode: Literal["train", "evaluate", "predict"] = "train"
    output: tuple[Any, str] | None = None
    weights: tuple[Any, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Links:
    """A worker's seat and its lines to the rest of the group.

    Attributes:
        rank: 0 is the chief.
        num_workers: ranks in the group.
        num_cpus: this worker's CPU share; decides its TensorFlow threads.
        num_gpus: GPUs this worker was given.
        host: IP address or name at which the other ranks reach this one, without port and brackets;
            `links.address(port)` joins the two.
        join: `join(address, attempt) -> Formation`; blocks until every rank of this attempt has
            joined. Raises StartupError naming the missing ranks after the start-up limit.
        hold: `hold(generation, error) -> bool`; reports that this rank still holds its port (error
            None) or why not, before any server starts, and blocks until every rank has reported.
            False: join again with a new address. Raises StartupError when attempts or time are used
            up.
        ready: `ready(generation, error) -> bool`; reports that this rank's server is up (error
            None) or why not, and blocks until every rank has reported or one failed. Raises
            StartupError when time is used up.
        compare: `compare(signature)`; raises ModelMismatchError on every rank if the ranks'
            signatures differ.
        progress: `progress(record)`; never blocks and never fails; records are plain dicts.
        deliver: `deliver(key, value)`; hands a result (rows of predict, say) to the driver.
    """

    rank: int
    num_workers: int
    num_cpus: float
    num_gpus: float
    host: str
    join: Callable[[str, int], Formation]
    hold: Callable[[int, str | None], bool]
    ready: Callable[[int, str | None], bool]
    compare: Callable[[dict[str, Any]], None]
    progress: Callable[[dict[str, Any]], None]
    deliver: Callable[[str, Any], None]

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def address(self, port: int) -> str:
        """What to join with: `host:port`, or `[host]:port` for IPv6."""
        return host_port(self.host, port)
