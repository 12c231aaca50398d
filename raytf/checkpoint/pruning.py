"""Deleting checkpoints and leftovers, so that a crash at any moment loses nothing that was kept.

Owns the order of deletions: the manifest first, so that a checkpoint is whole or gone, then what no
manifest names. What may go is decided by `retention`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable

from raytf.checkpoint.catalog import Catalog, Survey, is_bad_manifest, manifest_path
from raytf.checkpoint.files import TEMPORARY, Files
from raytf.checkpoint.manifest import parse_step, step_name
from raytf.checkpoint.retention import Record, Rule, to_delete
from raytf.errors import ConfigError, NotFoundError, StorageError

__all__ = ["PINNED", "READING", "Pruner", "shard_name"]

_log = logging.getLogger(__name__)

PINNED = "pinned"
READING = "reading-"  # then seconds since 1970, then something unique
READING_FOR_S = 3600.0  # a reader that takes longer has died
_SHARD = re.compile(r"a(\d+)-g(\d+)-r\d+-of-\d+-\d+(?:-\d+)?\.safetensors")


def shard_name(attempt: int, generation: int, rank: int, world: int, index: int) -> str:
    """A shard's name in its step's directory; it says who wrote it, so that what a dead attempt
    left behind is told from what is being written.
    """
    return f"a{attempt:04d}-g{generation:04d}-r{rank:05d}-of-{world:05d}-{index}.safetensors"


class Pruner:
    """Deletes. `verify` tells whether every byte of a step is good."""

    def __init__(
        self,
        files: Files,
        catalog: Catalog,
        verify: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._verify = verify
        self._clock = clock
        self._sound: set[int] = set()  # steps known to be good: committed or verified here
        self._unfinished: set[str] = set()  # files of deleted steps that could not be deleted

    def trust(self, step: int) -> None:
        """A step was just committed by this store and read back."""
        self._sound.add(step)

    def distrust(self, step: int) -> None:
        """A step turned out to be damaged."""
        self._sound.discard(step)

    def retain(self, rule: Rule, may_delete: Callable[[], None]) -> list[int]:
        """Deletes what the rule does not keep; returns those steps. What fails is logged and tried
        again at the next call.

        Raises:
            StorageError: the store cannot be listed.
            SupersededError: from `may_delete`.
        """
        if rule.keeps_all and not self._unfinished:
            return []
        survey = self._catalog.survey()
        self._finish(survey, may_delete)
        if not self._candidates(survey, rule, False) and not _quarantined(survey):
            return []
        newest = self._newest_sound(survey)
        if newest is None:
            return []
        deleted: list[int] = []
        for step in self._candidates(survey, rule, True):
            if step >= newest:
                continue  # newer ones may all be damaged: this one has to be there then
            may_delete()
            try:
                self._delete(step, survey)
                deleted.append(step)
            except StorageError as error:
                _log.warning("Step %d stays for now: %s", step, error)
        self._drop_quarantined(survey, rule, newest, may_delete)
        return deleted

    def delete(self, step: int) -> None:
        """Deletes one step by hand.

        Raises:
            NotFoundError: it is not there.
            ConfigError: it is the newest, pinned, or being read.
            StorageError: it could not be deleted.
        """
        survey = self._catalog.survey()
        if step not in survey.committed:
            raise NotFoundError(
                f"There is no checkpoint of step {step} in {self._files.absolute('')}.", step=step
            )
        if step == survey.committed[-1]:
            raise ConfigError(
                f"Step {step} is the newest checkpoint, which is never deleted on its own. Delete "
                "the whole run's directory if it is not wanted."
            )
        if self._files.exists(posixpath.join(step_name(step), PINNED)):
            raise ConfigError(f"Step {step} is pinned. Unpin it first.")
        if self._is_read(step):
            raise ConfigError(f"Step {step} is being read. Try again later.")
        self._delete(step, survey)

    def sweep(self, attempt: int, generation: int) -> list[str]:
        """Deletes what attempts and generations before this one left behind: shards that no
        manifest names, incomplete files, markers of dead readers, empty directories. Returns paths.
        What fails is logged.
        """
        survey = self._catalog.survey()
        named, unknown = survey.named(), survey.unreadable()
        deleted: list[str] = []
        for path in sorted(survey.files):
            directory, name = posixpath.split(path)
            step = parse_step(directory)
            if directory and step is None:
                continue  # not ours
            shard = _SHARD.fullmatch(name)
            older = shard is not None and (int(shard[1]), int(shard[2])) < (attempt, generation)
            orphan = older and path not in named and step is not None and step not in unknown
            dead = step is not None and self._is_dead_marker(name)
            if (orphan or dead or name.endswith(TEMPORARY)) and self._try_delete(path):
                deleted.append(path)
        for name, entry in self._files.list().items():
            if entry.is_dir and parse_step(name) is not None:
                self._drop_if_empty(name)
        return deleted

    def _candidates(self, survey: Survey, rule: Rule, with_marks: bool) -> list[int]:
        records = [self._record(survey, step) for step in survey.committed]
        chosen = to_delete(records, rule)
        if not with_marks or not chosen:
            return chosen
        # Only those about to go are asked about: one request each.
        marked = {
            step
            for step in chosen
            if self._files.exists(posixpath.join(step_name(step), PINNED)) or self._is_read(step)
        }
        return [step for step in chosen if step not in marked]

    def _record(self, survey: Survey, step: int) -> Record:
        manifest = survey.manifests[manifest_path(step)]
        return Record(step=step, metrics=manifest.metrics if manifest is not None else {})

    def _newest_sound(self, survey: Survey) -> int | None:
        """The newest step that is durable and good; only a step that an earlier process committed
        is read in full, once.
        """
        for step in reversed(survey.committed):
            manifest = survey.manifests[manifest_path(step)]
            if manifest is None:
                continue
            sizes = self._files.map(
                lambda shard: survey.files.get(shard.path) or self._files.size(shard.path),
                manifest.shards,
            )
            whole = sizes == [shard.nbytes for shard in manifest.shards]
            if whole and (step in self._sound or self._verify(step)):
                self._sound.add(step)
                return step
            _log.warning("Step %d is damaged: nothing older than it is deleted for it.", step)
        return None

    def _delete(self, step: int, survey: Survey) -> None:
        path = manifest_path(step)
        named, unknown = survey.named(without_step=step), survey.unreadable()
        present = [e.name for e in self._files.list(step_name(step)).values() if not e.is_dir]
        mine = {posixpath.join(step_name(step), name) for name in present} - {path}
        elsewhere = {
            shard
            for at, manifest in survey.manifests.items()
            if at.startswith(step_name(step) + "/") and manifest is not None
            for shard in (s.path for s in manifest.shards)
            if parse_step(posixpath.dirname(shard)) not in unknown | {step}
        }
        self._files.delete(path)
        self._catalog.forget(path)
        self._sound.discard(step)
        for at in [at for at in survey.manifests if at.startswith(step_name(step) + "/")]:
            del survey.manifests[at]
        # Quarantined manifests go before the shards they name, too.
        last = sorted((mine | elsewhere) - named, key=lambda p: not is_bad_manifest(_name(p)))
        self._unfinished.update(p for p in last if not self._try_delete(p))
        directories = {posixpath.dirname(p) for p in last} | {step_name(step)}
        for directory in sorted(directories):
            self._drop_if_empty(directory)

    def _finish(self, survey: Survey, may_delete: Callable[[], None]) -> None:
        """Tries again what could not be deleted earlier."""
        named = survey.named()
        for path in sorted(self._unfinished):
            may_delete()
            if path in named or self._try_delete(path):
                self._unfinished.discard(path)
                self._drop_if_empty(posixpath.dirname(path))

    def _drop_quarantined(
        self, survey: Survey, rule: Rule, newest: int, may_delete: Callable[[], None]
    ) -> None:
        """Quarantined steps go once as many newer good ones are kept as the rule wants."""
        for step in _quarantined(survey):
            newer = sum(kept > step for kept in survey.committed)
            if step > newest or newer < (rule.keep_last or 1):
                continue
            may_delete()
            try:
                self._delete(step, survey)
            except StorageError as error:
                _log.warning("Quarantined step %d stays for now: %s", step, error)

    def _is_read(self, step: int) -> bool:
        names = self._files.list(step_name(step))
        return any(n.startswith(READING) and not self._is_dead_marker(n) for n in names)

    def _is_dead_marker(self, name: str) -> bool:
        match = re.fullmatch(re.escape(READING) + r"(\d+)-\w+", name)
        return match is not None and self._clock() - int(match[1]) > READING_FOR_S

    def _try_delete(self, path: str) -> bool:
        try:
            self._files.delete(path)
        except StorageError as error:
            _log.warning("A leftover stays for now: %s", error)
            return False
        return True

    def _drop_if_empty(self, directory: str) -> None:
        try:
            self._files.delete_directory(directory)
        except StorageError as error:
            _log.warning("An empty directory stays for now: %s", error)


def _quarantined(survey: Survey) -> list[int]:
    """Steps that have only quarantined manifests."""
    steps = {parse_step(posixpath.dirname(path)) for path in survey.manifests}
    return sorted(step for step in steps - set(survey.committed) if step is not None)


def _name(path: str) -> str:
    return posixpath.basename(path)
