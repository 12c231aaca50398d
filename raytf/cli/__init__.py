"""The command line. Data goes to standard output, talk to standard error.

Owns the verbs and what their exit codes say: 0 ok, 1 failed, 2 usage, 3 bad configuration or
findings, 4 not found. What a verb does is done elsewhere; neither TensorFlow nor Ray is loaded for
any but those that need a model or a run.
"""

from __future__ import annotations

import click

import raytf
from raytf.cli.checkpoints import checkpoints as checkpoints_group
from raytf.cli.output import Edge
from raytf.cli.runs import events as events_command
from raytf.cli.runs import report as report_command
from raytf.cli.runs import runs as runs_command
from raytf.cli.runs import status as status_command
from raytf.cli.verify_resume import verify_resume as verify_resume_command

__all__ = ["main"]


@click.group(cls=Edge, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    raytf.__version__, "--version", prog_name="raytf", message="%(prog)s %(version)s"
)
def main() -> None:
    """Trains TensorFlow/Keras models on a Ray cluster.

    Training starts from Python (raytf.KerasTrainer). These commands look after what it leaves.
    """


main.add_command(checkpoints_group)
main.add_command(events_command)
main.add_command(report_command)
main.add_command(runs_command)
main.add_command(status_command)
main.add_command(verify_resume_command)
