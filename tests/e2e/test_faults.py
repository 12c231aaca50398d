"""Faults through real Ray: the right class, rank and answer, and the weights of an unbroken run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raytf
from raytf.errors import ConfigError, TrainingError
from raytf.faults.events import Event, Kind
from tests.e2e.runs import build_model, left_by, trainer, unbroken

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    # Ray 2.60 warns about its own defaults, and Keras 3.15 uses NumPy's old __array__ protocol.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def events(path: Path, *kinds: Kind) -> list[Event]:
    found = raytf.open_run(str(path / "run")).events
    return [event for event in found if event.kind in kinds]


FAULTS = (Kind.WORKER_KILLED, Kind.WORKER_EXITED, Kind.WORKER_ERROR, Kind.HANG_DETECTED)


def test_a_frozen_process_and_a_dead_one(tmp_path: Path) -> None:
    result = trainer(
        tmp_path,
        max_failures=3,
        drill="stop rank=1 step=5; segfault rank=0 step=15",
        watch=raytf.WatchConfig(hang_timeout_s=6),
    ).fit()
    assert left_by(result) == unbroken()
    frozen, crashed = events(tmp_path, *FAULTS)
    assert (frozen.kind, frozen.rank, frozen.fields["fault"]) == (Kind.HANG_DETECTED, 1, "hang")
    assert "0" in frozen.fields["stacks"]  # of the rank that could still speak
    assert (crashed.rank, crashed.kind) == (0, Kind.WORKER_KILLED)
    answers = [e.fields["action"] for e in events(tmp_path, Kind.DECISION)]
    assert answers == ["restart", "restart"]
    ledger = result.goodput
    assert ledger.restarts == 2
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, rel=0.01)
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_a_bug_that_comes_back_stops_the_run(tmp_path: Path) -> None:
    def broken(config: dict[str, Any]) -> Any:
        import keras

        class Bug(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                raise ValueError("a bug in the model")

        model = build_model(config)
        model.train_step = lambda data: Bug()(data)
        return model

    run = trainer(tmp_path, max_failures=5)
    run = raytf.KerasTrainer(
        broken,
        run.spec.train_data,
        global_batch_size=16,
        verbose=0,
        scaling_config=run.scaling_config,
        run_config=run.run_config,
    )
    with pytest.raises(TrainingError) as caught:
        run.fit()
    assert "a bug in the model" in caught.value.message
    assert len(events(tmp_path, *FAULTS)) == 2  # once more, to see whether it heals; not five times
    assert events(tmp_path, Kind.DECISION)[-1].fields["action"] == "stop"


def test_what_cannot_heal_is_not_tried_again(tmp_path: Path) -> None:
    def nothing(config: dict[str, Any]) -> Any:
        return None

    run = trainer(tmp_path, max_failures=5)
    run = raytf.KerasTrainer(
        nothing,
        run.spec.train_data,
        global_batch_size=16,
        verbose=0,
        scaling_config=run.scaling_config,
        run_config=run.run_config,
    )
    with pytest.raises(ConfigError, match="build_model returned None"):
        run.fit()
    assert len(events(tmp_path, *FAULTS)) == 1


def test_not_a_number_stops_or_goes_back_without_the_batch(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not a finite number"):
        trainer(tmp_path / "stop", drill="nan rank=0 step=5").fit()
    watch = raytf.WatchConfig(on_nan="rollback")
    result = trainer(tmp_path / "back", drill="nan rank=0 step=5", watch=watch).fit()
    assert result.steps == 27
    nan = events(tmp_path / "back", Kind.NAN_DETECTED)[0]
    assert nan.step is not None
    assert events(tmp_path / "back", Kind.DECISION)[0].fields["action"] in (
        "rollback",
        "skip_batch",
    )
    assert (tmp_path / "back" / "run" / "skips.json").exists()


def test_mode_off_stops_at_the_first_failure(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TrainingError, match="rank 1.*was killed"):
        trainer(
            tmp_path, drill="kill rank=1 step=5", recovery=raytf.RecoveryConfig(mode="off")
        ).fit()
    assert time.monotonic() - began < 120
    assert len(events(tmp_path, *FAULTS)) == 1
