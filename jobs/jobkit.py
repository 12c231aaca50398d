"""What the jobs share: their common flags, exit codes, and the last line on stdout."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import raytf
from raytf.errors import ConfigError, DataError, RaytfError

__all__ = ["given", "parser", "run", "summary"]

BEGAN = time.monotonic()  # jobs import this module first, before what takes long
OK, TRAINING_FAILED, BAD_CONFIG = 0, 1, 3  # as the raytf command; argparse exits with 2 for usage


def parser(doc: str, epochs: int, global_batch_size: int) -> argparse.ArgumentParser:
    """A parser with the flags that every job has; a job adds its own."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    flags.add_argument("--workers", type=int, default=2, metavar="N", help="Ray workers")
    flags.add_argument(
        "--epochs", type=int, default=epochs, metavar="N", help="times over the data"
    )
    flags.add_argument(
        "--global-batch-size",
        type=int,
        default=global_batch_size,
        metavar="ROWS",
        help="over all workers",
    )
    flags.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights, order and dropout"
    )
    flags.add_argument(
        "--storage", metavar="URL", help="where runs are kept; Ray's default if not given"
    )
    flags.add_argument("--name", help="of the run; made up if not given")
    flags.add_argument(
        "--max-failures", type=int, default=3, metavar="N", help="retries of a failed run"
    )
    flags.add_argument(
        "--save-every-steps", type=int, default=100, metavar="N", help="steps between checkpoints"
    )
    flags.add_argument(
        "--recovery", choices=("auto", "survivor", "restart", "off"), help="after a failure"
    )
    flags.add_argument("--spares", type=int, metavar="N", help="workers that wait for a failure")
    flags.add_argument("--drill", metavar="WHAT", help='inject a fault: "kill rank=1 step=30"')
    flags.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return flags


def given(args: argparse.Namespace) -> dict[str, Any]:
    """KerasTrainer's arguments for the flags that were given; it refuses what is not built."""
    options: dict[str, Any] = {"save": raytf.SaveConfig(every_steps=args.save_every_steps)}
    if args.recovery is not None or args.spares is not None:
        options["recovery"] = raytf.RecoveryConfig(
            mode=args.recovery or "auto", spares=args.spares or 0
        )
    if args.drill is not None:
        options["drill"] = args.drill
    return options


def summary(result: raytf.RunResult) -> dict[str, Any]:
    """What every job's JSON line says of a run."""
    restarts = result.generations - 1  # in this version each starts all worker processes anew
    return {
        "run": result.url,
        "steps": result.steps,
        "metrics": {name: round(float(value), 6) for name, value in (result.metrics or {}).items()},
        "weights_sha256": result.weights_sha256,
        "restarts": restarts,
        "generations": result.generations,
        "process_restarts": restarts,
        "lost_steps": result.replayed_steps,  # what a restart loses it does again
        "replayed_steps": result.replayed_steps,
    }


def run(job: Callable[[argparse.Namespace], dict[str, Any]], flags: argparse.ArgumentParser) -> int:
    """Runs the job, prints what it returns, and answers with the exit code."""
    args = flags.parse_args()
    try:
        report = job(args)
    except RaytfError as error:
        print(f"{flags.prog}: {error.message}", file=sys.stderr)
        return BAD_CONFIG if isinstance(error, ConfigError | DataError) else TRAINING_FAILED
    finally:
        ray = sys.modules.get("ray")
        if ray is not None:
            ray.shutdown()  # workers' last words come before ours, and nothing is left running
    report["seconds"] = round(time.monotonic() - BEGAN, 3)
    if args.json:
        print(json.dumps(report), flush=True)
    else:
        for key, value in report.items():
            print(f"{key:>18}  {value}", flush=True)
    return OK
