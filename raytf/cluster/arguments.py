"""What the driver can know about a run's arguments before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ray.train import ScalingConfig

from raytf.cluster.capture import check_functions
from raytf.cluster.keras_choice import check_keras_choice
from raytf.config import TrainSpec
from raytf.data import as_source, check_batch, is_factory
from raytf.errors import ConfigError

__all__ = ["check_scaling", "check_spec", "make_spec", "with_sources"]


def make_spec(build_model: Any, train_data: Any, arguments: Mapping[str, Any]) -> TrainSpec:
    """Makes the spec of a run from what the user wrote.

    Raises:
        ConfigError: a value is wrong, or the name is unknown.
    """
    given = dict(arguments)
    known = [f.name for f in dataclasses.fields(TrainSpec)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}. There are: {', '.join(known)}.")
    return TrainSpec(build_model=build_model, train_data=train_data, **given)


def check_spec(spec: TrainSpec, num_workers: int) -> TrainSpec:
    """Checks what can be known on the driver; returns the spec with data turned into sources.

    Raises:
        ConfigError: a function carries a TensorFlow object or cannot be pickled, the environment
            asks for another Keras, the data is of no known kind, or the batch is too small.
        DataError: the data is empty or ragged.
    """
    check_keras_choice(spec.legacy_keras)
    check_functions(
        build_model=spec.build_model,
        transform=spec.transform,
        callbacks=spec.callbacks,
        config=_holder(spec.config),
    )
    checked = with_sources(spec, num_workers)
    for name in ("train_data", "validation_data"):
        data = getattr(checked, name)
        if data is not None and is_factory(data):
            check_functions(**{name: data})
    return checked


def with_sources(spec: TrainSpec, num_workers: int) -> TrainSpec:
    """Turns the data into sources and checks that each batch can be shared.

    Raises:
        ConfigError: the batch is too small, or an argument does not go with this kind of data.
        DataError: the data is empty or ragged.
    """
    sources: dict[str, Any] = {}
    for name in ("train_data", "validation_data"):
        data = getattr(spec, name)
        if data is not None:
            source: Any = as_source(data, name)
            num_rows = 1 if is_factory(source) else len(source)
            check_batch(num_rows, spec.global_batch_size, num_workers)
            sources[name] = source
    _check_arguments_for(sources["train_data"], spec)
    return dataclasses.replace(spec, **sources)


def _check_arguments_for(train_data: Any, spec: TrainSpec) -> None:
    if is_factory(train_data):
        for name in ("transform", "class_weight", "drop_remainder"):
            if getattr(spec, name):
                raise ConfigError(
                    f"{name} cannot be applied to a data factory, whose batches are its own. Do it "
                    "in the dataset that it returns, or give a source."
                )
    elif spec.class_weight and train_data.spec()[2] is not None:
        raise ConfigError(
            "class_weight and sample_weight cannot be used at the same time. Multiply them into "
            "one sample_weight."
        )


def _holder(config: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: config  # what is in `config` travels like a variable of build_model


def check_scaling(scaling_config: ScalingConfig | None) -> ScalingConfig:
    """Refuses worker groups that this version cannot run."""
    scaling = scaling_config if scaling_config is not None else ScalingConfig()
    if not isinstance(scaling, ScalingConfig):
        raise ConfigError(
            f"scaling_config must be a ray.train.ScalingConfig. Received: {type(scaling).__name__}."
        )
    if isinstance(scaling.num_workers, tuple):
        raise ConfigError(
            f"ScalingConfig(num_workers={scaling.num_workers}): elastic training is not built yet "
            "in this version. Give one number."
        )
    if isinstance(scaling.num_workers, bool) or scaling.num_workers < 1:
        raise ConfigError(
            f"ScalingConfig(num_workers={scaling.num_workers}): raytf needs at least 1 worker."
        )
    if scaling.use_tpu:
        raise ConfigError("ScalingConfig(use_tpu=True): TPUs are not built yet in this version.")
    return scaling
