"""``workbench audit``: what this machine is, without what identifies it."""

from __future__ import annotations

import json

import typer

from workbench.cli.options import Json

app = typer.Typer(add_completion=False)


@app.command("audit")
def audit(as_json: Json = False) -> None:
    """Print GPUs, links, driver, software and the interpreter that is really active; no names, paths or addresses."""
    from rich.console import Console
    from rich.table import Table

    from workbench.core.audit import environment, table

    found = environment()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    view = Table("Item", "This machine", title="Audit (after Table 45)", title_justify="left")
    for item, value in table(found):
        view.add_row(item, value)
    Console().print(view, markup=False)
