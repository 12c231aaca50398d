"""The one place that reaches into TensorFlow's eager context, for either Keras.

Now for its random state: what gives eager random operations their seeds. Operations inside a
compiled step do not take part: Keras's are stateless, and the state of others (`tf.random.uniform`)
lies in their kernels, out of reach; `worker.step` names those.
"""

from __future__ import annotations

from typing import Any

from tensorflow.python.eager import context

__all__ = ["random_state", "set_random_state"]


def random_state() -> Any:
    """State of the generator, as JSON; None if no seed has been set."""
    # Read in TensorFlow 2.21: `Context._rng`, a `random.Random`, made anew by `tf.random.set_seed`.
    generator: Any = getattr(context.context(), "_rng", None)
    if generator is None:
        return None
    version, words, gauss = generator.getstate()
    return [version, list(words), gauss]


def set_random_state(state: Any) -> None:
    """Puts back what `random_state` gave."""
    generator: Any = getattr(context.context(), "_rng", None)
    if state is not None and generator is not None:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
