"""What Prometheus is told of a run, from made-up events; Ray's metrics are only recorded."""

from __future__ import annotations

from typing import Any

import pytest

from raytf.cluster import metrics
from raytf.faults.events import Event, Kind


class Recorded:
    """In place of Ray's Gauge and Counter."""

    seen: dict[tuple[str, str], float] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert name.startswith("raytf_")
        assert description
        self.name, self.keys = name, set(tag_keys)

    def _key(self, tags: dict[str, str]) -> tuple[str, str]:
        assert set(tags) == self.keys
        return self.name, ",".join(v for k, v in sorted(tags.items()) if k != "run")

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.seen[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.seen[self._key(tags)] = self.seen.get(self._key(tags), 0.0) + value


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> metrics.RunMetrics:
    Recorded.seen = {}
    monkeypatch.setattr(metrics, "Gauge", Recorded)
    monkeypatch.setattr(metrics, "Counter", Recorded)
    return metrics.RunMetrics("mnist")


def event(time: float, kind: Kind, **more: Any) -> Event:
    return Event(time=time, kind=kind, run="mnist", attempt=1, **more)


def test_steps_faults_and_saves(run: metrics.RunMetrics) -> None:
    run.add(event(0.0, Kind.ATTEMPT_STARTED))
    rate = {"examples_per_s": 320.0, "seconds": {"start": 4.0, "step": 6.0}}
    run.add(event(10.0, Kind.STEP_REACHED, step=5, rank=0, fields=rate))
    run.add(event(11.0, Kind.CHECKPOINT_COMMITTED, step=5))
    run.add(event(12.0, Kind.WORKER_KILLED, rank=1, step=6, fields={"fault": "killed"}))
    run.add(event(12.0, Kind.CHECKPOINT_FAILED, step=6))
    seen = Recorded.seen
    assert seen["raytf_step", ""] == 5
    assert seen["raytf_examples_per_second", ""] == 320.0
    assert seen["raytf_faults", "killed"] == 1
    assert seen["raytf_checkpoints", "committed"] == 1
    assert seen["raytf_checkpoints", "failed"] == 1
    assert 0 < seen["raytf_goodput", ""] < 1
    assert sum(v for (name, _), v in seen.items() if name == "raytf_seconds") == pytest.approx(12.0)


def test_trouble_with_metrics_ends_nothing(
    run: metrics.RunMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "set", lambda self, value, tags: 1 / 0)
    run.add(event(0.0, Kind.STEP_REACHED, step=5, rank=0))
