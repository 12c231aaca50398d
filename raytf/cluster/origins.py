"""What `resume_from=` means: text to an old state, decided on the driver before anything starts.

Owns the ways to write it. Nothing is read but names, sizes and manifests; the state itself is the
workers' to read. Whoever wrote it may have written it anywhere, so the text is first taken as it
stands (a directory may be called `a#best`) and only then apart.
"""

from __future__ import annotations

import ast
import posixpath
import re

from raytf.checkpoint.manifest import parse_step
from raytf.checkpoint.storage import FINAL, Storage, resolve
from raytf.checkpoint.store import CHECKPOINTS, CheckpointStore
from raytf.errors import ConfigError, NotFoundError, RaytfError, StorageError
from raytf.worker.links import Origin

__all__ = ["choose_step", "resolve_origin"]

_SHOWN = 8  # names or steps listed in a message
_WAYS = (
    "resume_from= takes the URL of a step directory (.../checkpoints/step-0000000500), of a run "
    "(its newest checkpoint; with #best, #latest or #500 at its end another), of a .keras file, of "
    "a SavedModel directory, or of a TensorFlow checkpoint (its prefix, or its directory)"
)
_CHOICE = re.compile(r"(.+)#(best|latest|[0-9]+)", re.S)
_NEWEST = re.compile(rb'^\s*model_checkpoint_path:\s*("(?:[^"\\]|\\.)*")', re.M)


def resolve_origin(text: str, strict: bool) -> Origin:
    """Finds the old state that a new run starts from.

    Args:
        text: URL or local path, as `KerasTrainer(resume_from=...)` says.
        strict: whether every name and shape must be the same.

    Raises:
        NotFoundError: nothing is there; names what is.
        ConfigError: there is something, but no state that can be used.
        StorageError: the storage cannot be asked.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"resume_from must be a URL or path. Received: {text!r}. {_WAYS}.")
    place = resolve(text)
    try:
        found = _at(place, text, strict)
        if found is not None:
            return found
        chosen = _CHOICE.fullmatch(text)
        if chosen is not None:
            return _of_run(resolve(chosen[1]), chosen[2], text, strict)
        raise _nothing(place, text)
    except RaytfError:
        raise
    except Exception as error:  # a store raises what it likes; all of it means "cannot"
        raise StorageError(
            f"resume_from={text!r}: the storage cannot be asked: {type(error).__name__}: {error}. "
            "Check the URL, permissions and credentials.",
            path=text,
        ) from error


def choose_step(store: CheckpointStore, choice: str) -> int:
    """The step that "latest", "best" or a number stands for, committed in `store`.

    Raises:
        NotFoundError: there is none; names the nearest.
        ConfigError: `choice` is none of these, or the run has no rule for what is best.
    """
    if choice == "latest":
        step = store.latest()
        if step is None:
            raise NotFoundError(f"{store.url} holds no checkpoint.", path=store.url)
        return step
    if choice == "best":
        return _best(store)
    if not re.fullmatch(r"[0-9]+", choice):
        raise ConfigError(f"A step is a number, 'latest' or 'best'. Received: {choice!r}.")
    step, steps = int(choice), store.steps()
    if step in steps:
        return step
    near = sorted(sorted(steps, key=lambda other: abs(other - step))[:_SHOWN])
    there = f"The nearest of {len(steps)}: {_listed(near)}." if steps else "It holds none at all."
    raise NotFoundError(
        f"There is no checkpoint of step {step} in {store.url}. {there}", path=store.url, step=step
    )


def _best(store: CheckpointStore) -> int:
    latest = choose_step(store, "latest")
    step = store.best()
    if step is not None:
        return step
    manifest = store.manifest(latest)
    if manifest.best is None:
        metrics = ", ".join(sorted(manifest.metrics)) or "none"
        raise ConfigError(
            f"{store.url} has no best checkpoint: the run was not told what is best "
            f"(SaveConfig(keep_best=...)). Its metrics: {metrics}. Name a step; "
            f"CheckpointStore(url).best(metric, mode) finds it.",
            path=store.url,
        )
    raise NotFoundError(
        f"{store.url} has no checkpoint with a value of {manifest.best['metric']!r}.",
        path=store.url,
    )


def _at(place: Storage, text: str, strict: bool) -> Origin | None:
    """What lies at exactly this place; None if nothing does that could be a state."""
    name = posixpath.basename(place.path)
    step = parse_step(name)
    parent = _parent(place)
    if step is not None and posixpath.basename(parent.path) == CHECKPOINTS:
        return _of_run(parent, str(step), text, strict)
    if place.exists():
        if place.fs.isfile(place.path):
            return _of_file(place, text, strict)
        return _of_directory(place, text, strict)
    return _of_prefix(place, text, strict)


def _of_prefix(place: Storage, text: str, strict: bool) -> Origin | None:
    if not Storage(place.fs, f"{place.path}.index", place.scheme).exists():
        return None
    return Origin(kind="tf_checkpoint", url=text, storage=place, strict=strict)


def _of_file(place: Storage, text: str, strict: bool) -> Origin:
    if place.path.endswith(".keras"):
        return Origin(kind="keras", url=text, storage=place, strict=strict)
    if place.path.endswith(".index"):
        prefix = Storage(place.fs, place.path.removesuffix(".index"), place.scheme)
        return Origin(kind="tf_checkpoint", url=text, storage=prefix, strict=strict)
    found = _of_prefix(place, text, strict)
    if found is None:
        raise ConfigError(f"resume_from={text!r} is a file with no state raytf reads. {_WAYS}.")
    return found


def _of_directory(place: Storage, text: str, strict: bool) -> Origin:
    if place.exists("saved_model.pb"):
        return Origin(kind="saved_model", url=text, storage=place, strict=strict)
    if place.exists("checkpoint"):
        return _of_tf_directory(place, text, strict)
    if _is_run(place):
        return _of_run(place, "latest", text, strict)
    found = _of_prefix(place, text, strict)  # a directory may share its name with a prefix
    if found is None:
        raise ConfigError(
            f"resume_from={text!r} is a directory with no state raytf reads: there is "
            f"{_names_in(place)}. {_WAYS}."
        )
    return found


def _is_run(place: Storage) -> bool:
    if posixpath.basename(place.path) == CHECKPOINTS:
        return True
    return place.exists(CHECKPOINTS) or place.exists("run.json") or place.exists(FINAL)


def _of_run(place: Storage, choice: str, text: str, strict: bool) -> Origin:
    store = CheckpointStore(place)
    if not _is_run(place):
        raise _nothing(place, text)
    try:
        step = choose_step(store, choice)
    except NotFoundError as error:
        raise NotFoundError(
            f"resume_from={text!r}: {error.message}{_finished_model(place)}", **error.context
        ) from error
    run = _parent(place) if posixpath.basename(place.path) == CHECKPOINTS else place
    return Origin(kind="step", url=store.step_url(step), storage=run, step=step, strict=strict)


def _finished_model(place: Storage) -> str:
    """A word on the trained model, which a run without checkpoints may still have."""
    final = place.join(FINAL)
    if not final.exists():
        return ""
    models = [name for name in _names(final) if name.endswith(".keras")]
    if not models:
        return ""
    return f" Its trained model can be used: resume_from={final.join(models[0]).url!r}."


def _of_tf_directory(place: Storage, text: str, strict: bool) -> Origin:
    index = place.join("checkpoint")
    if not place.fs.isfile(index.path):
        raise ConfigError(f"resume_from={text!r}: {index.url} is no file. {_WAYS}.")
    match = _NEWEST.search(index.read_bytes())
    if match is None:
        raise ConfigError(
            f"resume_from={text!r}: {index.url} is not the file that TensorFlow writes: it names "
            "no model_checkpoint_path. Give the checkpoint's prefix (the path without .index)."
        )
    # Protocol buffer text escapes as C does, and so do Python's bytes.
    named = ast.literal_eval("b" + match[1].decode("latin-1")).decode()
    # An absolute name is of where it was written; the files may have been moved since.
    candidates = [place.join(posixpath.basename(named))]
    if not posixpath.isabs(named):
        candidates.insert(0, place.join(named))
    elif place.is_local:
        candidates.append(Storage(place.fs, named, place.scheme))
    for prefix in candidates:
        found = _of_prefix(prefix, text, strict)
        if found is not None:
            return found
    raise NotFoundError(
        f"resume_from={text!r}: {index.url} names {named!r}, but there is no {named}.index. There "
        f"is {_names_in(place)}.",
        path=candidates[0].url,
    )


def _parent(place: Storage) -> Storage:
    return Storage(place.fs, posixpath.dirname(place.path), place.scheme)


def _names(place: Storage) -> list[str]:
    entries = place.fs.ls(place.path, detail=False)
    return sorted(posixpath.basename(str(entry).rstrip("/")) for entry in entries)


def _names_in(place: Storage) -> str:
    names = _names(place)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) + more) or "nothing in it"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _nothing(place: Storage, text: str) -> NotFoundError:
    """What was looked for, and what the nearest directory that exists holds."""
    above = _parent(place)
    while not above.exists() and posixpath.dirname(above.path) not in ("", above.path):
        above = _parent(above)
    there = f" In {above.url} there is {_names_in(above)}." if above.exists() else ""
    return NotFoundError(
        f"resume_from={text!r}: there is nothing at {place.url}.{there} {_WAYS}.", path=place.url
    )
