"""`raytf checkpoints`: lists, verifies, exports, deletes and pins what a run has saved."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from raytf.cli.output import BAD, age, emit, json_option, say, size, table
from raytf.errors import CheckpointDamagedError, ConfigError, NotFoundError, RaytfError

if TYPE_CHECKING:
    from raytf.checkpoint.store import CheckpointStore

__all__ = ["checkpoints", "is_terminal", "rows"]

_STEP = click.IntRange(min=0)


@click.group()
def checkpoints() -> None:
    """Looks after the checkpoints of a run.

    URL is the run's directory: a local path, s3://, gs://, abfs:// or any other fsspec URL.
    """


@checkpoints.command("list")
@click.argument("url")
@json_option
def list_(url: str, as_json: bool) -> None:
    """Lists a run's checkpoints, the oldest first.

    A damaged one that was set aside is shown with the file that names it. --json: one array.
    """
    found = rows(_open(url), time.time())
    if as_json:
        emit(found)
        return
    head = ("step", "epoch", "age", "size", "kept", "metrics")
    click.echo(table(head, [_line(row) for row in found]))


def rows(store: CheckpointStore, now: float) -> list[dict[str, Any]]:
    """Every checkpoint as plain data, damaged ones too, by step.

    Args:
        store: of the run.
        now: seconds since 1970.
    """
    from raytf.checkpoint.catalog import is_bad_manifest
    from raytf.checkpoint.manifest import MANIFEST, parse_step

    found: list[dict[str, Any]] = []
    pinned = store.pinned()
    latest, best = store.latest(), store.best()
    for step in store.steps():
        try:
            manifest = store.manifest(step)
        except CheckpointDamagedError as error:
            found.append(_damaged(store, step, MANIFEST, str(error)))
            continue
        except NotFoundError:  # deleted since it was listed
            continue
        found.append(
            {
                "step": step,
                "epoch": manifest.epoch,
                "time": manifest.time,
                "age_s": round(now - manifest.time, 3),
                "bytes": manifest.nbytes,
                "metrics": dict(manifest.metrics),
                "pinned": step in pinned,
                "latest": step == latest,
                "best": step == best,
                "damaged": False,
                "attempt": manifest.attempt,
                "num_workers": manifest.world_size,
                "url": store.step_url(step),
            }
        )
    for path in sorted(store.files.tree()):
        directory, name = posixpath.split(path)
        step = parse_step(directory)
        if step is not None and is_bad_manifest(name):
            found.append(_damaged(store, step, name, "damaged, and set aside"))
    return sorted(found, key=lambda row: row["step"])


def _damaged(store: CheckpointStore, step: int, name: str, what: str) -> dict[str, Any]:
    path = posixpath.join(store.step_url(step), name)
    return {"step": step, "damaged": True, "manifest": path, "what": what}


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if row["damaged"]:
        return (str(row["step"]), "-", "-", "-", "damaged", row["manifest"])
    marks = [name for name in ("pinned", "best", "latest") if row[name]]
    metrics = " ".join(f"{name}={value:.5g}" for name, value in row["metrics"].items())
    return (
        str(row["step"]),
        str(row["epoch"]),
        age(row["age_s"]),
        size(row["bytes"]),
        ",".join(marks) or "-",
        metrics or "-",
    )


@checkpoints.command()
@click.argument("url")
@click.option("--step", type=_STEP, help="Only this one; all if not given.")
@json_option
def verify(url: str, step: int | None, as_json: bool) -> None:
    """Reads every byte and compares it with what was written.

    Exit code 3 if something is damaged. --json: one object a line, as each is done.
    """
    store = _open(url)
    steps = store.steps() if step is None else [step]
    if not steps:
        raise NotFoundError(f"{store.url} holds no checkpoint.", path=store.url)
    num_damaged = 0
    for each in steps:
        began = time.monotonic()
        problems = store.verify(each)
        num_damaged += bool(problems)
        if as_json:
            told = [{"path": p.path, "what": p.what} for p in problems]
            seconds = round(time.monotonic() - began, 3)
            emit({"step": each, "ok": not problems, "problems": told, "seconds": seconds})
            continue
        click.echo(f"step {each}: {'damaged' if problems else 'good'}")
        for problem in problems:
            click.echo(f"  {problem.path} {problem.what}")
    if num_damaged:
        say(f"{num_damaged} of {len(steps)} checkpoints are damaged.")
        sys.exit(BAD)


@checkpoints.command()
@click.argument("url")
@click.argument("path")
@click.option("--step", default="latest", show_default=True, help="A number, latest or best.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["keras", "saved_model", "weights"]),
    default="keras",
    show_default=True,
    help="A .keras file, a SavedModel directory or a .weights.h5 file.",
)
@json_option
def export(url: str, path: str, step: str, kind: str, as_json: bool) -> None:
    """Writes one checkpoint as a model to PATH, a local path or a URL.

    A model that Keras cannot rebuild from its own config needs its build_model function: use
    raytf.export from Python. --json: one object.
    """
    from raytf.cluster.origins import choose_step

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its talk is of no use here
    store = _open(url)
    chosen = choose_step(store, step)
    with contextlib.redirect_stdout(sys.stderr):  # libraries talk as well
        written = store.export(chosen, path, kind)
    if as_json:
        emit({"step": chosen, "format": kind, "path": written})
    else:
        click.echo(written)


@checkpoints.command()
@click.argument("url")
@click.option("--step", "steps", type=_STEP, multiple=True, required=True, help="Can be repeated.")
@click.option("--force", is_flag=True, help="Also pinned ones, and the last good one.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def delete(url: str, steps: tuple[int, ...], force: bool, yes: bool, as_json: bool) -> None:
    """Deletes checkpoints.

    Pinned ones and the last good one only with --force; the newest never, as the run goes on from
    it. On a terminal it asks first. --json: one array.
    """
    store = _open(url)
    wanted = sorted(set(steps))
    _check_deletion(store, wanted, force)
    if not yes and is_terminal():
        names = ", ".join(map(str, wanted))
        click.confirm(f"Delete step {names} of {store.url} for good?", abort=True, err=True)
    done: list[dict[str, Any]] = []
    try:
        for step in wanted:
            _delete(store, step)
            done.append({"step": step, "deleted": True})
    finally:  # what is gone is said, whatever came in between
        if as_json:
            emit(done)
        else:
            for row in done:
                click.echo(f"deleted step {row['step']}")


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _delete(store: CheckpointStore, step: int) -> None:
    pinned = step in store.pinned()  # and then allowed: `_check_deletion` has looked
    if pinned:
        store.pin(step, False)
    try:
        store.delete(step)
    except RaytfError:
        if pinned:
            store.pin(step)
        raise


def _check_deletion(store: CheckpointStore, wanted: list[int], force: bool) -> None:
    """Nothing is deleted unless all can be."""
    there = store.steps()
    if missing := [step for step in wanted if step not in there]:
        raise NotFoundError(
            f"There is no checkpoint of step {missing[0]} in {store.url}; nothing was deleted. "
            f"There are: {', '.join(map(str, there)) or 'none'}.",
            path=store.url,
        )
    if there[-1] in wanted:
        raise ConfigError(
            f"Step {there[-1]} is the newest checkpoint, which the run goes on from; nothing was "
            "deleted. Delete the whole run's directory if it is not wanted."
        )
    if force:
        return
    if kept := sorted(store.pinned() & set(wanted)):
        raise ConfigError(
            f"Step {kept[0]} is pinned; nothing was deleted. Unpin it first "
            f"(raytf checkpoints pin {store.url} --step {kept[0]} --unpin), or use --force."
        )
    left = [step for step in reversed(there) if step not in wanted]
    if not any(not store.verify(step) for step in left):
        raise ConfigError(
            "No good checkpoint would be left: those that would stay are damaged "
            f"({', '.join(map(str, sorted(left)))}). Nothing was deleted. Use --force if that is "
            "meant."
        )


@checkpoints.command()
@click.argument("url")
@click.option("--step", "steps", type=_STEP, multiple=True, required=True, help="Can be repeated.")
@click.option("--unpin", is_flag=True, help="Leave it to retention again.")
@json_option
def pin(url: str, steps: tuple[int, ...], unpin: bool, as_json: bool) -> None:
    """Keeps checkpoints from being deleted by retention.

    --json: one array.
    """
    store = _open(url)
    wanted = sorted(set(steps))
    there = store.steps()
    if missing := [step for step in wanted if step not in there]:
        raise NotFoundError(
            f"There is no checkpoint of step {missing[0]} in {store.url}. There are: "
            f"{', '.join(map(str, there)) or 'none'}.",
            path=store.url,
        )
    for step in wanted:
        store.pin(step, not unpin)
    if as_json:
        emit([{"step": step, "pinned": not unpin} for step in wanted])
    else:
        for step in wanted:
            click.echo(f"{'unpinned' if unpin else 'pinned'} step {step}")


def _open(url: str) -> CheckpointStore:
    """The store at a URL.

    Raises:
        NotFoundError: nothing was ever saved there.
    """
    from raytf.checkpoint.store import CheckpointStore

    store = CheckpointStore(url)
    if not store.steps() and not store.files.tree():
        raise NotFoundError(f"{store.root.url} holds no checkpoints.", path=store.root.url)
    return store
