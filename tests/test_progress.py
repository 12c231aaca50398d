from __future__ import annotations

import io

import pytest

from raytf.progress import Display, epoch_line, format_logs, format_seconds, step_line

START = {"kind": "start", "epochs": 5, "steps_per_epoch": 100, "global_batch_size": 64}


def step(n: int, epoch: int = 0, **more: object) -> dict[str, object]:
    return {"kind": "step", "epoch": epoch, "step": n, "total_step": n, "logs": {}} | more


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (60, "1m 00s"), (185, "3m 05s"), (7380, "2h 03m"), (-1, "0s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_logs() -> None:
    logs = {"loss": 0.34561, "lr": 0.00012, "zero": 0.0, "name": "x", "flag": True}
    assert format_logs(logs) == "loss 0.3456 - lr 1.200e-04 - zero 0.0000 - name x - flag True"


def test_a_step_line_has_position_logs_speed_and_time_left() -> None:
    line = step_line(START, step(49, epoch=1, logs={"loss": 0.5}, examples_per_s=6400.0))
    assert line == "epoch 2/5 step 50/100 - loss 0.5000 - 6,400 examples/s - 4s left"
    # 350 steps of 64 examples at 6,400/s are 3.5 s


def test_a_step_line_without_knowledge() -> None:
    assert step_line({}, step(0)) == "epoch 1/? step 1/?"


def test_an_epoch_line() -> None:
    record = {"kind": "epoch", "epoch": 4, "logs": {"loss": 0.1, "val_loss": 0.2}, "seconds": 61.2}
    assert epoch_line(START, record) == "epoch 5/5 - 1m 01s - loss 0.1000 - val_loss 0.2000"


def shown(verbose: object, *calls: tuple[float, dict[str, object]]) -> list[str]:
    stream = io.StringIO()
    with Display(verbose, stream) as display:  # type: ignore[arg-type]
        for now, record in calls:
            display.update([record], now)
    return stream.getvalue().splitlines()


EPOCH = {"kind": "epoch", "epoch": 0, "logs": {"loss": 1.0}, "seconds": 3.0}
MESSAGE = {"kind": "message", "text": "batch 3 is odd"}


def test_plain_lines_every_ten_seconds() -> None:
    lines = shown(
        1, (0, START), (1, step(1)), (9.9, step(2)), (10, step(3)), (19.9, step(4)), (20, step(5))
    )
    assert lines == ["epoch 1/5 step 4/100", "epoch 1/5 step 6/100"]


def test_an_epoch_line_starts_the_ten_seconds_anew() -> None:
    lines = shown("auto", (0, START), (9, EPOCH), (18, step(3)), (19, step(4)))
    assert lines == ["epoch 1/5 - 3s - loss 1.0000", "epoch 1/5 step 5/100"]


def test_levels() -> None:
    calls = ((0.0, START), (50.0, step(1)), (60.0, EPOCH), (61.0, MESSAGE))
    assert shown(0, *calls) == []
    assert shown(2, *calls) == ["epoch 1/5 - 3s - loss 1.0000", "batch 3 is odd"]
    assert len(shown(1, *calls)) == 3


def test_unknown_kinds_and_phases_are_let_through() -> None:
    assert (
        shown(1, (0, {"kind": "phase", "phase": "building"}), (0, {"kind": "new"}), (0, {})) == []
    )


def test_the_bar_draws(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("raytf.progress._is_interactive", lambda: True)
    with Display(1) as display:
        display.update([{"kind": "phase", "phase": "building"}, START, step(9), EPOCH], 0.0)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "epoch 1/5 - 3s - loss 1.0000" in printed.err
