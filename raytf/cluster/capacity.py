"""Can the cluster ever hold the worker group? Asked first, so that nobody waits without end.

`check` is pure: node resources, node types of the autoscaler and the wanted bundle in, a verdict
out. `check_cluster` asks a live Ray for these.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raytf.errors import ResourceError

__all__ = ["NodeType", "check", "check_cluster"]

_SKIPPED = ("memory", "object_store_memory")  # shown only when asked for
Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeType:
    """A kind of node that the autoscaler can add, up to `max_count` (None: no limit)."""

    name: str
    resources: Resources
    max_count: int | None = None


def _fits(node: Resources, bundle: Resources) -> float:
    """How many bundles one node holds; a bundle never spans nodes."""
    wanted = {k: v for k, v in bundle.items() if v > 0}
    if not wanted:
        return math.inf
    return min(math.floor(node.get(k, 0.0) / v + 1e-9) for k, v in wanted.items())


def _held(counts: Sequence[float], strategy: str) -> float:
    """Bundles that nodes holding `counts` each can take under a placement strategy."""
    if not counts:
        return 0
    if strategy == "STRICT_PACK":
        return max(counts)
    if strategy == "STRICT_SPREAD":
        return sum(1 for count in counts if count >= 1)
    return sum(counts)


def check(
    num_workers: int,
    bundle: Resources,
    nodes: Sequence[Resources],
    *,
    strategy: str = "PACK",
    autoscaler: bool = False,
    node_types: Sequence[NodeType] = (),
) -> str | None:
    """Decides whether `num_workers` bundles can ever be placed.

    Args:
        bundle: resources of one worker.
        nodes: total resources of each living node (what is busy now may become free).
        strategy: Ray's placement strategy.
        autoscaler: whether nodes may be added.
        node_types: what the autoscaler can add, if that is known.

    Returns:
        None if the present nodes are enough, else one sentence saying what the group waits for.

    Raises:
        ResourceError: it can never fit; names what is missing.
    """
    here = [_fits(node, bundle) for node in nodes]
    if _held(here, strategy) >= num_workers:
        return None
    asked = f"{num_workers} worker{'s' if num_workers != 1 else ''} with {_shape(bundle)}"
    if autoscaler:
        if not node_types or _most(here, node_types, bundle, strategy) >= num_workers:
            now = _cluster(nodes, bundle)
            return f"waiting for the autoscaler to add nodes for {asked}; now {now}"
        kinds = "; ".join(f"{kind.name} {_shape(kind.resources)}" for kind in node_types)
        most = _most(here, node_types, bundle, strategy)
        why = f"with every node the autoscaler may add, {most:g} fit ({kinds})"
        raise _too_small(asked, why, num_workers, bundle)
    raise _too_small(
        asked,
        f"{_cluster(nodes, bundle)}; {_why(here, num_workers, strategy)}; no autoscaler",
        num_workers,
        bundle,
    )


def _most(
    here: Sequence[float], node_types: Sequence[NodeType], bundle: Resources, strategy: str
) -> float:
    """Upper bound of the bundles that fit once every allowed node is there.

    Living nodes may be counted twice, as themselves and within `max_count`: better to wait in vain
    for an autoscaler that says so in its own log than to refuse what would have fitted.
    """
    counts = list(here)
    for kind in node_types:
        each = _fits(kind.resources, bundle)
        if each >= 1 and kind.max_count is None:
            return math.inf if strategy != "STRICT_PACK" else max([*counts, each])
        counts += [each] * (kind.max_count or 0)
    return _held(counts, strategy)


def _too_small(asked: str, why: str, num_workers: int, bundle: Resources) -> ResourceError:
    return ResourceError(
        f"asked for {asked}, but the cluster can never hold them: {why}. Lower num_workers or "
        "resources_per_worker, or use a larger cluster.",
        num_workers=num_workers,
        bundle=dict(bundle),
    )


def _shape(resources: Resources) -> str:
    shown = {k: v for k, v in resources.items() if not k.startswith("node:") and v > 0}
    return "{" + ", ".join(f"{k}: {_amount(k, v)}" for k, v in sorted(shown.items())) + "}"


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if name in _SKIPPED else f"{value:g}"


def _cluster(nodes: Sequence[Resources], bundle: Resources) -> str:
    words = []
    for name in sorted(k for k, v in bundle.items() if v > 0):
        total = sum(node.get(name, 0.0) for node in nodes)
        words.append(f"{_amount(name, total)} {name}" if total else f"no {name} on any node")
    count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return f"the cluster has {' and '.join(words)} ({count})"


def _why(counts: Sequence[float], num_workers: int, strategy: str) -> str:
    most = max(counts, default=0)
    if most < 1:
        return "no single node holds one worker"
    if strategy == "STRICT_PACK":
        return f"STRICT_PACK wants all on one node, which holds {most:g}"
    if strategy == "STRICT_SPREAD":
        able = sum(1 for count in counts if count >= 1)
        return f"STRICT_SPREAD wants {num_workers} nodes, {able} can take a worker"
    return f"its nodes hold {sum(counts):g} of {num_workers} workers"


def check_cluster(num_workers: int, bundle: Resources, strategy: str) -> bool:
    """`check` against the cluster this process is connected to; says once what the group waits for.

    Returns:
        Whether the cluster has an autoscaler.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    autoscaler, node_types = _autoscaler()
    waits = check(
        num_workers, bundle, nodes, strategy=strategy, autoscaler=autoscaler, node_types=node_types
    )
    if waits is not None:
        logging.getLogger("raytf").warning(waits)
    return autoscaler


def _autoscaler() -> tuple[bool, list[NodeType]]:
    # Read in Ray 2.60: an autoscaler (v2, KubeRay) publishes its node types to the GCS; a local Ray
    # has none.
    from ray._private.state import state

    config: Any = state.get_cluster_config()
    if config is None or not config.node_group_configs:
        return False, []
    kinds = [
        NodeType(
            group.name, dict(group.resources), group.max_count if group.max_count >= 0 else None
        )
        for group in config.node_group_configs
    ]
    return True, kinds
