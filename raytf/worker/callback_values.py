"""Values that callbacks hold, as JSON and arrays, and whether they have changed.

Owns which kinds of value can be captured and come back as exactly what they were, type included.
No pickle: what is read from a checkpoint never runs code. Needs TensorFlow only to give a tensor
back that was one.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import io
import json
import random
import re
import struct
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash

from raytf.errors import CheckpointDamagedError, RaytfError

__all__ = [
    "INLINE_BYTES",
    "Uncapturable",
    "decode",
    "encode",
    "encode_in_place",
    "is_no_state",
    "is_variable",
    "moves_unseen",
    "restore_in_place",
    "snapshot",
    "unchanged",
    "variables_of",
]

INLINE_BYTES = 4096  # smaller arrays are written into the JSON
_KERAS = ("keras", "tf_keras")
# Dtypes that a file of tensors can hold by name; all others go in as bytes.
_PLAIN_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|float8_e4m3fn|float8_e5m2")
_FACTORIES = {f.__name__: f for f in (int, float, str, list, dict, set, bool)}


class Uncapturable(Exception):
    """A value that is no data; `args[0]` is its type's name."""


def _roots(value: Any) -> set[tuple[str, str]]:
    return {(c.__module__.split(".")[0], c.__name__) for c in type(value).__mro__}


def _is_keras(value: Any, *names: str) -> bool:
    return any(root in _KERAS and name in names for root, name in _roots(value))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "numpy") and any(root == "tensorflow" for root, _ in _roots(value))


def is_variable(value: Any) -> bool:
    """Whether it is a variable of TensorFlow or Keras."""
    known = any(root in ("tensorflow", *_KERAS) for root, _ in _roots(value))
    return known and hasattr(value, "numpy") and hasattr(value, "assign")


def variables_of(value: Any) -> list[Any]:
    """The variable itself, or those of a Keras metric; of anything else none."""
    if is_variable(value):
        return [value]
    return list(value.variables) if _is_keras(value, "Metric") else []


def is_no_state(value: Any) -> bool:
    """Whether it is code, or a part of the model or of the list of callbacks, whose state is kept
    elsewhere.
    """
    code = (types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    if isinstance(value, (*code, np.ufunc, type)):
        return True
    if _is_keras(value, "Metric"):  # a layer in legacy Keras
        return False
    return _is_keras(
        value, "Layer", "BaseOptimizer", "_BaseOptimizer", "OptimizerV2", "Callback", "CallbackList"
    )


def moves_unseen(value: Any) -> bool:
    """Whether it has a position that can neither be read nor compared (a generator)."""
    return hasattr(value, "__next__") and not isinstance(value, io.IOBase) and not _files(value)


def _files(value: Any) -> bool:
    return any(root == "tensorflow" and "GFile" in name for root, name in _roots(value)) or (
        hasattr(value, "fileno") or hasattr(value, "flush")
    )


# --- whether a value has changed


class _Same:
    """Equal to the same object only; keeps it alive, so that no other gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


_Opened = tuple[Any, list[Any], Callable[[], Any] | None]


def _open(value: Any) -> _Opened:
    """`(head, children, digest)`: what two equal values have in common, cheapest first."""
    kind = type(value)
    if kind is float:
        return (kind, struct.pack("<d", value)), [], None  # NaN is equal to itself, -0.0 not to 0.0
    if value is None or kind in (bool, int, complex, str, bytes):
        return (kind, value), [], None
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        head = (kind, str(value.dtype), value.shape)
        return head, [], lambda: _digest(value)
    if isinstance(value, np.ndarray):
        return (kind, value.shape), value.ravel().tolist(), None
    if isinstance(value, np.generic):
        return (kind, str(value.dtype), value.tobytes()), [], None
    if isinstance(value, dict):
        return (kind, len(value)), [part for pair in list(value.items()) for part in pair], None
    if isinstance(value, (list, tuple, collections.deque)):
        return (kind, len(value), getattr(value, "maxlen", None)), list(value), None
    if isinstance(value, (set, frozenset)):
        return (kind, len(value)), sorted(value, key=repr), None
    if not is_no_state(value):
        for read in (_random_state, _variable_values):
            state = read(value)
            if state is not None:
                return (kind, _Same(value)), [state], None
        if _is_tensor(value):
            return (kind,), [np.asarray(value.numpy())], None
        if _is_transparent(value):
            return (kind, _Same(value)), [_attributes(value)], None
    return (kind, _Same(value)), [], None


def _digest(value: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(value).view(np.uint8).data)


def _is_transparent(value: Any) -> bool:
    """Whether changes inside can be seen by looking at its attributes without harm: data, and
    classes of the user's own; not the insides of TensorFlow or of locks and files.
    """
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        return True
    root = type(value).__module__.split(".")[0]
    return root not in sys.stdlib_module_names and root not in ("tensorflow", *_KERAS, "numpy")


_MAX_DEPTH = 12


def snapshot(value: Any, _above: tuple[int, ...] = ()) -> Any:
    """What `unchanged` compares with later: small, without references into data."""
    head, children, digest = _open(value)
    if id(value) in _above or len(_above) > _MAX_DEPTH:
        return head, None, None
    above = (*_above, id(value))
    return head, [snapshot(c, above) for c in children], digest and digest()


def unchanged(shot: Any, value: Any, _above: tuple[int, ...] = ()) -> bool:
    """Whether the value is what it was at the snapshot, deep inside as well.

    Arrays are hashed (about 10 GB/s) only if all before them is equal.
    """
    head, children, digest = _open(value)
    if head != shot[0]:
        return False
    if shot[1] is None or id(value) in _above:
        return True
    above = (*_above, id(value))
    if len(children) != len(shot[1]):
        return False
    pairs = zip(shot[1], children, strict=True)
    if not all(unchanged(before, now, above) for before, now in pairs):
        return False
    return digest is None or digest() == shot[2]


# --- to JSON and arrays, and back


def encode(value: Any, key: str, arrays: dict[str, np.ndarray]) -> Any:
    """A value as JSON; shares nothing with it.

    Args:
        value: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset,
            deque, dict (also OrderedDict, Counter, and defaultdict of a built-in type), range,
            NumPy scalar or array, tensor.
        key: of the value; larger arrays are put into `arrays` under it or below it.
        arrays: takes copies.

    Raises:
        Uncapturable: it is, or holds, something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        finite = value - value == 0
        return value if finite else {"__float__": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"__complex__": [encode(part, key, arrays) for part in (value.real, value.imag)]}
    if kind in (bytes, bytearray):
        return {f"__{kind.__name__}__": base64.b64encode(value).decode()}
    if kind is range:
        return {"__range__": [value.start, value.stop, value.step]}
    if kind in (list, tuple, set, frozenset, collections.deque):
        items = [encode(item, f"{key}/{i}", arrays) for i, item in enumerate(value)]
        if kind is list:
            return items
        if kind in (set, frozenset):
            items.sort(key=json.dumps)
        more = {"maxlen": value.maxlen} if kind is collections.deque else {}
        return {f"__{kind.__name__}__": items, **more}
    if isinstance(value, dict):
        return _encode_dict(value, key, arrays)
    if isinstance(value, np.generic):
        return {"__scalar__": _encode_array(np.asarray(value), None, {})}
    if kind is np.ndarray:
        return _encode_array(value, key, arrays)
    if _is_tensor(value) and not is_variable(value):
        return {"__tensor__": _encode_array(np.asarray(value.numpy()), key, arrays)}
    raise Uncapturable(kind.__name__)


def _encode_dict(value: dict[Any, Any], key: str, arrays: dict[str, np.ndarray]) -> Any:
    def below(name: Any, place: int) -> str:
        plain = type(name) is str and re.fullmatch(r"[\w.-]+", name)
        return f"{key}/{name}" if plain else f"{key}/#{place}"

    kind = type(value)
    pairs = [
        [encode(name, f"{key}/#{i}/key", arrays), encode(item, below(name, i), arrays)]
        for i, (name, item) in enumerate(value.items())
    ]
    if kind is dict:
        names = list(value)
        plain = all(type(n) is str and not n.startswith("__") for n in names)
        # Whoever writes JSON may sort it: the order of others is kept as pairs.
        return dict(pairs) if plain and names == sorted(names) else {"__dict__": pairs}
    if kind in (collections.OrderedDict, collections.Counter):
        return {f"__{kind.__name__}__": pairs}
    if kind is collections.defaultdict:
        factory = getattr(value, "default_factory", None)
        name = getattr(factory, "__name__", None)
        if factory is None or _FACTORIES.get(name or "") is factory:
            return {"__defaultdict__": pairs, "factory": name}
    raise Uncapturable(kind.__name__)


def _encode_array(value: np.ndarray, key: str | None, arrays: dict[str, np.ndarray]) -> Any:
    dtype, shape = value.dtype, list(value.shape)
    if dtype.hasobject and dtype.names is None:
        where = key or ""
        items = [encode(v, f"{where}/{i}", arrays) for i, v in enumerate(value.ravel().tolist())]
        return {"__objects__": items, "shape": shape}
    named = dtype.name if dtype.kind == "V" else dtype.str  # "V": types that NumPy does not know
    if dtype.names is not None or named.startswith("void"):
        raise Uncapturable(f"array of {dtype}")
    copy = np.array(value, order="C", copy=True)
    if key is None or copy.nbytes < INLINE_BYTES:
        data = base64.b64encode(copy.tobytes()).decode()
        return {"__inline__": data, "dtype": named, "shape": shape}
    if dtype.isnative and _PLAIN_DTYPES.fullmatch(dtype.name):
        arrays[key] = copy
        return {"__array__": key}
    arrays[key] = np.frombuffer(copy.tobytes(), np.uint8).copy()
    return {"__array__": key, "dtype": named, "shape": shape}


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with TensorFlow

        return np.dtype(getattr(ml_dtypes, name))


def _from_bytes(data: bytes, node: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(data, _dtype(node["dtype"])).reshape(node["shape"]).copy()


def _decode_array(node: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if "__objects__" in node:
        flat = np.empty(len(node["__objects__"]), object)
        for i, item in enumerate(node["__objects__"]):
            flat[i] = decode(item, arrays)
        return flat.reshape(node["shape"])
    if "__inline__" in node:
        return _from_bytes(base64.b64decode(node["__inline__"]), node)
    key = node["__array__"]
    if key not in arrays:
        raise CheckpointDamagedError(
            f"The state of callbacks names an array {key!r} that is not there. Expected with it: "
            "the arrays that were captured together with it.",
            key=key,
        )
    value = np.asarray(arrays[key])
    return _from_bytes(value.tobytes(), node) if "dtype" in node else np.array(value, copy=True)


def decode(node: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that `encode` was given; shares nothing with `node` or `arrays`.

    Raises:
        CheckpointDamagedError: an array is not there.
    """
    if isinstance(node, list):
        return [decode(item, arrays) for item in node]
    if not isinstance(node, Mapping):
        return node
    tag = next((name for name in node if name.startswith("__")), None)
    if tag is None:
        return {name: decode(item, arrays) for name, item in node.items()}
    if tag in ("__array__", "__inline__", "__objects__"):
        return _decode_array(node, arrays)
    return _decode_tagged(tag, node, arrays)


def _decode_tagged(tag: str, node: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    body = node[tag]
    if tag == "__float__":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if tag in ("__bytes__", "__bytearray__"):
        data = base64.b64decode(body)
        return data if tag == "__bytes__" else bytearray(data)
    if tag == "__scalar__":
        return _decode_array(body, arrays)[()]
    if tag == "__tensor__":
        import tensorflow as tf

        return tf.constant(_decode_array(body, arrays))
    items = decode(body, arrays)
    if tag == "__complex__":
        return complex(*items)
    if tag == "__range__":
        return range(*items)
    if tag == "__deque__":
        return collections.deque(items, node["maxlen"])
    if tag == "__defaultdict__":
        factory = None if node["factory"] is None else _FACTORIES[node["factory"]]
        return collections.defaultdict(factory, items)
    if tag == "__Counter__":
        return collections.Counter(dict(items))
    simple = {"__tuple__": tuple, "__set__": set, "__frozenset__": frozenset, "__dict__": dict}
    make = {**simple, "__OrderedDict__": collections.OrderedDict}.get(tag)
    if make is None:
        raise RaytfError(f"The state of callbacks holds an unknown tag {tag!r}. A bug in raytf.")
    return make(items)


# --- objects that are kept, and get their content back


def _random_state(value: Any) -> Any:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return None


def _variable_values(value: Any) -> Any:
    found = variables_of(value)
    return [np.asarray(v.numpy()) for v in found] if found else None


def encode_in_place(value: Any, key: str, arrays: dict[str, np.ndarray]) -> Any:
    """The content of an object that a resumed run makes by itself: a random generator, a variable,
    a Keras metric, an instance of a dataclass, a SimpleNamespace.

    Raises:
        Uncapturable: it is something else, or holds something that is no data.
    """
    state = _random_state(value)
    if state is None:
        state = _variable_values(value)
    if state is None and not isinstance(value, type):
        if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            state = _attributes(value)
    if state is None:
        raise Uncapturable(type(value).__name__)
    return {"__in_place__": encode(state, key, arrays), "type": type(value).__name__}


def restore_in_place(value: Any, node: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
    """Puts the content back into the object that is there now; False: it is of another kind."""
    if type(value).__name__ != node["type"]:
        return False
    state = decode(node["__in_place__"], arrays)
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif variables := variables_of(value):
        shapes = [tuple(v.shape) for v in variables]
        if shapes != [v.shape for v in state]:
            return False
        for variable, array in zip(variables, state, strict=True):
            variable.assign(array)
    else:
        for name in set(_attributes(value)) - set(state):
            object.__delattr__(value, name)
        for name, item in state.items():
            object.__setattr__(value, name, item)
    return True
