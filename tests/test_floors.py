"""Folders are floors: imports go down only; TensorFlow, Ray and internals stay where they belong.

Every import counts: at module level, inside functions, through `importlib.import_module("...")`,
and dotted use of a submodule that was never imported by name (`keras.src.x`). `if TYPE_CHECKING:`
is free for other people's packages, since it costs nothing at run time, but not for raytf's floors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "raytf"
MAX_LINES = 450

# Bottom first. A unit (folder or module) imports lower floors only, and no sibling on its own.
FLOORS = (
    ("errors",),
    ("config",),
    ("checkpoint", "data", "faults"),
    ("worker",),
    ("cluster",),
    ("status",),
    ("report",),
    ("run",),
    ("progress", "result"),
    ("trainer",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {unit: level for level, units in enumerate(FLOORS) for unit in units}

TENSORFLOW = ("tensorflow", "keras", "tf_keras")
LAZY_TENSORFLOW = ("result", "trainer")  # inside the function that loads or exports a model
_HOMES = ("worker/keras_compat.py", "worker/survivor.py")
PRIVATE_HOMES = {
    "keras.src": _HOMES,
    "tensorflow.python": _HOMES,
    "tf_keras.src": ("worker/legacy.py",),  # a Keras of its own; no longer changes
}


@dataclass(frozen=True)
class Import:
    name: str  # dotted, absolute
    line: int
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING:`


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


class _Finder(ast.NodeVisitor):
    """Collects what a module imports; `package` resolves relative imports."""

    def __init__(self, package: str) -> None:
        self.package = package.split(".")
        self.found: list[Import] = []
        self.alias: dict[str, str] = {}
        self.lazy = self.typing = False

    def _add(self, name: str, node: ast.stmt | ast.expr) -> None:
        self.found.append(Import(name, node.lineno, self.lazy, self.typing))

    def visit_Import(self, node: ast.Import) -> None:
        for item in node.names:
            self._add(item.name, node)
            root = item.name.split(".")[0]
            self.alias[item.asname or root] = item.name if item.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            above = self.package[: len(self.package) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for item in node.names:
            self._add(f"{base}.{item.name}", node)
            self.alias[item.asname or item.name] = f"{base}.{item.name}"

    def visit_Call(self, node: ast.Call) -> None:
        called = _dotted(node.func) or ""
        if called.split(".")[-1] in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                self._add(first.value, node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = _dotted(node)
        if dotted is None:
            self.generic_visit(node)
            return
        root, _, rest = dotted.partition(".")
        if root in self.alias and self.alias[root].split(".")[0] in (*TENSORFLOW, "ray"):
            self._add(f"{self.alias[root]}.{rest}", node)

    def _function(self, node: ast.AST) -> None:
        before, self.lazy = self.lazy, True
        self.generic_visit(node)
        self.lazy = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_If(self, node: ast.If) -> None:
        if (_dotted(node.test) or "").split(".")[-1] != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        before, self.typing = self.typing, True
        for child in node.body:
            self.visit(child)
        self.typing = before
        for child in node.orelse:
            self.visit(child)


def imports(source: str, package: str) -> list[Import]:
    finder = _Finder(package)
    finder.visit(ast.parse(source))
    return finder.found


def _inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _own_floor(path: str, unit: str, found: Import) -> str | None:
    parts = found.name.split(".")
    target = parts[1] if len(parts) > 1 else ""
    if target == unit or (unit == "__init__" and (found.lazy or found.typing)):
        return None
    if target not in FLOOR_OF and unit in ("cli", "__main__"):  # above all floors: the root is lazy
        return None
    if target not in FLOOR_OF:
        return None if target.startswith("__") else f"imports the package root ({found.name})"
    if unit == "__init__":
        return f"imports {target} when raytf is imported"
    if FLOOR_OF[target] > FLOOR_OF[unit]:
        return f"imports upwards ({target})"
    if FLOOR_OF[target] == FLOOR_OF[unit]:
        return f"imports its sibling ({target})"
    return None


def _foreign(path: str, unit: str, found: Import) -> Iterator[str]:
    name = found.name
    if _inside(name, TENSORFLOW):
        lazily = found.lazy and unit in LAZY_TENSORFLOW
        if unit != "worker" and not lazily:
            yield f"imports TensorFlow or Keras ({name})"
        for private, homes in PRIVATE_HOMES.items():
            if _inside(name, (private,)) and path not in homes:
                yield f"uses internals of Keras or TensorFlow ({name})"
    if _inside(name, ("ray",)):
        if unit == "__init__" or FLOOR_OF[unit] < FLOOR_OF["cluster"]:
            yield f"imports Ray ({name})"
        dunder = name.rsplit(".", 1)[-1].startswith("__")
        if any(part.startswith("_") for part in name.split(".")[1:]) and not dunder:
            if unit != "cluster":
                yield f"uses internals of Ray ({name})"


def violations(path: str, source: str) -> list[str]:
    """What is wrong in the module at `path`, relative to the package folder, as readable lines."""
    parts = path.removesuffix(".py").split("/")
    unit = parts[0]
    if unit not in FLOOR_OF and unit != "__init__":
        return [f"{path}: stands on no floor; add it to FLOORS (and to the design)"]
    tree, lines, wrong = ast.parse(source), source.count("\n") + 1, []
    if lines - source.endswith("\n") > MAX_LINES:
        wrong.append(f"{path}: longer than {MAX_LINES} lines")
    names = [_dotted(t) for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    names += [_dotted(n.target) for n in tree.body if isinstance(n, ast.AnnAssign)]
    if "__all__" not in names and len(tree.body) > 1:  # a docstring alone exports nothing
        wrong.append(f"{path}: has no __all__")
    wrong += [f"{path}:{n.lineno}: assert" for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    for found in imports(source, ".".join(["raytf", *parts[:-1]])):
        reasons = []
        if _inside(found.name, ("raytf",)):
            reasons = [_own_floor(path, unit, found)]
        elif not found.typing:
            reasons = list(_foreign(path, unit, found))
        wrong += [f"{path}:{found.line}: {reason}" for reason in reasons if reason]
    return wrong


MODULES = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_module_keeps_to_its_floor(path: str) -> None:
    wrong = violations(path, (PACKAGE / path).read_text(encoding="utf-8"))
    assert not wrong, "\n".join(wrong)


def test_the_package_was_found() -> None:
    assert {"errors.py", "config.py", "trainer.py", "cli/__init__.py"} <= set(MODULES)


_OK = "__all__ = []\n"


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("errors.py", "from raytf.config import SaveConfig", "imports upwards (config)"),
        ("data/order.py", "import raytf.checkpoint.store", "imports its sibling (checkpoint)"),
        ("data/order.py", "from ..worker import loop", "imports upwards (worker)"),
        ("data/order.py", "from raytf import trainer", "imports upwards (trainer)"),
        ("data/order.py", "def f():\n    from raytf.cluster import x", "imports upwards (cluster)"),
        ("data/order.py", "from raytf import KerasTrainer", "imports the package root"),
        ("data/order.py", "import raytf", "imports the package root"),
        (
            "worker/loop.py",
            "import importlib\nimportlib.import_module('raytf.cli')",
            "upwards (cli)",
        ),
        (
            "worker/loop.py",
            "if TYPE_CHECKING:\n    from raytf.trainer import x",
            "upwards (trainer)",
        ),
        ("result.py", "import raytf.progress", "imports its sibling (progress)"),
        ("report/page.py", "import raytf.run", "imports upwards (run)"),
        ("__init__.py", "from raytf.trainer import KerasTrainer", "when raytf is imported"),
        ("data/order.py", "import tensorflow as tf", "imports TensorFlow"),
        ("cluster/backend.py", "def f():\n    import keras", "imports TensorFlow or Keras (keras)"),
        ("result.py", "from keras import Model", "imports TensorFlow or Keras"),
        ("cli.py", "def f():\n    import tf_keras", "imports TensorFlow or Keras (tf_keras)"),
        ("worker/loop.py", "import ray", "imports Ray (ray)"),
        (
            "config.py",
            "try:\n    from ray.train import RunConfig\nexcept ImportError: pass",
            "imports Ray",
        ),
        ("__init__.py", "import ray", "imports Ray"),
        ("worker/loop.py", "from keras.src.backend import x", "uses internals of Keras"),
        ("worker/loop.py", "from keras import src", "uses internals of Keras"),
        ("worker/loop.py", "import keras\nkeras.src.trainers.x()", "uses internals of Keras"),
        (
            "worker/loop.py",
            "from tensorflow.python.eager import context",
            "uses internals of Keras",
        ),
        ("worker/loop.py", "import tensorflow as tf\ntf.python.eager", "uses internals of Keras"),
        ("worker/loop.py", "from tf_keras.src import x", "uses internals of Keras"),
        ("worker/legacy.py", "from keras.src import x", "uses internals of Keras"),
        ("trainer.py", "from ray.train.v2._internal import x", "uses internals of Ray"),
        ("trainer.py", "from ray import _private", "uses internals of Ray"),
        ("trainer.py", "import ray\nray._raylet.x()", "uses internals of Ray"),
        ("data/order.py", "def f(x):\n    assert x", "assert"),
        ("data/order.py", "x = 1\n" * MAX_LINES, "longer than"),
        ("extra/new.py", "", "stands on no floor"),
    ],
)
def test_planted_violations_are_found(path: str, code: str, reason: str) -> None:
    assert any(reason in line for line in violations(path, f"{_OK}{code}\n"))


def test_a_missing_all_is_found() -> None:
    assert violations("errors.py", "x = 1\ny = 2\n") == ["errors.py: has no __all__"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("config.py", "from raytf.errors import ConfigError"),
        ("data/parquet.py", "from raytf.data.order import x\nfrom . import order\nimport pyarrow"),
        ("worker/loop.py", "import tensorflow as tf\nimport keras\nfrom raytf.data import x"),
        ("worker/keras_compat.py", "from keras.src import x\nfrom tensorflow.python import y"),
        ("worker/legacy.py", "from tf_keras.src import x"),
        ("cluster/backend.py", "import ray\nfrom ray.train.v2._internal import x\nray._private.y"),
        ("trainer.py", "from ray.train.v2.tensorflow.tensorflow_trainer import x"),
        ("trainer.py", "import ray\nray.__version__"),
        ("trainer.py", "from raytf.result import x\nfrom raytf.progress import y"),
        ("result.py", "def load_model():\n    import keras"),
        ("data/order.py", "if TYPE_CHECKING:\n    import tensorflow as tf"),
        ("__init__.py", "def __getattr__(n):\n    from raytf import trainer"),
        ("__init__.py", "if TYPE_CHECKING:\n    from raytf.trainer import KerasTrainer"),
        ("__main__.py", "from raytf.cli import main"),
        ("cli.py", "import raytf"),
    ],
)
def test_what_is_allowed_passes(path: str, code: str) -> None:
    assert violations(path, f"{_OK}{code}\n") == []
