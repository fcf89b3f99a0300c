"""Typed, strict parameters: text from the command line or a file becomes values, or stops before anything runs.

papermill guesses types from text and only warns about a name that no cell assigns; a sweep over a misspelt name
then runs to the end and ignores it. Here the experiment's declaration decides.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from workbench.core.params import Params, path_parameters
from workbench.suite.catalog import Declared, Notebook, NotebookError

SOURCE_CHOICES = ("auto", "model", "recorded", "live", "report")


class ParameterError(ValueError):
    """An unknown name or a bad value; the message names what is allowed."""


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


def describe(cls: type[Params], names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return name, type, default, bounds and meaning of each parameter, as plain JSON values."""
    hints = typing.get_type_hints(cls)
    rows = []
    for f in dataclasses.fields(cls):
        if names is not None and f.name not in names:
            continue
        row = {"name": f.name, "type": _type_name(hints[f.name]), "default": _plain(f.default)}
        row |= {
            k: _plain(f.metadata.get(k))
            for k in ("min", "max", "choices", "unit", "doc")
            if f.metadata.get(k) not in (None, "")
        }
        rows.append(row)
    return rows


def describe_line(row: Mapping[str, Any]) -> str:
    """Return one row of `describe` as a line for people."""
    bounds = ""
    if "choices" in row:
        bounds = f", one of {', '.join(map(str, row['choices']))}"
    elif "min" in row or "max" in row:
        bounds = f", {row.get('min', '-inf')} to {row.get('max', 'inf')}"
    unit = f" {row['unit']}" if row.get("unit") else ""
    doc = f"  ({row['doc']})" if row.get("doc") else ""
    return f"{row['name']}: {row['type']} = {row['default']!r}{unit}{bounds}{doc}"


def convert(cls: type[Params], given: Mapping[str, Any], *, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Turn given text or values into checked, JSON-ready values of the experiment's parameters.

    Args:
        cls: the experiment's parameters.
        given: name to text (or to a value from a file).
        base: values that the given ones are combined with for checks across fields.
    Raises:
        ParameterError: an unknown name or a bad value; the message lists what is allowed and the bounds.
    """
    hints = typing.get_type_hints(cls)
    allowed = [f.name for f in dataclasses.fields(cls)]
    typed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in allowed:
            if name == "source":
                raise ParameterError("parameter 'source': use --source")
            raise ParameterError(_unknown(name, allowed, [describe_line(r) for r in describe(cls)]))
        try:
            typed[name] = parse_text(value, hints[name]) if isinstance(value, str) else value
        except ValueError as error:
            line = describe_line(describe(cls, [name])[0])
            raise ParameterError(f"parameter {name!r}: {error}\n  allowed: {line}") from None
    try:
        checked = cls(**{**(base or {}), **typed}).as_dict()
    except (TypeError, ValueError) as error:
        lines = [describe_line(r) for r in describe(cls, list(typed) or None)]
        raise ParameterError("\n  ".join([str(error), "allowed:", *lines])) from None
    return {name: checked[name] for name in typed}


def parse_text(text: str, hint: Any) -> Any:
    """Read text as the annotated type, without guessing.

    Raises:
        ValueError: the text is not of that type.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if type(None) in args and text.strip().lower() in ("none", "null", ""):
            return None
        return parse_text(text, next(a for a in args if a is not type(None)))
    if origin is Literal:
        for choice in args:
            if str(choice) == text:
                return choice
        raise ValueError(f"expected one of {', '.join(map(repr, args))}, got {text!r}")
    if origin in (tuple, list):
        return _parse_list(text, args[0] if args else str)
    if hint is bool:
        word = {"true": True, "false": False}.get(text.strip().lower())
        if word is None:
            raise ValueError(f"expected true or false, got {text!r}")
        return word
    if hint is int or hint is float:
        try:
            return hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise ValueError(f"expected {kind}, got {text!r}") from None
    if hint is str:
        return text
    raise ValueError(f"cannot be set from text: its type is {_type_name(hint)}")


def _parse_list(text: str, item: Any) -> list[Any]:
    if text.strip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a JSON list, got {text!r}: {error}") from None
        return [parse_text(v, item) if isinstance(v, str) else v for v in values]
    return [parse_text(part.strip(), item) for part in text.split(",") if part.strip()]


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
    result: dict[str, dict[str, Any]] = {n.slug: {} for n in notebooks}
    unused = set(shared)
    have: dict[str, list[str]] = {}
    full: list[str] = []
    if source is not None and source not in SOURCE_CHOICES:
        raise ParameterError(f"--source {source!r}: expected one of {', '.join(SOURCE_CHOICES)}")
    for notebook in notebooks:
        try:
            declared, _ = notebook.declared, notebook.experiment
        except NotebookError:
            continue
        have[notebook.slug] = [name for name in declared if name != "source"]
        full += [f"{notebook.slug}: {line}" for line in _lines(notebook)]
        own = per_slug.get(notebook.slug, {})
        for name in own:
            if name not in declared or name == "source":
                raise ParameterError(f"{notebook.slug}: " + _unknown(name, have[notebook.slug], _lines(notebook)))
        mine = {k: v for k, v in shared.items() if k in declared and k != "source"} | dict(own)
        unused -= mine.keys()
        try:
            result[notebook.slug] = check(notebook, mine)
        except ParameterError as error:
            raise ParameterError(f"{notebook.slug}: {error}") from None
        if source is not None and "source" in declared:
            result[notebook.slug]["source"] = source
        if mine:
            _refuse_unrecorded(notebook, result[notebook.slug])
    if unused:
        name = sorted(unused)[0]
        if name == "source":
            raise ParameterError("parameter 'source': use --source")
        names = sorted({n for ns in have.values() for n in ns})
        lines = [f"{slug}: {', '.join(ns) or 'none'}" for slug, ns in have.items()]
        raise ParameterError(_unknown(name, names, full if len(notebooks) <= 3 else lines))
    stray = set(per_slug) - set(result)
    if stray:
        raise ParameterError(f"parameters given for {sorted(stray)[0]!r}, which is not selected")
    return result


def check(notebook: Notebook, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-ready values for one notebook's parameters, typed by its experiment, else by its parameters cell.

    Raises:
        ParameterError: a name that the notebook does not assign, or a bad value.
    """
    declared = notebook.declared
    for name in given:
        if name not in declared:
            raise ParameterError(_unknown(name, list(declared), _lines(notebook)))
    fields: set[str] = set()
    values: dict[str, Any] = {}
    if notebook.experiment is not None:
        cls = notebook.experiment.params
        fields = {f.name for f in dataclasses.fields(cls)}
        base = {d.name: d.default for d in declared.values() if d.literal and d.name in fields}
        values = convert(cls, {k: v for k, v in given.items() if k in fields}, base=base)
        values |= {name: _found(name, values[name]) for name in path_parameters(cls) if values.get(name)}
    for name, value in given.items():
        if name not in fields:
            values[name] = _own_value(declared[name], value)
    return values


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
            experiment._as_recorded(experiment.params(**{k: v for k, v in values.items() if k in fields}), recording)
    except (ValueError, FileNotFoundError) as error:
        raise ParameterError(str(error)) from None


def _own_value(declared: Declared, value: Any) -> Any:
    """Type a parameter that no experiment declares by its annotation, else by its default's type."""
    known = {"int": int, "float": float, "bool": bool, "str": str}
    hint: Any = known.get(declared.annotation) or (type(declared.default) if declared.literal else None)
    if declared.name == "source":
        if value not in SOURCE_CHOICES:
            raise ParameterError(f"parameter 'source': expected one of {', '.join(SOURCE_CHOICES)}, got {value!r}")
        return value
    if hint in (list, tuple):
        item = type(declared.default[0]) if declared.default else str
        hint = list[item]
    elif hint not in known.values():
        raise ParameterError(
            f"parameter {declared.name!r}: cannot be set, its type is not declared in the parameters cell"
        )
    try:
        typed = parse_text(value, hint) if isinstance(value, str) else value
    except ValueError as error:
        raise ParameterError(f"parameter {declared.name!r}: {error}") from None
    expected: type = typing.get_origin(hint) or hint
    if expected is float and isinstance(typed, int) and not isinstance(typed, bool):
        typed = float(typed)
    if not isinstance(typed, expected) or (expected is int and isinstance(typed, bool)):
        raise ParameterError(
            f"parameter {declared.name!r}: expected {expected.__name__}, got {type(typed).__name__} {typed!r}"
        )
    return typed


def _lines(notebook: Notebook) -> list[str]:
    names = [n for n in notebook.declared if n != "source"]
    if notebook.experiment is None:
        return [f"{n} = {notebook.declared[n].default!r}" for n in names]
    return [describe_line(r) for r in describe(notebook.experiment.params, names)]


def _unknown(name: str, allowed: Sequence[str], lines: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return "\n  ".join([f"unknown parameter {name!r}{hint}", "allowed:", *(lines or ["none"])])


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
