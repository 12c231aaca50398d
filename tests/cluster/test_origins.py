from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytf.checkpoint.storage import resolve
from raytf.checkpoint.store import CheckpointStore
from raytf.cluster.origins import choose_step, resolve_origin
from raytf.errors import ConfigError, NotFoundError, StorageError
from tests.checkpoint.states import save, state

BEST = {"metric": "loss", "mode": "max"}


def run(url: str, steps: tuple[int, ...] = (5, 10, 20), best: dict[str, str] | None = BEST) -> str:
    """A run with checkpoints; its loss falls, so that by BEST the first is best."""
    store = CheckpointStore(url)
    for step in steps:
        save(store, state(step), step, best=best)
    return url


@pytest.fixture(params=["local", "memory", "odd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://origins-{tmp_path.name}/mnist"
    return str(tmp_path / ("mnist" if request.param == "local" else "a [b] #best%20 ü"))


@pytest.mark.parametrize(
    ("ending", "step"),
    [
        ("", 20),
        ("/", 20),
        ("/checkpoints", 20),
        ("#latest", 20),
        ("#best", 5),
        ("#10", 10),
        ("/checkpoints/step-0000000010", 10),
        ("/checkpoints/step-0000000010/", 10),
    ],
)
def test_a_run_and_its_steps(place: str, ending: str, step: int) -> None:
    origin = resolve_origin(run(place) + ending, strict=True)
    assert (origin.kind, origin.step, origin.strict) == ("step", step, True)
    assert origin.url == CheckpointStore(place).step_url(step)
    assert origin.storage.path == resolve(place).path
    assert CheckpointStore(origin.storage).manifest(step).step == step


def test_not_strict_is_kept(tmp_path: Path) -> None:
    assert not resolve_origin(run(str(tmp_path)), strict=False).strict


@pytest.mark.parametrize("ending", ["#12", "/checkpoints/step-0000000012"])
def test_a_step_that_is_not_there_names_the_nearest(tmp_path: Path, ending: str) -> None:
    url = run(str(tmp_path / "r"), (*range(1, 8), 10, 20))
    with pytest.raises(NotFoundError, match=r"step 12 .*nearest of 9: 2, 3, 4, 5, 6, 7, 10, 20"):
        resolve_origin(url + ending, strict=True)


def test_a_step_directory_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="step 1 .*holds none at all"):
        resolve_origin(str(tmp_path / "no" / "checkpoints" / "step-0000000001"), strict=True)


def test_best_of_a_run_that_was_not_told_what_is_best(tmp_path: Path) -> None:
    url = run(str(tmp_path / "r"), best=None)
    with pytest.raises(ConfigError, match=r"keep_best=.*metrics: loss"):
        resolve_origin(f"{url}#best", strict=True)


def test_best_without_a_value(tmp_path: Path) -> None:
    url = run(str(tmp_path / "r"), best={"metric": "val_loss", "mode": "min"})
    with pytest.raises(NotFoundError, match="no checkpoint with a value of 'val_loss'"):
        resolve_origin(f"{url}#best", strict=True)


def test_a_finished_run_without_checkpoints_names_its_model(tmp_path: Path) -> None:
    final = tmp_path / "r" / "final"
    final.mkdir(parents=True)
    (final / "final.json").write_text(json.dumps({"model": "model-1.keras"}))
    (final / "model-1.keras").write_bytes(b"zip")
    with pytest.raises(NotFoundError, match=r"no checkpoint.*final/model-1\.keras") as caught:
        resolve_origin(str(tmp_path / "r"), strict=True)
    assert resolve_origin(str(final / "model-1.keras"), strict=True).kind == "keras"
    assert caught.value.context["path"] == str(tmp_path / "r")


@pytest.mark.parametrize("root", ["local", "memory"])
def test_files_from_elsewhere(tmp_path: Path, root: str) -> None:
    url = str(tmp_path) if root == "local" else f"memory://origins-{tmp_path.name}"
    base = resolve(url)
    base.write_bytes(b"zip", "m [1]#2.keras")
    base.write_bytes(b"pb", "saved", "saved_model.pb")
    base.write_bytes(b"", "tf", "ck-3.index")
    base.write_bytes(b"", "tf", "ck-3.data-00000-of-00001")
    base.write_bytes(b'model_checkpoint_path: "ck-3"\n', "tf", "checkpoint")
    found = {
        name: resolve_origin(f"{url}/{name}", strict=True)
        for name in ("m [1]#2.keras", "saved", "tf", "tf/ck-3", "tf/ck-3.index")
    }
    assert [o.kind for o in found.values()] == ["keras", "saved_model", *["tf_checkpoint"] * 3]
    assert {o.storage.path for n, o in found.items() if n.startswith("tf")} == {
        base.join("tf", "ck-3").path
    }
    assert found["saved"].storage.path == base.join("saved").path
    assert all(o.step is None for o in found.values())


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ('all: 1\nmodel_checkpoint_path: "a\\303\\274 \\"b-2"\n', 'aü "b-2'),
        ('model_checkpoint_path: "/somewhere/else/ck-2"\n', "ck-2"),
        ('model_checkpoint_path: "sub/ck-2"\n', "sub/ck-2"),
    ],
)
def test_the_file_checkpoint_as_tensorflow_writes_it(
    tmp_path: Path, text: str, prefix: str
) -> None:
    (tmp_path / "checkpoint").write_text(text)
    (tmp_path / "sub").mkdir()
    (tmp_path / f"{prefix}.index").write_bytes(b"")
    origin = resolve_origin(str(tmp_path), strict=True)
    assert origin.storage.path == str(tmp_path / prefix)


def test_a_tensorflow_directory_whose_newest_is_gone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ck-9"')
    (tmp_path / "ck-8.index").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"'ck-9'.*checkpoint, ck-8\.index"):
        resolve_origin(str(tmp_path), strict=True)


def test_a_file_called_checkpoint_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("hello")
    with pytest.raises(ConfigError, match="names no model_checkpoint_path"):
        resolve_origin(str(tmp_path), strict=True)


def test_nothing_there_says_what_is(tmp_path: Path) -> None:
    run(str(tmp_path / "runs" / "mnist"))
    with pytest.raises(NotFoundError, match=r"nothing at .*minst\. In .*runs there is mnist\."):
        resolve_origin(str(tmp_path / "runs" / "minst"), strict=True)
    with pytest.raises(NotFoundError, match=r"nothing at .*minst\. In .*runs there is mnist\."):
        resolve_origin(str(tmp_path / "runs" / "minst#best"), strict=True)


@pytest.mark.parametrize("text", ["", "  ", None, 7])
def test_no_text(text: object) -> None:
    with pytest.raises(ConfigError, match="must be a URL or path"):
        resolve_origin(text, strict=True)  # type: ignore[arg-type]


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(b"h5")
    with pytest.raises(ConfigError, match="file with no state"):
        resolve_origin(str(tmp_path / "weights.h5"), strict=True)
    with pytest.raises(ConfigError, match=r"directory with no state.*weights\.h5"):
        resolve_origin(str(tmp_path), strict=True)
    with pytest.raises(ConfigError, match=r"nosuch://"):
        resolve_origin("nosuch://x/y", strict=True)


def test_a_store_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def exists(self: object, path: str, **_: object) -> bool:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "exists", exists)
    with pytest.raises(StorageError, match="PermissionError: Forbidden"):
        resolve_origin("memory://x/y", strict=True)


@pytest.mark.parametrize(("choice", "step"), [("latest", 20), ("best", 5), ("010", 10)])
def test_choices_of_a_step(tmp_path: Path, choice: str, step: int) -> None:
    assert choose_step(CheckpointStore(run(str(tmp_path))), choice) == step


def test_a_choice_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'newest'"):
        choose_step(CheckpointStore(run(str(tmp_path))), "newest")
