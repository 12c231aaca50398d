"""Do the user's functions carry anything that cannot travel to a worker?

Functions travel by pickle with the variables they use. A model, layer or optimizer among them was
made on the driver: it cannot be unpickled before the worker has set up its strategy, or at all.
Found here by walking the functions, so that the error names the variable instead of a line inside
pickle. TensorFlow is not imported: an object's class tells where it comes from.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ray.cloudpickle import dumps  # pyright: ignore[reportAttributeAccessIssue]

from raytf.errors import ConfigError

__all__ = ["captured", "check_functions"]

_ROOTS = ("tensorflow", "keras", "tf_keras")
# Plain values that TensorFlow happens to define; they pickle and need no runtime.
_HARMLESS = ("DType", "TensorShape", "TensorSpec", "AutoShardPolicy")
_MAX_ITEMS = 1000  # of a container that is looked into


def check_functions(**functions: Any) -> None:
    """Checks each function that goes to the workers.

    Raises:
        ConfigError: names the argument, the variable and the object, and what to do.
    """
    for argument, function in functions.items():
        if function is not None:
            _check_objects(argument, function)
            _check_pickle(argument, function)


def _check_objects(argument: str, function: Any) -> None:
    for name, value in captured(function):
        found = _foreign_object(value)
        if found is not None:
            kind = type(found)
            root = kind.__module__.split(".")[0]
            raise ConfigError(
                f"{argument} uses the variable {name!r}, which holds a {root} object "
                f"({kind.__name__}). It was made on the driver and cannot go to the workers: build "
                "it inside the function."
            )


def _foreign_object(value: Any) -> Any:
    for item in _items(value):
        kind = type(item)
        if isinstance(
            item, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType
        ):
            continue
        if _root(kind) in _ROOTS and kind.__name__ not in _HARMLESS:
            return item
        # A subclass of a Keras class, defined by the user: its own module says nothing.
        if any(_root(base) in _ROOTS for base in kind.__mro__) and kind.__name__ not in _HARMLESS:
            return item
    return None


def _root(kind: type) -> str:
    return (kind.__module__ or "").split(".")[0]


def _items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, Mapping):
        yield from list(value.values())[:_MAX_ITEMS]
    elif isinstance(value, list | tuple | set | frozenset):
        yield from list(value)[:_MAX_ITEMS]


def captured(function: Any) -> list[tuple[str, Any]]:
    """Variables that a function brings along, nested ones too.

    They are in its closure, defaults and bound object, and the globals it names. Other functions of
    the user among them are walked as well; those of installed packages are not.
    """
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", function)]
    while waiting:
        prefix, item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        for name, value in _direct(item):
            full = f"{prefix}{name}"
            found.append((full, value))
            if _is_user_code(value):
                waiting.append((f"{full}.", value))
    return found


def _direct(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, functools.partial):
        yield from ((f"argument {i}", value) for i, value in enumerate(item.args))
        yield from item.keywords.items()
        yield "function", item.func
    elif inspect.ismethod(item):
        yield "self", item.__self__
        yield item.__name__, item.__func__
    elif isinstance(item, types.FunctionType):
        yield from _of_function(item)
    elif isinstance(item, type):
        yield from (
            (n, v) for n, v in vars(item).items() if not n.startswith("__") or inspect.isfunction(v)
        )
    elif callable(item) and not inspect.isbuiltin(item):
        yield from getattr(item, "__dict__", {}).items()
        yield "__call__", inspect.getattr_static(type(item), "__call__", None)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if function.__closure__:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is assigned later, such as the function's own name
                continue
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"default value {i}", value) for i, value in enumerate(defaults))
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield "__wrapped__", wrapped


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # functions and comprehensions inside the function
            names |= _global_names(constant)
    return names


def _is_user_code(value: Any) -> bool:
    if isinstance(value, functools.partial) or inspect.ismethod(value):
        return True
    if isinstance(value, type):
        return value.__module__ == "__main__" or "<locals>" in value.__qualname__
    if not isinstance(value, types.FunctionType):  # an object of the user's that can be called
        value = inspect.getattr_static(type(value), "__call__", None)
    code = getattr(value, "__code__", None)
    if code is None:
        return False
    return "site-packages" not in code.co_filename and "<frozen" not in code.co_filename


def _check_pickle(argument: str, function: Any) -> None:
    try:
        dumps(function)
    except Exception as error:  # pickling raises whatever the object's own code raises
        culprits = [name for name, value in captured(function) if not _pickles(value)]
        what = f"the variable {culprits[0]!r}" if culprits else "something it uses"
        raise ConfigError(
            f"{argument} cannot be sent to the workers because {what} cannot be pickled: {error}. "
            "Make it inside the function, or pass plain values through `config`."
        ) from error


def _pickles(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # the question is only whether
        return False
    return True
