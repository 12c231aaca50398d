"""`raytf verify-resume`: runs a job twice, once unbroken and once killed again and again, and
compares what is left.

Owns the plan of the kills and the two processes. The job must take the flags of `jobs/jobkit.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import click

from raytf.cli.comparing import of_reports, of_stores
from raytf.cli.output import FAILED, emit, json_option, say
from raytf.errors import ConfigError, RaytfError, TrainingError

__all__ = ["plan_kills", "verify_resume"]

_OURS = ("--storage", "--name", "--drill", "--json", "--max-failures")
_SAVES_PER_KILL = 2  # so that most kills find a state to go back to that is not the beginning


@click.command(
    "verify-resume",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--kills", type=click.IntRange(min=1), default=3, show_default=True, help="How many.")
@click.option("--seed-kills", type=int, default=0, show_default=True, help="Of steps and ranks.")
@click.option("--storage", metavar="DIR", help="Keeps both runs below it; else nothing is left.")
@json_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def verify_resume(
    kills: int,
    seed_kills: int,
    storage: str | None,
    as_json: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Proves on this machine that SCRIPT survives kills without a trace.

    Runs it twice with ARGS, the second time killing workers (kill -9) at random steps, and compares
    results, every tensor, history, metrics and callback state, bit for bit. Prints "equal", or the
    first difference (exit code 1). SCRIPT takes the flags of jobs/jobkit.py; options of this
    command come before it.
    """
    given = [arg.split("=")[0] for arg in args]
    if taken := [name for name in _OURS if name in given]:
        raise click.UsageError(f"{taken[0]} is chosen by verify-resume; leave it out.")
    if storage is not None:
        os.makedirs(storage, exist_ok=True)
        if os.listdir(storage):
            raise ConfigError(f"--storage {storage} is not empty: both runs must begin anew.")
        outcome = _verify(script, args, kills, seed_kills, os.path.abspath(storage))
    else:
        with tempfile.TemporaryDirectory(prefix="raytf-verify-") as scratch:
            outcome = _verify(script, args, kills, seed_kills, scratch)
    if as_json:
        emit(outcome)
    else:
        click.echo("equal" if outcome["equal"] else f"different: {outcome['difference']}")
    if not outcome["equal"]:
        sys.exit(FAILED)


def _verify(
    script: str, args: tuple[str, ...], kills: int, seed: int, storage: str
) -> dict[str, Any]:
    from raytf.checkpoint.store import CheckpointStore

    runs = {name: os.path.join(storage, name) for name in ("unbroken", "broken")}
    say(f"unbroken run: {script}")
    unbroken = _run(script, args, storage, "unbroken")
    stores = {name: CheckpointStore(path) for name, path in runs.items()}
    latest = stores["unbroken"].latest()
    if latest is None:
        raise TrainingError(f"The unbroken run left no checkpoint in {runs['unbroken']}.")
    steps = int(unbroken["steps"])
    drill = plan_kills(steps, stores["unbroken"].manifest(latest).world_size, kills, seed)
    num_kills = drill.count("kill")
    say(f"broken run: {drill}")
    flags = ["--drill", drill, "--max-failures", str(num_kills + 1)]
    if not any(arg.startswith("--save-every-steps") for arg in args):
        flags += ["--save-every-steps", str(max(1, steps // (_SAVES_PER_KILL * (num_kills + 1))))]
    broken = _run(script, (*args, *flags), storage, "broken")
    fired = _num_fired(runs["broken"])
    difference = of_reports(unbroken, broken)
    if difference is None and fired != num_kills:
        difference = f"only {fired} of {num_kills} kills struck, so nothing is proved"
    difference = difference or of_stores(stores["unbroken"], stores["broken"])
    return {
        "equal": difference is None,
        "difference": difference,
        "steps": steps,
        "drill": drill,
        "kills": fired,
        "restarts": broken.get("restarts"),
        "weights_sha256": broken.get("weights_sha256"),
        "seconds": [unbroken.get("seconds"), broken.get("seconds")],
    }


def plan_kills(steps: int, num_workers: int, kills: int, seed: int) -> str:
    """A drill of kills spread over the run: one at a random step of each equal stretch. Pure.

    Args:
        steps: of the whole run; no kill comes before the first or after the last of them.
        num_workers: ranks to choose from.
        kills: how many; fewer if there are not as many steps.
        seed: of the choice.

    Raises:
        ConfigError: the run is too short to be killed within it.
    """
    places = steps - 1  # after 1 to steps - 1 completed ones
    count = min(kills, places)
    if count < 1:
        raise ConfigError(f"A run of {steps} steps cannot be killed within. Use a longer one.")
    draw = random.Random(seed)
    parts = []
    for k in range(count):
        first, last = 1 + places * k // count, places * (k + 1) // count
        rank = draw.randrange(num_workers)
        parts.append(f"kill rank={rank} step={draw.randint(first, last)}")
    return "; ".join(parts)


def _run(script: str, args: tuple[str, ...], storage: str, name: str) -> dict[str, Any]:
    """One run of the job, and the JSON line it ends with."""
    command = [sys.executable, script, *args, "--storage", storage, "--name", name, "--json"]
    began = time.monotonic()
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode != 0:
        kind: type[RaytfError] = ConfigError if ran.returncode in (2, 3) else TrainingError
        raise kind(f"The {name} run of {script} ended with exit code {ran.returncode}; see above.")
    lines = ran.stdout.strip().splitlines()
    try:
        report = json.loads(lines[-1]) if lines else None
    except ValueError as error:
        raise ConfigError(
            f"{script} --json does not end with a line of JSON: {lines[-1]!r}."
        ) from (error)
    if not isinstance(report, dict) or not isinstance(report.get("steps"), int):
        raise ConfigError(f"The last line of {script} --json names no steps: {lines[-1:]}.")
    say(f"{name} run: {report['steps']} steps in {time.monotonic() - began:.0f} s")
    return report


def _num_fired(run: str) -> int:
    """Kills that a run remembers."""
    drills = os.path.join(run, "drills")
    return len(os.listdir(drills)) if os.path.isdir(drills) else 0
