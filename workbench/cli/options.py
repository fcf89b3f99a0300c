"""What several commands share: options and arguments, each declared once, and the one way to refuse a request."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import typer

from workbench.core.output import refuse

Json = Annotated[bool, typer.Option("--json", help="Print JSON: every row, nothing rounded; names end in units.")]
Param = Annotated[
    list[str] | None, typer.Option("-p", "--param", metavar="NAME=VALUE", help="A parameter; may be repeated.")
]
Scheduler = Annotated[
    str | None,
    typer.Option(help="Address of a Dask scheduler, or the file that it wrote; processes of this machine when absent."),
]
Slug = Annotated[str, typer.Argument(metavar="SLUG", help="Name of an experiment; see: workbench list.")]
Source = Annotated[
    str | None, typer.Option(help="auto, model, recorded, live or report; default: what a notebook says, else auto.")
]
Timeout = Annotated[float, typer.Option(min=1, help="Limit for each notebook, in seconds.")]
Window = Annotated[
    str,
    typer.Option(
        "--window", help="all, steps, step:N, a range's name, or A:B (ns, or +1ms:+5ms from the first operation)."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes here; default: cores, at most 4. Notebooks that measure run alone; each reads one trace."
    ),
]


def default_jobs() -> int:
    """Processes to run at a time where the user does not say."""
    return max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@contextlib.contextmanager
def refusing(*errors: type[Exception], group: str = "", before: str = "", after: str = "") -> Iterator[None]:
    """Refuse, with what the error says, a request of a command of `group` that raises one of `errors`."""
    try:
        yield
    except errors as error:
        # The text of a KeyError is its argument in quotes.
        refuse(f"{before}{error.args[0] if isinstance(error, KeyError) else error}{after}", group)
