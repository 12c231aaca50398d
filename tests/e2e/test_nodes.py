"""A node that fails is left alone: three nodes on one machine, real raylets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import raytf
from raytf.faults.events import Kind
from tests.e2e.runs import left_by, trainer, unbroken

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    # Ray 2.60 warns about its own defaults, and Keras 3.15 uses NumPy's old __array__ protocol.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[None]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_a_node_with_a_fault_is_avoided_and_remembered(tmp_path: Path, three_nodes: None) -> None:
    result = trainer(
        tmp_path,
        max_failures=3,
        drill="segfault rank=1 step=5",
        recovery=raytf.RecoveryConfig(max_node_faults=1),
    ).fit()
    assert left_by(result) == unbroken()
    events = result.events
    excluded = [e for e in events if e.kind is Kind.NODE_EXCLUDED]
    fault = next(e for e in events if e.kind is Kind.WORKER_KILLED)
    assert [e.node for e in excluded] == [fault.node]
    started = [(e.time, e.node) for e in events if e.kind is Kind.WORKER_STARTED]
    before = {node for at, node in started if at < fault.time}
    after = {node for at, node in started if at > fault.time}
    assert fault.node in before
    assert fault.node not in after
    assert len(after) == 2
    # A later driver of the same run knows it, too, and so does whoever asks.
    book = json.loads((tmp_path / "run" / "nodes.json").read_text())
    assert fault.node in json.dumps(book)
    assert raytf.open_run(str(tmp_path / "run")).status()["excluded_nodes"]
