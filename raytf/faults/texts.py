"""What the words of Ray, TensorFlow and the kernel mean. Pure.

Owns every text that classification looks for, with the version it was read in: Ray 2.60's raylet
and GCS, TensorFlow 2.21's collective runtime, gRPC.
"""

from __future__ import annotations

import re

__all__ = [
    "exit_code_in",
    "is_crash_text",
    "is_device_text",
    "is_memory_text",
    "is_node_text",
    "is_ordered_text",
    "is_peer_gone_text",
    "is_preemption_text",
    "named_tasks",
    "spoken_of",
]

# Whenever a worker's socket closes, Ray lists what it may have been: that names the kernel's OOM
# killer and SIGSEGV, and is evidence of neither.
_GUESSES = re.compile(
    r"(?:There are some potential root causes|Some common causes include)"
    r".*?(?:unexpected errors?\.|\Z)"
    r"(?:\s*If the process was killed by the kernel OOM killer[^\n]*)?",
    re.DOTALL,
)
_MEMORY = (
    "running low on memory",  # the raylet's memory monitor
    "killed due to memory pressure",
    "outofmemoryerror",
    "oomkilled",  # Kubernetes
    "out of memory: killed process",  # the kernel's log
)
_NODE = (
    "its node has died",  # the GCS on an actor
    "node was terminated unexpectedly",
    "node was terminated expectedly",
    "the node it was running on is dead",
    "its node is dead",
)
_ORDERED = ("killed by `ray.kill`", "because its owner has died", "all references to the actor")
_PREEMPTION = (
    "died by preemption",
    "failed due to node preemption",
    "autoscaler_drain_preempted",
    "preemptionerror",
)
_CRASH = ("fatal python error: segmentation fault", "sigsegv received", "sigbus received")
_DEVICE = (
    "uncorrectable ecc",
    "xid",
    "cuda_error_ecc",
    "cuda_error_illegal_address",
    "cuda_error_launch_failed",
    "gpu is lost",
    "device is lost",
    "hardware failure",
)
_PEER_GONE = (
    "socket closed",
    "connection reset by peer",
    "connection refused",
    "failed to connect to all addresses",
    "collective ops is aborted",
    "collective op has been aborted",
    "heartbeat",
    "peer health",
)
_EXIT_CODE = re.compile(r"exit(?:s|ed)? with an? exit code\s+(-?\d+)|Exit code:\s*(-?\d+)", re.I)
_TASK = re.compile(r"/job:(worker|chief)/(?:replica:\d+/)?task:(\d+)")


def spoken_of(text: str) -> str:
    """The text without Ray's list of what might have been."""
    return _GUESSES.sub("", text)


def _has(text: str, phrases: tuple[str, ...]) -> bool:
    lowered = spoken_of(text).lower()
    return any(phrase in lowered for phrase in phrases)


def is_memory_text(text: str) -> bool:
    """Whether a process was killed because its node ran out of memory."""
    return _has(text, _MEMORY)


def is_node_text(text: str) -> bool:
    """Whether a worker died because its node did."""
    return _has(text, _NODE)


def is_ordered_text(text: str) -> bool:
    """Whether Ray ended the process because it was asked to: no machine is at fault."""
    return _has(text, _ORDERED)


def is_preemption_text(text: str) -> bool:
    """Whether the node was reclaimed."""
    return _has(text, _PREEMPTION)


def is_crash_text(text: str) -> bool:
    """Whether the process crashed in native code."""
    return _has(text, _CRASH)


def is_device_text(text: str) -> bool:
    """Whether a device is broken."""
    lowered = spoken_of(text).lower()
    return any(re.search(rf"\b{re.escape(p)}\b", lowered) for p in _DEVICE)


def is_peer_gone_text(text: str) -> bool:
    """Whether a rank says that the process of another one is gone."""
    return _has(text, _PEER_GONE)


def exit_code_in(text: str) -> int | None:
    """The exit code that Ray tells, if it does."""
    found = _EXIT_CODE.search(spoken_of(text))
    return None if found is None else int(found[1] or found[2])


def named_tasks(text: str) -> frozenset[int]:
    """Ranks that a message of TensorFlow names as the remote end; a hint, no proof.

    `/job:worker/replica:0/task:1` is rank 1: raytf's groups have no chief of their own.
    """
    return frozenset(int(task) for job, task in _TASK.findall(text) if job == "worker")
