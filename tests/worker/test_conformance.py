"""Keras 3 on 1, 2 and 3 workers equals plain Keras in one process over the same batches.

Each group of processes trains its cases in turn; the tests compare what came out. On 2 workers all
cases run; on 1 and 3 a selection, and all of them with `-m slow`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.worker.cases import CASES, FLOAT32
from tests.worker.group import run_group

pytestmark = [pytest.mark.tf, pytest.mark.timeout(600)]


SELECTED = (
    "dense",
    "conv2d",
    "embedding_adam",
    "masked_sequence",
    "batchnorm",
    "batchnorm_synchronized",
    "dropout",
    "own_train_step",
    "adversaries",
    "mean_with_sample_weight",
    "auc",
    "global_clipnorm",
    "accumulation",
    "float16_overflow",
    "steps_per_execution_many",
    "last_batch_of_one_row",
)


@functools.cache
def outcomes(num_workers: int, every: bool = True) -> list[dict[str, Any]]:
    target = "worker" if num_workers else "reference"
    names = list(CASES) if every else list(SELECTED)
    return run_group(f"tests.worker.cases:{target}", num_workers, names, timeout_s=540)


def compared() -> list[Any]:
    slow = pytest.mark.slow
    some = [(n, w, False) for w in (1, 3) for n in SELECTED]
    rest = [pytest.param(n, w, True, marks=slow) for w in (1, 3) for n in CASES]
    return [*((n, 2, True) for n in CASES), *some, *rest]


def differences(
    mine: dict[str, Any], theirs: dict[str, Any], tolerance: tuple[float, float]
) -> list[str]:
    relative, absolute = tolerance
    found = []
    for kind in ("weights", "optimizer"):
        # The last part only: scopes differ by when Keras builds an optimizer.
        assert [n.split("/")[-1] for n, _ in mine[kind]] == [
            n.split("/")[-1] for n, _ in theirs[kind]
        ]
        for (name, a), (_, b) in zip(mine[kind], theirs[kind], strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
            limit = relative * np.max(np.abs(a), initial=0) + absolute
            error = np.max(np.abs(a - b), initial=0)
            if not error <= limit:
                found.append(f"{kind} {name}: {error:.3g} > {limit:.3g}")
    return found + log_differences(mine, theirs, relative)


def log_differences(mine: dict[str, Any], theirs: dict[str, Any], relative: float) -> list[str]:
    assert set(mine["history"]) == set(theirs["history"])
    found = []
    for name, values in theirs["history"].items():
        if not np.allclose(
            mine["history"][name], values, rtol=relative, atol=max(1e-6, relative / 10)
        ):
            found.append(f"{name}: {mine['history'][name]} is not {values}")
    return found


@pytest.mark.parametrize(("name", "num_workers", "every"), compared())
def test_equals_plain_keras(name: str, num_workers: int, every: bool) -> None:
    case = CASES[name]
    ranks = [rank[name] for rank in outcomes(num_workers, every)]
    assert "error" not in ranks[0], ranks[0]["error"]
    assert len({rank["digest"] for rank in ranks}) == 1, "ranks are not bit-equal"
    if num_workers > 1 and not case.equal_to_one_process:
        return
    expected = outcomes(0)[0][name]
    if case.loss_tolerance is not None:
        assert log_differences(ranks[0], expected, case.loss_tolerance) == []
        return
    tolerance = FLOAT32 if num_workers == 1 else case.tolerance
    assert differences(ranks[0], expected, tolerance) == []


def test_the_overflow_case_skips_one_step_per_epoch() -> None:
    """Else the case would show nothing."""
    state = dict(outcomes(2)[0]["float16_overflow"]["optimizer"])
    iterations = next(v for n, v in state.items() if n.startswith("adam") and "iteration" in n)
    assert iterations == 2 * (5 - 1)
