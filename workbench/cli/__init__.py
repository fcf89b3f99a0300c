"""The command line ``workbench``: one module of this package per command group.

Groups other than the suite's are imported only when they are called, so that ``workbench list`` stays quick.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import io
import sys
from typing import Any

import typer
from typer.core import TyperGroup

LAZY_GROUPS = {
    "trace": "where a real profiler trace waits",
    "record": "measure an experiment on this GPU and keep it",
    "audit": "what this machine is and whether it can be trusted for timing",
    "history": "archived metric histories: stitch segments, compare windows",
    "sweep": "many parameter sets over several machines",
    "launch": "run under torchrun or Slurm",
}


class LazyGroup(TyperGroup):
    """Mounts ``workbench.cli.<name>`` on first use, where that module exists."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the suite's commands, then the groups that are there."""
        return [*super().list_commands(ctx), *(n for n in LAZY_GROUPS if _exists(n))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, importing its module if need be."""
        if cmd_name in LAZY_GROUPS and _exists(cmd_name):
            return _mount(cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is called; typer's own hint does not know those that are mounted on first use."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and (near := difflib.get_close_matches(args[0], known, n=1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"workbench.cli.{name}") is not None


def _mount(name: str) -> Any:
    module = importlib.import_module(f"workbench.cli.{name}")
    mounted = getattr(module, "app", None)
    if mounted is None:
        mounted = typer.Typer()
        module.register(mounted)
    command: Any = typer.main.get_group(mounted)
    if list(command.commands) == [name]:
        command = command.commands[name]
    command.name = name
    command.help = command.help or LAZY_GROUPS[name]
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Why does my GPU wait? Experiments that run: list, show and run them.",
)


def main() -> None:
    """Entry point of the ``workbench`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


from workbench.cli import suite  # noqa: E402  (its commands register on `app`)

suite.register(app)
