"""Runs that are killed under a real Ray end with the bytes of a run that nobody touched.

Every phase and kind of state is tried without Ray in `tests/worker/test_resume.py`; here it is what
Ray does about a dead process, and what the user sees of it.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cloudpickle import register_pickle_by_value
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import raytf
from raytf.checkpoint.store import CheckpointStore
from raytf.errors import ConfigError, TrainingError
from raytf.worker.links import Job, Links
from tests.e2e import runs
from tests.e2e.runs import EPOCHS, STEPS, left_by, trainer, unbroken

pytestmark = [
    pytest.mark.ray,
    # Ray 2.60 warns about its own defaults, and Keras 3.15 uses NumPy's old __array__ protocol.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


def notes_in(directory: Path) -> list[list[str]]:
    """What each worker process wrote, in the order of writing."""
    files = sorted(directory.iterdir(), key=lambda p: p.stat().st_mtime)
    return [p.read_text().split("\n") for p in files]


def test_killed_on_each_rank_beyond_what_ray_retries(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    made = functools.partial(
        trainer,
        tmp_path,
        max_failures=1,
        drill="kill rank=1 step=8; kill rank=0 step=16",
        callbacks=runs.callbacks(notes=str(notes)),
        run={"checkpoint_config": CheckpointConfig(num_to_keep=2)},
    )
    with pytest.raises(TrainingError, match="rank 0 failed: its process died"):
        made().fit()
    result = made().fit()
    assert left_by(result) == unbroken()

    # What Ray's own words say on the workers: nothing at first, then the step that was restored.
    said = notes_in(notes)
    assert len(said) == 6
    assert [lines[0] for lines in said[:2]] == ["none", "none"]
    steps = [int(re.search(r"/checkpoints/step-(\d+)$", lines[0])[1]) for lines in said[2:]]  # type: ignore[index]
    assert steps[0] == steps[1] <= 8
    assert 8 <= steps[2] == steps[3] <= 16
    assert all("manifest.json" in lines for lines in said[2:])
    assert all(any(name.endswith(".safetensors") for name in lines) for lines in said[2:])

    # And on the driver.
    assert result.checkpoint.path.endswith(f"/checkpoints/step-{EPOCHS * STEPS:010}")
    with result.checkpoint.as_directory() as directory:
        assert "manifest.json" in os.listdir(directory)
    assert [c.path[-10:] for c, _ in result.best_checkpoints] == [
        f"{step:010}" for step in CheckpointStore(result.url).steps()
    ]
    assert len(result.best_checkpoints) == 2
    best = result.get_best_checkpoint("val_loss", "min")
    assert best.path == result.checkpoint.path  # the only one of the two with an epoch's metrics


def dies(job: Job, links: Links) -> dict[str, Any]:
    """A stand-in that is killed as often as its config says, on alternating ranks."""
    formation = links.join(links.address(1000 + links.rank), 1)
    assert links.hold(formation.generation, None)
    assert links.ready(formation.generation, None)
    marks = Path(job.spec.config["marks"])
    deaths = links.share("deaths", len(list(marks.iterdir())))[0]
    if links.rank == deaths % 2 and deaths < job.spec.config["deaths"]:
        (marks / str(deaths)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    links.share("end", None)
    return {"metrics": {"deaths": deaths}, "generation": formation.generation}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_failures", "deaths", "is_done"), [(1, 1, True), (1, 2, False), (2, 2, True)]
)
def test_failures_are_counted_exactly(
    tmp_path: Path, max_failures: int, deaths: int, is_done: bool
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    x = np.zeros((8, 3), np.float32)
    kind = type("StandIn", (raytf.KerasTrainer,), {"_session": staticmethod(dies)})
    made = kind(
        runs.build_model,
        raytf.ArraySource(x, x[:, 0]),
        global_batch_size=4,
        config={"marks": str(marks), "deaths": deaths},
        verbose=0,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    if is_done:
        result = made.fit()
        assert (result.metrics, result.generations) == ({"deaths": deaths}, deaths + 1)
        return
    with pytest.raises(TrainingError, match="its process died"):
        made.fit()
    assert len(list(marks.iterdir())) == max_failures + 1
    assert made.fit().metrics == {"deaths": deaths}  # the same command again counts anew


def test_asked_again_for_the_same_fewer_and_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trainer(tmp_path, epochs=2).fit()
    assert first.steps == 2 * STEPS

    def no_ray(*args: Any) -> None:
        raise AssertionError("Ray was started for a finished run")

    with monkeypatch.context() as patched:
        patched.setattr("raytf.cluster.local.ensure_ray", no_ray)
        began = time.monotonic()
        again = trainer(tmp_path, epochs=2).fit()
        assert time.monotonic() - began < 5
        assert left_by(again) == left_by(first)
        assert (again.metrics, again.history) == (first.metrics, first.history)
        assert "asks for less" not in caplog.text
        fewer = trainer(tmp_path, epochs=1).fit()
        assert "is finished, with epochs=2; epochs=1 asks for less" in caplog.text
        assert left_by(fewer) == left_by(first)

    with pytest.raises(ConfigError, match="trained with the optimizer Adam, .* now gives SGD"):
        trainer(tmp_path, config={"optimizer": "SGD"}).fit()
    more = trainer(tmp_path, save=raytf.SaveConfig(every_epochs=1)).fit()
    assert left_by(more) == unbroken()


@pytest.mark.slow
def test_another_number_of_workers(tmp_path: Path) -> None:
    trainer(tmp_path, epochs=1).fit()
    result = trainer(tmp_path, workers=1, epochs=2).fit()
    assert result.steps == 2 * STEPS
    assert len(result.history["loss"]) == 2
    assert result.history["loss"][0] == unbroken()["history"]["loss"][0]
    # Dropout masks are a worker's own, so the rest is alike and not equal.
    assert result.history["loss"][1] == pytest.approx(unbroken()["history"]["loss"][1], rel=0.05)


def test_killed_in_somebodys_own_loop(tmp_path: Path) -> None:
    from ray.train.tensorflow import TensorflowTrainer

    given = runs.arguments(drill="kill rank=0 step=14")

    def loop(config: dict[str, Any]) -> Any:
        return raytf.fit(runs.build_model, **given)

    result = TensorflowTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="own",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    assert left_by(result.return_value, str(tmp_path / "own")) == unbroken()


@pytest.mark.slow
def test_the_best_by_rays_rule(tmp_path: Path) -> None:
    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_accuracy")
    result = trainer(tmp_path, epochs=5, run={"checkpoint_config": config}).fit()
    accuracy = np.array(result.history["val_accuracy"])
    two = sorted(np.argsort(-accuracy, kind="stable")[:2])
    steps = {STEPS * (epoch + 1) for epoch in (*two, 4)}
    assert set(CheckpointStore(result.url).steps()) == steps
    best = result.get_best_checkpoint("val_accuracy", "max")
    assert best.path.endswith(f"{STEPS * (int(accuracy.argmax()) + 1):010}")


@pytest.mark.slow
def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    trainer(tmp_path, epochs=1).fit()
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, config={"units": 9}).fit()
    text = str(caught.value)
    assert "hidden/kernel" in text
    assert "6, 8" in text
    assert "6, 9" in text
