"""`python -m raytf` is the `raytf` command."""

from __future__ import annotations

from raytf.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="raytf")
