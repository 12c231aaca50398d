"""The tests: mirrors raytf/. `python -m tests` runs the whole gate."""
