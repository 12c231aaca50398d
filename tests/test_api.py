"""What users see, frozen: public names, arguments with their defaults, verbs of the command line.

A change here is a change of the interface: it has a line in the changelog of README.md.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

import raytf
from raytf.cli import main
from raytf.config import (
    CommunicationConfig,
    RecoveryConfig,
    SaveConfig,
    TrainSpec,
    WatchConfig,
)

NAMES = [
    "ArraySource",
    "CheckpointDamagedError",
    "CheckpointStore",
    "CommunicationConfig",
    "ConfigError",
    "DataError",
    "KerasTrainer",
    "ModelMismatchError",
    "NotFoundError",
    "ParquetSource",
    "RaytfError",
    "RecoveryConfig",
    "ResourceError",
    "Run",
    "RunInUseError",
    "RunResult",
    "SaveConfig",
    "SequenceSource",
    "StartupError",
    "StorageError",
    "SupersededError",
    "TrainingError",
    "WatchConfig",
    "__version__",
    "export",
    "fit",
    "open_run",
]

VERBS = {
    "checkpoints": {
        "delete": ["--force", "--json", "--step", "--yes", "url"],
        "export": ["--format", "--json", "--step", "path", "url"],
        "list": ["--json", "url"],
        "pin": ["--json", "--step", "--unpin", "url"],
        "verify": ["--json", "--step", "url"],
    },
    "events": ["--follow", "--json", "--kind", "run"],
    "report": ["--json", "--output", "run"],
    "runs": ["--json", "storage"],
    "status": ["--json", "run"],
    "verify-resume": ["--json", "--kills", "--seed-kills", "--storage", "args", "script"],
}

TRAINER = """(
build_model
train_data
* save=None
* recovery=None
* watch=None
* drill=None
* resume_from=None
* resume_strict=True
* scaling_config=None
* run_config=None
** arguments
)"""

# What KerasTrainer takes as **arguments, and `raytf.fit` too.
SPEC = """
build_model
train_data
validation_data=None
validation_freq=1
global_batch_size=32
epochs=1
initial_epoch=0
seed=0
shuffle=True
drop_remainder=False
transform=None
callbacks=None
class_weight=None
verbose='auto'
config={}
strategy='auto'
legacy_keras=False
deterministic=True
communication=CommunicationConfig(...)
"""

SAVE = """
every_steps=None
every_s=None
every_epochs=None
cadence='fixed'
max_overhead=0.02
keep_last=None
keep_best=None
best_mode='min'
keep_every=None
max_stale_saves=10
max_stale_s=3600.0
"""

RECOVERY = """
mode='auto'
spares=0
shrink_after_s=30.0
memory_every_steps='auto'
max_in_place=20
max_node_faults=2
"""

WATCH = """
hang_timeout_s='auto'
on_nan='stop'
poison_batches='stop'
agree_every_steps='auto'
"""

COMMUNICATION = """
implementation='auto'
bytes_per_pack=16777216
timeout_s=None
startup_timeout_s=120.0
max_port_attempts=3
"""

ARRAYS = """(
x
y=None
sample_weight=None
)"""

PARQUET = """(
url
* columns=None
* label=None
* sample_weight=None
* cache_bytes=1073741824
* filesystem=None
)"""

STORE = """(
url
* storage_filesystem=None
* retry=None
* clock=<built-in function time>
)"""

STORE_VERBS = """
best(self, metric=None, mode=None)
delete(self, step)
export(self, step, path, format='keras', **options)
latest(self)
manifest(self, step)
pin(self, step, pinned=True)
pinned(self)
read(self, step, names=None, problems=None)
reading(self, step)
step_url(self, step)
steps(self)
verify(self, step)
"""

OPEN_RUN = """(
url
* storage_filesystem=None
)"""

EXPORT = """(
url
step
path
format='keras'
build_model=None
config=None
)"""


def signature(function: Any) -> str:
    """Names, kinds and defaults, a line each."""
    lines = ["("]
    marks = {inspect.Parameter.KEYWORD_ONLY: "* ", inspect.Parameter.VAR_KEYWORD: "** "}
    for p in inspect.signature(function).parameters.values():
        default = "" if p.default is inspect.Parameter.empty else f"={p.default!r}"
        lines.append(f"{marks.get(p.kind, '')}{p.name}{default}")
    return "\n".join([*lines, ")"])


def fields(kind: Any) -> str:
    """Names and defaults of a keyword-only dataclass, a line each."""
    lines = []
    for f in dataclasses.fields(kind):
        assert f.kw_only, f.name
        default = "" if f.default is dataclasses.MISSING else f"={f.default!r}"
        if f.default_factory is not dataclasses.MISSING:
            made = f.default_factory()
            default = (
                f"={type(made).__name__}(...)" if dataclasses.is_dataclass(made) else f"={made!r}"
            )
        lines.append(f.name + default)
    return "\n".join(["", *lines, ""])


def test_names() -> None:
    assert sorted(raytf.__all__) == NAMES
    assert set(NAMES) <= set(dir(raytf))


@pytest.mark.parametrize("name", NAMES)
def test_names_resolve(name: str) -> None:
    assert getattr(raytf, name) is getattr(raytf, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        raytf.Trainer  # noqa: B018


def test_errors_are_raytf_errors() -> None:
    errors = [getattr(raytf, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, raytf.RaytfError) for error in errors)
    assert issubclass(raytf.ConfigError, ValueError)


def test_keras_trainer() -> None:
    assert signature(raytf.KerasTrainer) == TRAINER
    assert fields(TrainSpec) == SPEC


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        (SaveConfig, SAVE),
        (RecoveryConfig, RECOVERY),
        (WatchConfig, WATCH),
        (CommunicationConfig, COMMUNICATION),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_configs(kind: Any, frozen: str) -> None:
    assert fields(kind) == frozen
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, None)


def test_sources() -> None:
    assert signature(raytf.ArraySource) == ARRAYS
    assert signature(raytf.ParquetSource) == PARQUET


def test_checkpoints() -> None:
    assert signature(raytf.CheckpointStore) == STORE
    assert signature(raytf.export) == EXPORT
    assert signature(raytf.open_run) == OPEN_RUN
    frozen = STORE_VERBS.split("\n")[1:-1]
    found = []
    for line in frozen:
        verb = inspect.signature(getattr(raytf.CheckpointStore, line.split("(")[0]))
        bare = [p.replace(annotation=p.empty) for p in verb.parameters.values()]
        found.append(line.split("(")[0] + str(inspect.Signature(bare)))
    assert found == frozen


def verbs(command: click.Command) -> Any:
    """Commands below a group, options and arguments of a command."""
    if isinstance(command, click.Group):
        return {name: verbs(below) for name, below in command.commands.items()}
    return sorted(p.opts[0] for p in command.params)


def test_verbs_of_the_command_line() -> None:
    assert verbs(main) == VERBS


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert raytf.__version__ == project["version"] == importlib.metadata.version("raytf")


@pytest.mark.parametrize("command", [["-m", "raytf"], ["-c", "from raytf.cli import main; main()"]])
def test_version_and_usage(command: list[str]) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *command, *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=60)

    assert run("--version").stdout.strip() == f"raytf {raytf.__version__}"
    wrong = run("nonsense")
    assert wrong.returncode == 2
    assert "nonsense" in wrong.stderr
    assert wrong.stdout == ""
