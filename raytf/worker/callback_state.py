"""The state of callbacks, captured and put back exactly.

Owns which attributes of a callback are state. A callback that has `get_state()` and
`set_state(state)` speaks for itself. Of any other those attributes are taken that differ from what
they were when the callback was made, or from what `on_train_begin` left: so counters and best
values are state, and settings such as `patience` are not and may change when a run is resumed.
Functions that the user hands to LambdaCallback, and whatever they close over, cannot be seen.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytf.errors import ConfigError, RaytfError
from raytf.worker import callback_values as values
from raytf.worker.callback_files import LogFile

__all__ = ["CallbackStates"]

logger = logging.getLogger("raytf")

VERSION = 1
_KERAS_OWN = {"_model", "model", "params", "validation_data"}
# By class: what each process makes for itself, or what on_train_begin derives.
_REMADE = {
    "CSVLogger": {"csv_file", "writer", "append", "append_header"},
    "TensorBoard": {
        *("_writers", "_summary_module", "_prev_summary_state", "_train_step", "_val_step"),
        *("_is_tracing", "_profiler_started", "_batch_trace_context"),
    },
}


@dataclass
class _Member:
    """A callback on this rank.

    Attributes:
        name: class name, with "#2" for the second of its kind.
        at_start: attributes at construction; `begun`: after on_train_begin, None before.
        file: of a CSVLogger.
    """

    callback: Any
    name: str
    everywhere: bool
    at_start: dict[str, Any]
    begun: dict[str, Any] | None = None
    file: LogFile | None = None
    warned: set[str] = field(default_factory=set)

    @property
    def speaks(self) -> bool:
        """Whether it has get_state and set_state."""
        return all(callable(getattr(self.callback, n, None)) for n in ("get_state", "set_state"))

    def key(self, *parts: str) -> str:
        return "/".join(("callback", self.name, *parts))


class CallbackStates:
    """The state of this rank's callbacks.

    Order of calls: construction, `before_train_begin` when resuming, on_train_begin, `began`,
    `restore` when resuming, then `capture` as often as wanted.

    Args:
        callbacks: in the order of the CallbackList, History included, with their model set; those
            that run on the chief only where this is the chief.
        everywhere: whether a callback runs on every rank.
    """

    def __init__(self, callbacks: list[Any], everywhere: Callable[[Any], bool]) -> None:
        names: Counter[str] = Counter()
        self._members: list[_Member] = []
        # Those that run everywhere are numbered first: their names are the same on all ranks.
        for callback in sorted(callbacks, key=lambda c: not everywhere(c)):
            kind = type(callback).__name__
            names[kind] += 1
            name = kind if names[kind] == 1 else f"{kind}#{names[kind]}"
            member = _Member(callback, name, everywhere(callback), _snapshots(callback))
            if _is(callback, "CSVLogger"):
                member.file = LogFile(str(callback.filename))
            self._members.append(member)
        self._appended: list[tuple[Any, bool]] = []

    def before_train_begin(self, state: Mapping[str, Any] | None) -> None:
        """Brings the files of CSVLogger back to what they held, and makes it append.

        Args:
            state: what `capture` gave; None: a fresh start, nothing happens.
        """
        for member, known in self._with_state(state or {}):
            if member.file is not None and "file" in known:
                member.file.restore(known["file"])
                self._appended.append((member.callback, member.callback.append))
                member.callback.append = True

    def began(self) -> None:
        """To be called after on_train_begin."""
        for callback, append in self._appended:
            callback.append = append
        self._appended.clear()
        for member in self._members:
            member.begun = _snapshots(member.callback)

    def capture(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The present state; shares nothing with the callbacks.

        Returns:
            JSON-able state; arrays of the callbacks that run on every rank; those of the
            chief-only ones. The state refers to arrays as `{"__array__": key}`.

        Raises:
            ConfigError: `get_state()` gave something that is no data.
        """
        everywhere: dict[str, np.ndarray] = {}
        chief: dict[str, np.ndarray] = {}
        found: dict[str, Any] = {}
        for member in self._members:
            arrays = everywhere if member.everywhere else chief
            known: dict[str, Any] = {"everywhere": member.everywhere}
            if member.speaks:
                known["given"] = _given(member, arrays)
            else:
                known |= self._changed(member, arrays)
                known["chosen"] = _has_chosen(member.callback)
            if member.file is not None:
                known["file"] = member.file.capture()
            found[member.name] = known
        return {"version": VERSION, "callbacks": found}, everywhere, chief

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
        """Puts the state back; to be called after on_train_begin.

        Args:
            state: what `capture` gave, on any rank.
            arrays: those of this rank's callbacks, by key.

        Returns:
            Messages for the user, about what could not be put back.

        Raises:
            CheckpointDamagedError: an array is not there.
        """
        if any(member.begun is None for member in self._members):
            self.began()
        messages: list[str] = []
        for member, known in self._with_state(state):
            if "given" in known and member.speaks:
                member.callback.set_state(values.decode(known["given"], arrays))
            elif "attributes" in known and not member.speaks:
                messages += _put_back(member, known, arrays)
            else:
                messages.append(
                    f"{member.name} was saved {'with' if 'given' in known else 'without'} "
                    "get_state() and set_state() and now is the other way round; it starts anew."
                )
        here = {member.name for member in self._members}
        saved = state.get("callbacks", {})
        for name in saved:
            if name not in here:
                messages.append(f"{name} has state in the checkpoint and is no callback any more.")
        for name in sorted(here - set(saved)):
            messages.append(f"{name} has no state in the checkpoint; it starts anew.")
        return messages

    def _with_state(self, state: Mapping[str, Any]) -> Iterator[tuple[_Member, Mapping[str, Any]]]:
        version = state.get("version", VERSION)
        if version != VERSION:
            raise RaytfError(
                f"The state of callbacks has version {version}; this raytf reads {VERSION}. Resume "
                "with the raytf that wrote it."
            )
        saved = state.get("callbacks", {})
        for member in self._members:
            if member.name in saved:
                yield member, saved[member.name]

    def _changed(self, member: _Member, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """`{"attributes": ..., "deleted": ...}`: what is no longer as it was made or begun."""
        attributes: dict[str, Any] = {}
        now = _attributes(member.callback)
        begun = member.at_start if member.begun is None else member.begun
        owned: set[int] | None = None
        for name, value in now.items():
            shots = (member.at_start.get(name), begun.get(name))
            as_before = [shot is not None and values.unchanged(shot, value) for shot in shots]
            if values.moves_unseen(value):
                self._warn(member, name, type(value).__name__)
                continue
            if all(as_before):
                continue
            if values.variables_of(value):
                owned = _ids_of_model(member.callback) if owned is None else owned
                if all(id(v) in owned for v in values.variables_of(value)):
                    continue  # the model's own
            mine: dict[str, np.ndarray] = {}  # of an attribute that cannot be captured, nothing
            try:
                attributes[name] = _encode(value, member.key(name), mine)
            except values.Uncapturable as error:
                plain = values.is_no_state(value) and hasattr(value, "__code__")
                if not any(as_before) and not plain:
                    self._warn(member, name, error.args[0])
            arrays.update(mine if name in attributes else {})
        return {"attributes": attributes, "deleted": sorted(set(begun) - set(now))}

    def _warn(self, member: _Member, name: str, kind: str) -> None:
        if name in member.warned:
            return
        member.warned.add(name)
        logger.warning(
            "callbacks: %s.%s (%s) cannot be captured, so a resumed run goes on without what it "
            "holds now. Give %s get_state() and set_state(state), or keep its state in numbers, "
            "text, lists, dicts and NumPy arrays.",
            *(member.name, name, kind, type(member.callback).__name__),
        )


def _is(callback: Any, name: str) -> bool:
    """Whether it is Keras's callback of that name, or derived from it."""
    return any(
        cls.__name__ == name and cls.__module__.split(".")[0] in ("keras", "tf_keras")
        for cls in type(callback).__mro__
    )


def _attributes(callback: Any) -> dict[str, Any]:
    skip = set(_KERAS_OWN)
    for name, remade in _REMADE.items():
        skip |= remade if _is(callback, name) else set()
    if hasattr(callback, "_set_monitor_op"):
        skip |= {"monitor_op", "min_delta"}  # see _has_chosen
    return {name: value for name, value in vars(callback).items() if name not in skip}


def _has_chosen(callback: Any) -> bool:
    """Whether Keras has chosen what an improvement is.

    Keras 3.15 does so at the first end of an epoch, and then flips the sign of min_delta, which is
    a setting. A resumed callback has to choose at once: ModelCheckpoint may ask before an epoch
    ends.
    """
    return hasattr(callback, "_set_monitor_op") and callback.monitor_op is not None


def _snapshots(callback: Any) -> dict[str, Any]:
    return {name: values.snapshot(value) for name, value in _attributes(callback).items()}


def _ids_of_model(callback: Any) -> set[int]:
    model: Any = getattr(callback, "model", None)
    optimizer: Any = getattr(model, "optimizer", None)
    owners: list[Any] = [model, optimizer, getattr(optimizer, "inner_optimizer", None)]
    found = [v for o in owners for n in ("variables", "metrics_variables") for v in _listed(o, n)]
    # Legacy optimizers do not list their learning rate.
    found += [getattr(o, n, None) for o in owners[1:] for n in ("_learning_rate", "_iterations")]
    return {id(v) for v in found} | {id(v.value) for v in found if hasattr(v, "value")}


def _listed(owner: Any, name: str) -> list[Any]:
    listed: Any = getattr(owner, name, None)
    if callable(listed):  # a method in some optimizers of legacy Keras
        listed = listed()
    return [] if listed is None else list(listed)


def _encode(value: Any, key: str, arrays: dict[str, np.ndarray]) -> Any:
    try:
        return values.encode(value, key, arrays)
    except values.Uncapturable:
        arrays.clear()
        if values.is_no_state(value):
            raise
    return values.encode_in_place(value, key, arrays)


def _given(member: _Member, arrays: dict[str, np.ndarray]) -> Any:
    try:
        return values.encode(member.callback.get_state(), member.key("given"), arrays)
    except values.Uncapturable as error:
        raise ConfigError(
            f"callbacks: {member.name}.get_state() must return numbers, text, lists, dicts and "
            f"NumPy arrays, nested as you like. Received in it: {error.args[0]}."
        ) from error


def _put_back(
    member: _Member, known: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> list[str]:
    attributes = vars(member.callback)
    messages: list[str] = []
    if known["chosen"] and not _has_chosen(member.callback):
        member.callback._set_monitor_op()
    for name in known["deleted"]:
        attributes.pop(name, None)
    for name, node in known["attributes"].items():
        if not (isinstance(node, Mapping) and "__in_place__" in node):
            attributes[name] = values.decode(node, arrays)
        elif not values.restore_in_place(attributes.get(name), node, arrays):
            messages.append(
                f"{member.name}.{name} was a {node['type']} and is "
                f"{type(attributes.get(name)).__name__} of another shape or kind now; it starts "
                "anew."
            )
    return messages
