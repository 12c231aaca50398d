"""The files around the package agree with each other, and modules stay short and documented."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = sorted(p for d in ("raytf", "jobs") for p in (ROOT / d).rglob("*.py"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def requirements() -> Iterator[str]:
    project = PYPROJECT["project"]
    yield from project["dependencies"]
    for extra in project["optional-dependencies"].values():
        yield from extra


def commands(text: str) -> list[str]:
    """The lines of README's fenced shell blocks."""
    return [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.S)
        for line in block.splitlines()
    ]


def test_constraints_are_names_and_versions_only() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"# .*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_every_requirement_is_pinned_inside_its_range() -> None:
    pinned = pins()
    for requirement in requirements():
        name, rest = re.match(r"([A-Za-z0-9._-]+)(.*)", requirement).groups()
        if name == "raytf":
            continue
        version = pinned[normal(name)]
        exact = re.search(r"==([\w.]+)", rest)
        assert exact is None or exact[1] == version, requirement


def test_ci_runs_the_second_command_of_the_readme() -> None:
    first, second = commands((ROOT / "README.md").read_text())[:2]
    assert "jobs/mnist.py" in first
    assert second in (ROOT / ".ci" / "run").read_text().splitlines()


def test_hooks_are_local() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"- repo: (.*)", hooks) == ["local"]


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_are_documented_and_functions_short(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
