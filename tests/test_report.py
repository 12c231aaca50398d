"""The report: one page, everything escaped, numbers that agree with the events."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raytf.checkpoint.storage import resolve
from raytf.faults.events import Event, Kind
from raytf.faults.incidents import Incidents
from raytf.report.curves import (
    Series,
    attempts_of,
    chart,
    number,
    series_of,
    span,
    timeline,
)
from raytf.report.page import fragment, page
from raytf.report.style import CATEGORY_COLORS, CSS
from raytf.status import Facts, read_facts
from tests.faults import logs

VOID = {"meta", "br", "img", "link", "input", "hr"}
KNOWN = {
    *"html head meta title style body div main h1 h2 p span dl dt dd section i b ul li".split(),
    *"small figure figcaption svg path line article header strong time details summary".split(),
    *"pre table tr th td footer".split(),
}


class Page(HTMLParser):
    """Tags, their balance, and texts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def facts(log: logs.Log, **given: Any) -> Facts:
    return Facts(name="r", url="/r", events=log.events, **given)


def shown(log: logs.Log, **given: Any) -> Page:
    return Page(page(facts(log, **given), log.now + 5))


@pytest.mark.parametrize("name", logs.ALL)
def test_a_page_that_needs_nothing_else(name: str) -> None:
    found = shown(logs.ALL[name]())
    assert {tag for tag, _ in found.tags} <= KNOWN
    for tag, attributes in found.tags:
        names = set(attributes)
        assert not names & {"src", "href", "srcset", "data", "action"}, tag
        assert not [n for n in names if n.startswith("on")], tag
        assert "url(" not in (attributes.get("style") or "")
    assert "url(" not in CSS and "@import" not in CSS


def test_hostile_texts_stay_texts() -> None:
    log = logs.hostile()
    hostile = Facts(
        name=logs.HOSTILE,
        url=logs.HOSTILE,
        events=log.events,
        run={"run": logs.HOSTILE, "fingerprint": {logs.HOSTILE: logs.HOSTILE}},
        versions={logs.HOSTILE: logs.HOSTILE},
    )
    source = page(hostile, log.now)
    assert "<script" not in source and "<img" not in source
    found = Page(source)
    assert {tag for tag, _ in found.tags} <= KNOWN
    assert found.text.count("<script>alert(1)</script>") > 10
    assert not [a for _, a in found.tags if any(n.startswith("on") for n in a)]


def test_it_says_what_happened() -> None:
    text = shown(logs.killed()).text
    for part in (
        "FINISHED",
        "1 fault; the last: rank 1 on node node-1 was killed.",
        "200/200",
        "4/4",
        "the process is gone; exit signal 9",
        "restart: rank 1 on node node-1 was killed",
        "7.0 s, 12 steps lost",
        "steps done again",
    ):
        assert part in text, part
    assert "Nothing went wrong." in shown(logs.unbroken()).text
    assert "TrainingError: the loss is no number" in shown(logs.nan()).text


def test_the_account_adds_up() -> None:
    found = Page(fragment(facts(logs.killed()), 0.0))
    flex = [
        float(re.match(r"flex:([\d.]+)", style)[1])  # type: ignore[index]
        for _, attributes in found.tags
        if (style := attributes.get("style") or "").startswith("flex:")
    ]
    assert sum(flex) == pytest.approx(1.0, abs=1e-3)
    assert set(CATEGORY_COLORS) == set(re.findall(r"--c-(\w+):", CSS))


def test_stacks_can_be_unfolded() -> None:
    found = shown(logs.hang())
    assert [tag for tag, _ in found.tags].count("details") == 2
    assert "in slow_map" in found.text


def test_secrets_of_the_configuration_are_hidden() -> None:
    fingerprint = {"data": {"url": "s3://key:hush@bucket", "api_key": "hush"}, "seed": 7}
    text = shown(logs.unbroken(), fingerprint=fingerprint).text
    assert "hush" not in text and "config.seed" in text


def test_a_run_without_events() -> None:
    found = Page(page(Facts(name="r", url="/r", saved_step=5, saved_at=1.0), 2.0))
    assert "RUNNING" in found.text and "step 5" in found.text
    assert "None." not in found.text  # nobody has kept a log
    assert "UNKNOWN" in Page(page(Facts(name="r", url="/r"), 2.0)).text


def test_a_run_that_goes_on_and_stands_still() -> None:
    log = logs.hang(is_over=False)
    text = shown(log).text
    assert "RESTARTING" in text and "stands still since" in text


def test_many_faults_are_cut() -> None:
    log = logs.Log().begin(1).train(10)
    for rank in range(300):
        log.add(Kind.WORKER_KILLED, 0.1, rank=rank)
    assert "100 older ones are left out" in shown(log).text


def test_curves_follow_the_way_taken() -> None:
    series, restarts = series_of(logs.killed().events)
    assert restarts == [125]
    for line in (series["loss"].steps, series["loss"].epochs, series["loss"].val):
        steps = [step for step, _ in line]
        assert steps == sorted(set(steps)) and steps[-1] == 200
    assert 137 not in [step for step, _ in series["loss"].steps]
    assert sorted(series) == ["accuracy", "loss"]
    _, restarts = series_of(logs.unbroken().events)
    assert restarts == []


def test_a_rewind_that_nobody_told_of() -> None:
    log = logs.Log().begin(1).train(30)
    log.step = 10
    series, restarts = series_of(log.train(50).events)
    assert restarts == [14]
    assert [s for s, _ in series["loss"].steps] == [5, 10, *range(15, 51, 5)]


def path(figure: str, kind: str = "train") -> str:
    return re.search(rf'class="line {kind}" d="([^"]*)"', figure)[1]  # type: ignore[index]


def test_a_gap_where_there_is_no_number() -> None:
    figure = chart("loss", Series(steps=[(1, 1.0), (2, math.nan), (3, 2.0), (4, math.inf)]), [])
    assert path(figure).count("M") == 2 and "nan" not in path(figure)
    assert chart("loss", Series(steps=[(1, math.nan)]), []) == ""


def test_one_value_and_equal_values() -> None:
    for values in ([(1, 0.0)], [(1, 3.0), (2, 3.0)], [(0, 1e300)], [(5, -1e-9)]):
        figure = chart("loss", Series(steps=values), [])
        assert "nan" not in figure and "inf" not in figure
        Page(figure)


def test_long_lines_are_thinned_and_keep_their_peaks() -> None:
    line = [(step, math.sin(step / 500)) for step in range(100_000)]
    line[54_321] = (54_321, 9.0)
    figure = chart("loss", Series(steps=line), [50_000])
    assert path(figure).count("L") < 1000
    assert "543.2,13.6" in path(figure)  # the peak, 5 % below the upper edge
    assert figure.count('class="restart"') == 1


def test_the_timeline_stays_inside() -> None:
    log = logs.driver_death()
    attempts = attempts_of(log.events)
    assert [(a.number, a.ended) for a in attempts] == [(1, False), (2, True)]
    figure = timeline(attempts, Incidents.of(log.events), [0.0, 9e12])
    for left, width in re.findall(r"left:([\d.-]+)%(?:;width:([\d.-]+)%)?", figure):
        assert 0 <= float(left) <= 100 and float(left) + float(width or 0) <= 100.5
    assert timeline([], [], []) == ""
    Page(figure)


def test_one_event_only() -> None:
    event = Event(time=5.0, kind=Kind.ATTEMPT_STARTED, run="r", attempt=1)
    Page(page(Facts(name="r", url="/r", events=[event]), 6.0))


def test_numbers_and_spans_for_people() -> None:
    assert [number(v) for v in (0.0, 1.23456, 123456.0, 1e-5, math.nan)] == [
        "0",
        "1.235",
        "1.23e+05",
        "1.00e-05",
        "nan",
    ]
    assert [span(s) for s in (1.25, 65, 3725, 90000)] == [
        "1.2 s",
        "1 min 05 s",
        "1 h 02 min",
        "1 d 1 h",
    ]


def test_from_storage(tmp_path: Path) -> None:
    directory = logs.lay_down(tmp_path / "a", logs.killed())
    source = page(read_facts(resolve(directory)), logs.START)
    assert "config.train_data.rows" in source


def test_only_an_attempt_that_broke_off_has_an_edge() -> None:
    log = logs.driver_death()
    classes = [a.get("class") for _, a in shown(log).tags]
    assert classes.count("bar open") == 1 and classes.count("bar") == 1
    live = logs.Log().begin(1).train(20)
    classes = [a.get("class") for _, a in shown(live).tags]
    assert classes.count("bar open") == 0
    gone = [a.get("class") for _, a in Page(page(facts(live), live.now + 900)).tags]
    assert gone.count("bar open") == 1


def test_who_holds_it_and_which_nodes_are_left_out(tmp_path: Path) -> None:
    directory = logs.lay_down(tmp_path / "a", logs.Log().begin(1).train(20))
    logs.lease(directory)
    node = "4f3a9c1be77d" + "0" * 44
    book = {"max_faults": 2, "half_life_s": 1.0, "probation_s": 1.0}
    nodes = {**book, "nodes": {node: {"excluded_until": logs.START + 1200.0}}}
    (directory / "nodes.json").write_text(json.dumps(nodes))
    text = Page(page(read_facts(resolve(directory)), logs.START)).text
    assert "process 42 on elsewhere since" in text
    assert "4f3a9c1be77d (for 20 min 00 s)" in text and node not in text
