"""`raytf runs`, `status`, `events`, `report`: what runs have left in their storage, or do now."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from raytf.cli.output import age, emit, json_option, say, table
from raytf.errors import NotFoundError, RaytfError, StorageError
from raytf.faults.incidents import short_node
from raytf.faults.record import Kind

if TYPE_CHECKING:
    from raytf.checkpoint.storage import Storage
    from raytf.faults.events import Event

__all__ = ["events", "report", "runs", "status", "status_lines"]

_POLL_S = 1.0


@click.command()
@click.argument("run")
@click.option("--follow", is_flag=True, help="Go on as new ones come, until Ctrl-C.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only these: step_reached, worker_killed, decision, ... Can be repeated.",
)
@json_option
def events(run: str, follow: bool, kinds: tuple[str, ...], as_json: bool) -> None:
    """Shows the events of a run, the oldest first.

    RUN is its directory: a local path, s3://, gs://, abfs:// or any other fsspec URL. Lines leave
    stacks out; --json has them: one object a line.
    """
    from raytf.cluster.event_log import events_of

    _check_kinds(kinds)
    storage = _run_at(run)
    skipped = 0
    if follow:
        shown: Iterator[Event] = _followed(storage)
    else:
        found = events_of(storage)
        shown, skipped = iter(found), found.skipped
    try:
        for event in shown:
            if not kinds or str(event.kind) in kinds:
                _show(event, as_json)
    except KeyboardInterrupt:
        if not follow:
            raise
    if skipped:
        say(f"{skipped} lines could not be read: torn by a death in mid-write, or foreign.")


def _check_kinds(kinds: Sequence[str]) -> None:
    known = {str(kind) for kind in Kind}
    for kind in kinds:
        if kind not in known:
            raise click.BadParameter(
                f"{kind!r} is no kind of event. There are: {', '.join(sorted(known))}.",
                param_hint="--kind",
            )


def _show(event: Event, as_json: bool) -> None:
    from raytf.faults.record import event_line, to_line

    click.echo(to_line(event) if as_json else event_line(event))
    sys.stdout.flush()


def _followed(storage: Storage) -> Iterator[Event]:
    from raytf.cluster.event_log import EVENTS, names, read_from
    from raytf.faults.events import follow

    place = storage.join(EVENTS)
    try:
        yield from follow(
            lambda: names(place),
            lambda name, offset: read_from(place, name, offset),
            time.sleep,
            poll_s=_POLL_S,
        )
    except RaytfError:
        raise
    except Exception as error:  # a store raises what it likes
        raise StorageError(
            f"The events of {storage.url} cannot be read: {error}. Check that the storage can be "
            "reached.",
            path=storage.url,
        ) from error


@click.command()
@click.argument("storage")
@json_option
def runs(storage: str, as_json: bool) -> None:
    """Lists the runs below a storage path.

    --json: one array, each entry as in `raytf status --json`.
    """
    from raytf.checkpoint.storage import resolve
    from raytf.status import run_names

    place = resolve(storage)
    found = [_status_or_error(place.join(name)) for name in run_names(place)]
    if not found:
        raise NotFoundError(f"There are no runs below {place.url}.", path=place.url)
    if as_json:
        emit(found)
        return
    head = ("state", "step", "epoch", "saved", "faults", "goodput", "silent", "run")
    click.echo(table(head, [_row(told) for told in found]))


def _status_or_error(storage: Storage) -> dict[str, Any]:
    """One that cannot be read must not hide the others."""
    try:
        return _status(storage)
    except RaytfError as error:
        name = storage.path.rsplit("/", 1)[-1]
        return {"name": name, "url": storage.url, "state": "UNKNOWN", "note": error.message}


def _status(storage: Storage) -> dict[str, Any]:
    from raytf.status import read_facts
    from raytf.status import status as status_of

    return status_of(read_facts(storage), time.time())


def _row(told: Mapping[str, Any]) -> tuple[str, ...]:
    save, silent = told.get("last_save"), told.get("silent_s")
    is_over = told["state"] in ("FINISHED", "ERRORED", "ABORTED")
    cells = (
        told["state"],
        _of(told.get("step"), told.get("num_steps")),
        _of(_next(told.get("epoch")), told.get("epochs")),
        None if save is None else save["step"],
        len(told.get("faults", ())),
        None if told.get("goodput") is None else f"{told['goodput']:.0%}",
        None if silent is None or is_over else age(silent),
        told["name"],
    )
    return tuple("-" if cell is None else str(cell) for cell in cells)


def _of(number: Any, total: Any) -> str | None:
    if number is None:
        return None
    return f"{number}/{total}" if total else str(number)


def _next(epoch: Any) -> int | None:
    return epoch + 1 if isinstance(epoch, int) else None


@click.command()
@click.argument("run")
@json_option
def status(run: str, as_json: bool) -> None:
    """Shows how a run is, from its storage alone.

    The state is one of Ray Train's, or UNKNOWN where there is no sign of life and no end either.
    --json: one object.
    """
    told = _status(_run_at(run))
    if as_json:
        emit(told)
        return
    click.echo("\n".join(status_lines(told)))


def status_lines(told: Mapping[str, Any]) -> list[str]:
    """A status for people, a fact a line. Pure."""
    save, holder = told["last_save"], told["holder"]
    speed = told["examples_per_s"]
    facts = {
        "state": told["state"] + (f" ({told['note']})" if told["note"] else ""),
        "run": told["url"],
        "attempt": told["attempt"],
        "step": _of(told["step"], told["num_steps"]),
        "epoch": _of(_next(told["epoch"]), told["epochs"]),
        "metrics": "  ".join(f"{k} {_short(v)}" for k, v in told["metrics"].items()) or None,
        "throughput": f"{speed:,.0f} examples/s" if isinstance(speed, int | float) else None,
        "left": None if told["eta_s"] is None else age(told["eta_s"]),
        "last save": None if save is None else _save_line(save),
        "goodput": _goodput_line(told),
        "faults": _faults_line(told["faults"]),
        "excluded": ", ".join(map(_node_line, told["excluded_nodes"])) or None,
        "held by": None if holder is None or holder["released"] else _holder_line(holder),
        "last sign": None if told["silent_s"] is None else f"{age(told['silent_s'])} ago",
    }
    shown = {name: value for name, value in facts.items() if value is not None}
    lines = [f"{name:<11}{value}" for name, value in shown.items()]
    for row in told["faults"][-5:]:
        lines.append(f"  {_fault_line(row)}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _save_line(save: Mapping[str, Any]) -> str:
    return f"step {save['step']}" + ("" if save["age_s"] is None else f", {age(save['age_s'])} ago")


def _goodput_line(told: Mapping[str, Any]) -> str | None:
    if told["goodput"] is None:
        return None
    lost = f", {told['lost_steps']} steps lost" if told["lost_steps"] else ""
    return f"{told['goodput']:.1%} of {age(told['wall_s'])}, {told['restarts']} restarts{lost}"


def _faults_line(rows: Sequence[Mapping[str, Any]]) -> str:
    stops = sum(bool(row["stopped"]) for row in rows)
    more = len(rows) - stops
    return f"{stops}" + (f", and {more} that did not stop it" if more else "")


def _node_line(row: Mapping[str, Any]) -> str:
    left = "" if row["left_s"] is None else f" (for {age(row['left_s'])})"
    return f"node {short_node(row['node'])}{left}"


def _holder_line(holder: Mapping[str, Any]) -> str:
    gone = ", which is gone" if holder["is_dead"] else ""
    return f"process {holder['pid']} on {holder['host']}{gone}, since {holder['since']}"


def _fault_line(row: Mapping[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(row["time"]))
    who = "" if row["rank"] is None else f" rank {row['rank']}"
    where = f" on node {short_node(row['node'])}" if row["node"] else ""
    step = "" if row["step"] is None else f" at step {row['step']}"
    decision = f": {row['decision']}" if row["decision"] else ""
    return f"{at}  {row['kind']}{who}{where}{step}{decision}"


@click.command()
@click.argument("run")
@click.option(
    "--output",
    "-o",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False),
    help="The file to write; - for standard output.",
)
@json_option
def report(run: str, output: str, as_json: bool) -> None:
    """Writes a run as one HTML page that needs no network.

    --json: one object that names the file.
    """
    from raytf.report.page import page
    from raytf.status import read_facts

    if output == "-" and as_json:
        raise click.UsageError("--json and -o - both want standard output.")
    storage = _run_at(run)
    text = page(read_facts(storage), time.time())
    with click.open_file(output, "w", encoding="utf-8") as file:
        file.write(text)
    if as_json:
        emit({"run": storage.url, "path": output, "bytes": len(text.encode())})
    elif output != "-":
        say(f"{output} shows {storage.url}")


def _run_at(url: str) -> Storage:
    """The directory of a run.

    Raises:
        NotFoundError: there is none.
    """
    from raytf.checkpoint.storage import resolve
    from raytf.status import is_run, listing

    storage = resolve(url)
    if not is_run(listing(storage)):
        raise NotFoundError(
            f"There is no run in {storage.url}. `raytf runs` lists those of a storage path.",
            path=storage.url,
        )
    return storage
