"""A rank's state goes into buffers and back without copies that nobody needs, and without sharing
memory that somebody writes into.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytf.checkpoint.layout import Image, group
from raytf.worker.callback_state import CallbackStates

pytestmark = pytest.mark.tf
SHAPE = (256, 256)  # above the size from which arrays are lent


def variables_of(variable: Any) -> Any:
    from raytf.worker.state import Cell, Variables

    return Variables([Cell("v", variable)], 0)


def memory(dtype: str, fill: float, offset: int = 0) -> np.ndarray:
    from raytf.worker.state import aligned

    nbytes = int(np.prod(SHAPE)) * np.dtype(dtype).itemsize
    array = aligned(nbytes + 64)[offset : offset + nbytes].view(dtype).reshape(SHAPE)
    array[:] = fill
    return array


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_what_is_restored_is_never_written_into(dtype: str, offset: int) -> None:
    import tensorflow as tf

    changes = {
        "add": lambda v: v.assign_add(tf.ones(SHAPE, dtype)),
        "rows": lambda v: v.scatter_nd_add([[0]], tf.ones((1, SHAPE[1]), dtype)),
        "slice": lambda v: v[:1].assign(tf.fill((1, SHAPE[1]), tf.cast(4, dtype))),
        "graph": tf.function(lambda v: v.assign_sub(tf.ones(SHAPE, dtype))),
    }
    for name, change in changes.items():
        variable = tf.Variable(tf.zeros(SHAPE, dtype))
        array = memory(dtype, 3, offset)
        variables_of(variable).assign({"v": array})
        np.testing.assert_array_equal(variable.numpy(), 3)
        change(variable)
        assert variable.numpy()[0, 0] != 3, name
        np.testing.assert_array_equal(array, 3, err_msg=name)
        array[:] = 7  # nor does the variable look at it any more
        assert not (variable.numpy() == 7).any(), name


def test_restored_memory_outlives_its_array() -> None:
    import gc

    import tensorflow as tf

    variable = tf.Variable(tf.zeros(SHAPE))
    variables_of(variable).assign({"v": memory("float32", 3)})
    gc.collect()
    others = [memory("float32", 9) for _ in range(8)]
    np.testing.assert_array_equal(variable.numpy(), 3)
    assert len(others) == 8


def test_odd_types_are_restored() -> None:
    import tensorflow as tf

    for dtype in (tf.bfloat16, tf.bool):
        variable = tf.Variable(tf.zeros(SHAPE, dtype))
        variables_of(variable).assign({"v": np.ones(SHAPE, dtype.as_numpy_dtype)})
        np.testing.assert_array_equal(tf.cast(variable, tf.float32).numpy(), 1)


def test_a_capture_keeps_its_values_when_training_goes_on() -> None:
    import tensorflow as tf

    from raytf.worker.state import RankState

    variable = tf.Variable(tf.fill(SHAPE, 2.0))
    state = RankState(variables_of(variable), CallbackStates([], lambda callback: True), 0, 1)
    images, _ = state.capture(lambda slices: [Image(part) for part in group(slices, 10**9)])
    before = images[0].views[0].view(np.float32).copy()
    variable.assign_add(tf.ones(SHAPE))
    np.testing.assert_array_equal(before, 2)
    np.testing.assert_array_equal(images[0].views[0].view(np.float32), 2)
