"""What every verb shares: data and talk, JSON that anyone reads, errors as exit codes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import click

from raytf.errors import ConfigError, DataError, NotFoundError, RaytfError

__all__ = ["BAD", "FAILED", "Edge", "age", "emit", "json_option", "say", "size", "table"]

FAILED, BAD, NOT_FOUND = 1, 3, 4  # click exits with 2 for usage


class Edge(click.Group):
    """A group that turns raytf's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb."""
        try:
            return super().invoke(ctx)
        except RaytfError as error:
            say(f"raytf: {error.message}")
            ctx.exit(exit_code(error))


def exit_code(error: RaytfError) -> int:
    """What a program sees of an error."""
    if isinstance(error, NotFoundError):
        return NOT_FOUND
    return BAD if isinstance(error, ConfigError | DataError) else FAILED


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def say(text: str) -> None:
    """Talk: standard error."""
    click.echo(text, err=True)


def emit(value: Any) -> None:
    """One JSON value on a line of its own. JSON has no NaN and no infinities: they become text."""
    click.echo(json.dumps(_finite(value), allow_nan=False))
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them; all but the last aligned right. Pure."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    last = len(head) - 1
    return "\n".join(
        "  ".join(
            cell if i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def size(nbytes: float) -> str:
    """Bytes for people. Pure."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age(seconds: float) -> str:
    """A time span for people, cut to its largest unit. Pure."""
    seconds = max(seconds, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
