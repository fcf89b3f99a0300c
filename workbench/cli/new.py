"""``workbench new SLUG``: the files of a new experiment."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.options import refusing

app = typer.Typer()


@app.command("new")
def new_command(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="One name for module, notebook, test and recordings.")],
    group: Annotated[str, typer.Option(help="Folder of its notebook: s08_sync_free, appendix_b or tools.")] = "tools",
) -> None:
    """Write module, notebook and test of a new experiment, whose one claim fails until you state it."""
    from workbench.core.files import replace_file
    from workbench.suite.catalog import notebooks_root
    from workbench.suite.generated import stale
    from workbench.suite.new import create

    root = notebooks_root().parent
    with refusing(ValueError):
        paths = create(slug, group)
    for path, text in stale(root / "README.md").items():
        replace_file(path, text)
    names = [str(p.relative_to(root)) for p in paths]
    print("\n".join(f"wrote {name}" for name in [*names, "README.md (the index)"]))
    print(
        f"next:\n  workbench show {slug}   its table and claims, while you fill in what says TODO, in all three files\n"
        f"  workbench sync   after each change: the index and the parameters cell follow\n"
        f"  python -m pytest {names[-1]} tests/test_architecture.py\n  workbench run {slug}"
    )
