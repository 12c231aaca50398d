"""What a worker is told and handed from outside: plain data and plain callables, neither TensorFlow
nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from raytf.checkpoint.storage import Storage
from raytf.config import SaveConfig, TrainSpec, WatchConfig
from raytf.faults.drill import Strike

__all__ = ["Formation", "Job", "Links", "Origin", "RunPlace", "host_port"]


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
class Origin:
    """An old state that a new run starts from.

    Attributes:
        kind: "step" is a raytf checkpoint; "keras", "saved_model" and "tf_checkpoint" come from
            elsewhere and hold weights, perhaps an optimizer, and no position.
        url: for people.
        storage: the checkpoint's run, or the file or directory.
        step: of a raytf checkpoint.
        strict: whether every name and shape must be the same.
    """

    kind: Literal["step", "keras", "saved_model", "tf_checkpoint"]
    url: str
    storage: Storage
    step: int | None = None
    strict: bool = True


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where a run keeps its state, and which attempt at the run this is.

    Attributes:
        storage: the run's directory.
        run: id of the run, the same in all attempts.
        attempt: counts the drivers that have worked on the run.
        owner: who holds the run's lease; a commit and a deletion look whether that is still so.
        save: when to save and what to keep.
        num_best: how many of the best are kept, if `save.keep_best` says so.
        fingerprint: what must not change when a run is resumed.
        kills: faults to inject.
        watch: what counts as a fault while training is alive.
        origin: what a run without own checkpoints starts from; None: from the beginning.
        go_on: whether training goes on although a callback had stopped it (more epochs were asked
            for).
    """

    storage: Storage
    run: str
    attempt: int
    owner: str
    save: SaveConfig
    fingerprint: dict[str, Any]
    num_best: int = 1
    kills: tuple[Strike, ...] = ()
    watch: WatchConfig = field(default_factory=WatchConfig)
    origin: Origin | None = None
    go_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of one worker group runs.

    Attributes:
        spec: the run.
        mode: "train" runs fit and exports; "evaluate" and "predict" load `weights` and read
            `spec.train_data`.
        output: fsspec filesystem and directory (no protocol) that the chief writes the trained
            model to; None: nowhere.
        place: of the run's checkpoints; None: none are written or read.
        weights: fsspec filesystem and path of the exported weights that evaluate and predict load.
    """

    spec: TrainSpec
    mode: Literal["train", "evaluate", "predict"] = "train"
    output: tuple[Any, str] | None = None
    place: RunPlace | None = None
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
        share: `share(key, value) -> list`; plain data of every rank, by rank. Blocks until all
            ranks have come with this key; a key is used once. Safe on any thread.
        post: `post(key, value)`; gives this rank's value for `share` and does not wait.
        restored: `restored(storage)`; tells the framework around which step directory the state
            came from.
        progress: `progress(record)`; never blocks and never fails; records are plain dicts.
        deliver: `deliver(key, value)`; hands a result (rows of predict, say) to the driver.
        beat: `beat(record)`; a sign of life, about once a second and never on the training thread:
            `phase` (of `phases.PHASES`), `step` (completed in the run), `since_s` (how long it has
            been in this phase and step), and over the time since the last beat `seconds` (by
            phase) and `steps`. Never fails.
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
    share: Callable[[str, Any], list[Any]]
    post: Callable[[str, Any], None]
    restored: Callable[[Storage], None]
    progress: Callable[[dict[str, Any]], None]
    deliver: Callable[[str, Any], None]
    beat: Callable[[dict[str, Any]], None] = lambda record: None

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def address(self, port: int) -> str:
        """What to join with: `host:port`, or `[host]:port` for IPv6."""
        return host_port(self.host, port)
