"""Runs a function on several real worker processes without Ray: TF_CONFIG on loopback, a real
strategy.

`python -m tests.worker.group MODULE:FUNCTION RANK NUM_WORKERS PORTS OUT [ARG]` is one worker;
`run_group` starts them. The function is called as `function(links, strategy, arg) -> picklable` and
its result comes back per rank.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

from raytf.worker.links import Formation, Links

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def loopback_links(rank: int, addresses: tuple[str, ...], **overrides: Any) -> Links:
    """Links of a group whose ports are chosen beforehand; nothing is compared, progress is
    dropped.
    """
    values: dict[str, Any] = {
        "rank": rank,
        "num_workers": len(addresses),
        "num_cpus": 1.0,
        "num_gpus": 0.0,
        "host": "127.0.0.1",
        "join": lambda address, attempt: Formation(generation=1, addresses=addresses),
        "hold": lambda generation, error: True,
        "ready": lambda generation, error: True,
        "compare": lambda signature: None,
        "share": lambda key, value: [value],
        "post": lambda key, value: None,
        "restored": lambda storage: None,
        "progress": lambda record: None,
        "deliver": lambda key, value: None,
    }
    return Links(**(values | overrides))


class FileExchange:
    """`share` and `post` of a group, over files in a directory of its own."""

    def __init__(self, directory: str, rank: int, num_workers: int) -> None:
        self._directory = directory
        self._rank = rank
        self._num_workers = num_workers

    def post(self, key: str, value: Any) -> None:
        place = os.path.join(self._directory, key.replace("/", "_"))
        os.makedirs(place, exist_ok=True)
        temporary = os.path.join(place, f".{self._rank}")
        with open(temporary, "wb") as f:
            pickle.dump(value, f)
        os.replace(temporary, os.path.join(place, str(self._rank)))

    def share(self, key: str, value: Any) -> list[Any]:
        self.post(key, value)
        return [self._read(key, rank) for rank in range(self._num_workers)]

    def _read(self, key: str, rank: int) -> Any:
        path = os.path.join(self._directory, key.replace("/", "_"), str(rank))
        while not os.path.exists(path):
            time.sleep(0.002)
        with open(path, "rb") as f:
            return pickle.load(f)


def session_links(rank: int, num_workers: int, directory: str, **overrides: Any) -> Links:
    """Links of a group that forms itself, ports included, as it does under Ray."""
    exchange = FileExchange(directory, rank, num_workers)

    def join(address: str, attempt: int) -> Formation:
        addresses = tuple(exchange.share(f"join/{attempt}", address))
        return Formation(generation=attempt, addresses=addresses)

    def all_well(what: str, generation: int, error: str | None) -> bool:
        return not any(exchange.share(f"{what}/{generation}", error))

    return loopback_links(
        rank,
        ("",) * num_workers,
        join=join,
        hold=lambda generation, error: all_well("hold", generation, error),
        ready=lambda generation, error: all_well("ready", generation, error),
        share=exchange.share,
        post=exchange.post,
        **overrides,
    )


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class GroupFailed(RuntimeError):
    """A rank raised, or gave nothing because its process died."""


def run_group(
    target: str,
    num_workers: int,
    arg: Any = None,
    timeout_s: float = 300,
    bare: bool = False,
    grace_s: float = 20.0,
) -> list[Any]:
    """Runs `module:function` on a group; returns each rank's result, raises the first rank's error
    text.

    With 0 workers it runs in one process of its own without any strategy: `function(None, None,
    arg)`.

    Args:
        bare: TensorFlow is left alone, and links form the group by themselves: for functions that
            call `session.run`.
        grace_s: of the others, once a rank has failed.

    Raises:
        GroupFailed: a rank failed.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    search = os.pathsep.join([ROOT, *sys.path])
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": search}
    env["CUDA_VISIBLE_DEVICES"] = ""
    env.pop("TF_CONFIG", None)
    with tempfile.TemporaryDirectory() as scratch:
        with open(os.path.join(scratch, "arg"), "wb") as f:
            pickle.dump(arg, f)
        workers = []
        for rank in range(max(1, num_workers)):
            command = [sys.executable, "-m", "tests.worker.group", target, str(rank)]
            with open(os.path.join(scratch, f"log{rank}"), "wb") as log:
                workers.append(
                    subprocess.Popen(
                        [*command, f"bare:{num_workers}" if bare else ",".join(addresses), scratch],
                        cwd=ROOT,
                        env=env,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            _wait(workers, scratch, timeout_s, grace_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return [_result(rank, target, scratch) for rank in range(len(workers))]


def _wait(
    workers: list[subprocess.Popen[bytes]], scratch: str, timeout_s: float, grace_s: float
) -> None:
    """Until all have ended; a worker whose peer has failed may wait for ever: it gets a grace."""
    deadline = time.monotonic() + timeout_s
    while any(w.poll() is None for w in workers) and time.monotonic() < deadline:
        for rank, worker in enumerate(workers):
            if worker.poll() is not None and not _succeeded(rank, scratch):
                deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(0.05)


def _succeeded(rank: int, scratch: str) -> bool:
    path = os.path.join(scratch, f"out{rank}")
    if not os.path.exists(path):
        return False
    with open(path, "rb") as f:
        return pickle.load(f)[0]


def _result(rank: int, target: str, scratch: str) -> Any:
    path = os.path.join(scratch, f"out{rank}")
    if not os.path.exists(path):
        with open(os.path.join(scratch, f"log{rank}")) as f:
            raise GroupFailed(f"rank {rank} of {target} gave nothing:\n{f.read()[-4000:]}")
    with open(path, "rb") as f:
        ok, value = pickle.load(f)
    if not ok:
        raise GroupFailed(f"rank {rank} of {target}:\n{value}")
    return value


def main() -> None:
    target, rank, addresses, scratch = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    with open(os.path.join(scratch, "arg"), "rb") as f:
        arg = pickle.load(f)
    links = strategy = None
    try:
        from raytf.config import CommunicationConfig

        if addresses.startswith("bare:"):
            directory = os.path.join(scratch, "exchange")
            links = session_links(rank, int(addresses.removeprefix("bare:")), directory)
        else:
            from raytf.worker.strategy import _strategy, configure

            configure(1, 0, deterministic=True)
        if addresses and links is None:
            formation = Formation(generation=1, addresses=tuple(addresses.split(",")))
            links = loopback_links(rank, formation.addresses)
            strategy = _strategy(formation, links, CommunicationConfig())
        module, function = target.split(":")
        outcome = (True, getattr(importlib.import_module(module), function)(links, strategy, arg))
    except BaseException:
        outcome = (False, traceback.format_exc())
    temporary = os.path.join(scratch, f"tmp{rank}")
    with open(temporary, "wb") as f:
        pickle.dump(outcome, f)
    os.replace(temporary, os.path.join(scratch, f"out{rank}"))
    os._exit(0)  # TensorFlow's server threads outlive the last collective


if __name__ == "__main__":
    main()
