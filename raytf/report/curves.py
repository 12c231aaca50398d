"""Curves of metrics and the timeline of a run as inline SVG. Pure.

Owns the geometry. Lines are drawn in a box that stretches with the page; texts are HTML beside it,
so that they keep their size at any width.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.faults.events import Event, Kind
from raytf.faults.incidents import Incident

__all__ = ["Attempt", "Series", "attempts_of", "chart", "number", "series_of", "timeline"]

_MOST_POINTS = 800  # of one line: more are not seen
_MOST_DOTS = 30  # of validation: more would be a thick line
_W, _H = 1000.0, 300.0  # of the box that stretches


@dataclass
class Series:
    """A metric over the steps of the run, without the ways that were not taken.

    Attributes:
        steps: (step, value) of training, now and then.
        epochs: (step, value) at the ends of epochs.
        val: the same of `val_*`.
    """

    steps: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    epochs: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    val: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])


@dataclass(frozen=True)
class Attempt:
    """From when to when an attempt ran; `ended` is None if it is not known to have ended."""

    number: int
    began: float
    latest: float
    ended: bool


def series_of(events: Iterable[Event]) -> tuple[dict[str, Series], list[int]]:
    """Metric name -> its curve, and the steps from which the run went on after going back."""
    found: dict[str, Series] = {}
    restarts: list[int] = []
    reached = 0
    for event in events:
        step = event.step
        is_step = event.kind is Kind.STEP_REACHED and event.rank in (None, 0)
        if step is not None and (event.kind is Kind.RESTORED or is_step):
            if step < reached or (event.kind is Kind.RESTORED and reached):
                restarts.append(step if event.kind is Kind.RESTORED else step - 1)
                _forget(found, restarts[-1])
            reached = step
        if not is_step and event.kind is not Kind.EPOCH_ENDED:
            continue
        at = reached if step is None else step
        for name, value in _numbers(event.fields.get("logs")):
            of_epoch = event.kind is Kind.EPOCH_ENDED
            series = found.setdefault(name.removeprefix("val_"), Series())
            line = series.val if name.startswith("val_") else series.steps
            line = series.epochs if of_epoch and line is series.steps else line
            if not line or line[-1][0] < at:
                line.append((at, value))
    return found, restarts


def _forget(found: Mapping[str, Series], step: int) -> None:
    for series in found.values():
        for line in (series.steps, series.epochs, series.val):
            line[:] = [point for point in line if point[0] <= step]


def _numbers(logs: Any) -> list[tuple[str, float]]:
    if not isinstance(logs, Mapping):
        return []
    pairs = [(str(k), v) for k, v in logs.items() if isinstance(v, int | float)]
    return [(name, float(value)) for name, value in pairs if not isinstance(value, bool)]


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """The attempts of a run, oldest first."""
    found: dict[int, Attempt] = {}
    for event in events:
        number = event.attempt
        old = found.get(number)
        ended = event.kind in (Kind.ATTEMPT_ENDED, Kind.RUN_FINISHED)
        if old is None:
            found[number] = Attempt(number, event.time, event.time, ended)
        else:
            latest = max(old.latest, event.time)
            found[number] = Attempt(number, old.began, latest, old.ended or ended)
    return [found[number] for number in sorted(found)]


def number(value: float) -> str:
    """A number for people: four digits."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.2e}"
    return f"{value:.4g}"


def chart(name: str, series: Series, restarts: Sequence[int]) -> str:
    """A figure with one metric's curve."""
    lines = (series.steps, series.epochs, series.val)
    points = [point for line in lines for point in line]
    values = [value for _, value in points if math.isfinite(value)]
    if not values:
        return ""
    low, high = _span(values)
    first, last = 0, max(step for step, _ in points) or 1

    def x(step: float) -> float:
        return _W * (step - first) / (last - first)

    def y(value: float) -> float:
        return _H * (1 - (value - low) / (high - low))

    grid = "".join(
        f'<line class="grid" x1="0" x2="{_W:g}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        for t in _ticks(low, high)
    )
    marks = "".join(
        f'<line class="restart" x1="{x(s):.1f}" x2="{x(s):.1f}" y1="0" y2="{_H:g}"/>'
        for s in restarts
    )
    drawn = [_path(series.steps or series.epochs, x, y, "train"), _path(series.val, x, y, "val")]
    if len(series.val) <= _MOST_DOTS:
        drawn += [_path([point], x, y, "val dots") for point in series.val]
    labels = "".join(
        f'<span style="top:{100 * y(t) / _H:.2f}%">{html.escape(number(t))}</span>'
        for t in _ticks(low, high)
    )
    return (
        f'<figure class="chart"><figcaption>{html.escape(name)}{_latest(series)}</figcaption>'
        f'<div class="plot"><div class="ys" aria-hidden="true">{labels}</div>'
        f'<svg viewBox="0 0 {_W:g} {_H:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(name)} over steps">{grid}{marks}{"".join(drawn)}</svg></div>'
        f'<div class="xs"><span>step {first}</span><span>{last}</span></div></figure>'
    )


def _latest(series: Series) -> str:
    parts: list[str] = []
    train = series.epochs or series.steps
    if train:
        parts.append(f'<span class="key train">train {number(train[-1][1])}</span>')
    if series.val:
        parts.append(f'<span class="key val">validation {number(series.val[-1][1])}</span>')
    return f'<span class="keys">{"".join(parts)}</span>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    room = 0.05 * (high - low)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers in a range."""
    raw = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(raw))
    width = next(scale * m for m in (1, 2, 2.5, 5, 10) if scale * m >= raw)
    start = math.ceil(low / width)
    return [i * width for i in range(start, math.floor(high / width) + 1)]


def _path(line: Sequence[tuple[int, float]], x: Any, y: Any, kind: str) -> str:
    """A line with gaps where a value is no number; single points become dots."""
    commands: list[str] = []
    pen_down = False
    for step, value in _thinned(line):
        if not math.isfinite(value):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x(step):.1f},{y(value):.1f}")
        if not pen_down:
            commands.append("h0")  # with round caps a point by itself is a dot
        pen_down = True
    return f'<path class="line {kind}" d="{"".join(commands)}"/>' if commands else ""


def _thinned(line: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most about `_MOST_POINTS`, the smallest and the largest of each stretch among them."""
    if len(line) <= _MOST_POINTS:
        return line
    width = math.ceil(2 * len(line) / _MOST_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(line), width):
        part = line[start : start + width]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept if kept[-1] == line[-1] else [*kept, line[-1]]


def timeline(
    attempts: Sequence[Attempt],
    incidents: Sequence[Incident],
    saves: Sequence[float],
    is_live: bool = False,
) -> str:
    """A figure over the wall time: attempts, what went wrong and how long it stood still, saves.

    Attempts that broke off have an edge; the last one does not if the run `is_live`.
    """
    if not attempts:
        return ""
    begin = attempts[0].began
    end = max([a.latest for a in attempts] + [i.time for i in incidents])
    whole = max(end - begin, 1e-9)

    def at(time: float) -> float:
        return min(max(100 * (time - begin) / whole, 0.0), 100.0)

    whole_ones = [a for a in attempts if a.ended or (is_live and a is attempts[-1])]
    bars = "".join(
        f'<i class="bar{"" if a in whole_ones else " open"}" style="left:{at(a.began):.2f}%;'
        f'width:{max(at(a.latest) - at(a.began), 0.3):.2f}%" title="attempt {a.number}: '
        f'{span(a.latest - a.began)}"><b>{a.number}</b></i>'
        for a in attempts
    )
    outages = "".join(
        f'<i class="out" style="left:{at(i.began):.2f}%;width:'
        f'{max(at(end if i.cost_s is None else i.began + i.cost_s) - at(i.began), 0.3):.2f}%" '
        f'title="{html.escape(f"{i.where} {i.said}: {i.cost}", quote=True)}"></i>'
        for i in incidents
        if i.stopped
    )
    marks = "".join(
        f'<i class="{"mark" if i.stopped else "mark soft"}" style="left:{at(i.time):.2f}%" '
        f'title="{html.escape(f"{i.where} {i.said}", quote=True)}"></i>'
        for i in incidents
    )
    ticks = "".join(f'<i class="save" style="left:{at(t):.2f}%"></i>' for t in _sparse(saves))
    rows = (("attempts", bars), ("faults", outages + marks), ("saves", ticks))
    lanes = "".join(
        f'<div class="lane"><span>{name}</span><div>{content}</div></div>' for name, content in rows
    )
    return (
        f'<figure class="timeline">{lanes}<div class="lane scale"><span></span>'
        f"<div><span>0 s</span><span>{span(whole)}</span></div></div></figure>"
    )


def _sparse(times: Sequence[float], most: int = 300) -> Sequence[float]:
    return times if len(times) <= most else times[:: math.ceil(len(times) / most)]


def span(seconds: float) -> str:
    """`12.3 s`, `4 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
