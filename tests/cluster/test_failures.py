"""Errors become plain records and one error again, without Ray and TensorFlow."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from raytf.cluster.failures import describe, from_ray, is_collateral, merged, plain, to_error
from raytf.errors import DataError, ModelMismatchError, RaytfError, StartupError, TrainingError


def tensorflow_error(name: str, text: str) -> Exception:
    kind = type(name, (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    return kind(text)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def user_code() -> None:
    raise ValueError("bad row")


def caught() -> Exception:
    try:
        user_code()
    except ValueError as error:
        return error
    raise RuntimeError


def test_a_user_error_keeps_its_traceback_as_text() -> None:
    record = describe(caught(), rank=1, step=12)
    error = to_error(record)
    assert isinstance(error, TrainingError)
    assert error.context["rank"] == 1
    assert error.context["step"] == 12
    assert error.context["error_type"] == "ValueError"
    assert "in user_code" in error.context["traceback"]
    assert record["headline"] == "ValueError at step 12: bad row"
    pickle.loads(pickle.dumps(error))


def test_an_error_knows_its_own_step() -> None:
    error = caught()
    error.raytf_step = 3  # type: ignore[attr-defined]
    assert describe(error, rank=0, step=12)["context"]["step"] == 3


def test_a_raytf_error_stays_what_it_is() -> None:
    error = to_error(describe(DataError("ran out", counts={0: 5, 1: 4}), rank=1))
    assert type(error) is DataError
    assert error.message == "ran out"
    assert error.context == {"counts": {0: 5, 1: 4}, "rank": 1}


def test_records_are_plain() -> None:
    class Odd(Exception):
        pass

    error = tensorflow_error("InvalidArgumentError", "shape")
    record = describe(error, rank=0)
    assert pickle.loads(pickle.dumps(record)) == record
    assert b"tensorflow.python.framework.errors_impl" in pickle.dumps(record)  # as text only
    assert isinstance(record["error_type"], str)
    assert describe(RaytfError("x", odd=Odd()), 0)["context"]["odd"] == ""


def test_plain_takes_numpy_apart() -> None:
    value = plain(
        {"a": np.float64(1.5), "b": (1, True, None), 3: np.int64(4), (1,): {"x"}, "c": np.ones(2)}
    )
    assert value == {"a": 1.5, "b": [1, True, None], 3: 4, "(1,)": ["x"], "c": [1.0, 1.0]}
    assert type(value["a"]) is float


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (tensorflow_error("AbortedError", "x"), True),
        (tensorflow_error("UnavailableError", "Socket closed"), True),
        (tensorflow_error("InternalError", "Collective ops is aborted by: peer"), True),
        (tensorflow_error("InvalidArgumentError", "shapes differ"), False),
        (tensorflow_error("InternalError", "bad kernel"), False),
        (ConnectionError("Connection reset by peer"), False),  # of the user's own code
        (RaytfError("x", collateral=True), True),
        (StartupError("x", superseded=True), True),
        (StartupError("x"), False),
    ],
)
def test_echoes(error: Exception, echo: bool) -> None:
    assert is_collateral(error) is echo


def test_the_root_wins_over_an_earlier_echo() -> None:
    echo = describe(tensorflow_error("AbortedError", "aborted"), rank=0)
    root = describe(caught(), rank=1, step=4)
    error = merged([echo, root])
    assert isinstance(error, TrainingError)
    first, *rest = error.message.splitlines()
    assert first == "rank 1 failed: ValueError at step 4: bad row"
    assert "in user_code" in error.message
    assert any("rank 0 followed: AbortedError: aborted" in line for line in rest)
    assert error.context["rank"] == 1


def test_an_echo_alone_is_all_there_is() -> None:
    error = merged([describe(tensorflow_error("AbortedError", "aborted"), rank=0)])
    assert error is not None and "rank 0 failed: AbortedError" in error.message


def test_equal_errors_are_one() -> None:
    error = merged([describe(caught(), rank=rank) for rank in (2, 0, 1, 3)])
    assert error is not None
    assert error.message.startswith("ranks 0-3 failed: ValueError: bad row")
    assert error.message.count("Traceback") == 1
    assert error.context["ranks"] == [0, 1, 2, 3]


def test_mismatch_is_not_repeated_per_rank() -> None:
    error = merged([describe(ModelMismatchError("models differ"), rank=r) for r in (0, 1)])
    assert type(error) is ModelMismatchError
    assert error.message == "models differ"


def test_nothing_recorded() -> None:
    assert merged([]) is None


class WorkerDied(Exception):
    def __init__(self) -> None:
        super().__init__("worker 1 failed its health check")
        self.health_check_failure = RuntimeError("The actor died unexpectedly: SIGKILL")


class GroupError(Exception):
    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__("Training failed due to worker errors")
        self.worker_failures = failures


def test_a_killed_worker_is_the_root_of_the_others_aborts() -> None:
    echo = describe(tensorflow_error("UnavailableError", "Socket closed"), rank=0)
    error = from_ray(GroupError({0: TrainingError("..."), 1: WorkerDied()}), [echo])
    assert error.message.startswith("rank 1 failed: its process died")
    assert "SIGKILL" in error.message
    assert "rank 0 followed" in error.message
    assert error.context["rank"] == 1


def test_a_recorded_user_error_wins_over_rays_words() -> None:
    failure = GroupError({1: TrainingError("converted")})
    error = from_ray(failure, [describe(caught(), rank=1)])
    assert "bad row" in error.message and "converted" not in error.message


def test_an_error_that_never_reached_the_run_actor() -> None:
    error = from_ray(GroupError({1: DataError("ran out")}), [])
    assert type(error) is DataError


def test_an_exception_outside_the_session_is_no_death() -> None:
    error = from_ray(GroupError({0: TypeError("boom")}), [])
    assert error.message.startswith("rank 0 failed: TypeError: boom")


def test_a_controller_error() -> None:
    error = Exception("Training failed due to controller error")
    error.controller_failure = OSError("disk full")  # type: ignore[attr-defined]
    mapped = from_ray(error, [])
    assert isinstance(mapped, TrainingError) and "OSError: disk full" in mapped.message
