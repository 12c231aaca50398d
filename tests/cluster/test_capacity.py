from __future__ import annotations

import pytest

from raytf.cluster.capacity import NodeType, check
from raytf.errors import ResourceError

TWO_CPUS = {"CPU": 2.0, "memory": 2**33, "node:10.0.0.1": 1.0}
GPU_NODE = {"CPU": 8.0, "GPU": 4.0}


def test_what_fits_needs_no_waiting() -> None:
    assert check(2, {"CPU": 1}, [TWO_CPUS]) is None
    assert check(6, {"CPU": 1, "GPU": 1}, [GPU_NODE, GPU_NODE]) is None
    assert check(3, {"CPU": 0.5}, [TWO_CPUS]) is None
    assert check(100, {}, [TWO_CPUS]) is None


def test_the_missing_shape_is_named() -> None:
    with pytest.raises(ResourceError) as caught:
        check(4, {"CPU": 1, "GPU": 1}, [TWO_CPUS])
    text = str(caught.value)
    assert "asked for 4 workers with {CPU: 1, GPU: 1}" in text
    assert "the cluster has 2 CPU and no GPU on any node" in text
    assert "no autoscaler" in text


def test_too_many_workers() -> None:
    with pytest.raises(ResourceError, match="nodes hold 2 of 3 workers; no autoscaler"):
        check(3, {"CPU": 1}, [TWO_CPUS])


def test_a_bundle_does_not_span_nodes() -> None:
    with pytest.raises(ResourceError, match="no single node holds one worker"):
        check(1, {"CPU": 3}, [TWO_CPUS, TWO_CPUS])


@pytest.mark.parametrize(
    ("strategy", "workers", "fits"),
    [
        ("PACK", 4, True),
        ("SPREAD", 4, True),
        ("STRICT_PACK", 2, True),
        ("STRICT_PACK", 3, False),
        ("STRICT_SPREAD", 2, True),
        ("STRICT_SPREAD", 3, False),
    ],
)
def test_placement_strategies(strategy: str, workers: int, fits: bool) -> None:
    def ask() -> str | None:
        return check(workers, {"CPU": 1}, [TWO_CPUS, TWO_CPUS], strategy=strategy)

    if fits:
        assert ask() is None
    else:
        with pytest.raises(ResourceError, match=strategy):
            ask()


def test_an_autoscaler_of_unknown_nodes_is_waited_for() -> None:
    waits = check(4, {"CPU": 1}, [TWO_CPUS], autoscaler=True)
    assert waits is not None
    assert "waiting for the autoscaler" in waits and "4 workers with {CPU: 1}" in waits


def test_an_autoscaler_whose_nodes_hold_no_bundle() -> None:
    kinds = [NodeType("small", {"CPU": 2.0}, 10)]
    with pytest.raises(ResourceError, match=r"small \{CPU: 2\}"):
        check(1, {"CPU": 1, "GPU": 1}, [TWO_CPUS], autoscaler=True, node_types=kinds)


def test_an_autoscaler_with_room() -> None:
    kinds = [NodeType("gpu", GPU_NODE, 2)]
    asked = {"CPU": 1, "GPU": 1}
    assert check(8, asked, [TWO_CPUS], autoscaler=True, node_types=kinds)
    with pytest.raises(ResourceError, match="8 fit"):
        check(9, asked, [TWO_CPUS], autoscaler=True, node_types=kinds)
    assert check(9, asked, [], autoscaler=True, node_types=[NodeType("gpu", GPU_NODE)])


def test_memory_reads_in_gib() -> None:
    with pytest.raises(ResourceError, match=r"memory: 16.0 GiB"):
        check(1, {"memory": 2**34}, [TWO_CPUS])


def test_errors_carry_plain_values() -> None:
    with pytest.raises(ResourceError) as caught:
        check(3, {"CPU": 1}, [TWO_CPUS])
    assert caught.value.context == {"num_workers": 3, "bundle": {"CPU": 1}}
