"""A run that is killed ends with the bytes of a run that nobody touched: all state, every phase.

Real processes, real SIGKILL, no Ray (`tests/e2e/test_resume.py` has Ray's part). The full matrix is
`slow`; its seed and result are recorded in tests/evidence/store.md.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest

from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.config import SaveConfig
from raytf.faults.drill import PHASES
from raytf.worker.links import Origin
from tests.worker.broken import ROWS, Case, left_by, run
from tests.worker.group import GroupFailed

pytestmark = [pytest.mark.tf, pytest.mark.timeout(400)]
KINDS = ("adam", "schedule", "mixed", "ema")
STEPS = 21  # of three epochs
SEED = 20261201


@functools.cache
def unbroken(kind: str, per_call: int) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        case = Case(storage=f"{directory}/run", kind=kind, per_call=per_call, epochs=3)
        return run(case, max_starts=1)


def check(tmp_path: Path, kind: str, drill: str, per_call: int = 1) -> None:
    case = Case(storage=str(tmp_path / "run"), kind=kind, drill=drill, per_call=per_call, epochs=3)
    broken = run(case)
    # Each kill has fired; two ranks may have died in one group.
    assert len(list((tmp_path / "run" / "drills").iterdir())) == drill.count("kill")
    assert 2 <= broken.pop("starts") <= drill.count("kill") + 1
    assert "resumed at step" in " ".join(broken.pop("said"))
    whole = {k: v for k, v in unbroken(kind, per_call).items() if k not in ("starts", "said")}
    assert set(broken["tensors"]) == set(whole["tensors"])
    differing = [n for n, d in whole["tensors"].items() if broken["tensors"][n] != d]
    assert differing == []
    assert broken == whole
    if kind != "legacy":
        assert broken["ledger"] == [broken["position"]["epoch"]] * ROWS


def test_killed_in_every_phase(tmp_path: Path) -> None:
    check(
        tmp_path,
        "adam",
        "kill rank=1 step=2 phase=data; kill rank=0 step=5 phase=copy; kill rank=1 step=6 "
        "phase=validate; kill rank=1 step=8 phase=write; kill rank=0 step=11 phase=commit; "
        "kill rank=0 step=14 phase=callback; kill rank=0 step=17",
    )


def test_half_precision_and_several_steps_per_call(tmp_path: Path) -> None:
    check(tmp_path, "mixed", "kill rank=0 step=5; kill rank=1 step=12", per_call=2)


@pytest.mark.parametrize("kind", ["schedule", "ema"])
def test_schedules_and_averaged_weights(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, "kill rank=1 step=10")


def test_another_number_of_workers_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    case = Case(
        storage=str(tmp_path / "run"),
        workers=(2, 1, 3),
        drill="kill rank=1 step=5; kill rank=0 step=10",
        epochs=3,
    )
    left = run(case)
    assert left["starts"] == 3
    assert left["ledger"] == [left["position"]["epoch"]] * ROWS
    store = CheckpointStore(case.storage)
    sizes = {step: store.manifest(step).world_size for step in store.steps()}
    assert set(sizes.values()) == {1, 2, 3}


def test_tf_keras(tmp_path: Path) -> None:
    check(tmp_path, "legacy", "kill rank=0 step=10")


def test_tf_keras_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    case = Case(
        storage=str(tmp_path / "run"),
        kind="legacy",
        workers=(2, 3),
        drill="kill rank=1 step=5",
        epochs=2,
    )
    left = run(case)
    assert (left["starts"], left["step"]) == (2, 14)
    assert {name.rpartition("@")[2] for name in left["tensors"] if "@" in name} == {"0", "1", "2"}


def drills(kind: str, number: int) -> list[str]:
    """Seeded: several kills each, at random steps, on random ranks, in random phases."""
    rng = random.Random(f"{SEED} {kind}")
    found = []
    for _ in range(number):
        steps = sorted(rng.sample(range(1, STEPS - 1), 4))
        found.append(
            "; ".join(
                f"kill rank={rank} step={step} phase={phase}"
                for step in steps
                for phase in [rng.choice(PHASES)]
                for rank in [0 if phase == "commit" else rng.randrange(2)]
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(5))
def test_the_full_matrix(tmp_path: Path, kind: str, number: int) -> None:
    check(tmp_path, kind, drills(kind, 5)[number], per_call=2 if number == 4 else 1)


def test_what_is_kept(tmp_path: Path) -> None:
    save = SaveConfig(every_steps=2, keep_last=2, keep_best="val_loss", keep_every=8)
    case = Case(storage=str(tmp_path / "run"), save=save, epochs=3, workers=(1,), pause_s=0.1)
    left = run(case, max_starts=1)
    store = CheckpointStore(case.storage)
    best = store.best()
    history = left["result"]["history"]["val_loss"]
    assert best == 7 * (history.index(min(history)) + 1)
    assert store.steps() == sorted({8, 16, 20, 21, best})
    assert all(store.verify(step) == [] for step in store.steps())


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run of one worker, two epochs, with a checkpoint of each fourth step."""
    storage = str(tmp_path_factory.mktemp("old") / "run")
    save = SaveConfig(every_steps=4, keep_last=10)
    case = Case(storage=storage, workers=(1,), epochs=2, save=save, pause_s=0.05)
    run(case, max_starts=1)
    return case


class TestStartsFromAnOldState:
    """`resume_from`: a new run from a step of another one; one worker each, to be quick."""

    def start(self, tmp_path: Path, old: Case, strict: bool = True, **more: Any) -> dict[str, Any]:
        origin = Origin(kind="step", url="old", storage=resolve(old.storage), step=4, strict=strict)
        values: dict[str, Any] = {"storage": str(tmp_path / "new"), "origin": origin}
        return run(dataclasses.replace(old, **(values | more)), max_starts=1)

    def test_the_same_data_goes_on_exactly(self, tmp_path: Path, old: Case) -> None:
        new = self.start(tmp_path, old)
        whole = left_by(old.storage)
        assert "starting at step 4 (epoch 1, step 4 of it)" in " ".join(new["said"])
        assert new["step"] == 14
        # Callbacks begin anew: it is another run; all that is trained is the same.
        assert new["tensors"].keys() >= {n for n in whole["tensors"] if "callback" not in n}
        for name, digest in whole["tensors"].items():
            assert name.startswith("callback/") or new["tensors"][name] == digest, name
        assert new["ledger"] == [2] * ROWS

    def test_other_data_begins_the_epoch_anew(self, tmp_path: Path, old: Case) -> None:
        new = self.start(tmp_path, old, fingerprint={"seed": 9})
        assert "the old state is of other data (seed): epoch 1 begins anew" in " ".join(new["said"])
        assert new["step"] == 4 + 14

    def test_a_new_learning_rate_counts(self, tmp_path: Path, old: Case) -> None:
        new = self.start(tmp_path, old, rate=3e-3)
        assert "learning rate: 0.003, as build_model says; the checkpoint has 0.01" in " ".join(
            new["said"]
        )
        assert "0.003" in new["files"]["log.csv"] or "0.0030" in new["files"]["log.csv"]

    def test_another_model_is_refused_with_a_diff(self, tmp_path: Path, old: Case) -> None:
        with pytest.raises(GroupFailed) as caught:
            self.start(tmp_path, old, units=24)
        text = str(caught.value)
        assert "ConfigError" in text
        assert "~ dense/kernel: model F32[16, 24], checkpoint F32[16, 16]" in text
        assert "resume_strict=False" in text

    def test_not_strict_takes_what_fits(self, tmp_path: Path, old: Case) -> None:
        new = self.start(tmp_path, old, strict=False, units=24)
        assert new["step"] == 14


class TestARunGoesOn:
    """The same run again, with what may change and what may not."""

    def test_more_epochs_equal_a_run_that_had_them_from_the_start(self, tmp_path: Path) -> None:
        case = Case(storage=str(tmp_path / "a"), workers=(1,), epochs=1)
        run(case, max_starts=1)
        more = run(dataclasses.replace(case, epochs=2, attempt=2), max_starts=1)
        whole = run(Case(storage=str(tmp_path / "b"), workers=(1,), epochs=2), max_starts=1)
        assert more["tensors"] == whole["tensors"]
        assert more["result"]["history"] == whole["result"]["history"]

    def test_the_state_s_learning_rate_counts_and_that_is_said(self, tmp_path: Path) -> None:
        case = Case(storage=str(tmp_path / "a"), workers=(1,), epochs=1)
        run(case, max_starts=1)
        more = run(dataclasses.replace(case, epochs=2, rate=1.0, attempt=2), max_starts=1)
        assert "learning rate: 0.01, as in the checkpoint; build_model now says 1" in " ".join(
            more["said"]
        )

    def test_damage_steps_back_and_is_set_aside(self, tmp_path: Path) -> None:
        save = SaveConfig(every_steps=3, keep_last=10)
        case = Case(storage=str(tmp_path / "a"), epochs=1, save=save, pause_s=0.1)
        run(case, max_starts=1)
        newest = tmp_path / "a" / "checkpoints" / "step-0000000007"
        shard = max(newest.glob("*.safetensors"), key=lambda p: p.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
        more = run(dataclasses.replace(case, epochs=2, attempt=2), max_starts=1)
        said = " ".join(more["said"])
        assert "checkpoint of step 7 is damaged and set aside" in said
        assert "resumed at step 6" in said
        assert (newest / "manifest.bad-2.json").exists() or list(newest.glob("manifest.bad-*"))
        whole = run(dataclasses.replace(case, storage=str(tmp_path / "b"), epochs=2), max_starts=1)
        assert more["tensors"] == whole["tensors"]
