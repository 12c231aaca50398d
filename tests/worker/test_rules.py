"""The rules for what cannot equal one process, for decisions, factories, saving and tf_keras; on
real workers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.worker.group import run_group

pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]


def test_dropout_differs_per_rank_and_repeats() -> None:
    first = run_group("tests.worker.rules:masks", 2)
    again = run_group("tests.worker.rules:masks", 2)
    (mask0, state0), (mask1, state1) = first
    assert len(mask0) == len(mask1) == 3
    assert state0 == state1, "the seed state counts alike on all ranks"
    for a, b in zip(mask0, mask1, strict=True):
        assert not np.array_equal(a, b), "ranks must not draw the same mask"
    assert not np.array_equal(mask0[0], mask0[1]), "steps must not draw the same mask"
    for (before, _), (after, _) in zip(first, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [8, 9])
def test_plain_batch_normalization_averages_over_ranks_by_rows(rows: int) -> None:
    results = run_group("tests.worker.rules:statistics", 2, rows)
    (mean0, variance0, x), (mean1, variance1, _) = results
    assert np.array_equal(mean0, mean1) and np.array_equal(variance0, variance1)
    cut = (rows + 1) // 2
    parts = [x[:cut], x[cut:]]
    weights = [len(p) / rows for p in parts]
    mean = sum(w * p.mean(0) for w, p in zip(weights, parts, strict=True))
    variance = sum(w * p.var(0) for w, p in zip(weights, parts, strict=True))
    np.testing.assert_allclose(mean0, 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(mean0, 0.1 * x.mean(0), rtol=1e-5)  # which is the whole batch's mean
    np.testing.assert_allclose(variance0, 0.9 + 0.1 * variance, rtol=1e-5)


def test_factory_gets_its_context_and_trains() -> None:
    (contexts, result, weights0), (_, _, weights1) = run_group(
        "tests.worker.rules:factory", 2, [5, 5]
    )
    assert (0, 2, 4, 0) in contexts and (0, 2, 4, 1) in contexts
    assert result["steps"] == 10 and weights0 == weights1


def test_uneven_factories_end_all_ranks_at_the_same_step() -> None:
    for _, kind, message in run_group("tests.worker.rules:factory", 2, [5, 4], timeout_s=60):
        assert kind == "DataError"
        assert "rank(s) 1 had 4, rank(s) 0 at least 5" in message
        assert "All ranks stopped after step 4" in message


def test_an_empty_factory_is_an_error() -> None:
    for _, kind, message in run_group("tests.worker.rules:factory", 2, [0, 0], timeout_s=60):
        assert kind == "DataError" and "no batch for epoch 0" in message


def test_factory_batches_count_by_their_rows() -> None:
    (history, weights), _ = run_group("tests.worker.rules:factory_of_uneven_rows", 2)
    ((expected, expected_weights),) = run_group("tests.worker.rules:factory_of_uneven_rows", 1)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
    for a, b in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_decisions_are_rank_0s() -> None:
    first, second = run_group("tests.worker.rules:disagreeing_callbacks", 2)
    assert first == second
    epochs, learning_rate, _ = first
    assert epochs == 2 and learning_rate == 0.5


def test_saving_from_callbacks_leaves_one_copy_and_nobody_waits(tmp_path: Path) -> None:
    run_group("tests.worker.rules:saving", 2, str(tmp_path), timeout_s=120)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best-0.keras",
        "own-0.keras",
        "own-0.weights.h5",
    ]


def test_legacy_keras_trains_with_ranks_equal() -> None:
    (result0, module, same), (result1, _, _) = run_group("tests.worker.rules:legacy", 2)
    assert module.startswith("tf_keras") and same
    assert result0["weights_sha256"] == result1["weights_sha256"]
    assert result0["history"] == result1["history"]
    assert result0["history"]["loss"][-1] < result0["history"]["loss"][0]
    assert set(result0["metrics"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_callbacks_on_one_rank_alone_do_not_part_the_ranks() -> None:
    (seen0, hash0), (seen1, hash1) = run_group("tests.worker.rules:callbacks_on_one_rank", 2)
    assert seen0 == [0, 1, 2, 0, 1, 2] and seen1 == []
    assert hash0 == hash1


EXPECTED = {
    "masked norm": "does not synchronize inputs with a mask",
    "parts": "Without weights: dense",
    "none": "build_model returned None",
    "not a model": "build_model returned builtins.int",
    "uncompiled": "uncompiled",
    "eager": "run_eagerly",
    "stateful": "stateful RNN",
    "branch": "inside a tf.cond or tf.while_loop",
    "spectral": "SpectralNormalization",
    "no list": "must return a list",
    "no callback": "must return Keras callbacks",
    "backup": "BackupAndRestore",
}


def test_what_cannot_be_supported_is_refused_by_name() -> None:
    (messages,) = run_group("tests.worker.rules:refusals", 1)
    assert set(messages) == set(EXPECTED)
    for name, part in EXPECTED.items():
        assert messages[name].startswith("ConfigError") and part in messages[name], messages[name]
