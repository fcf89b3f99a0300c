"""Parameters of an experiment: declared once, typed, bounded, and refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class ParameterError(ValueError):
    """An unknown name or a bad value; the message names what is allowed."""


def param(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    min: float | None = None,
    max: float | None = None,
    step: float | None = None,
    choices: Sequence[Any] | None = None,
    log: bool = False,
    analysis: bool = False,
    path: bool = False,
) -> Any:
    """Declare one parameter of an experiment: its default (the report's value), meaning, unit and slider bounds.

    Args:
        default: value that reproduces the report.
        doc: one line for help texts.
        unit: unit shown beside the slider, e.g. ``"us"``.
        min: least allowed value, inclusive.
        max: greatest allowed value, inclusive.
        step: slider step.
        choices: allowed values, instead of bounds.
        log: the slider is logarithmic; with `choices`, it steps through them.
        analysis: it only changes how a table is analysed or drawn, so it may differ from a recording's.
        path: text that names a file or folder; on the command line a relative one counts from the current folder.
    """
    metadata = {
        "doc": doc, "unit": unit, "min": min, "max": max, "step": step, "choices": choices, "log": log,
        "analysis": analysis, "path": path,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def path_parameters(params: type[Params]) -> set[str]:
    """Return the names of the parameters that name a file or folder, see `param`."""
    return {f.name for f in dataclasses.fields(params) if f.metadata.get("path")}


@dataclass(frozen=True, kw_only=True)
class Params:
    """Base of every experiment's parameters: frozen, typed, bounded.

    Raises:
        ValueError: a value has the wrong type, is not finite, or lies outside its bounds; the message names the
            parameter, what is allowed and what came.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = typed(f.name, getattr(self, f.name), hints[f.name])
            _check_bounds(f.name, value, f.metadata)
            object.__setattr__(self, f.name, value)

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def replace(self, **changes: Any) -> typing.Self:
        """Return a copy with `changes`, checked like a new one."""
        check_names(type(self), changes)
        return dataclasses.replace(self, **changes)


def check_names(cls: type[Params], names: Iterable[str]) -> None:
    """Refuse a name that the parameters do not have.

    Raises:
        ParameterError: it names a near one, and all there are.
    """
    allowed = [f.name for f in dataclasses.fields(cls)]
    for name in names:
        if name not in allowed:
            raise ParameterError(unknown_name(name, allowed, [", ".join(allowed)] if allowed else []))


def typed(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type, without guessing (a string is never a number); a list becomes a tuple.

    Raises:
        ValueError: it is not of that type, or not finite.
    """
    if typing.get_origin(hint) in (tuple, list):
        item = typing.get_args(hint)[0]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"parameter {name!r}: expected a list of {item.__name__}, got {value!r}")
        return tuple(typed(f"{name}[{i}]", v, item) for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"parameter {name!r}: expected {hint.__name__}, got {type(value).__name__} {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"parameter {name!r}: expected a finite number, got {value!r}")
    return value


def _check_bounds(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    if isinstance(value, tuple):
        for i, v in enumerate(value):
            _check_bounds(f"{name}[{i}]", v, meta)
        return
    choices, low, high = meta.get("choices"), meta.get("min"), meta.get("max")
    if choices is not None and value not in choices:
        raise ValueError(f"parameter {name!r}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"{'-inf' if low is None else low} to {'inf' if high is None else high}"
        raise ValueError(f"parameter {name!r}: expected {bounds}, got {value!r}")


KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def parse_text(text: str, hint: Any) -> Any:
    """Read text as the annotated type: a number, ``true`` or ``false``, a list as ``a,b`` or as JSON.

    Raises:
        ValueError: the text is not of that type.
    """
    if typing.get_origin(hint) in (tuple, list):
        item = typing.get_args(hint)[0]
        if not text.strip().startswith("["):
            return [parse_text(part.strip(), item) for part in text.split(",") if part.strip()]
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a JSON list, got {text!r}: {error}") from None
        return [parse_text(v, item) if isinstance(v, str) else v for v in values]
    if hint is str:
        return text
    try:
        return {"true": True, "false": False}[text.strip().lower()] if hint is bool else hint(text)
    except (KeyError, ValueError):
        raise ValueError(f"expected {KINDS[hint]}, got {text!r}") from None


def parsed(name: str, value: Any, hint: Any) -> Any:
    """Return text as the annotated type, see `parse_text`, and any other value as it is; an error names `name`."""
    try:
        return parse_text(value, hint) if isinstance(value, str) else value
    except ValueError as error:
        raise ParameterError(f"parameter {name!r}: {error}") from None


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
    lines = {row["name"]: describe_line(row) for row in describe(cls)}
    for name in given:
        if name == "source":
            raise ParameterError("parameter 'source': use --source")
        if name not in lines:
            raise ParameterError(unknown_name(name, list(lines), list(lines.values())))
    try:
        values = {name: parsed(name, value, hints[name]) for name, value in given.items()}
        checked = cls(**{**(base or {}), **values}).as_dict()
    except (TypeError, ValueError) as error:
        named = [lines[name] for name in given] or list(lines.values())
        raise ParameterError("\n  ".join([str(error), "allowed:", *named])) from None
    return {name: checked[name] for name in values}


def describe(cls: type[Params]) -> list[dict[str, Any]]:
    """Return name, type, default, bounds and meaning of each parameter, as plain JSON values."""
    hints, rows = typing.get_type_hints(cls), []
    for f in dataclasses.fields(cls):
        default = list(f.default) if isinstance(f.default, tuple) else f.default
        told = {k: f.metadata.get(k) for k in ("min", "max", "choices", "unit", "doc")}
        told = {k: list(v) if isinstance(v, tuple) else v for k, v in told.items() if v not in (None, "")}
        rows.append({"name": f.name, "type": type_name(hints[f.name]), "default": default, **told})
    return rows


def type_name(hint: Any) -> str:
    """Return a type as a parameters cell writes it: ``int``, ``list[float]``."""
    item = typing.get_args(hint)
    return f"list[{item[0].__name__}]" if item else hint.__name__


def meaning(row: Mapping[str, Any]) -> str:
    """Return what one row of `describe` means and allows: the comment of its line in a notebook."""
    if "choices" in row:
        allowed = [f"one of {', '.join(map(str, row['choices']))}"]
    elif "min" in row or "max" in row:
        allowed = [f"{row.get('min', '-inf')} to {row.get('max', 'inf')}"]
    else:
        allowed = []
    return "; ".join([row["doc"], *filter(None, [row.get("unit")]), *allowed])


def describe_line(row: Mapping[str, Any]) -> str:
    """Return one row of `describe` as a line of Python: annotated default, then what it means and allows."""
    return f"{row['name']}: {row['type']} = {row['default']!r}  # {meaning(row)}"


def unknown_name(name: str, allowed: Sequence[str], lines: Sequence[str]) -> str:
    """Return the message for a name that is not `allowed`: a near one, and the `lines` that say what is."""
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return "\n  ".join([f"unknown parameter {name!r}{hint}", "allowed:", *(lines or ["none"])])


def close_names(name: str, known: Sequence[str]) -> list[str]:
    """Return a few of the `known` names: those that contain `name`, else those spelt like it."""
    containing = [k for k in known if name and name.lower() in k.lower()]
    return containing[:8] or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
