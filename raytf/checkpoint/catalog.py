"""Which checkpoints a store holds: committed ones, quarantined ones, and files of neither.

Owns what counts as committed, and the defence against listings that lag behind: every step is
announced in `recent.json` before its manifest is written, so a step is in the listing or announced;
whether it exists is then asked of its manifest directly.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from raytf.checkpoint.files import Files
from raytf.checkpoint.manifest import MANIFEST, Manifest, parse_step, step_name
from raytf.errors import CheckpointDamagedError, NotFoundError

__all__ = ["RECENT", "Catalog", "Survey", "is_bad_manifest"]

_log = logging.getLogger(__name__)

RECENT = "recent.json"
NUM_RECENT = 64  # far more saves than any listing lags behind
_BAD_PREFIX, _BAD_SUFFIX = "manifest.bad-", ".json"


def is_bad_manifest(name: str) -> bool:
    """Whether a file's name is that of a quarantined manifest."""
    return name.startswith(_BAD_PREFIX) and name.endswith(_BAD_SUFFIX)


@dataclass
class Survey:
    """All that a store holds, at one time.

    Attributes:
        files: path to bytes.
        manifests: path to manifest, quarantined ones too; None where it cannot be read as one.
    """

    files: dict[str, int]
    manifests: dict[str, Manifest | None] = field(default_factory=dict[str, Manifest | None])

    @property
    def committed(self) -> list[int]:
        """Ascending."""
        found = (_split(path) for path in self.manifests)
        return sorted(step for step, name in found if step is not None and name == MANIFEST)

    def of_step(self, step: int) -> list[str]:
        """Paths of the files in a step's directory."""
        return [path for path in self.files if _split(path)[0] == step]

    def named(self, without_step: int | None = None) -> set[str]:
        """Shards that a manifest names, those in the directory of `without_step` left out."""
        return {
            shard.path
            for path, manifest in self.manifests.items()
            if manifest is not None and (without_step is None or _split(path)[0] != without_step)
            for shard in manifest.shards
        }

    def unreadable(self) -> set[int]:
        """Steps with a manifest that cannot be read: what it names is unknown."""
        found = (_split(path)[0] for path, manifest in self.manifests.items() if manifest is None)
        return {step for step in found if step is not None}


class Catalog:
    """What is there, read from the store each time it is asked."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._cache: dict[str, tuple[int, Manifest]] = {}

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        candidates = sorted(self._candidates())
        there = self._files.map(self.exists, candidates)
        return [step for step, exists in zip(candidates, there, strict=True) if exists]

    def latest(self) -> int | None:
        """The newest committed step."""
        candidates = sorted(self._candidates(), reverse=True)
        return next((step for step in candidates if self.exists(step)), None)

    def exists(self, step: int) -> bool:
        """Whether a step is committed."""
        return self._files.exists(manifest_path(step))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed step.

        Raises:
            NotFoundError: the step is not committed.
            CheckpointDamagedError: the manifest is not what was written.
        """
        path = manifest_path(step)
        absolute = self._files.absolute(path)
        try:
            data = self._files.read(path)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"There is no checkpoint of step {step}: {absolute} does not exist. "
                "`raytf checkpoints list` shows which there are.",
                path=absolute,
                step=step,
            ) from error
        manifest = Manifest.from_bytes(data, absolute)
        if manifest.step != step:
            raise CheckpointDamagedError(
                f"{absolute} is the manifest of step {manifest.step}.", path=absolute, step=step
            )
        return manifest

    def announce(self, step: int) -> None:
        """Says, before a step is committed, that it will be."""
        steps = sorted({*self._recent(), step})[-NUM_RECENT:]
        if step not in steps:  # going back by more than is remembered
            steps[0] = step
        self._files.write_small_atomic(RECENT, json.dumps({"steps": steps}).encode())

    def survey(self, tensors: bool = False) -> Survey:
        """Everything that is there.

        Args:
            tensors: whether manifests name their tensors. Without them they are remembered, and
                one that was read before is not read again.

        Raises:
            StorageError: the store cannot be listed, or a manifest not be read.
        """
        survey = Survey(self._files.tree())
        for step in self._recent():
            path = manifest_path(step)
            size = None if path in survey.files else self._files.size(path)
            if size is not None:
                survey.files[path] = size
        paths = [path for path in survey.files if _is_manifest(path)]
        found = self._files.map(lambda p: self._known(p, survey.files[p], tensors), paths)
        for path, (there, manifest) in zip(paths, found, strict=True):
            if there:
                survey.manifests[path] = manifest
            else:
                survey.files.pop(path)  # a listing from before it was deleted
        self._cache = {path: kept for path, kept in self._cache.items() if path in survey.files}
        return survey

    def forget(self, path: str) -> None:
        """A manifest was written, renamed or deleted: what was read of it no longer counts."""
        self._cache.pop(path, None)

    def bad_manifests(self, step: int) -> list[str]:
        """Paths of the quarantined manifests of a step."""
        directory = step_name(step)
        names = self._files.list(directory)
        return sorted(posixpath.join(directory, name) for name in names if is_bad_manifest(name))

    def bad_path(self, step: int, attempt: int, data: bytes) -> tuple[str, bool]:
        """Where to put a damaged manifest, and whether those bytes lie there already."""
        number = 1
        while True:
            suffix = f"-{number}" if number > 1 else ""
            name = f"{_BAD_PREFIX}{attempt}{suffix}{_BAD_SUFFIX}"
            path = posixpath.join(step_name(step), name)
            try:
                if self._files.read(path) == data:
                    return path, True
            except FileNotFoundError:
                return path, False
            number += 1

    def _known(self, path: str, nbytes: int, tensors: bool) -> tuple[bool, Manifest | None]:
        cached = self._cache.get(path)
        if cached is not None and cached[0] == nbytes and not tensors:
            return True, cached[1]
        try:
            data = self._files.read(path)
        except FileNotFoundError:
            return False, None
        try:
            manifest = Manifest.from_bytes(data, self._files.absolute(path))
        except CheckpointDamagedError as error:
            _log.debug("%s", error)
            return True, None
        if not tensors:  # thousands of tensors in hundreds of checkpoints would fill the memory
            manifest = replace(manifest, tensors=())
            self._cache[path] = (nbytes, manifest)
        return True, manifest

    def _candidates(self) -> set[int]:
        listed = (parse_step(name) for name in self._files.list())
        return {step for step in listed if step is not None} | set(self._recent())

    def _recent(self) -> list[int]:
        try:
            data = self._files.read(RECENT)
        except FileNotFoundError:
            return []
        try:
            document: Any = json.loads(data)
            return [step for step in cast("Iterable[Any]", document["steps"]) if _is_step(step)]
        except (ValueError, TypeError, KeyError) as error:
            # It only helps listings along; the next commit writes it anew.
            _log.warning("%s cannot be read: %s", self._files.absolute(RECENT), error)
            return []


def manifest_path(step: int) -> str:
    return posixpath.join(step_name(step), MANIFEST)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_manifest(path: str) -> bool:
    step, name = _split(path)
    return step is not None and (name == MANIFEST or is_bad_manifest(name))


def _split(path: str) -> tuple[int | None, str]:
    directory, _, name = path.partition("/")
    return (parse_step(directory), name) if "/" not in name else (None, name)
