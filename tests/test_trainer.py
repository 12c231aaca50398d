"""Everything KerasTrainer refuses on the driver, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.tensorflow.tensorflow_trainer import TensorflowTrainer

import raytf
from raytf.errors import ConfigError, DataError, NotFoundError, RaytfError

X, Y = np.zeros((8, 3), np.float32), np.zeros(8)
WEIGHTED = raytf.ArraySource(X, Y, np.ones(8))


def build_model(config: Any) -> Any:
    raise AssertionError("runs on workers only")


def factory(ctx: Any) -> Any:
    raise AssertionError("runs on workers only")


def keep(x: Any, y: Any) -> Any:
    return x, y


def trainer(tmp_path: Path, **arguments: Any) -> raytf.KerasTrainer:
    given = {
        "build_model": build_model,
        "train_data": raytf.ArraySource(X, Y),
        "run_config": RunConfig(name="run", storage_path=str(tmp_path)),
        "scaling_config": ScalingConfig(num_workers=2),
    }
    return raytf.KerasTrainer(**(given | arguments))


def test_is_rays_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, epochs=3)
    assert isinstance(made, TensorflowTrainer)
    assert made.spec.epochs == 3
    assert made.storage.url == f"{tmp_path}/run"


def test_no_tensorflow_in_the_driver() -> None:
    code = (
        "import sys, numpy, raytf\n"
        "x = numpy.zeros((8, 3), 'float32')\n"
        "t = raytf.KerasTrainer(lambda c: 1, raytf.ArraySource(x, x), global_batch_size=4)\n"
        "assert not {'tensorflow', 'keras', 'tf_keras'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"save": 3}, "save must be a raytf.SaveConfig"),
        ({"recovery": raytf.RecoveryConfig(mode="survivor")}, "mode='survivor'.*not built yet"),
        ({"recovery": raytf.RecoveryConfig(spares=1)}, "spares=1.*not built yet"),
        ({"recovery": "off"}, "recovery must be a raytf.RecoveryConfig"),
        ({"watch": 3}, "watch must be a raytf.WatchConfig"),
        ({"drill": "kill rank=2 step=3"}, "rank=2 is no rank of 2 workers"),
        ({"drill": "burn rank=1"}, "'burn' is no fault"),
        ({"resume_from": 3}, "resume_from"),
        ({"resume_strict": False}, "resume_strict=False"),
        ({"strategy": "mirrored"}, "not built yet"),
        ({"batch_size": 3}, "unknown argument 'batch_size'.*global_batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"callbacks": []}, "callbacks must be a function"),
        ({"scaling_config": ScalingConfig(num_workers=(1, 2))}, "elastic training is not built"),
        ({"scaling_config": ScalingConfig(num_workers=0)}, "at least 1 worker"),
        ({"scaling_config": ScalingConfig(num_workers=1, use_tpu=True)}, "use_tpu"),
        ({"scaling_config": 2}, "ray.train.ScalingConfig"),
        ({"run_config": {"name": "x"}}, "ray.train.RunConfig"),
        (
            {
                "save": raytf.SaveConfig(keep_last=1),
                "run_config": RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2)),
            },
            "say which checkpoints to keep",
        ),
        ({"run_config": RunConfig(name="a/b")}, "one directory name"),
        ({"run_config": RunConfig(storage_path="memory://runs")}, "memory of one process"),
        ({"run_config": RunConfig(storage_path="nope://runs")}, "nope://"),
        ({"global_batch_size": 1}, "global_batch_size=1 is less than num_workers=2"),
        ({"train_data": None}, "train_data is None"),
        ({"train_data": 7}, "train_data"),
        ({"validation_data": 7}, "validation_data"),
        ({"train_data": factory, "transform": keep}, "transform.*Do it in the dataset"),
        ({"train_data": factory, "class_weight": {1: 2.0}}, "class_weight.*Do it in the dataset"),
        ({"train_data": factory, "drop_remainder": True}, "drop_remainder.*Do it in the dataset"),
        ({"train_data": WEIGHTED, "class_weight": {1: 2.0}}, "class_weight and sample_weight"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_refused(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trainer(tmp_path, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"train_data": factory, "shuffle": False},
        {"class_weight": {1: 2.0}, "transform": keep, "drop_remainder": True},
        {"validation_data": WEIGHTED, "class_weight": {1: 2.0}},
        {"validation_data": factory, "transform": keep},
    ],
    ids=lambda value: "-".join(value),
)
def test_taken(tmp_path: Path, arguments: dict[str, Any]) -> None:
    given = {"global_batch_size": 4} | arguments
    made = trainer(tmp_path, **given)
    assert {name: getattr(made.spec, name) for name in given} == given


def test_ragged_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        trainer(tmp_path, train_data=raytf.ArraySource(X, Y[:-1]))


def test_a_lock_in_config_is_refused(tmp_path: Path) -> None:
    import threading

    with pytest.raises(ConfigError, match="config cannot be sent to the workers"):
        trainer(tmp_path, config={"lock": threading.Lock()})


def test_the_environment_s_keras_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    with pytest.raises(ConfigError, match="TF_USE_LEGACY_KERAS=1"):
        trainer(tmp_path)
    assert trainer(tmp_path, legacy_keras=True).backend_config.legacy_keras


def test_a_run_without_a_name_gets_a_unique_one(tmp_path: Path) -> None:
    config = RunConfig(storage_path=str(tmp_path))
    names = {trainer(tmp_path, run_config=config).run_config.name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("raytf-") for name in names)


def test_the_users_config_is_left_alone_and_handed_on(tmp_path: Path) -> None:
    config = RunConfig(
        name="run", storage_path="some dir", failure_config=FailureConfig(max_failures=2)
    )
    made = trainer(tmp_path, run_config=config)
    assert config.storage_path == "some dir" and config.storage_filesystem is None
    assert made.run_config.failure_config.max_failures == 2
    assert made.run_config.storage_path == str(Path.cwd() / "some dir")
    assert made.run_config.storage_filesystem is not None


def test_ray_is_not_started_by_making_a_trainer(tmp_path: Path) -> None:
    import ray

    trainer(tmp_path)
    assert not ray.is_initialized()


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_nothing_trained_yet(tmp_path: Path, verb: str) -> None:
    with pytest.raises(NotFoundError, match="no trained model"):
        getattr(trainer(tmp_path), verb)(raytf.ArraySource(X, Y))


def test_fit_outside_of_a_worker_says_so() -> None:
    with pytest.raises(ConfigError, match="train_loop_per_worker"):
        raytf.fit(build_model, raytf.ArraySource(X, Y))
    with pytest.raises(ConfigError, match="scaling_config belongs"):
        raytf.fit(build_model, raytf.ArraySource(X, Y), scaling_config=ScalingConfig())


def test_no_rays_address_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.init", _refuse)
    with pytest.raises(RaytfError, match="127.0.0.1:1"):
        trainer(tmp_path).fit()


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("nobody there.")
