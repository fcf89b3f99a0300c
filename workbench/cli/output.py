"""Printing names from files of others: as text, in lines that fit the terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

import typer

_UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def say(text: object, err: bool = False) -> None:
    """Print a line; control characters of names from outside are shown, so that none of them steers a terminal.

    On a terminal long lines continue below their first word; elsewhere a line stays one line.
    """
    plain = _UNSEEN.sub(lambda m: f"\\x{ord(m[0]):02x}", str(text))
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        plain = "\n".join(_wrapped(line, width) for line in plain.split("\n"))
    typer.echo(plain, err=err)


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip(" -")) + 2)
    return textwrap.fill(line, max(width, 40), subsequent_indent=indent[:12], break_long_words=False,
                         break_on_hyphens=False, drop_whitespace=True)  # fmt: skip
