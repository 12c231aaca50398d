from __future__ import annotations

import os

import pytest

from raytf.cluster.local import _helps, embedded_size, environment


@pytest.mark.parametrize(
    ("workers", "bundle", "here", "cpus"),
    [
        (2, {"CPU": 1.0}, 2, 2),
        (4, {"CPU": 1.0}, 2, 4),
        (3, {"CPU": 0.5}, 1, 2),
        (2, {}, 8, 8),
        (2, {"CPU": 4.0}, 2, 8),
        (500, {"CPU": 1.0}, 2, 32),
    ],
)
def test_workers_always_fit(workers: int, bundle: dict[str, float], here: int, cpus: int) -> None:
    assert embedded_size(workers, bundle, here) == (cpus, {})


def test_only_custom_resources_are_made_up() -> None:
    bundle = {"CPU": 1.0, "GPU": 1.0, "memory": 1e9, "accelerator_type:A100": 0.001, "special": 2.0}
    assert embedded_size(3, bundle, 2)[1] == {"special": 6.0}


def test_environment_is_set_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYTF_TEST_A", raising=False)
    monkeypatch.setenv("RAYTF_TEST_B", "users")
    with environment(RAYTF_TEST_A="1", RAYTF_TEST_B="2"):
        assert os.environ["RAYTF_TEST_A"] == "1"
        assert os.environ["RAYTF_TEST_B"] == "users"
    assert "RAYTF_TEST_A" not in os.environ
    assert os.environ["RAYTF_TEST_B"] == "users"


def test_whether_a_new_embedded_ray_would_be_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert not _helps({"CPU": 4.0}, 4, {"CPU": 1.0})
    assert _helps({"CPU": 2.0}, 4, {"CPU": 1.0})
    assert _helps({"CPU": 4.0}, 2, {"CPU": 1.0, "special": 1.0})
    assert not _helps({"CPU": 32.0}, 500, {"CPU": 1.0})  # no machine is made that large
