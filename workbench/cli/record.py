"""``workbench record``: measure and keep, check what was kept, list it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure an experiment on this GPU and keep it; check what was kept.",
)
Root = Annotated[Path | None, typer.Option("--root", help="Folder of recordings instead of data/recorded.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Param = Annotated[
    list[str] | None, typer.Option("-p", "--param", metavar="NAME=VALUE", help="A parameter; repeatable.")
]


@app.command("run")
def run(
    slug: str, param: Param = None, out: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None
) -> None:
    """Measure experiment SLUG here and write its recording."""
    from workbench.record import main

    arguments = [slug, *(x for p in param or () for x in ("-p", p))]
    raise typer.Exit(main([*arguments, "--out", str(out)] if out else arguments))


@app.command("check")
def check(root: Root = None, as_json: Json = False) -> None:
    """Validate every recording and pin (schema, required fields, SHA-256, identifying text); exit 1 if one is wrong."""
    from workbench.record import check_all

    if root is not None and not root.is_dir():
        typer.echo(f"--root {root}: no such folder", err=True)
        raise typer.Exit(2)
    found = check_all(root)
    bad = {k: v for k, v in found.items() if v}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for name, problems in found.items():
            print(f"{'FAIL' if problems else 'ok':4}  {name}")
            for line in problems:
                print(f"      {line}")
        print(f"{len(found)} recordings, {len(bad)} with problems")
    raise typer.Exit(1 if bad else 0)


@app.command("list")
def list_(root: Root = None) -> None:
    """List the recordings and say which are shown (pinned)."""
    from workbench.experiment import load, slugs
    from workbench.record import data_root

    pins = {(s, load(s).recording) for s in slugs()}
    for path in sorted((root or data_root() / "recorded").glob("*/*/record.json")):
        slug, name = path.parent.parent.name, path.parent.name
        print(f"{slug}/{name}{'  (pinned)' if (slug, name) in pins else ''}")
