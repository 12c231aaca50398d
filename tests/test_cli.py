from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from raytf.checkpoint.store import CheckpointStore
from raytf.cli import main
from raytf.cli.checkpoints import rows
from raytf.cli.comparing import first_difference, of_reports, of_stores
from raytf.cli.output import age, size, table
from raytf.cli.verify_resume import plan_kills
from raytf.errors import ConfigError, NotFoundError
from raytf.faults.drill import parse_drill
from tests.checkpoint.states import save, state


def raytf(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def data(*arguments: Any, code: int = 0) -> Any:
    """The JSON on standard output."""
    ran = raytf(*arguments, "--json")
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout)


def lines(*arguments: Any, code: int = 0) -> list[Any]:
    ran = raytf(*arguments, "--json")
    assert ran.exit_code == code, ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Steps 5, 10 and 20, each an epoch; by loss the last is best."""
    made = CheckpointStore(tmp_path / "a run [1] #ü")
    for step in (5, 10, 20):
        best = {"metric": "loss", "mode": "min"}
        save(made, state(step), step, epoch=step // 5, best=best, time=1000.0)
    return made


def damage(store: CheckpointStore, step: int) -> None:
    for shard in Path(store.path(step)).glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-3] + b"xyz")


def test_list(store: CheckpointStore) -> None:
    store.pin(10)
    ran = raytf("checkpoints", "list", store.url)
    assert ran.exit_code == 0
    head, *body = ran.stdout.splitlines()
    assert head.split() == ["step", "epoch", "age", "size", "kept", "metrics"]
    assert [line.split()[0] for line in body] == ["5", "10", "20"]
    assert "pinned" in body[1] and "best,latest" in body[2] and "loss=0.16667" in body[0]
    assert ran.stderr == ""


def test_list_as_data(store: CheckpointStore) -> None:
    found = data("checkpoints", "list", store.url)
    assert [row["step"] for row in found] == [5, 10, 20]
    assert [row["age_s"] for row in rows(store, 1090.0)] == [90.0] * 3
    row = found[2]
    assert row["bytes"] == store.manifest(20).nbytes
    assert (row["epoch"], row["latest"], row["best"], row["pinned"]) == (4, True, True, False)
    assert row["metrics"] == {"loss": 1 / 21} and row["num_workers"] == 2
    assert row["url"] == store.step_url(20)


def test_list_shows_damaged_manifests(store: CheckpointStore) -> None:
    store.quarantine(20, 3)
    Path(store.path(5), "manifest.json").write_text("{")
    found = data("checkpoints", "list", store.url)
    assert [(row["step"], row["damaged"]) for row in found] == [(5, True), (10, False), (20, True)]
    assert found[0]["manifest"].endswith("step-0000000005/manifest.json")
    assert found[2]["manifest"].endswith("step-0000000020/manifest.bad-3.json")
    text = raytf("checkpoints", "list", store.url).stdout.splitlines()
    assert "damaged" in text[1] and "manifest.bad-3.json" in text[3]


def test_metrics_that_json_does_not_know(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), state(1), 1, metrics={"loss": float("nan"), "x": float("inf")})
    assert data("checkpoints", "list", tmp_path)[0]["metrics"] == {"loss": "nan", "x": "inf"}
    assert "loss=nan x=inf" in raytf("checkpoints", "list", tmp_path).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["verify"],
        ["verify", "--step", "1"],
        ["export", "x.keras"],
        ["delete", "--step", "1"],
        ["pin", "--step", "1"],
    ],
    ids=" ".join,
)
def test_nothing_there_is_exit_code_4(tmp_path: Path, arguments: list[str]) -> None:
    verb, *rest = arguments
    ran = raytf("checkpoints", verb, tmp_path / "none", *rest)
    assert ran.exit_code == 4
    assert ran.stdout == ""
    assert "holds no checkpoint" in ran.stderr and "none" in ran.stderr
    assert os.listdir(tmp_path) == []


def test_verify(store: CheckpointStore) -> None:
    assert [(r["step"], r["ok"]) for r in lines("checkpoints", "verify", store.url)] == [
        (5, True),
        (10, True),
        (20, True),
    ]
    damage(store, 10)
    found = lines("checkpoints", "verify", store.url, code=3)
    assert [r["ok"] for r in found] == [True, False, True]
    assert "safetensors" in found[1]["problems"][0]["path"] and found[1]["problems"][0]["what"]
    assert lines("checkpoints", "verify", store.url, "--step", 5)[0]["ok"]
    ran = raytf("checkpoints", "verify", store.url)
    assert ran.exit_code == 3
    assert "step 10: damaged" in ran.stdout and "step 20: good" in ran.stdout
    assert "1 of 3 checkpoints are damaged" in ran.stderr


def test_verify_of_a_step_that_is_not_there(store: CheckpointStore) -> None:
    assert raytf("checkpoints", "verify", store.url, "--step", 7).exit_code == 4


def test_delete(store: CheckpointStore) -> None:
    assert data("checkpoints", "delete", store.url, "--step", 5, "--step", 10) == [
        {"step": 5, "deleted": True},
        {"step": 10, "deleted": True},
    ]
    assert store.steps() == [20]


def test_delete_takes_all_or_nothing(store: CheckpointStore) -> None:
    ran = raytf("checkpoints", "delete", store.url, "--step", 5, "--step", 7)
    assert ran.exit_code == 4 and "There are: 5, 10, 20" in ran.stderr
    store.pin(10)
    ran = raytf("checkpoints", "delete", store.url, "--step", 5, "--step", 10)
    assert ran.exit_code == 3 and "pinned" in ran.stderr and "--unpin" in ran.stderr
    ran = raytf("checkpoints", "delete", store.url, "--step", 5, "--step", 20, "--force")
    assert ran.exit_code == 3 and "newest" in ran.stderr
    assert store.steps() == [5, 10, 20]


def test_delete_the_last_good_one(store: CheckpointStore) -> None:
    damage(store, 5)
    damage(store, 20)
    ran = raytf("checkpoints", "delete", store.url, "--step", 10)
    assert ran.exit_code == 3 and "No good checkpoint would be left" in ran.stderr
    assert store.steps() == [5, 10, 20]
    assert raytf("checkpoints", "delete", store.url, "--step", 10, "--force").exit_code == 0
    assert store.steps() == [5, 20]


def test_force_deletes_a_pinned_one_unless_it_is_read(store: CheckpointStore) -> None:
    store.pin(10)
    with store.reading(10):
        ran = raytf("checkpoints", "delete", store.url, "--step", 10, "--force")
        assert ran.exit_code == 3 and "being read" in ran.stderr
    assert store.pinned() == {10}
    assert raytf("checkpoints", "delete", store.url, "--step", 10, "--force").exit_code == 0
    assert store.steps() == [5, 20] and store.pinned() == set()


@pytest.mark.parametrize(
    ("answer", "flags", "code", "left"),
    [("n\n", [], 1, [5, 10, 20]), ("y\n", [], 0, [10, 20]), ("", ["--yes"], 0, [10, 20])],
)
def test_delete_asks_on_a_terminal(
    store: CheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    flags: list[str],
    code: int,
    left: list[int],
) -> None:
    monkeypatch.setattr("raytf.cli.checkpoints.is_terminal", lambda: True)
    ran = CliRunner().invoke(
        main, ["checkpoints", "delete", store.url, "--step", "5", *flags], input=answer
    )
    assert ran.exit_code == code
    assert ("for good?" in ran.stderr) == (not flags)
    assert store.steps() == left


def test_pin(store: CheckpointStore) -> None:
    flags = ["--step", 5, "--step", 10]
    assert data("checkpoints", "pin", store.url, *flags) == [
        {"step": 5, "pinned": True},
        {"step": 10, "pinned": True},
    ]
    assert store.pinned() == {5, 10}
    ran = raytf("checkpoints", "pin", store.url, "--step", 5, "--unpin")
    assert (ran.stdout, store.pinned()) == ("unpinned step 5\n", {10})
    ran = raytf("checkpoints", "pin", store.url, "--step", 5, "--step", 7)
    assert ran.exit_code == 4 and store.pinned() == {10}


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoints", "delete", "x"],
        ["checkpoints", "list"],
        ["checkpoints", "verify", "x", "--step", "-1"],
        ["checkpoints", "export", "x", "y", "--format", "onnx"],
        ["verify-resume", "no-such-script.py"],
        ["verify-resume", "--kills", "0", __file__],
        ["verify-resume", __file__, "--drill=kill rank=0 step=1"],
    ],
    ids=lambda a: " ".join(a)[:40],
)
def test_usage_is_exit_code_2(arguments: list[str]) -> None:
    ran = raytf(*arguments)
    assert (ran.exit_code, ran.stdout) == (2, "")


def test_a_bad_url_is_exit_code_3() -> None:
    ran = raytf("checkpoints", "list", "nosuch://x")
    assert (ran.exit_code, ran.stdout) == (3, "")
    assert "nosuch://" in ran.stderr


def test_a_store_that_cannot_be_read_is_exit_code_1(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytf.checkpoint.files import Files
    from raytf.errors import StorageError

    def fail(*_: Any) -> Any:
        raise StorageError("no network")

    monkeypatch.setattr(Files, "tree", fail)
    ran = raytf("checkpoints", "list", store.url)
    assert (ran.exit_code, ran.stderr) == (1, "raytf: no network\n")


@pytest.mark.tf
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_export(tmp_path: Path) -> None:
    import keras

    from tests.worker.test_export_step import dense, same, stored, trained

    model = trained(dense)
    store = stored(tmp_path / "run", model)
    path = tmp_path / "m.keras"
    assert data("checkpoints", "export", store.url, path) == {
        "step": 8,
        "format": "keras",
        "path": str(path),
    }
    assert same(keras.models.load_model(path).get_weights(), model.get_weights())
    ran = raytf("checkpoints", "export", store.url, tmp_path / "s", "--format", "saved_model")
    assert (ran.exit_code, ran.stdout) == (0, f"{tmp_path / 's'}\n")
    assert raytf("checkpoints", "export", store.url, path, "--step", 9).exit_code == 4
    assert raytf("checkpoints", "export", store.url, path, "--step", "best").exit_code == 3
    assert raytf("checkpoints", "export", store.url, tmp_path / "m.h5").exit_code == 3


# --- verify-resume


@pytest.mark.parametrize("kills", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_kills_are_spread_over_the_run(kills: int, seed: int) -> None:
    planned = parse_drill(plan_kills(80, 3, kills, seed), 3)
    assert len(planned) == kills
    steps = [kill.step for kill in planned]
    stretches = [(1 + 79 * k // kills, 79 * (k + 1) // kills) for k in range(kills)]
    assert all(a <= step <= b for step, (a, b) in zip(steps, stretches, strict=True))
    assert plan_kills(80, 3, kills, seed) == plan_kills(80, 3, kills, seed)


def test_plans_of_short_runs() -> None:
    assert len(parse_drill(plan_kills(3, 2, 5, 0))) == 2
    assert {k.step for k in parse_drill(plan_kills(3, 2, 5, 0))} == {1, 2}
    assert len({plan_kills(1000, 2, 3, seed) for seed in range(10)}) == 10
    with pytest.raises(ConfigError, match="run of 1 steps"):
        plan_kills(1, 2, 3, 0)


@pytest.mark.parametrize(
    ("mine", "other", "told"),
    [
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.0}]}, None),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": 0.0}, {"a": -0.0}, "p.a: 0.0 unbroken, -0.0 broken"),
        ({"a": 1}, {"a": 1.0}, "p.a: 1 unbroken, 1.0 broken"),
        ({"a": True}, {"a": 1}, "p.a: True unbroken, 1 broken"),
        ({"a": [1, 2]}, {"a": [1]}, "p.a has a length of: 2 unbroken, 1 broken"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "p.a[1]: 2 unbroken, 3 broken"),
        ({"a": 1}, {}, "p.a: 1 unbroken, 'nothing' broken"),
        ({}, {"a": None}, "p.a: 'nothing' unbroken, None broken"),
        (1, [1], "p: 1 unbroken, [1] broken"),
    ],
)
def test_first_difference(mine: Any, other: Any, told: str | None) -> None:
    assert first_difference(mine, other, "p") == told


def test_reports() -> None:
    mine = {"run": "a", "steps": 3, "weights_sha256": "x", "metrics": {"loss": 1.0}, "restarts": 0}
    assert of_reports(mine, mine | {"run": "b", "restarts": 3, "seconds": 9.0}) is None
    assert of_reports(mine, mine | {"metrics": {"loss": 2.0}}) == (
        "the job's JSON line: metrics.loss: 1.0 unbroken, 2.0 broken"
    )


def pair(tmp_path: Path, tensors: Any = None, step: int = 4, **fields: Any) -> str | None:
    """The difference of a run to one with other tensors or fields, written in another way."""
    own = {"own": [{"x": 1}], "own_of_rank": [0, 0], "loop": {"stopped": False}}
    mine, other = CheckpointStore(tmp_path / "mine"), CheckpointStore(tmp_path / "other")
    save(mine, state(1), 4, state=own)
    save(other, state(2), 2, state=own)
    head = {"state": own, "attempt": 3, "generation": 2, "run": "other", "time": 9.0}
    save(other, tensors or state(1), step, max_bytes=64, **head | fields)
    return of_stores(mine, other)


def test_equal_stores(tmp_path: Path) -> None:
    spelled = {"own": [{"x": 0}, {"x": 1}], "own_of_rank": [1, 1], "loop": {"stopped": False}}
    assert pair(tmp_path, state=spelled) is None


def test_one_bit_of_one_tensor(tmp_path: Path) -> None:
    tensors = state(1)
    tensors["dense/kernel"] = tensors["dense/kernel"].copy()
    tensors["dense/kernel"].view(np.uint32)[3, 2] ^= 1
    told = pair(tmp_path, tensors)
    assert told is not None
    assert told.startswith("tensor dense/kernel F32[7, 5]: 1 of 35 elements differ; the first, [3,")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.asarray(2, np.int64), "1 of 1 elements differ; the first, [], is np.int64(1)"),
        (np.asarray(1, np.int32), "tensors: iterations: 'I64[]' unbroken, 'I32[]' broken"),
    ],
)
def test_scalars_and_types(tmp_path: Path, value: Any, told: str) -> None:
    assert told in str(pair(tmp_path, state(1) | {"iterations": value}))


def test_a_bfloat16_nan_of_other_bits(tmp_path: Path) -> None:
    name = "dense/bias [0:2] ü%#"
    values = state(1)[name].copy()
    values.view(np.uint16)[0] = 0x7FC1
    told = pair(tmp_path, state(1) | {name: values})
    assert values.dtype == ml_dtypes.bfloat16 and "1 of 5" in str(told)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"step": 5}, "newest checkpoint: step 4 unbroken, step 5 broken"),
        ({"metrics": {"loss": 0.5}}, "manifest.metrics.loss: 0.2 unbroken, 0.5 broken"),
        ({"epoch": 1}, "manifest.epoch: 0 unbroken, 1 broken"),
        (
            {"state": {"own": [{"x": 1}, {"x": 2}], "own_of_rank": [0, 1], "loop": {}}},
            "manifest.state.loop.stopped: False unbroken, 'nothing' broken",
        ),
        (
            {
                "state": {
                    "own": [{"x": 1}, {"x": 2}],
                    "own_of_rank": [0, 1],
                    "loop": {"stopped": False},
                }
            },
            "manifest.state.rank.1.x: 1 unbroken, 2 broken",
        ),
    ],
)
def test_manifests(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    assert pair(tmp_path, **fields) == told


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    mine = CheckpointStore(tmp_path / "mine")
    save(mine, state(1), 4)
    with pytest.raises(NotFoundError, match="other"):
        of_stores(mine, CheckpointStore(tmp_path / "other"))


JOB = textwrap.dedent(
    """
    import argparse, json, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from raytf.checkpoint.store import CheckpointStore
    from tests.checkpoint.states import save, state

    flags = argparse.ArgumentParser()
    for name in ("--storage", "--name", "--drill", "--max-failures", "--save-every-steps"):
        flags.add_argument(name)
    flags.add_argument("--json", action="store_true")
    flags.add_argument("--trouble", default="")
    args = flags.parse_args()
    broken, run = args.name == "broken", Path(args.storage, args.name)
    if args.trouble == "fails" or (args.trouble == "stops" and broken):
        sys.exit(3 if args.trouble == "fails" else 1)
    if args.trouble == "silent":
        sys.exit(0)
    print("talk on stdout, as libraries do")
    kills = args.drill.split(";") if broken else []
    for number, kill in enumerate(kills[args.trouble == "lucky":]):
        Path(run, "drills").mkdir(parents=True, exist_ok=True)
        Path(run, "drills", str(number)).write_text(kill)
    save(CheckpointStore(run), state(7 if args.trouble == "other" and broken else 1), 40)
    report = dict(run=str(run), steps=40, weights_sha256="ab", restarts=len(kills))
    report["flags"] = [args.max_failures] if broken and args.trouble == "flags" else []
    print(json.dumps(report))
    """
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Stands for a job: leaves a checkpoint and says that it was killed."""
    path = tmp_path / "job.py"
    path.write_text(JOB.format(root=str(Path(__file__).parents[1])))
    return path


def test_verify_resume_equal(tmp_path: Path, job: Path) -> None:
    ran = raytf("verify-resume", "--kills", 2, "--storage", tmp_path / "keep", job)
    assert (ran.exit_code, ran.stdout) == (0, "equal\n"), ran.stderr
    assert "broken run: kill rank=" in ran.stderr
    assert sorted(os.listdir(tmp_path / "keep")) == ["broken", "unbroken"]
    ran = raytf("verify-resume", "--storage", tmp_path / "keep", job)
    assert ran.exit_code == 3 and "not empty" in ran.stderr


def test_verify_resume_as_data(job: Path) -> None:
    ran = raytf("verify-resume", "--json", "--seed-kills", 5, job)
    told = json.loads(ran.stdout)
    assert (told["equal"], told["kills"], told["restarts"]) == (True, 3, 3)
    assert told["drill"] == plan_kills(40, 2, 3, 5)


@pytest.mark.parametrize(
    ("trouble", "code", "told"),
    [
        ("other", 1, "different: tensor dense/bias"),
        ("lucky", 1, "different: only 2 of 3 kills struck"),
        ("flags", 1, "different: the job's JSON line: flags has a length of: 0"),
        ("fails", 3, "unbroken run of"),
        ("stops", 1, "broken run of"),
        ("silent", 3, "names no steps"),
    ],
)
def test_verify_resume_says_what_is_wrong(job: Path, trouble: str, code: int, told: str) -> None:
    ran = raytf("verify-resume", job, "--trouble", trouble)
    assert ran.exit_code == code, ran.output
    assert told in (ran.stdout if told.startswith("different") else ran.stderr)


# --- Output


def test_spans_and_sizes() -> None:
    assert [age(s) for s in (-1, 5, 90, 7200, 200000)] == ["0 s", "5 s", "2 min", "2 h", "2 d"]
    assert [size(n) for n in (0, 1023, 2048, 3 << 30)] == ["0 B", "1023 B", "2.0 KiB", "3.0 GiB"]
    assert size(5 << 40) == "5.0 TiB"


def test_tables() -> None:
    assert table(("a", "name"), [("10", "x"), ("5", "long")]) == " a  name\n10  x\n 5  long"
    assert table(("a", "b"), []) == "a  b"
