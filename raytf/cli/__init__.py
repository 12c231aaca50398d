"""The command line. Data goes to standard output, talk to standard error."""

from __future__ import annotations

import click

import raytf

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    raytf.__version__, "--version", prog_name="raytf", message="%(prog)s %(version)s"
)
def main() -> None:
    """Trains TensorFlow/Keras models on a Ray cluster.

    Training starts from Python (raytf.KerasTrainer). Commands for clusters and runs come with later
    versions.
    """
