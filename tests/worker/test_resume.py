"""A run that is killed ends with the bytes of a run that nobody touched: all state, every phase.

Real processes, real SIGKILL, no Ray (`tests/e2e/test_resume.py` has Ray's part). The full matrix is
`slow`; its seed and result are recorded in tests/evidence/store.md.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from raytf.checkpoint.store import CheckpointStore
from raytf.config import SaveConfig
from raytf.faults.drill import PHASES
from tests.worker.broken import ROWS, Case, run

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
    assert broken.pop("starts") == drill.count("kill") + 1
    whole = {k: v for k, v in unbroken(kind, per_call).items() if k != "starts"}
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
