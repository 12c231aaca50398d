"""Which old state this rank goes on from, and its bytes: chosen by rank 0, read and verified by
all.

If any rank finds damage that no other copy mends, all step back together to the next older
checkpoint. Trouble of the storage itself is no damage: it raises, and nothing is set aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytf.checkpoint.layout import TensorInfo
from raytf.checkpoint.manifest import Manifest, Part, TensorEntry
from raytf.checkpoint.store import CheckpointStore, Problem
from raytf.errors import CheckpointDamagedError, ConfigError, NotFoundError
from raytf.worker.links import Links, RunPlace
from raytf.worker.state import aligned, array_of, base_name, difference

__all__ = ["Restored", "Restorer"]

_MAX_LINES = 20  # of a difference between model and checkpoint that an error shows
logger = logging.getLogger("raytf")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """An old state, read and verified.

    Attributes:
        store: it came from.
        manifest: of the checkpoint.
        arrays: every tensor by name.
        is_own: whether it is of this very run; else the run starts from it (`resume_from`).
        repaired: whether some of its bytes had to come from another copy.
    """

    store: CheckpointStore
    manifest: Manifest
    arrays: dict[str, np.ndarray] = field(repr=False)
    is_own: bool
    repaired: bool

    def own(self, rank: int) -> Mapping[str, Any]:
        """The JSON that a rank had for itself; a rank that the run did not have gets rank 0's."""
        places = self.manifest.state["own_of_rank"]
        return self.manifest.state["own"][places[rank] if rank < len(places) else places[0]]


@dataclass(frozen=True)
class _Candidate:
    store: CheckpointStore
    step: int
    is_own: bool
    manifest: Manifest | None
    problem: str | None


class Restorer:
    """Finds and reads the state to go on from.

    Args:
        place: of the run.
        store: of the run.
        links: of this rank.
        exchange: `exchange(int32 array) -> int32 array`, the sum over all ranks: how bytes that one
            rank has read reach the others.
        tell: takes a message for the user, on rank 0.
    """

    def __init__(
        self,
        place: RunPlace,
        store: CheckpointStore,
        links: Links,
        tell: Callable[[str], None],
    ) -> None:
        self._place = place
        self._store = store
        self._links = links
        self._tell = tell
        self._round = 0
        self._left: list[int] | None = None
        self._candidate = self._next()
        self._reading = self._start_reading(self._candidate)

    @property
    def threads(self) -> int | None:
        """TensorFlow's threads of the run so far; fixed, because results depend on them."""
        found = self._candidate
        if found is None or found.manifest is None or not found.is_own:
            return None
        return found.manifest.threads

    def load(
        self, here: Mapping[str, TensorInfo], optimizer: str, exchange: Callable[[Any], Any]
    ) -> Restored | None:
        """Reads the newest good state.

        Args:
            here: the model's variables by name.
            optimizer: its class.

        Returns:
            None if there is none: the run starts from the beginning.

        Raises:
            ConfigError: the state is of another model.
            StorageError: the storage cannot be read.
        """
        while (found := self._candidate) is not None:
            arrays: dict[str, np.ndarray] = {}
            problems: list[Problem] = []
            damage = found.problem
            if found.manifest is not None:
                self._check_model(found, here, optimizer)
                arrays, damage = self._read(found, found.manifest, here, problems, exchange)
            told = {"damage": damage, "repaired": [str(p) for p in problems]}
            answers = self._links.share(f"restored/{self._round}", told)
            repaired = sorted({text for a in answers for text in a["repaired"]})
            damages = [f"rank {r}: {a['damage']}" for r, a in enumerate(answers) if a["damage"]]
            if not damages and found.manifest is not None:
                for text in repaired:
                    self._tell(f"checkpoint of step {found.step}: {text}, repaired from a copy")
                return Restored(
                    store=found.store,
                    manifest=found.manifest,
                    arrays=arrays,
                    is_own=found.is_own,
                    repaired=bool(repaired),
                )
            self._set_aside(found, damages)
            self._round += 1
            self._candidate = self._next()
            self._reading = self._start_reading(self._candidate)
        return None

    def _next(self) -> _Candidate | None:
        """The next older candidate, the same on all ranks, its manifest read by each."""
        proposal = self._propose() if self._links.is_chief else None
        chosen = self._links.share(f"resume/{self._round}", proposal)[0]
        if chosen is None:
            return None
        is_own, step = chosen
        origin = self._place.origin
        store = self._store if is_own or origin is None else CheckpointStore(origin.storage)
        try:
            return _Candidate(store, step, is_own, store.manifest(step), None)
        except (CheckpointDamagedError, NotFoundError) as error:
            return _Candidate(store, step, is_own, None, error.message)

    def _propose(self) -> tuple[bool, int] | None:
        if self._left is None:
            self._left = self._store.steps()
            if not self._left and self._place.origin is not None:
                origin = self._place.origin
                return (False, origin.step) if origin.step is not None else None
        return (True, self._left.pop()) if self._left else None

    def _set_aside(self, found: _Candidate, damages: list[str]) -> None:
        what = "; ".join(damages)
        if not found.is_own:
            raise CheckpointDamagedError(
                f"{found.store.step_url(found.step)} cannot be used: {what}. Choose another "
                "checkpoint for resume_from.",
                path=found.store.step_url(found.step),
            )
        self._tell(f"checkpoint of step {found.step} is damaged and set aside: {what}")
        if self._links.is_chief:
            problems = [Problem(found.store.path(found.step), text) for text in damages]
            found.store.quarantine(found.step, self._place.attempt, problems)

    def _check_model(
        self, found: _Candidate, here: Mapping[str, TensorInfo], optimizer: str
    ) -> None:
        manifest, origin = found.manifest, self._place.origin
        if manifest is None or (not found.is_own and origin is not None and not origin.strict):
            return
        where = found.store.step_url(found.step)
        then = manifest.model.get("optimizer")
        if then != optimizer:
            raise ConfigError(
                f"{where} was trained with the optimizer {then}, build_model now gives "
                f"{optimizer}. {_way_out(found.is_own)}",
                old=then,
                new=optimizer,
            )
        lines = difference(here, _comparable(manifest))
        if lines:
            more = len(lines) - _MAX_LINES
            shown = [*lines[:_MAX_LINES], f"and {more} more"] if more > 0 else lines
            raise ConfigError(
                f"build_model does not give the model of {where}:\n  "
                + "\n  ".join(shown)
                + f"\n{_way_out(found.is_own)}",
                path=where,
            )

    def _start_reading(self, found: _Candidate | None) -> Future[_Bytes] | None:
        """Reads while TensorFlow forms the group and the model is built, if all is to be read.

        On a local file system every rank reads all; over a network each reads its share, and the
        ranks hand it to each other (`_read`).
        """
        if found is None or found.manifest is None or not self._alone(found):
            return None
        if not self._strict(found):
            return None
        pool = ThreadPoolExecutor(1, thread_name_prefix="raytf-read")
        reading = pool.submit(_read_all, found.store, found.manifest.tensors)
        pool.shutdown(wait=False)
        return reading

    def _alone(self, found: _Candidate) -> bool:
        return found.store.root.is_local or self._links.num_workers == 1

    def _strict(self, found: _Candidate) -> bool:
        origin = self._place.origin
        return found.is_own or origin is None or origin.strict

    def _read(
        self,
        found: _Candidate,
        manifest: Manifest,
        here: Mapping[str, TensorInfo],
        problems: list[Problem],
        exchange: Callable[[Any], Any],
    ) -> tuple[dict[str, np.ndarray], str | None]:
        """All tensors, or what is wrong with them."""
        strict = self._strict(found)
        wanted = [t for t in manifest.tensors if strict or _fits(here.get(base_name(t.name)[0]), t)]
        if self._alone(found):
            reading, self._reading = self._reading, None
            read = _read_all(found.store, wanted) if reading is None else reading.result()
            memory, damage = read.memory, read.damage
            problems += read.problems
        else:
            memory, damage = self._read_together(found, wanted, problems, exchange)
        if damage is not None:
            return {}, damage
        return {t.name: array_of(memory[t.name], t.dtype, t.shape) for t in wanted}, None

    def _read_together(
        self,
        found: _Candidate,
        wanted: Sequence[TensorEntry],
        problems: list[Problem],
        exchange: Callable[[Any], Any],
    ) -> tuple[dict[str, np.ndarray], str | None]:
        parts = [part for tensor in wanted for part in tensor.parts]
        mine = _shares(parts, self._links.num_workers)[self._links.rank]
        data: dict[Any, Any] = {}
        damage = None
        try:
            pieces = found.store.read_parts(mine, problems)
            data = {_place_of(p): d for p, d in zip(mine, pieces, strict=True)}
        except CheckpointDamagedError as error:
            damage = error.message
        if any(self._links.share(f"read/{self._round}", damage)):
            return {}, damage
        whole = _exchanged(parts, data, exchange)
        return {t.name: _joined([whole[_place_of(p)] for p in t.parts]) for t in wanted}, None


@dataclass(frozen=True)
class _Bytes:
    """What one rank has read: memory by tensor, or what is wrong with it."""

    memory: dict[str, np.ndarray]
    problems: list[Problem]
    damage: str | None


def _read_all(store: CheckpointStore, tensors: Sequence[TensorEntry]) -> _Bytes:
    memory = {t.name: aligned(t.nbytes) for t in tensors}
    places = [place for t in tensors for place in _cut(memory[t.name], t.parts)]
    parts = [part for tensor in tensors for part in tensor.parts]
    problems: list[Problem] = []
    try:
        pieces = store.read_parts(parts, problems, places)
    except CheckpointDamagedError as error:
        return _Bytes({}, problems, error.message)
    for place, piece in zip(places, pieces, strict=True):
        if not np.shares_memory(place, piece):
            place[:] = piece
    return _Bytes(memory, problems, None)


def _fits(mine: TensorInfo | None, tensor: Any) -> bool:
    return mine is not None and (mine.shape, mine.dtype) == (tuple(tensor.shape), tensor.dtype)


def _comparable(manifest: Manifest) -> dict[str, Any]:
    """The checkpoint's variables: no arrays of callbacks; of what each rank has, rank 0's."""
    found: dict[str, Any] = {}
    for tensor in manifest.tensors:
        name, rank = base_name(tensor.name)
        if not name.startswith("callback/") and not rank:
            found[name] = tensor
    return found


def _way_out(is_own: bool) -> str:
    if is_own:
        return "Use the build_model of the run, or start a new run under another name."
    return "Use the build_model it was trained with, or resume_strict=False to take what fits."


def _place_of(part: Part) -> tuple[str, int, int]:
    return part.shard, part.offset, part.nbytes


def _cut(memory: np.ndarray, parts: Sequence[Part]) -> list[np.ndarray]:
    """A tensor's memory in pieces of the sizes of its parts."""
    return np.split(memory, np.cumsum([part.nbytes for part in parts])[:-1])


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _shares(parts: list[Part], number: int) -> list[list[Part]]:
    """The parts in `number` lists of about equal bytes; the same on all ranks."""
    shares: list[list[Part]] = [[] for _ in range(number)]
    sizes = [0] * number
    for part in sorted(parts, key=lambda p: (-p.nbytes, _place_of(p))):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(part)
        sizes[smallest] += part.nbytes
    return shares


def _exchanged(
    parts: list[Part],
    data: Mapping[tuple[str, int, int], np.ndarray],
    exchange: Callable[[Any], Any],
) -> dict[tuple[str, int, int], Any]:
    """Every part's bytes on every rank: each rank's own in their places, added up as integers."""
    places = sorted({_place_of(part) for part in parts})
    starts = np.cumsum([0, *(-(-nbytes // 4) for _, _, nbytes in places)])
    words = np.zeros(int(starts[-1]), np.int32)
    for start, place in zip(starts, places, strict=False):
        if place in data:
            words.view(np.uint8)[start * 4 : start * 4 + place[2]] = data[place]
    whole = exchange(words).view(np.uint8)
    return {
        place: whole[start * 4 : start * 4 + place[2]]
        for start, place in zip(starts, places, strict=False)
    }
