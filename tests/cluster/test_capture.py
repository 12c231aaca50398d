"""TensorFlow objects and unpicklable things in the user's functions are found and named."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raytf.cluster.capture import captured, check_functions
from raytf.errors import ConfigError


def keras_like(name: str = "Dense", module: str = "keras.src.layers.core.dense") -> Any:
    """An object whose class says that it is Keras's; Keras itself is not needed for the check."""
    return type(name, (), {"__module__": module})()


LAYER = keras_like()
NUMBER = 3


def uses_global(config: Any) -> Any:
    return LAYER


def uses_plain(config: Any) -> Any:
    return NUMBER, threading.Thread  # a class and a module are fine


def helper() -> Any:
    return LAYER


def calls_helper(config: Any) -> Any:
    return helper()


def nested(config: Any) -> Any:
    def inner() -> Any:
        return [LAYER for _ in range(2)]

    return inner()


def refused(function: Any, variable: str, argument: str = "build_model") -> str:
    with pytest.raises(ConfigError) as caught:
        check_functions(**{argument: function})
    text = str(caught.value)
    assert argument in text
    assert repr(variable) in text
    return text


def test_a_global_is_named() -> None:
    text = refused(uses_global, "LAYER")
    assert "keras object (Dense)" in text
    assert "build it inside the function" in text


def test_a_closure_is_named() -> None:
    model = keras_like("Sequential")

    def build_model(config: Any) -> Any:
        return model

    refused(build_model, "model")


def test_nested_functions_and_comprehensions_are_walked() -> None:
    refused(nested, "LAYER")


def test_functions_that_are_called_are_walked() -> None:
    refused(calls_helper, "helper.LAYER")


def test_containers_are_looked_into() -> None:
    layers = {"a": keras_like()}
    more = [1, keras_like()]
    refused(lambda config: layers, "layers")
    refused(lambda config: more, "more")


def test_defaults_partials_methods_and_callables() -> None:
    layer = keras_like()
    refused(lambda config, layer=layer: layer, "default value 0")
    refused(functools.partial(uses_plain, layer), "argument 0")
    refused(functools.partial(uses_plain, config=layer), "config")

    class Builder:
        def __init__(self) -> None:
            self.layer = layer

        def build(self, config: Any) -> Any:
            return self.layer

        def __call__(self, config: Any) -> Any:
            return self.layer

    refused(Builder(), "layer")
    refused(functools.partial(Builder(), 1), "function.layer")
    refused(Builder().build, "self.layer")


def test_a_user_class_derived_from_keras() -> None:
    base = type(keras_like("Model"))
    model = type("MyModel", (base,), {"__module__": "__main__"})()
    refused(lambda config: model, "model")


@pytest.mark.parametrize("root", ["tensorflow.python.ops", "tf_keras.src.engine", "keras.src"])
def test_all_roots(root: str) -> None:
    thing = keras_like("Thing", root)
    refused(lambda x, y: thing, "thing", argument="transform")


def test_what_is_fine() -> None:
    dtype = keras_like("DType", "tensorflow.python.framework.dtypes")
    layer_class = type(keras_like())

    class Layer(layer_class):  # type: ignore[misc,valid-type]
        def call(self, x: Any) -> Any:
            return x

    check_functions(
        build_model=lambda config: (dtype, layer_class, Layer, NUMBER, uses_plain),
        transform=None,
        callbacks=lambda: [Layer()],
    )


def test_a_recursive_function_ends() -> None:
    def build_model(config: Any) -> Any:
        return build_model(config)

    check_functions(build_model=build_model)
    assert "build_model" in dict(captured(build_model))


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def build_model(config: Any) -> Any:
        return lock

    text = refused(build_model, "lock")
    assert "cannot be pickled" in text
    assert "lock" in text


def test_config_values_are_checked_too() -> None:
    config: dict[str, Any] = {"layer": keras_like()}
    holder: Callable[[], Any] = lambda: config  # noqa: E731
    refused(holder, "config", argument="config")
