"""Weights and optimizer state from files that raytf did not write: `.keras`, SavedModel, TensorFlow
checkpoint.

Owns the rule by which what such a file holds is matched to this rank's model, and what the user is
told about it; the reading is `foreign_files`'. Each rank reads alone; nothing here waits for
another rank, and the random state stays as it was.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.checkpoint.layout import TensorInfo
from raytf.config import TrainSpec
from raytf.errors import ConfigError, NotFoundError, StorageError
from raytf.worker.foreign_files import (
    SEEDS,
    Found,
    Named,
    name_of,
    rate_variable,
    read_checkpoint,
    read_keras,
    read_saved_model,
    without_rate,
)
from raytf.worker.links import Origin
from raytf.worker.state import code_of, difference
from raytf.worker.survivor import random_state, set_random_state

__all__ = ["load_foreign"]

_MAX_LINES = 20  # of a difference that is shown


@dataclass(frozen=True)
class _Match:
    """What goes where.

    Attributes:
        pairs: (index in the model's list, index in the file's).
        how: "path", "order" or "nothing".
    """

    pairs: list[tuple[int, int]]
    how: str


def load_foreign(origin: Origin, model: Any, spec: TrainSpec, keras: Any) -> list[str]:
    """Copies what fits from a file into the built, localized model of this rank.

    Weights are matched by their paths or, where these differ as a whole, by their order. The
    optimizer's variables are taken if its class and all shapes are the same; the learning rate
    stays as `build_model` compiled it.

    Args:
        origin: of kind "keras", "saved_model" or "tf_checkpoint".
        model: compiled and built, its optimizer too.
        spec: of the run; `build_model` is called once more where the file needs a model to be read
            into.
        keras: the Keras of the run (keras or tf_keras).

    Returns:
        What was taken and what was not, a line each, for the user.

    Raises:
        ConfigError: the file cannot be read into this model: with `origin.strict` unless every
            weight matches, with a list of names and shapes; else if nothing matches.
        NotFoundError: the file is not there.
        StorageError: it cannot be fetched.
    """
    readers: dict[str, Callable[..., Found]] = {
        "keras": read_keras,
        "saved_model": read_saved_model,
        "tf_checkpoint": read_checkpoint,
    }
    with _same_randomness(), _fetched(origin) as path:
        found = readers[origin.kind](path, origin, model, spec, keras)
    weights = [w for w in model.weights if not name_of(w).endswith(SEEDS)]
    match = _matched([(name_of(w), tuple(w.shape)) for w in weights], found.weights)
    lines = _unmatched(weights, found.weights, match)
    if lines and (origin.strict or not match.pairs):
        raise _refused(origin, lines)
    for mine, theirs in match.pairs:
        weights[mine].assign(_cast(found.weights[theirs][1], weights[mine]))
    said = [f"{len(match.pairs)} of {len(weights)} weights taken by {match.how} from {origin.url}"]
    if lines:
        said.append("not taken:\n  " + "\n  ".join(_cut(lines)))
    return [*said, *_take_optimizer(found, model, match, len(weights))]


def _take_optimizer(found: Found, model: Any, match: _Match, num_weights: int) -> list[str]:
    optimizer = model.optimizer
    kind = type(optimizer).__name__
    rate = _rate_line(found, optimizer)
    if found.optimizer is None:
        return ["the file holds no optimizer state: the optimizer starts anew", *rate]
    theirs, values = found.optimizer
    if theirs != kind:
        return [
            f"optimizer: the file's is {theirs}, build_model's {kind}, which starts anew",
            *rate,
        ]
    variables = without_rate(optimizer)
    slots = _matched([(name_of(v), tuple(v.shape)) for v in variables], values)
    # Slots in another order than the weights they belong to would look alike.
    by_order = match.how == "order" or [a for a, _ in match.pairs] == [b for _, b in match.pairs]
    whole = len(slots.pairs) == len(variables) == len(values)
    if not whole or len(match.pairs) < num_weights or (slots.how == "order" and not by_order):
        return [f"optimizer: the state of the file's {kind} does not fit and starts anew", *rate]
    for mine, other in slots.pairs:
        variables[mine].assign(_cast(values[other][1], variables[mine]))
    steps = int(optimizer.iterations.numpy())
    return [f"optimizer: state of {kind} taken, which has done {steps} steps", *rate]


def _rate_line(found: Found, optimizer: Any) -> list[str]:
    mine = rate_variable(optimizer)
    if mine is None:
        return [
            "learning rate: the schedule that build_model compiled, from the optimizer's step on"
        ]
    now = float(mine.numpy())
    if found.learning_rate is None or found.learning_rate == now:
        return [f"learning rate: {now:g}, as build_model compiled it"]
    return [
        f"learning rate: {now:g}, as build_model compiled it; the file's {found.learning_rate:g} "
        "is not taken"
    ]


# --- Matching


def _matched(mine: Sequence[tuple[str, tuple[int, ...]]], theirs: Named) -> _Match:
    """By path where paths agree, else by order where shapes do; what matches all wins. Pure."""
    places = {name: index for index, name in enumerate(_bare([n for n, _ in theirs]))}
    pairs: list[tuple[int, int]] = []
    for index, name in enumerate(_bare([n for n, _ in mine])):
        other = places.get(name)
        if other is not None and theirs[other][1].shape == mine[index][1]:
            pairs.append((index, other))
    if len(pairs) == len(mine) == len(theirs):
        return _Match(pairs, "path")
    both = [(i, i) for i in range(min(len(mine), len(theirs)))]
    in_order = [(i, j) for i, j in both if mine[i][1] == theirs[j][1].shape]
    # Automatic names count what a process has built: some agree by chance where all are shifted.
    if len(in_order) == len(mine) == len(theirs) or not pairs:
        return _Match(in_order, "order" if in_order else "nothing")
    return _Match(pairs, "path")


def _bare(names: Sequence[str]) -> list[str]:
    """Names without the first part that all have, the model's or the optimizer's, which counts
    what a process has built and is not always there; made different: a second `a` is `a#2`.
    """
    parts = [name.split("/") for name in names]
    if len({p[0] for p in parts}) == 1 and all(len(p) > 1 for p in parts):
        names = ["/".join(p[1:]) for p in parts]
    seen: dict[str, int] = {}
    result: list[str] = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _unmatched(weights: Sequence[Any], theirs: Named, match: _Match) -> list[str]:
    """Names and shapes of what has no counterpart, a line each."""
    mine_left = set(range(len(weights))) - {a for a, _ in match.pairs}
    theirs_left = set(range(len(theirs))) - {b for _, b in match.pairs}
    mine, others = _bare([name_of(w) for w in weights]), _bare([n for n, _ in theirs])
    return difference(
        {mine[i]: _info(mine[i], weights[i].shape, weights[i].dtype) for i in mine_left},
        {others[i]: _info(others[i], theirs[i][1].shape, theirs[i][1].dtype) for i in theirs_left},
    )


def _info(name: str, shape: Any, dtype: Any) -> TensorInfo:
    return TensorInfo(name, tuple(shape), code_of(dtype, name))


def _refused(origin: Origin, lines: list[str]) -> ConfigError:
    way = "Use the build_model it was made with"
    if origin.strict:
        way += ", or resume_strict=False to take what fits"
    return ConfigError(
        f"{origin.url} does not fit build_model's model ('checkpoint' is that file):\n  "
        + "\n  ".join(_cut(lines))
        + f"\n{way}.",
        path=origin.url,
    )


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"and {more} more"] if more > 0 else lines


def _cast(value: np.ndarray, variable: Any) -> Any:
    return tf.cast(value, variable.dtype) if value.dtype != variable.dtype else value


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Models draw when they are built; the run must draw as if there had been none."""
    before = random.getstate(), np.random.get_state(), random_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        set_random_state(before[2])


# --- Fetching


@contextlib.contextmanager
def _fetched(origin: Origin) -> Iterator[str]:
    """A local path of the file; remote ones lie in a temporary directory meanwhile."""
    storage = origin.storage
    if storage.is_local:
        yield storage.path
        return
    with tempfile.TemporaryDirectory(prefix="raytf-") as scratch:
        target = os.path.join(scratch, posixpath.basename(storage.path))
        try:
            for source, relative in _sources(origin).items():
                local = target + relative
                os.makedirs(os.path.dirname(local), exist_ok=True)
                storage.fs.get_file(source, local)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{origin.url} is not there (any more).", path=origin.url
            ) from error
        except Exception as error:  # a store raises what it likes; all of it means "cannot"
            raise StorageError(
                f"{origin.url} cannot be fetched: {type(error).__name__}: {error}", path=origin.url
            ) from error
        yield target


def _sources(origin: Origin) -> Mapping[str, str]:
    """Remote path -> what it adds to the local one."""
    fs, path = origin.storage.fs, origin.storage.path
    if origin.kind == "keras":
        return {path: ""}
    if origin.kind == "saved_model":
        return {found: found[found.index(path) + len(path) :] for found in fs.find(path)}
    beside = fs.ls(posixpath.dirname(path), detail=False)
    mine = [f for f in beside if posixpath.basename(f).startswith(posixpath.basename(path) + ".")]
    return {f: posixpath.basename(f)[len(posixpath.basename(path)) :] for f in mine}
