"""``workbench list``, ``show``, ``run`` and ``sync``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import Json, Param, Slug, Source, Timeout, Workers, default_jobs, refusing
from workbench.core.output import refuse, say

app = typer.Typer()


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List every experiment and notebook with its sources; --json adds claims, anchors and parameters."""
    rows = listing()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max((len(r["slug"]) for r in rows), default=0)
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            say(group)
        without = "" if row["notebook"] else "  (no notebook)"
        say(f"  {row['slug']:<{width}}  {row['title']}  [{','.join(row['sources'])}]{without}", indent=width + 4)
        if row["error"]:
            say(f"  {'':<{width}}  {row['error']}", indent=width + 4)
    say(f"{len(rows)} in all; one of them: workbench show SLUG; all notebooks: workbench run")


def listing() -> list[dict[str, Any]]:
    """Return slug, group, title, claim, kind, anchor, sources, params and notebook of everything that can be run."""
    from workbench.core.params import describe
    from workbench.experiments import slugs
    from workbench.suite.catalog import GROUPS, Notebook, NotebookError, find_notebooks, notebooks_root

    notebooks = {n.slug: n for n in find_notebooks()}
    rows = []
    for slug in sorted(notebooks.keys() | set(slugs())):
        # an experiment without a notebook still has a place where its notebook would lie
        notebook = notebooks.get(slug) or Notebook(notebooks_root() / "none" / f"{slug}.ipynb")
        row: dict[str, Any] = {
            "slug": slug,
            "group": notebook.group,
            "title": slug,
            "claim": "",
            "kind": "",
            "anchor": "",
        }
        row |= {"sources": [], "params": [], "error": None}
        row["notebook"] = f"{notebook.group}/{slug}.ipynb" if slug in notebooks else None
        try:
            experiment = notebook.experiment
            row["title"] = notebook.title
            if experiment is not None:
                row |= {k: getattr(experiment, k) for k in ("group", "claim", "kind", "anchor")}
                row |= {"sources": experiment.sources(), "params": describe(experiment.params)}
            if slug in notebooks:
                _ = notebook.declared
        except NotebookError as error:
            row["error"] = str(error)
        rows.append(row)
    order = {g: i for i, g in enumerate(GROUPS)}
    return sorted(rows, key=lambda r: (order.get(r["group"], len(order)), r["group"], r["slug"]))


@app.command("show")
def show_command(
    slug: Slug,
    source: Source = None,
    param: Param = None,
    part: Annotated[str | None, typer.Option(metavar="TABLE", help="Print one of its tables whole.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print every row and column.")] = False,
    as_json: Json = False,
) -> None:
    """Compute an experiment's table and check its claims, without a notebook; exit status 1 when a claim fails.

    Prints the source, the claims and, of each table, the first and last, rounded to fit the terminal.
    """
    from workbench.core.experiment import to_json
    from workbench.core.params import convert
    from workbench.experiments import load
    from workbench.suite.parameters import split_assignments

    if as_json and (part is not None or everything):
        refuse("--part and --all are for reading; --json prints every row of every part")
    with refusing(KeyError):
        experiment = load(slug)
    with refusing(ValueError, FileNotFoundError):
        values = convert(experiment.params, split_assignments(param or []))
        result = experiment.run(experiment.choose(source or "auto"), **values)
    if as_json:
        print(to_json(result, indent=1))
    else:
        from workbench.cli.show import require_part, show

        if part is not None:
            with refusing(ValueError):
                require_part(result, part)
        show(result, part, everything)
    raise typer.Exit(int(any(c.fails for c in result.checks)))


@app.command("run")
def run_command(
    slugs: Annotated[
        list[str] | None, typer.Argument(help="Slugs, groups or .ipynb files; all notebooks if none is named.")
    ] = None,
    param: Param = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="YAML file of parameters; a slug as key holds that notebook's own."),
    ] = None,
    source: Source = None,
    jobs: Workers = None,
    timeout: Timeout = 900.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report page and the executed notebooks; default: out/run, or out/NAME of a notebook."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run even what is unchanged since it passed.")] = False,
) -> None:
    """Execute notebooks headless and write a report page; exit status 1 when a notebook or a claim fails."""
    from workbench.suite import OutputError, run_suite, select
    from workbench.suite.parameters import assign, read_parameter_file, split_assignments

    out = out or default_out(slugs or [])
    try:
        with refusing(ValueError, OutputError):
            notebooks = select(slugs or [])
            if not notebooks:
                refuse("there are no notebooks to run")
            from_file = read_parameter_file(file) if file else {}
            known = {n.slug for n in notebooks}
            per_slug = {k: v for k, v in from_file.items() if isinstance(v, dict)}
            if stray := sorted(per_slug.keys() - known):
                refuse(f"parameter file {file}: {stray[0]!r} is not a selected notebook")
            shared = {k: v for k, v in from_file.items() if not isinstance(v, dict)} | split_assignments(param or [])
            skipped = without_source(notebooks, source, named=slugs or [])
            params = assign([n for n in notebooks if n.slug not in skipped], shared, per_slug, source)
            summary = run_suite(
                notebooks, params, out, jobs=jobs or default_jobs(), timeout_s=timeout, force=force, skipped=skipped
            )
    except OSError as error:  # a disk that fills up while notebooks run
        refuse(f"run stopped, results cannot be written to {out}: {error.strerror or error}; what passed stays there")
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in summary["counts"].items())
    parts = [
        f"{counts} in {summary['seconds']:.0f} s",
        claims_line(summary["notebooks"]),
        f"report: {out / 'index.html'}",
    ]
    print("; ".join(p for p in parts if p))
    raise typer.Exit(summary["exit_status"])


def without_source(notebooks: Sequence[Any], source: str | None, named: Sequence[str]) -> dict[str, str]:
    """Return slug to reason for notebooks that lack `source`: left out of a group, refused when asked for by name.

    Raises:
        ParameterError: a notebook that was named, or every one, lacks it.
    """
    from workbench.suite import NotebookError, ParameterError

    lacking: dict[str, str] = {}
    for notebook in notebooks:
        try:
            experiment = notebook.experiment
            if experiment is not None:
                # Without a GPU, what nobody has recorded yet has no source at all: said, and left out.
                experiment.choose(source or "auto")
        except NotebookError:
            continue
        except ValueError as error:
            if notebook.slug in named:
                raise ParameterError(str(error)) from None
            lacking[notebook.slug] = str(error)
    if lacking and len(lacking) == len(notebooks):
        raise ParameterError(next(iter(lacking.values())))
    return lacking


def claims_line(outcomes: Sequence[dict[str, Any]]) -> str:
    """How the claims of all notebooks stand, in the words of the report page; empty where there are none."""
    from workbench.suite.verdict import standing

    words = {"failed": "FAILED", "held": "held", "differs": "known to differ", "n/a": "not decided"}
    found = Counter(standing(c) for o in outcomes for c in o["checks"])
    told = ", ".join(f"{found[s]} {word}" for s, word in words.items() if found[s])
    return f"claims: {told}" if told else ""


def default_out(asked: Sequence[str]) -> Path:
    """Folder of a run where the user names none: a few notebooks must not replace the page of all of them."""
    if not asked:
        return Path("out/run")
    return Path("out") / (Path(asked[0]).stem if len(asked) == 1 else "selection")


@app.command("sync")
def sync_command(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit status 1 where a file is stale.")
    ] = False,
    readme: Annotated[
        Path | None, typer.Option(help="The file between whose markers the index goes; default: the checkout's.")
    ] = None,
) -> None:
    """Write what is generated from the experiments: the README's index and the notebooks' parameters cells."""
    from workbench.core.files import replace_file
    from workbench.suite.catalog import notebooks_root
    from workbench.suite.generated import stale

    with refusing(OSError, ValueError):
        texts = stale(readme or notebooks_root().parent / "README.md")
    for path, text in texts.items():
        if not check:
            replace_file(path, text)
        print(f"{path}: {'stale, run: workbench sync' if check else 'written'}")
    raise typer.Exit(int(check and bool(texts)))
