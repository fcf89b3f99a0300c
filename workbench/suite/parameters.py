"""Typed, strict parameters: text from the command line or a file becomes values, or stops before anything runs.

papermill guesses types from text and only warns about a name that no cell assigns; a sweep over a misspelt name
then runs to the end and ignores it. Here the experiment's declaration decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.core.experiment import SOURCES
from workbench.core.params import (
    ParameterError,
    Params,
    convert,
    describe,
    describe_line,
    parsed,
    path_parameters,
    typed,
    unknown_name,
)
from workbench.suite.catalog import Declared, Notebook, NotebookError

SOURCE_CHOICES = ("auto", *SOURCES)


def split_assignments(items: Iterable[str]) -> dict[str, str]:
    """Return ``name=value`` items as a mapping of text.

    Raises:
        ParameterError: an item without ``=``, or a name given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        name, sep, text = item.partition("=")
        if not sep or not name.strip():
            raise ParameterError(f"-p {item!r}: expected name=value")
        if name.strip() in found:
            raise ParameterError(f"-p {name.strip()!r}: given twice")
        found[name.strip()] = text
    return found


def read_parameter_file(path: Path) -> dict[str, Any]:
    """Read a YAML (or JSON) mapping of parameter to value; a slug as key holds a mapping for that notebook alone.

    Raises:
        ParameterError: the file cannot be read or is not a mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ParameterError(f"parameter file {path}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(k, str) for k in content):
        raise ParameterError(
            f"parameter file {path}: expected a mapping of names to values, got {type(content).__name__}"
        )
    return content


def assign(
    notebooks: Sequence[Notebook],
    shared: Mapping[str, Any],
    per_slug: Mapping[str, Mapping[str, Any]],
    source: str | None,
) -> dict[str, dict[str, Any]]:
    """Return, for each notebook's slug, the checked parameters to inject.

    A shared parameter goes to every notebook that has it; a parameter of `per_slug` must exist there. A notebook that
    cannot be read gets none: running it reports why.

    Args:
        notebooks: the selection.
        shared: name to text or value, for all.
        per_slug: the same for one notebook.
        source: value of the parameter ``source``; None leaves each notebook's own.
    Raises:
        ParameterError: no selected notebook has a shared parameter, or a name or value is bad.
    """
    if source is not None and source not in SOURCE_CHOICES:
        raise ParameterError(f"--source {source!r}: expected one of {', '.join(SOURCE_CHOICES)}")
    result: dict[str, dict[str, Any]] = {n.slug: {} for n in notebooks}
    have: dict[str, list[str]] = {}
    lines: list[str] = []
    for notebook in notebooks:
        slug, own = notebook.slug, per_slug.get(notebook.slug, {})
        try:
            declared, _ = notebook.declared, notebook.experiment
        except NotebookError:
            continue
        have[slug] = [name for name in declared if name != "source"]
        lines += [f"{slug}: {line}" for line in _lines(notebook)]
        for name in own:
            if name not in have[slug]:
                raise ParameterError(f"{slug}: " + unknown_name(name, have[slug], _lines(notebook)))
        mine = {k: v for k, v in shared.items() if k in have[slug]} | dict(own)
        try:
            result[slug] = check(notebook, mine)
        except ParameterError as error:
            raise ParameterError(f"{slug}: {error}") from None
        if source is not None and "source" in declared:
            result[slug]["source"] = source
        if mine:
            _refuse_unrecorded(notebook, result[slug])
    names = {name for mine in have.values() for name in mine}
    for name in sorted(set(shared) - names):
        if name == "source":
            raise ParameterError("parameter 'source': use --source")
        if len(notebooks) > 3:
            lines = [f"{slug}: {', '.join(mine) or 'none'}" for slug, mine in have.items()]
        raise ParameterError(unknown_name(name, sorted(names), lines))
    for slug in sorted(set(per_slug) - set(result)):
        raise ParameterError(f"parameters given for {slug!r}, which is not selected")
    return result


def check(notebook: Notebook, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-ready values for one notebook's parameters, typed by its experiment, else by its parameters cell.

    Raises:
        ParameterError: a name that the notebook does not assign, or a bad value.
    """
    declared, experiment = notebook.declared, notebook.experiment
    for name in given:
        if name not in declared:
            raise ParameterError(unknown_name(name, list(declared), _lines(notebook)))
    cls = experiment.params if experiment else Params
    fields = {f.name for f in dataclasses.fields(cls)}
    base = {d.name: d.default for d in declared.values() if d.literal and d.name in fields}
    values = convert(cls, {k: v for k, v in given.items() if k in fields}, base=base)
    values |= {name: _found(name, values[name]) for name in path_parameters(cls) if values.get(name)}
    return values | {name: _own_value(declared[name], v) for name, v in given.items() if name not in fields}


def _found(name: str, text: str) -> str:
    """Return a path as an absolute one: the notebook runs in its own folder, not where the user typed the path."""
    path = Path(text).expanduser()
    if not path.is_absolute() and not path.exists():
        raise ParameterError(f"parameter {name!r}: no file or folder {text!r} in the current folder, {Path.cwd()}")
    return str(path.absolute())


def _refuse_unrecorded(notebook: Notebook, params: Mapping[str, Any]) -> None:
    """Refuse a value that a recording cannot answer, where the recording is what would be shown."""
    experiment = notebook.experiment
    if experiment is None or experiment.recording is None:
        return
    from workbench.core.record import load_recording

    values = {d.name: d.default for d in notebook.declared.values() if d.literal} | dict(params)
    source = values.pop("source", "auto")
    fields = {f.name for f in dataclasses.fields(experiment.params)}
    try:
        if experiment.choose(source) == "recorded":
            recording = load_recording(experiment.slug, experiment.recording)
            experiment.as_recorded(experiment.params(**{k: v for k, v in values.items() if k in fields}), recording)
    except (ValueError, FileNotFoundError) as error:
        raise ParameterError(str(error)) from None


def _own_value(declared: Declared, value: Any) -> Any:
    """Type a parameter that no experiment declares by its annotation, else by its default's type."""
    name, default = declared.name, declared.default
    if name == "source":
        if value not in SOURCE_CHOICES:
            raise ParameterError(f"parameter 'source': expected one of {', '.join(SOURCE_CHOICES)}, got {value!r}")
        return value
    known = {t.__name__: t for t in (int, float, bool, str)}
    hint: Any = known.get(declared.annotation) or (type(default) if declared.literal else None)
    if hint in (list, tuple):
        hint = list[type(default[0]) if default else str]
    elif hint not in known.values():
        raise ParameterError(f"parameter {name!r}: cannot be set, its type is not declared in the parameters cell")
    try:
        found = typed(name, parsed(name, value, hint), hint)
    except ValueError as error:
        raise ParameterError(str(error)) from None
    return list(found) if isinstance(found, tuple) else found


def _lines(notebook: Notebook) -> list[str]:
    if notebook.experiment is None:
        return [f"{n} = {d.default!r}" for n, d in notebook.declared.items() if n != "source"]
    return [describe_line(r) for r in describe(notebook.experiment.params) if r["name"] in notebook.declared]
