"""KerasTrainer on real Ray workers, with a stand-in for what a worker does.

The stand-in needs no TensorFlow, so what is tested is the Ray side: start, rendezvous, progress,
results, errors, restarts, clean-up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cloudpickle import register_pickle_by_value
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import raytf
from raytf.cluster.run_actor import NAMESPACE
from raytf.errors import (
    ConfigError,
    ModelMismatchError,
    ResourceError,
    StartupError,
    TrainingError,
)
from raytf.worker.links import Job, Links

pytestmark = [
    pytest.mark.ray,
    # Ray 2.60 warns about defaults of its own when it makes a DataContext.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
]

register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

X = np.arange(24, dtype=np.float32).reshape(8, 3)
SHA = "ab" * 32


def form(links: Links) -> int:
    formation = links.join(links.address(1000 + links.rank), 1)
    if not links.hold(formation.generation, None) or not links.ready(formation.generation, None):
        raise RuntimeError("the group did not form")
    return formation.generation


def well(job: Job, links: Links) -> dict[str, Any]:
    """A session that does all that a session can do with its links."""
    generation = form(links)
    links.compare({"variables": [{"path": "w", "shape": [3]}]})
    if job.mode == "predict":
        rows = np.arange(links.rank, 8, links.num_workers)
        links.deliver("rows", (rows, job.spec.train_data.read(rows)[0] * 2))
        return {}
    if job.mode == "evaluate":
        return {"metrics": {"loss": 0.5}}
    if links.is_chief:
        links.progress({"kind": "start", "epochs": 1, "steps_per_epoch": 2, "global_batch_size": 4})
        links.progress({"kind": "epoch", "epoch": 0, "logs": {"loss": 1.0}, "seconds": 1})
        fs, path = job.output or (None, "")
        fs.makedirs(path, exist_ok=True)
        fs.pipe_file(f"{path}/final.json", b"{}")
    return {
        "history": {"loss": [1.0]},
        "metrics": {"loss": 1.0},
        "steps": 2,
        "weights_sha256": SHA,
        "seen": {
            "generation": generation,
            "cpus": links.num_cpus,
            "gpus": links.num_gpus,
            "legacy": os.environ["TF_USE_LEGACY_KERAS"],
            "config": dict(job.spec.config),
            "address": links.address(7),
        },
    }


def fails_on_rank_1(job: Job, links: Links) -> dict[str, Any]:
    if links.rank == 1:
        time.sleep(0.5)  # rank 0 waits by then
        raise KeyError("no such column")
    form(links)
    return {}


def differs(job: Job, links: Links) -> dict[str, Any]:
    form(links)
    links.compare({"variables": [{"path": "dense/kernel", "shape": [3, links.rank]}]})
    return {}


def rank_1_never_joins(job: Job, links: Links) -> dict[str, Any]:
    if links.rank == 1:
        time.sleep(600)
    form(links)
    return {}


def all_stuck_after_join(job: Job, links: Links) -> dict[str, Any]:
    links.join(links.address(1000 + links.rank), 1)
    time.sleep(600)  # as a thread inside TensorFlow that waits for a peer
    return {}


def dies_once(job: Job, links: Links) -> dict[str, Any]:
    mark = Path(job.spec.config["mark"])
    form(links)
    if links.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    links.compare({})  # rank 0 waits here for the dead one until Ray replaces the group
    return well(job, links)


def build_model(config: Any) -> Any:
    raise AssertionError("the stand-in builds nothing")


def trainer(session: Callable[..., Any], path: Path, **arguments: Any) -> raytf.KerasTrainer:
    kind = type("StandIn", (raytf.KerasTrainer,), {"_session": staticmethod(session)})
    given = {
        "global_batch_size": 4,
        "scaling_config": ScalingConfig(num_workers=2),
        "run_config": RunConfig(name="run", storage_path=str(path)),
        "verbose": 2,
    }
    return kind(build_model, raytf.ArraySource(X, X[:, 0]), **(given | arguments))


@pytest.fixture(autouse=True)
def nothing_of_the_run_is_left() -> Any:
    yield
    if ray.is_initialized():
        named = ray.util.list_named_actors(all_namespaces=True)
        assert not [a for a in named if a["namespace"] == NAMESPACE]
        groups = ray.util.placement_group_table().values()
        assert not [g for g in groups if g["state"] != "REMOVED"]


def test_fit_evaluate_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "odd path ü"
    before = signal.getsignal(signal.SIGINT)
    loaded = set(sys.modules)  # other tests of this process may have brought TensorFlow in
    made = trainer(well, place, config={"lr": 0.1})
    result = made.fit()
    assert result.metrics == {"loss": 1.0}
    assert result.history == {"loss": [1.0]}
    assert (result.steps, result.weights_sha256, result.generations) == (2, SHA, 1)
    assert result.url == str(place / "run")
    seen = result.return_value["seen"]
    assert seen["generation"] == 1
    assert (seen["cpus"], seen["gpus"], seen["legacy"]) == (1.0, 0.0, "0")
    assert seen["config"] == {"lr": 0.1}
    assert seen["address"].endswith(":7")
    assert "epoch 1/1 - 1s - loss 1.0000" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before
    assert not {"tensorflow", "keras"} & (set(sys.modules) - loaded)

    assert made.evaluate(raytf.ArraySource(X, X[:, 0])) == {"loss": 0.5}
    np.testing.assert_array_equal(made.predict(raytf.ArraySource(X)), X * 2)
    left = {p.name for p in (place / "run").iterdir() if not p.name.startswith(".validate")}
    assert left == {"events", "final", "lease.json", "run.json", "tensorboard"}


def test_the_users_error_comes_first_and_whole(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        trainer(fails_on_rank_1, tmp_path).fit()
    text = str(caught.value)
    assert text.startswith("rank 1 failed: KeyError: 'no such column'")
    assert "in fails_on_rank_1" in text
    assert caught.value.context["rank"] == 1
    assert caught.value.context["error_type"] == "KeyError"
    assert isinstance(caught.value.__cause__, ray.train.TrainingFailedError)


def test_models_that_differ(tmp_path: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"dense/kernel.*\[3, 0\].*rank 1 has \[3, 1\]"):
        trainer(differs, tmp_path).fit()


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    limits = raytf.CommunicationConfig(startup_timeout_s=2.0)
    with pytest.raises(StartupError, match="rank 1 of 2 did not join within 2 s"):
        trainer(rank_1_never_joins, tmp_path, communication=limits).fit()


def test_ranks_that_cannot_raise_are_ended_by_the_driver(tmp_path: Path) -> None:
    limits = raytf.CommunicationConfig(startup_timeout_s=2.0)
    with pytest.raises(StartupError, match="did not come up within 2 s"):
        trainer(all_stuck_after_join, tmp_path, communication=limits).fit()


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="rank 1 failed: its process died") as caught:
        trainer(
            dies_once,
            tmp_path,
            config={"mark": str(tmp_path / "mark")},
            recovery=raytf.RecoveryConfig(mode="off"),
        ).fit()
    assert caught.value.context["fault"] == "killed"


def test_a_restarted_group_forms_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = trainer(
        dies_once,
        tmp_path,
        config={"mark": str(tmp_path / "mark")},
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.metrics == {"loss": 1.0}
    assert result.generations == 2
    assert "was killed" in caplog.text
    assert "failure 1 of 1: all workers start anew" in caplog.text


def test_more_than_the_cluster_can_ever_hold(tmp_path: Path) -> None:
    for scaling, text in (
        (ScalingConfig(num_workers=500), "its nodes hold"),
        (ScalingConfig(num_workers=1, use_gpu=True), "no GPU on any node"),
    ):
        began = time.monotonic()
        with pytest.raises(ResourceError, match=text):
            trainer(well, tmp_path, scaling_config=scaling, global_batch_size=500).fit()
        assert time.monotonic() - began < 15


def test_interrupt_ends_the_run(tmp_path: Path) -> None:
    timer = threading.Timer(4.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer(rank_1_never_joins, tmp_path).fit()
    finally:
        timer.cancel()


def test_fit_in_somebodys_own_loop(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        import raytf.cluster.in_loop as in_loop

        in_loop._session = config["session"]
        os.environ["TF_CONFIG"] = os.environ["TF_USE_LEGACY_KERAS"] = "1"  # as Ray's backend does
        out = raytf.fit(build_model, raytf.ArraySource(X, X[:, 0]), global_batch_size=4, verbose=0)
        return out | {"tf_config": os.environ.get("TF_CONFIG")}

    result = DataParallelTrainer(
        loop,
        train_loop_config={"session": well},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="own", storage_path=str(tmp_path)),
    ).fit()
    outcome = result.return_value
    assert outcome["weights_sha256"] == SHA
    assert outcome["seen"]["legacy"] == "0"
    assert outcome["tf_config"] is None
    assert (tmp_path / "own" / "final" / "final.json").exists()


def test_refused_in_a_worker_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size=1 is less than num_workers=2"):
        trainer(well, tmp_path, global_batch_size=1)


def test_an_embedded_ray_ends_with_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys
            import numpy as np
            import raytf
            from ray.train import RunConfig, ScalingConfig

            class T(raytf.KerasTrainer):
                @staticmethod
                def _session(job, links):
                    f = links.join(links.address(1), 1)
                    return {"metrics": {"n": links.num_workers}}

            x = np.zeros((8, 3), "float32")
            t = T(lambda c: 1, raytf.ArraySource(x, x), global_batch_size=4, verbose=0,
                  scaling_config=ScalingConfig(num_workers=3),
                  run_config=RunConfig(name="r", storage_path=sys.argv[1]))
            print(json.dumps(t.fit().metrics))
            """
        )
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {"n": 3}
    # What it leaves running is found by conftest's check at the end of this file.
