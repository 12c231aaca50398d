"""The gate, the same by hand, in pre-commit and in CI: `python -m tests [PYTEST ARGUMENTS]`.

Runs every check even if an earlier one failed; exits with 1 if any did. pytest comes last, so that
its closing line ends the output.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    # Named, so that a configuration in a folder above is not taken instead.
    ("pyright", "--project", "pyproject.toml", "--pythonpath", sys.executable),
    ("pytest",),
)


def main(arguments: list[str]) -> int:
    """Runs all checks in the repository root, pytest with `arguments`; 0 if all passed."""
    failed: list[str] = []
    for check in CHECKS:
        extra = arguments if check[0] == "pytest" else []
        print(f"== {' '.join((*check, *extra))}", flush=True)
        if subprocess.run([sys.executable, "-m", *check, *extra], cwd=ROOT).returncode:
            failed.append(" ".join(check[:2]))
    if failed:  # on stderr: pytest's closing line stays the last one on stdout
        print(f"== failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
