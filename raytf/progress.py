"""What the driver shows of a run: a bar on a terminal or notebook, plain lines elsewhere.

`Display` is fed with progress records from the run actor. How a record reads is a pure function of
it (`step_line`, `epoch_line`); when something is shown depends on a time that is an argument.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

__all__ = ["Display", "epoch_line", "format_logs", "format_seconds", "step_line"]

PLAIN_EVERY_S = 10.0
Verbose = Literal["auto", 0, 1, 2]


def format_seconds(seconds: float) -> str:
    """`7s`, `3m 05s`, `2h 03m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_logs(logs: Mapping[str, Any]) -> str:
    """`accuracy 0.9012 - loss 0.3456`, in the given order; tiny values keep their digits."""
    return " - ".join(f"{name} {_number(value)}" for name, value in logs.items())


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.3e}"


def _position(start: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    steps = start.get("steps_per_epoch")
    epoch = f"epoch {record['epoch'] + 1}/{start.get('epochs', '?')}"
    return f"{epoch} step {record['step'] + 1}/{steps or '?'}"


def eta_s(start: Mapping[str, Any], record: Mapping[str, Any]) -> float | None:
    """Seconds to the end of the run at the present speed, validation not counted.

    None when it cannot be known.
    """
    steps, epochs = start.get("steps_per_epoch"), start.get("epochs")
    batch, speed = start.get("global_batch_size"), record.get("examples_per_s")
    if not (steps and epochs and batch and speed):
        return None
    left = steps * (epochs - record["epoch"]) - (record["step"] + 1)
    return max(left, 0) * batch / speed


def step_line(start: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """One line for a step: position, logs, speed, time left."""
    parts = [_position(start, record)]
    if record.get("logs"):
        parts.append(format_logs(record["logs"]))
    if record.get("examples_per_s"):
        parts.append(f"{record['examples_per_s']:,.0f} examples/s")
    left = eta_s(start, record)
    if left is not None:
        parts.append(f"{format_seconds(left)} left")
    return " - ".join(parts)


def epoch_line(start: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """One line for a finished epoch."""
    parts = [f"epoch {record['epoch'] + 1}/{start.get('epochs', '?')}"]
    if record.get("seconds") is not None:
        parts.append(format_seconds(record["seconds"]))
    if record.get("logs"):
        parts.append(format_logs(record["logs"]))
    return " - ".join(parts)


class Display:
    """Shows progress records. Use as a context manager: the bar must be closed.

    Args:
        verbose: 0 nothing; 1 the bar, or lines every 10 s where there is no terminal; 2 one line
            per epoch; "auto" is 1.
        stream: for lines; standard error by default, so that standard output stays data.
    """

    def __init__(self, verbose: Verbose = "auto", stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._level = 1 if verbose == "auto" else verbose
        self._start: dict[str, Any] = {}
        self._shown_at: float | None = None
        self._bar: _Bar | None = None
        if self._level == 1 and stream is None and _is_interactive():
            self._bar = _Bar()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, records: list[dict[str, Any]], now: float) -> None:
        """Takes records in order of arrival; `now` is a monotonic time in seconds."""
        if self._level == 0:
            return
        for record in records:
            self._one(record, now)

    def _one(self, record: dict[str, Any], now: float) -> None:
        kind = record.get("kind")
        if kind == "start":
            self._start, self._shown_at = record, now
            if self._bar is not None:
                self._bar.start(record)
        elif kind == "step":
            self._step(record, now)
        elif kind == "epoch":
            self._line(epoch_line(self._start, record))
            self._shown_at = now
        elif kind == "message":
            self._line(str(record["text"]))
        elif kind == "phase" and self._bar is not None:
            self._bar.phase(str(record["phase"]))

    def _step(self, record: dict[str, Any], now: float) -> None:
        if self._bar is not None:
            self._bar.step(self._start, record)
        elif self._level == 1 and (self._shown_at is None or now - self._shown_at >= PLAIN_EVERY_S):
            self._shown_at = now
            self._line(step_line(self._start, record))

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.line(text)
        else:
            print(text, file=self._stream, flush=True)


def _is_interactive() -> bool:
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


class _Bar:
    """The rich bar: made when it is first needed, because rich costs 50 ms to import."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.fields[where]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=None, where="starting", text="")

    def start(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, total=record.get("steps_per_epoch"), completed=0)

    def phase(self, name: str) -> None:
        self._progress.update(self._task, where=name)

    def step(self, start: dict[str, Any], record: dict[str, Any]) -> None:
        where, _, text = step_line(start, record).partition(" - ")
        self._progress.update(self._task, completed=record["step"] + 1, where=where, text=text)

    def line(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()
