"""Printing names from files of others: as text, in lines that fit the terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import NoReturn

import typer

_UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PIPED_WIDTH = 100


def say(text: object, err: bool = False, indent: int | None = None) -> None:
    """Print a line; control characters of names from outside are shown, so that none of them steers a terminal.

    On a terminal long lines continue below their first word, or `indent` columns in; elsewhere a line stays one line.
    """
    shown = plain(text)
    if _on_terminal():
        shown = "\n".join(_wrapped(line, line_width(), indent) for line in shown.split("\n"))
    typer.echo(shown, err=err)


def refuse(message: object, group: str = "") -> NoReturn:
    """Say what was wrong with the request, of a command of `group`, and leave with status 2; nothing has run."""
    say(f"workbench{' ' * bool(group)}{group}: {message}", err=True)
    raise typer.Exit(2)


def plain(text: object) -> str:
    """Return text with its control characters spelled out; line ends stay."""
    return _UNSEEN.sub(lambda m: f"\\x{ord(m[0]):02x}", str(text))


def line_width() -> int:
    """Columns of the terminal, `PIPED_WIDTH` where there is none; at least 40."""
    return max(40, shutil.get_terminal_size((PIPED_WIDTH, 24)).columns)


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _wrapped(line: str, width: int, indent: int | None = None) -> str:
    if indent is None:
        indent = min(12, len(line) - len(line.lstrip(" -")) + 2)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False,
                         break_on_hyphens=False, drop_whitespace=True)  # fmt: skip
