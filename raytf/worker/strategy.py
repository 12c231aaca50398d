"""TensorFlow in this process: threads, GPUs, ports and the MultiWorkerMirroredStrategy of a formed
group.

TensorFlow must not have been used before `configure` (collectives are set up at program start).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator

import tensorflow as tf

from raytf.config import CommunicationConfig
from raytf.errors import StartupError
from raytf.worker.links import Formation, Links

__all__ = ["configure", "form_strategy", "reserve_port"]

logger = logging.getLogger("raytf")


def configure(
    num_cpus: float, num_gpus: float, deterministic: bool, fixed_threads: int | None = None
) -> int:
    """Sets threads, GPU memory and determinism of this process; returns the number of threads.

    The number of threads decides the order of sums in some kernels (convolution gradients), so it
    follows from the worker's CPU share and not from the machine. `fixed_threads` is the number that
    the run began with: it stays, whatever share this attempt has.
    """
    threads = fixed_threads or max(1, int(num_cpus))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # A collective waits in an inter-op thread while the rest of the step goes on.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    gpus = tf.config.list_physical_devices("GPU")
    if num_gpus and not gpus:
        raise StartupError(
            f"This worker was given {num_gpus:g} GPU, but TensorFlow {tf.__version__} sees none "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Install "
            "tensorflow[and-cuda] on the workers, or set use_gpu=False."
        )
    if not num_gpus:
        tf.config.set_visible_devices([], "GPU")
    for gpu in gpus if num_gpus else ():
        tf.config.experimental.set_memory_growth(gpu, True)
    if deterministic and num_gpus:
        # CPU kernels used here are deterministic for a fixed number of threads; GPU ones are not
        # unless asked.
        tf.config.experimental.enable_op_determinism()
    return threads


@contextlib.contextmanager
def reserve_port(host: str) -> Iterator[int]:
    """A free port that nobody else can take inside the block.

    A socket bound with SO_REUSEPORT but not listening keeps the port from other programs, and
    TensorFlow's server, which sets the same option when TF_GRPC_REUSE_PORT is set, can still bind
    it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        if hasattr(socket, "SO_REUSEPORT"):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            os.environ["TF_GRPC_REUSE_PORT"] = "true"
        held.bind(("", 0))
        yield held.getsockname()[1]


def port_problem(port: int, host: str) -> str | None:
    """Why TensorFlow's server could not listen on a port right now; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            return f"port {port}: {error}"
    return None


def form_strategy(
    links: Links,
    communication: CommunicationConfig,
    reserve: Callable[[str], contextlib.AbstractContextManager[int]] = reserve_port,
) -> tuple[tf.distribute.Strategy, Formation]:
    """Joins the group and creates its strategy.

    A rank that finds its port taken says so before any server has started (a server whose peer
    never comes waits for ever inside TensorFlow), and the whole group joins again with new ports.

    Raises:
        StartupError: the group did not form within its limits; names ranks and addresses.
    """
    for attempt in range(1, communication.max_port_attempts + 1):
        with reserve(links.host) as port:
            formation = links.join(links.address(port), attempt)
            if not links.hold(formation.generation, port_problem(port, links.host)):
                logger.info("rank %d: a port was taken, joining again", links.rank)
                continue
            strategy = _strategy(formation, links, communication)
            links.ready(formation.generation, None)
            return strategy, formation
    raise StartupError(
        f"rank {links.rank} found no usable port in {communication.max_port_attempts} attempts.",
        rank=links.rank,
    )


def _strategy(
    formation: Formation, links: Links, communication: CommunicationConfig
) -> tf.distribute.Strategy:
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": list(formation.addresses)},
            "task": {"type": "worker", "index": links.rank},
        }
    )
    implementations = tf.distribute.experimental.CommunicationImplementation
    chosen = {
        "auto": implementations.NCCL if links.num_gpus else implementations.RING,
        "ring": implementations.RING,
        "nccl": implementations.NCCL,
    }[communication.implementation]
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=communication.bytes_per_pack,
        timeout_seconds=communication.timeout_s,
        implementation=chosen,
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
