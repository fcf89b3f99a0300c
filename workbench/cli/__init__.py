"""The command line ``workbench``: one module of this package per command group.

The modules import what they run inside their commands, so that ``workbench list`` stays quick.
"""

from __future__ import annotations

import io
import sys

import typer

from workbench.cli import audit, history, launch, new, record, suite, sweep, trace

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Why does my GPU wait? Experiments that run: list, show and run them.",
)
for commands in (suite, sweep, new, audit, launch):
    app.add_typer(commands.app)
for name, group in (("trace", trace), ("record", record), ("history", history)):
    app.add_typer(group.app, name=name)


def main() -> None:
    """Entry point of the ``workbench`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
