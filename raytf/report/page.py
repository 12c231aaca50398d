"""The report: facts of a run in, one self-contained page of HTML out. Pure.

Owns the order and the words. Every text that comes from outside goes through `_e`, and through
`redact`: what configuration and environment say is not redacted where it is stored.
"""

from __future__ import annotations

import html
import time as clock
from collections.abc import Mapping, Sequence
from typing import Any

from raytf.faults.events import Kind
from raytf.faults.goodput import CATEGORIES, Ledger
from raytf.faults.incidents import Incident, Incidents, short_node
from raytf.faults.redaction import is_secret_name, redact
from raytf.report.curves import attempts_of, chart, number, series_of, span, timeline
from raytf.report.style import CSS
from raytf.status import Facts, status

__all__ = ["fragment", "page"]

_MOST_CHARTS = 24
_MOST_FAULTS = 200  # newest: a run that fails all night is read from its end
_LIVE = ("INITIALIZING", "RUNNING", "RESTARTING")
_SAID = {
    "step": "training",
    "validate": "validation",
    "start": "start-up",
    "compile": "first steps (tracing)",
    "data_wait": "waiting for data",
    "save_stall": "held up by saves",
    "detect": "noticing faults",
    "restart": "restarting",
    "replay": "steps done again",
    "idle": "nothing known",
}


def page(facts: Facts, now: float) -> str:
    """The whole document.

    Args:
        facts: from `raytf.status.read_facts`.
        now: UTC seconds since the epoch.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{_e(facts.name)} - raytf</title>"
        "<style>html,body{margin:0;background:Canvas}</style></head>"
        f"<body>{fragment(facts, now)}</body></html>\n"
    )


def fragment(facts: Facts, now: float) -> str:
    """The same without a document around it: for notebooks."""
    told = status(facts, now)
    is_live = told["state"] in _LIVE
    ledger = Ledger.of(facts.events, now if is_live else None)
    incidents = Incidents.of(facts.events)
    parts = [
        _head(facts, told, incidents),
        _tiles(told, ledger),
        _section("Where the time went", _account(ledger)),
        _section("Timeline", _timeline(facts, incidents, is_live)),
        _section("Faults", _faults(incidents) if facts.events else ""),
        _section("Metrics", _charts(facts)),
        _section("Environment and configuration", _tables(facts, told)),
        f"<footer>Made {_moment(now)} from {_e(facts.url)}</footer>",
    ]
    return f'<div class="raytf"><style>{CSS}</style><main>{"".join(parts)}</main></div>'


def _e(text: Any) -> str:
    return html.escape(redact(str(text)), quote=True)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _moment(seconds: float) -> str:
    return clock.strftime("%Y-%m-%d %H:%M:%S UTC", clock.gmtime(seconds))


def _head(facts: Facts, told: Mapping[str, Any], incidents: Sequence[Incident]) -> str:
    state = str(told["state"])
    note = f"<p>{_e(told['note'])}</p>" if told["note"] else ""
    began = f"Began {_moment(facts.events[0].time)}. " if facts.events else ""
    stops = [row for row in incidents if row.stopped]
    said = "Nothing went wrong." if facts.events and not incidents else ""
    if stops:
        last = stops[-1]
        said = f"{_count(len(stops), 'fault')}; the last: {last.where} {last.said}."
    return (
        f'<h1>{_e(facts.name)}<span class="state {_e(state)}">{_e(state)}</span></h1>'
        f'<p class="soft">{_e(facts.url)}</p>{note}<p>{_e(began + said)}</p>'
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tiles(told: Mapping[str, Any], ledger: Ledger) -> str:
    tiles: list[tuple[str, str]] = []
    if told["step"] is not None:
        of = f"/{told['num_steps']}" if told["num_steps"] else ""
        tiles.append(("steps", f"{told['step']}{of}"))
    if isinstance(told["epoch"], int):
        of = f"/{told['epochs']}" if told["epochs"] else ""
        tiles.append(("epoch", f"{told['epoch'] + 1}{of}"))
    for name in _shown_metrics(told["metrics"]):
        tiles.append((name, number(told["metrics"][name])))
    if ledger.wall_s:
        tiles.append(("wall time", span(ledger.wall_s)))
        tiles.append(("goodput", f"{ledger.goodput:.1%}"))
        tiles.append(("restarts", str(ledger.restarts)))
        tiles.append(("steps lost", str(ledger.lost_steps)))
    if ledger.mttr_s is not None:
        tiles.append(("mean recovery", span(ledger.mttr_s)))
    if isinstance(told["examples_per_s"], int | float):
        tiles.append(("examples per s", f"{told['examples_per_s']:,.0f}"))
    if told["eta_s"] is not None:
        tiles.append(("left", span(told["eta_s"])))
    if told["last_save"]:
        tiles.append(("last save", f"step {told['last_save']['step']}"))
    cells = "".join(f"<div><dt>{_e(k)}</dt><dd>{_e(v)}</dd></div>" for k, v in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _shown_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """The loss and the first metric beside it, of validation where there is one."""
    names = [n for n, v in metrics.items() if isinstance(v, int | float)]
    own = [n for n in names if not n.startswith("val_")]
    first = [f"val_{name}" if f"val_{name}" in names else name for name in own]
    return first[:2]


def _account(ledger: Ledger) -> str:
    if ledger.wall_s <= 0:
        return ""
    seconds = ledger.seconds
    order = sorted(CATEGORIES, key=lambda name: list(_SAID).index(name))
    shown = [name for name in order if seconds[name] > 0]
    bar = "".join(
        f'<i style="flex:{seconds[name] / ledger.wall_s:.5f} 1 0;background:var(--c-{name})" '
        f'title="{_SAID[name]}: {span(seconds[name])}"></i>'
        for name in shown
    )
    legend = "".join(
        f'<li><i style="background:var(--c-{name})"></i><span>{_SAID[name]}</span>'
        f"{span(seconds[name])}<small>{seconds[name] / ledger.wall_s:.1%}</small></li>"
        for name in shown
    )
    total = sum(seconds.values())
    return (
        f'<div class="stack" role="img" aria-label="goodput {ledger.goodput:.1%}">{bar}</div>'
        f'<ul class="legend">{legend}</ul><p class="soft">Together {span(total)}. '
        f"{ledger.ettr:.1%} of the time in which it ran at all was not lost to starting, faults "
        "and doing steps again.</p>"
    )


def _timeline(facts: Facts, incidents: Sequence[Incident], is_live: bool) -> str:
    saves = [e.time for e in facts.events if e.kind is Kind.CHECKPOINT_COMMITTED]
    return timeline(attempts_of(facts.events), incidents, saves, is_live)


def _faults(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return "<p>None.</p>"
    shown = list(reversed(incidents))[:_MOST_FAULTS]
    more = len(incidents) - len(shown)
    rest = f'<p class="soft">{more} older ones are left out.</p>' if more else ""
    return "".join(map(_fault, shown)) + rest


def _fault(row: Incident) -> str:
    times = f" ({row.count} times)" if row.count > 1 else ""
    at = [f"step {row.step}"] if row.step is not None else []
    at += [f"phase {row.phase}"] if row.phase else []
    at += [f"process {row.pid}"] if row.pid is not None else []
    at += [f"node {row.node}"] if row.node and short_node(row.node) != row.node else []
    facts = [
        ("where", f"attempt {row.attempt}" + "".join(f", {part}" for part in at)),
        ("evidence", "; ".join(row.evidence)),
        ("decision", row.decision),
        ("cost", row.cost),
    ]
    cells = "".join(f"<dt>{k}</dt><dd>{_e(v)}</dd>" for k, v in facts if v)
    stacks = "".join(
        f"<details><summary>{_e(title)}</summary><pre>{_e(text)}</pre></details>"
        for title, text in row.stacks
    )
    return (
        f'<article class="fault {"stopped" if row.stopped else "soft"}"><header>'
        f"<strong>{_e(row.where)} {_e(row.said)}{times}</strong>"
        f'<time class="soft">{_moment(row.time)}</time></header><dl>{cells}</dl>{stacks}</article>'
    )


def _charts(facts: Facts) -> str:
    series, restarts = series_of(facts.events)
    order = sorted(series, key=lambda name: (name != "loss", name))
    figures = [chart(redact(name), series[name], restarts) for name in order[:_MOST_CHARTS]]
    figures = [figure for figure in figures if figure]
    if not figures:
        return ""
    note = ""
    if restarts:
        note = '<p class="soft">Dashed lines: the run went back and continued from there.</p>'
    return f'<div class="charts">{"".join(figures)}</div>{note}'


def _tables(facts: Facts, told: Mapping[str, Any]) -> str:
    about: dict[str, Any] = {"attempt": told["attempt"]}
    holder = told["holder"]
    if holder is not None and not holder["released"]:
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        about["held by"] = who + (", which is gone" if holder["is_dead"] else "")
    about["excluded nodes"] = ", ".join(map(_excluded, told["excluded_nodes"]))
    about |= {"run": facts.run.get("run"), "raytf, first start": facts.run.get("raytf")}
    fingerprint = facts.fingerprint or facts.run.get("fingerprint")
    left = _table({**about, "versions": facts.versions})
    right = _table({"config": fingerprint} if isinstance(fingerprint, Mapping) else {})
    return f'<div class="two">{left}{right}</div>'


def _excluded(row: Mapping[str, Any]) -> str:
    left = row["left_s"]
    return short_node(row["node"]) + ("" if left is None else f" (for {span(left)})")


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{_e(k)}</th><td>{_e(v)}</td></tr>" for k, v in _flat(values))
    return f"<table>{rows}</table>" if rows else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names with dots, texts of at most 300 characters; empty values are left out."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if is_secret_name(str(key)):
            rows.append((name, "***"))
        elif isinstance(value, Mapping):
            rows += _flat(value, f"{name}.")
        elif value is not None and value != [] and value != "":
            text = str(value)
            rows.append((name, text if len(text) <= 300 else f"{text[:299]}…"))
    return rows
