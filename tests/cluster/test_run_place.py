"""A run's place in the store: whose it is, what it began with, whether it is finished."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from ray.train import RunConfig

import raytf
from raytf.checkpoint.lease import read_holder
from raytf.checkpoint.storage import Storage, resolve
from raytf.cluster.arguments import check_spec, make_spec
from raytf.cluster.run_place import OpenRun, changed, fingerprint, open_run
from raytf.config import SaveConfig, TrainSpec
from raytf.errors import ConfigError, RunInUseError, StorageError
from raytf.worker.links import Origin

X = np.arange(40, dtype=np.float32).reshape(10, 4)
Y = np.arange(10, dtype=np.int64)


def build_model(config: Any) -> Any:
    raise AssertionError("nothing is built here")


def spec(x: Any = X, y: Any = Y, data: Any = None, **more: Any) -> TrainSpec:
    given = {"global_batch_size": 4, "epochs": 3, "seed": 7} | more
    source = raytf.ArraySource(x, y) if data is None else data
    return check_spec(make_spec(build_model, source, given), 2)


def opened(storage: Storage, asked: TrainSpec | None = None, **more: Any) -> OpenRun:
    """Takes the run and gives it back."""
    with open_run(storage, asked or spec(), SaveConfig(keep_last=3), **more) as held:
        return held


def finish(storage: Storage, **result: Any) -> None:
    """Leaves what `worker.export` writes last."""
    storage.write_bytes(json.dumps({"result": result}).encode(), "final", "final.json")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return resolve(str(tmp_path / "run"))


def test_the_same_run_keeps_its_id_and_counts_its_attempts(storage: Storage) -> None:
    first, second = opened(storage), opened(storage)
    assert first.place.run == second.place.run
    assert (first.place.attempt, second.place.attempt) == (1, 2)
    assert first.place.owner != second.place.owner
    assert first.finished is None
    holder = read_holder(storage)
    assert holder is not None
    assert holder.released
    assert opened(resolve(storage.url + "2")).place.run != first.place.run


def test_the_run_is_given_back_when_something_fails(storage: Storage) -> None:
    with pytest.raises(RuntimeError), open_run(storage, spec(), SaveConfig()):
        raise RuntimeError("training failed")
    with pytest.raises(ConfigError):
        opened(storage, spec(seed=8))
    began = time.monotonic()
    assert opened(storage).place.attempt == 3
    assert time.monotonic() - began < 5


Z = X.copy()
Z[3, 2] = -1


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        (lambda: spec(seed=8), ["seed: 7 -> 8"]),
        (lambda: spec(global_batch_size=5), ["global_batch_size: 4 -> 5"]),
        (lambda: spec(shuffle=False), ["shuffle: True -> False"]),
        (lambda: spec(drop_remainder=True), ["drop_remainder: False -> True"]),
        (lambda: spec(legacy_keras=True), ["legacy_keras: False -> True"]),
        (lambda: spec(X[:9], Y[:9]), ["train_data.rows: 10 -> 9", "train_data.content: "]),
        (lambda: spec(X[:, :3]), ["train_data.element.", "float32[4]", "float32[3]"]),
        (lambda: spec(y=Y.astype(np.int32)), ["int64[]", "int32[]"]),
        (lambda: spec(Z), ["train_data.content: "]),
        (lambda: spec(data=lambda ctx: None), ["train_data.factory: None -> True"]),
    ],
)
def test_what_must_not_change(
    storage: Storage, other: Callable[[], TrainSpec], lines: list[str]
) -> None:
    opened(storage)
    with pytest.raises(ConfigError) as caught:
        opened(storage, other())
    for line in lines:
        assert line in str(caught.value)
    assert "another name" in str(caught.value)


def test_what_may_change(storage: Storage) -> None:
    first = opened(storage)
    asked = spec(epochs=9, callbacks=list, validation_data=raytf.ArraySource(X, Y))
    with open_run(storage, asked, SaveConfig(every_steps=1)) as held:
        assert held.place.run == first.place.run
        assert held.place.save.every_steps == 1


def test_differences_are_named_with_their_path() -> None:
    old = {"a": 1, "b": {"c": 2, "d": [1]}, "e": None}
    assert changed(old, old) == []
    assert changed(old, {"a": 1, "b": {"c": 3, "d": [1]}, "f": 1}) == [
        "b.c: 2 -> 3",
        "f: None -> 1",
    ]


def test_a_fingerprint_is_json_and_is_of_the_sampled_rows() -> None:
    many = np.zeros((1000, 2), np.float32)
    first = fingerprint(spec(many, np.zeros(1000)))
    assert json.loads(json.dumps(first)) == first
    changed_first = many.copy()
    changed_first[0, 1] = 1
    assert fingerprint(spec(changed_first, np.zeros(1000))) != first


def test_finished_runs(storage: Storage) -> None:
    opened(storage)
    finish(storage, epochs=2, epochs_asked=3, metrics={"loss": 1.0})  # stopped early
    done = opened(storage).finished
    assert done is not None
    assert (done.result["metrics"], done.epochs_asked) == ({"loss": 1.0}, 3)
    fewer = opened(storage, spec(epochs=1))
    assert fewer.finished == done
    assert not fewer.place.go_on
    more = opened(storage, spec(epochs=4))
    assert more.finished is None
    assert more.place.go_on


def test_a_directory_of_somebody_else(storage: Storage) -> None:
    finish(storage, epochs=3)
    with pytest.raises(ConfigError, match=r"run\.json is missing.*another name"):
        opened(storage)


def test_resume_from_is_for_a_run_without_checkpoints(storage: Storage, tmp_path: Path) -> None:
    origin = Origin(kind="step", url="u", storage=resolve(str(tmp_path / "old")), step=3)
    opened(storage, origin=origin)
    # begun and killed before its first checkpoint: the same command still starts from there
    assert opened(storage, origin=origin).place.origin == origin


HOLDER = """
import sys
from raytf.checkpoint.lease import Lease
from raytf.checkpoint.storage import resolve
lease = Lease.acquire(resolve(sys.argv[1]), say=print)
lease.start()
print("held", flush=True)
sys.stdin.read()
"""


def hold(storage: Storage) -> subprocess.Popen[str]:
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDER, storage.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    return held


def test_a_second_driver_is_refused_and_told_who(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    held = hold(storage)
    try:
        began = time.monotonic()
        with pytest.raises(RunInUseError, match=f"process {held.pid} on .*another name"):
            opened(storage)
        assert 19 < time.monotonic() - began < 30
        assert f"held by process {held.pid}" in caplog.text
        assert "Waiting up to 20 s" in caplog.text
        assert held.poll() is None
    finally:
        held.kill()
        held.communicate()
    began = time.monotonic()
    assert opened(storage).place.attempt == 2  # a dead process on this host is no holder
    assert time.monotonic() - began < 5


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file" / "run"), "/proc/raytf/run"):
        with pytest.raises(StorageError, match="cannot be written and read: .*Check storage_path"):
            opened(resolve(place))
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_store_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class ReadOnly(type(fsspec.filesystem("memory"))):
        def pipe_file(self, path: str, value: Any, **kwargs: Any) -> None:
            raise PermissionError("403 Forbidden")

    storage = Storage(ReadOnly(skip_instance_cache=True), f"/{tmp_path.name}/run", "memory")
    with pytest.raises(StorageError, match="PermissionError: 403 Forbidden"):
        opened(storage)
    assert not storage.exists("run.json")
    assert not storage.exists("lease.json")


def test_memory_is_refused_on_the_driver() -> None:
    with pytest.raises(ConfigError, match="lives in the memory of one process"):
        raytf.KerasTrainer(
            build_model,
            raytf.ArraySource(X, Y),
            global_batch_size=4,
            run_config=RunConfig(storage_path="memory://runs"),
        )


def test_the_place_travels(storage: Storage) -> None:
    place = opened(storage).place
    assert dataclasses.asdict(pickle.loads(pickle.dumps(place))) == dataclasses.asdict(place)
