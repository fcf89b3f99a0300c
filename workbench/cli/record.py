"""``workbench record``: measure and keep, check what was kept, list it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.options import Json, Param, Slug, refusing
from workbench.core.output import refuse, say

ROOT = Path(__file__).resolve().parents[2]
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure an experiment on this GPU and keep it; check what was kept.",
)
Root = Annotated[Path | None, typer.Option("--root", help="Folder of recordings instead of data/recorded.")]


@app.command("run")
def run(
    slug: Slug,
    param: Param = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to, instead of data/recorded.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Refuse what would be refused; measure nothing.")] = False,
) -> None:
    """Measure an experiment here and write its recording."""
    from workbench.core.params import convert
    from workbench.core.record import Recorder
    from workbench.experiments import load
    from workbench.suite.parameters import split_assignments

    with refusing(KeyError, ValueError):
        experiment = load(slug)
        values = convert(experiment.params, split_assignments(param or []))
        experiment.choose("live")
    if dry_run:
        return
    if run_tests(experiment.tests):
        refuse(f"{slug}: nothing is recorded while its tests are red: {' '.join(experiment.tests)}")
    params = experiment.params(**values)
    recorder = Recorder(slug, params.as_dict())
    rows = experiment.measure(params, recorder)  # type: ignore[misc]
    if rows is not None and not any(recorder.tables.values()):
        recorder.rows.extend(rows)
    print(recorder.write(out).name)


def run_tests(names: Sequence[str]) -> int:
    """Run test files of the checkout and return pytest's status; without a checkout, say that none ran."""
    if not (ROOT / "tests").is_dir():
        say("an installed package has no tests: the recording is made without them", err=True)
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *names], cwd=ROOT, stdout=sys.stderr).returncode


@app.command("check")
def check(root: Root = None, as_json: Json = False) -> None:
    """Validate every recording and pin (schema, required fields, SHA-256, identifying text); exit 1 if one is wrong."""
    from workbench.suite.record_check import check_all

    _require_folder(root)
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
    from workbench.core.record import data_root
    from workbench.experiments import load, slugs

    _require_folder(root)
    pins = {(s, load(s).recording) for s in slugs()}
    for path in sorted((root or data_root() / "recorded").glob("*/*/record.json")):
        slug, name = path.parent.parent.name, path.parent.name
        print(f"{slug}/{name}{'  (pinned)' if (slug, name) in pins else ''}")


def _require_folder(root: Path | None) -> None:
    if root is not None and not root.is_dir():
        refuse(f"--root {root}: no such folder")
