"""What the user says about keeping a run alive, apart from the training itself: saving, resuming,
drills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray.train import CheckpointConfig

from raytf.config import RecoveryConfig, SaveConfig, WatchConfig, refuse_unbuilt
from raytf.errors import ConfigError
from raytf.faults.drill import Strike, parse_drill

__all__ = ["RunOptions", "take_options"]

_KEEP_LAST = 3
_NAMES = ("save", "recovery", "watch", "drill", "resume_from", "resume_strict")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Checked options of one run.

    Attributes:
        save: effective: what is kept is always said.
        num_best: how many of the best are kept, if `save.keep_best` says so.
        recovery: how the run goes on after a failure.
        watch: what counts as one.
        kills: faults to inject.
        resume_from: where the state of a new run comes from, as the user wrote it.
        resume_strict: of `resume_from`.
    """

    save: SaveConfig
    num_best: int = 1
    recovery: RecoveryConfig = dataclasses.field(default_factory=RecoveryConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    kills: tuple[Strike, ...] = ()
    resume_from: str | None = None
    resume_strict: bool = True


def take_options(
    arguments: Mapping[str, Any], num_workers: int, ray_config: CheckpointConfig | None = None
) -> tuple[RunOptions, dict[str, Any]]:
    """Splits a trainer's arguments into these options and the rest.

    Args:
        arguments: as the user wrote them.
        num_workers: ranks that a drill can name.
        ray_config: `RunConfig.checkpoint_config`.

    Raises:
        ConfigError: a value cannot work, or is not built yet.
    """
    rest = dict(arguments)
    save, recovery, watch, drill, resume_from, strict = (rest.pop(n, None) for n in _NAMES)
    recovery = RecoveryConfig() if recovery is None else recovery
    watch = WatchConfig() if watch is None else watch
    if not isinstance(recovery, RecoveryConfig):
        kind = type(recovery).__name__
        raise ConfigError(f"recovery must be a raytf.RecoveryConfig. Received: {kind}.")
    if not isinstance(watch, WatchConfig):
        raise ConfigError(f"watch must be a raytf.WatchConfig. Received: {type(watch).__name__}.")
    refuse_unbuilt(recovery)
    if save is not None and not isinstance(save, SaveConfig):
        raise ConfigError(f"save must be a raytf.SaveConfig. Received: {type(save).__name__}.")
    strict = True if strict is None else strict
    if not isinstance(strict, bool):
        raise ConfigError(f"resume_strict must be True or False. Received: {strict!r}.")
    if resume_from is None and strict is not True:
        raise ConfigError("resume_strict=False has no effect without resume_from. Leave it out.")
    if resume_from is not None and (not isinstance(resume_from, str) or not resume_from.strip()):
        raise ConfigError(
            "resume_from is a path or URL of a checkpoint, a run, or a .keras file. Received: "
            f"{resume_from!r}."
        )
    if drill is not None and not isinstance(drill, str):
        raise ConfigError(f"drill is a string. Received: {type(drill).__name__}.")
    effective, num_best = _effective(save or SaveConfig(), ray_config)
    options = RunOptions(
        save=effective,
        num_best=num_best,
        recovery=recovery,
        watch=watch,
        kills=() if drill is None else parse_drill(drill, num_workers),
        resume_from=resume_from,
        resume_strict=strict,
    )
    return options, rest


def _effective(save: SaveConfig, ray_config: CheckpointConfig | None) -> tuple[SaveConfig, int]:
    """The two places where retention can be said, joined.

    Raises:
        ConfigError: both are used.
    """
    if ray_config is None or ray_config == CheckpointConfig():
        if not save.says_what_to_keep:
            save = dataclasses.replace(save, keep_last=_KEEP_LAST)
        return save, 1
    if save.says_what_to_keep:
        raise ConfigError(
            "both SaveConfig (keep_last, keep_best, keep_every) and RunConfig(checkpoint_config="
            "...) say which checkpoints to keep. Leave one of the two out."
        )
    number = ray_config.num_to_keep
    if ray_config.checkpoint_score_attribute is None or number is None:
        return dataclasses.replace(save, keep_last=number), 1
    return (
        dataclasses.replace(
            save,
            keep_last=1,
            keep_best=ray_config.checkpoint_score_attribute,
            best_mode=ray_config.checkpoint_score_order,
        ),
        number,
    )
