"""`raytf.open_run`: a run from its storage."""

from __future__ import annotations

from pathlib import Path

import pytest

import raytf
from raytf.checkpoint.storage import resolve
from tests.faults import logs


def test_an_opened_run(tmp_path: Path) -> None:
    log = logs.killed()
    run = raytf.open_run(logs.lay_down(tmp_path / "a", log))
    assert len(run.events) == len(log.events) and run.events.skipped == 0
    assert run.status()["state"] == "FINISHED"
    assert run.goodput.lost_steps == 12 and run.goodput.restarts == 1
    assert run.goodput.wall_s == pytest.approx(log.now - logs.START)
    assert len(run.history["val_loss"]) == 4
    assert run.store.steps() == []
    assert run.url == str(tmp_path / "a") and repr(run) == f"Run({run.url!r})"
    assert run.report().startswith("<!DOCTYPE html>")
    assert run._repr_html_().startswith('<div class="raytf">')


def test_it_is_read_anew(tmp_path: Path) -> None:
    log = logs.Log().begin(1).train(10)
    run = raytf.open_run(logs.lay_down(tmp_path / "a", log))
    before = len(run.events)
    log.events.clear()
    logs.lay_down(tmp_path / "a", log.train(20))
    assert len(run.events) > before


def test_in_memory_and_on_a_given_filesystem(tmp_path: Path) -> None:
    here = logs.lay_down(tmp_path / "a", logs.killed())
    there = resolve(f"memory://raytf-{tmp_path.name}/a")
    there.fs.put(str(here) + "/", there.path, recursive=True)
    assert raytf.open_run(there.url).goodput.restarts == 1
    assert raytf.open_run(there.path, storage_filesystem=there.fs).status()["step"] == 200


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(raytf.NotFoundError, match="no run"):
        raytf.open_run(tmp_path / "none")


def test_a_notebook_shows_trouble_as_text(tmp_path: Path) -> None:
    directory = logs.lay_down(tmp_path / "a<b", logs.killed())
    run = raytf.open_run(directory)
    directory.rename(tmp_path / "moved")
    shown = run._repr_html_()
    assert shown.startswith("<code>") and "NotFoundError" in shown and "a<b" not in shown
