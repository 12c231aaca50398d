"""What the user says about saving, resuming and drills, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train import CheckpointConfig

import raytf
from raytf.cluster.run_options import RunOptions, take_options
from raytf.errors import ConfigError


def options(ray_config: CheckpointConfig | None = None, **arguments: Any) -> RunOptions:
    return take_options(arguments, 2, ray_config)[0]


def test_the_rest_is_handed_back() -> None:
    given = {"epochs": 3, "save": None, "drill": None, "resume_from": None, "recovery": None}
    taken, rest = take_options(given, 2)
    assert rest == {"epochs": 3}
    assert given["epochs"] == 3
    assert (taken.kills, taken.resume_from, taken.resume_strict) == ((), None, True)


@pytest.mark.parametrize(
    ("save", "ray_config", "kept"),
    [
        (None, None, (3, None, 1)),
        (raytf.SaveConfig(every_steps=5), CheckpointConfig(), (3, None, 1)),
        (raytf.SaveConfig(keep_last=7), None, (7, None, 1)),
        (raytf.SaveConfig(keep_best="loss"), None, (None, "loss", 1)),
        (None, CheckpointConfig(num_to_keep=2), (2, None, 1)),
        (
            None,
            CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_accuracy"),
            (1, "val_accuracy", 2),
        ),
        (None, CheckpointConfig(checkpoint_score_attribute="loss"), (None, None, 1)),
    ],
)
def test_what_is_kept(save: Any, ray_config: Any, kept: tuple[Any, ...]) -> None:
    taken = options(ray_config, save=save)
    assert (taken.save.keep_last, taken.save.keep_best, taken.num_best) == kept


def test_rays_order_is_the_mode() -> None:
    for order in ("min", "max"):
        config = CheckpointConfig(
            num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order=order
        )
        assert options(config).save.best_mode == order


def test_when_to_save_stays_what_the_user_said() -> None:
    taken = options(CheckpointConfig(num_to_keep=2), save=raytf.SaveConfig(every_steps=5))
    assert (taken.save.every_steps, taken.save.keep_last) == (5, 2)


@pytest.mark.parametrize(
    "keep", [{"keep_last": 1}, {"keep_best": "loss"}, {"keep_every": 10}], ids=str
)
def test_two_rules_are_refused(keep: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="both SaveConfig.*and RunConfig.*Leave one"):
        options(CheckpointConfig(num_to_keep=2), save=raytf.SaveConfig(**keep))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"save": 100}, "save must be a raytf.SaveConfig. Received: int"),
        ({"save": {"every_steps": 1}}, "save must be a raytf.SaveConfig. Received: dict"),
        ({"resume_strict": "no"}, "resume_strict must be True or False. Received: 'no'"),
        ({"resume_strict": False}, "resume_strict=False has no effect without resume_from"),
        ({"resume_from": "  "}, "resume_from is a path or URL"),
        ({"resume_from": 500}, "resume_from is a path or URL.*500"),
        ({"drill": ["kill rank=1 step=3"]}, "drill is a string. Received: list"),
        ({"drill": "kill rank=2 step=3"}, "rank=2 is no rank of 2 workers"),
        ({"recovery": raytf.RecoveryConfig(spares=1)}, "spares=1.*not built yet"),
        ({"watch": 30}, "watch must be a raytf.WatchConfig"),
    ],
)
def test_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        options(**arguments)


def test_a_drill_is_read() -> None:
    kills = options(drill="kill rank=1 step=30; kill rank=0 step=50 phase=copy").kills
    assert [(k.rank, k.step, k.phase) for k in kills] == [(1, 30, "step"), (0, 50, "copy")]
