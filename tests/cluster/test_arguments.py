"""What can be said of data and arguments together, on the driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytf.cluster.arguments import make_spec, with_sources
from raytf.data import ArraySource
from raytf.errors import ConfigError

X, Y = np.zeros((8, 2), "float32"), np.arange(8) % 2


def model(config: Any) -> Any:
    raise AssertionError("nothing is built here")


def factory(ctx: Any) -> Any:
    raise AssertionError("nothing is read here")


@pytest.mark.parametrize(
    ("name", "value"),
    [("transform", lambda x, y: (x, y)), ("class_weight", {0: 2.0}), ("drop_remainder", True)],
)
def test_what_a_factory_has_to_do_itself(name: str, value: Any) -> None:
    spec = make_spec(model, factory, {name: value, "global_batch_size": 4})
    with pytest.raises(ConfigError, match=f"{name} cannot be applied to a data factory"):
        with_sources(spec, 2)


def test_a_factory_alone_passes() -> None:
    spec = with_sources(make_spec(model, factory, {"global_batch_size": 4}), 2)
    assert spec.train_data is factory


def test_class_weight_and_sample_weight_are_refused_together() -> None:
    source = ArraySource(X, Y, np.ones(8, "float32"))
    spec = make_spec(model, source, {"class_weight": {0: 2.0}, "global_batch_size": 4})
    with pytest.raises(ConfigError, match="class_weight and sample_weight"):
        with_sources(spec, 2)
