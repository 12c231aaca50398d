from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import Result

from raytf.checkpoint.storage import resolve
from raytf.errors import NotFoundError
from raytf.result import RunResult
from tests.faults import logs

OUTCOME = {
    "history": {"loss": (2.0, 1.0)},
    "metrics": {"loss": 1.0, "val_accuracy": 0.91},
    "steps": 40,
    "weights_sha256": "0123456789abcdef" * 4,
}


def result(path: Path, outcome: dict[str, Any] | None = None) -> RunResult:
    ray_result = SimpleNamespace(
        checkpoint=None,
        error=None,
        metrics_dataframe=None,
        best_checkpoints=[],
        _storage_filesystem=None,
    )
    given: Any = ray_result
    return RunResult.from_run(given, outcome or OUTCOME, resolve(path), {"lr": 1}, 2)


def test_is_rays_result(tmp_path: Path) -> None:
    made = result(tmp_path)
    assert isinstance(made, Result)
    assert made.metrics == {"loss": 1.0, "val_accuracy": 0.91}
    assert made.history == {"loss": [2.0, 1.0]}
    assert (made.steps, made.generations, made.url) == (40, 2, str(tmp_path))
    assert made.return_value == OUTCOME


def test_an_empty_outcome(tmp_path: Path) -> None:
    made = result(tmp_path, {"metrics": None})
    assert (made.metrics, made.history, made.steps, made.weights_sha256) == ({}, {}, 0, "")


def test_reads_well(tmp_path: Path) -> None:
    made = result(tmp_path / "a<b")
    assert repr(made).startswith("RunResult(url=")
    assert "val_accuracy=0.91" in repr(made)
    assert "0123456789ab…" in repr(made)
    html = made._repr_html_()
    assert "a&lt;b" in html and "<table>" in html


def test_events_and_where_the_time_went(tmp_path: Path) -> None:
    log = logs.killed()
    made = result(logs.lay_down(tmp_path / "a", log))
    assert len(made.events) == len(log.events)
    assert made.goodput.lost_steps == 12
    assert "was killed" in made._repr_html_()


@pytest.mark.parametrize("verb", ["load_model", "export"])
def test_no_model_there(tmp_path: Path, verb: str) -> None:
    arguments = [str(tmp_path / "x.keras")] if verb == "export" else []
    with pytest.raises(NotFoundError, match="no trained model"):
        getattr(result(tmp_path), verb)(*arguments)


class FakeExport:
    """Stands for raytf.worker.export, which imports TensorFlow."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_model(self, fs: Any, path: str, build_model: Any, config: Any) -> str:
        self.loaded.append((path, build_model, config))
        return "model"

    def export(
        self, fs: Any, path: str, to: str, format: str, build_model: Any, config: Any
    ) -> str:
        if format == "saved_model":
            Path(to, "variables").mkdir(parents=True)
            Path(to, "variables", "v").write_bytes(b"v")
        else:
            Path(to).write_bytes(format.encode())
        return to


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeExport:
    import sys

    import raytf.worker

    made = FakeExport()
    monkeypatch.setitem(sys.modules, "raytf.worker.export", made)  # type: ignore[arg-type]
    monkeypatch.setattr(raytf.worker, "export", made, raising=False)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "final.json").write_text("{}")
    return made


def test_load_model(tmp_path: Path, fake: FakeExport) -> None:
    assert result(tmp_path).load_model() == "model"
    assert fake.loaded == [(str(tmp_path / "final"), None, {"lr": 1})]


@pytest.mark.parametrize(("format", "name"), [("keras", "m.keras"), ("saved_model", "m")])
def test_export_to_a_url(tmp_path: Path, fake: FakeExport, format: str, name: str) -> None:
    url = f"memory://raytf-{tmp_path.name}/{name}"
    result(tmp_path).export(url, format)  # type: ignore[arg-type]
    target = resolve(url)
    if format == "saved_model":
        assert target.read_bytes("variables", "v") == b"v"
    else:
        assert target.read_bytes() == b"keras"


def test_export_to_a_local_path(tmp_path: Path, fake: FakeExport) -> None:
    result(tmp_path).export(str(tmp_path / "w.weights.h5"), "weights")
    assert (tmp_path / "w.weights.h5").read_bytes() == b"weights"
