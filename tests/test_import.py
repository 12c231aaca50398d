"""`import raytf` and `raytf --help` are quick and load nothing heavy (fresh processes)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raytf.checkpoint.store import CheckpointStore
from tests.checkpoint.states import save
from tests.faults import logs

PACKAGE = Path(__file__).parents[1] / "raytf"

HEAVY = ("tensorflow", "keras", "tf_keras", "ray", "pyarrow", "pandas")

_PROBE = """
import sys, time
began = time.perf_counter()
{code}
took = time.perf_counter() - began
import json
print(json.dumps({{"took": took, "loaded": sorted(sys.modules)}}))
"""

_HELP = """
import contextlib, io
sys.argv = ["raytf", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        from raytf.cli import main
        main()
    except SystemExit as stop:
        code = stop.code
if code not in (0, None) or "Usage" not in out.getvalue():
    raise RuntimeError(out.getvalue())
"""


def probe(code: str) -> tuple[float, set[str]]:
    """Seconds that `code` took in a fresh process, and the modules that were loaded after it."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROBE.format(code=code)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout.splitlines()[-1])
    return answer["took"], set(answer["loaded"])


@pytest.mark.parametrize(
    "code",
    ["import raytf", "import raytf; dir(raytf); raytf.__version__", _HELP],
    ids=["import", "names", "help"],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    _, loaded = probe(code)
    assert not loaded.intersection(HEAVY)


def test_the_probe_sees_a_heavy_import() -> None:
    _, loaded = probe("import pyarrow")
    assert loaded.intersection(HEAVY) == {"pyarrow"}


def test_import_takes_under_a_tenth_of_a_second() -> None:
    assert min(probe("import raytf")[0] for _ in range(5)) < 0.1


def test_help_is_quick() -> None:
    assert min(probe(_HELP)[0] for _ in range(5)) < 0.5


LOWER = sorted(
    {p.stem for p in PACKAGE.iterdir()} & {*"errors config data checkpoint faults".split()}
)


@pytest.mark.parametrize("name", LOWER)
def test_the_lower_floors_load_neither_tensorflow_nor_ray(name: str) -> None:
    _, loaded = probe(f"import raytf.{name}")
    assert not loaded.intersection(("tensorflow", "keras", "tf_keras", "ray"))


def test_the_checkpoints_verbs_load_neither_tensorflow_nor_ray(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), {"w": np.zeros(3, np.float32)}, 1)
    for verb in (f"list {tmp_path}", f"verify {tmp_path}", f"pin {tmp_path} --step 1"):
        arguments = ["checkpoints", *verb.split(), "--json"]
        code = f"from raytf.cli import main\nmain({arguments!r}, standalone_mode=False)"
        _, loaded = probe(code)
        assert "raytf.checkpoint.store" in loaded
        assert not loaded.intersection(HEAVY)


def test_the_verbs_on_runs_load_neither_tensorflow_nor_ray(tmp_path: Path) -> None:
    logs.lay_down(tmp_path / "a", logs.killed())
    run = tmp_path / "a"
    verbs = (f"runs {tmp_path}", f"status {run}", f"events {run}", f"report {run} -o {run}/x.html")
    for verb in verbs:
        arguments = [*verb.split(), "--json"]
        code = f"from raytf.cli import main\nmain({arguments!r}, standalone_mode=False)"
        _, loaded = probe(code)
        assert "raytf.cluster.event_log" in loaded
        assert not loaded.intersection((*HEAVY, "tensorboardX"))
    _, loaded = probe(f"import raytf; raytf.open_run({str(run)!r}).status()")
    assert not loaded.intersection(HEAVY)


def test_the_trainer_loads_no_tensorflow() -> None:
    _, loaded = probe("import raytf; raytf.KerasTrainer; raytf.ArraySource; raytf.fit")
    assert "ray" in loaded
    assert not loaded.intersection(("tensorflow", "keras", "tf_keras"))


def test_module_entry_point_answers() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "raytf", "--help"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0
    assert "Usage" in ran.stdout
