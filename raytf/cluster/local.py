"""Which Ray a run uses: the one connected to, the one `RAY_ADDRESS` names, or one of its own.

Nothing here happens on import, and environment variables are changed only around the call that
reads them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping

import ray

from raytf.errors import StartupError

__all__ = ["embedded_size", "ensure_ray", "environment"]

# A machine has these or has not: an embedded Ray may not claim them just because somebody asks.
_PHYSICAL = ("GPU", "TPU", "NPU", "HPU", "neuron_cores", "memory", "object_store_memory")


# Ray starts a process per CPU of its own at once. More workers than this on a core are a mistake.
_MOST_PER_CORE = 16
_embedded_nodes: set[str] = set()  # of the Rays that this process has started by itself
_log = logging.getLogger("raytf")


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables that are set inside the block unless the user has set them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def embedded_size(
    num_workers: int, bundle: Mapping[str, float], cpus_here: int
) -> tuple[int, dict[str, float]]:
    """CPUs and custom resources of an embedded Ray in which `num_workers` bundles always fit.

    CPUs are a count for scheduling, so several workers may share one core, up to a bound; GPUs and
    memory are never made up.
    """
    wanted = math.ceil(num_workers * bundle.get("CPU", 0.0))
    cpus = max(cpus_here, min(wanted, cpus_here * _MOST_PER_CORE))
    custom = {
        name: num_workers * amount
        for name, amount in bundle.items()
        if name != "CPU" and name not in _PHYSICAL and not name.startswith("accelerator_type:")
    }
    return cpus, custom


def ensure_ray(num_workers: int, bundle: Mapping[str, float]) -> bool:
    """Makes sure that this process is connected to a Ray.

    An embedded Ray stays for the next `fit()` of this process and ends with it: `ray.init`
    registers its own shutdown at interpreter exit. One that is too small for the next run is
    replaced by a larger one.

    Returns:
        Whether raytf started it.

    Raises:
        StartupError: `RAY_ADDRESS` is set and nothing answers there.
    """
    if ray.is_initialized():
        if not _is_embedded() or not _helps(ray.cluster_resources(), num_workers, bundle):
            return False
        _log.info("replacing the embedded Ray by a larger one")
        ray.shutdown()
        return _start_embedded(num_workers, bundle)
    address = os.environ.get("RAY_ADDRESS")
    if address:
        try:
            with _quiet():
                ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, TimeoutError) as error:
            raise StartupError(
                f"no Ray cluster answers at RAY_ADDRESS={address!r}: {error} Start one, mend the "
                "address, or unset RAY_ADDRESS to train on this machine.",
                address=address,
            ) from error
        return False
    return _start_embedded(num_workers, bundle)


def _quiet() -> contextlib.AbstractContextManager[None]:
    return environment(RAY_USAGE_STATS_PROMPT_ENABLED="0")


def _start_embedded(num_workers: int, bundle: Mapping[str, float]) -> bool:
    cpus, custom = embedded_size(num_workers, bundle, os.cpu_count() or 1)
    with _quiet():
        ray.init(
            address="local",
            num_cpus=cpus,
            resources=custom or None,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    _embedded_nodes.add(ray.get_runtime_context().get_node_id())
    return True


def _is_embedded() -> bool:
    return ray.get_runtime_context().get_node_id() in _embedded_nodes


def _helps(total: Mapping[str, float], num_workers: int, bundle: Mapping[str, float]) -> bool:
    """Whether a new embedded Ray would be larger than one of these total resources."""
    cpus, custom = embedded_size(num_workers, bundle, os.cpu_count() or 1)
    return any(total.get(name, 0.0) < amount for name, amount in {"CPU": cpus, **custom}.items())
