"""Parameters of an experiment: declared once, typed, bounded, and refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


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
        "doc": doc,
        "unit": unit,
        "min": min,
        "max": max,
        "step": step,
        "choices": choices,
        "log": log,
        "analysis": analysis,
        "path": path,
    }
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
            value = _coerce(f.name, getattr(self, f.name), hints[f.name])
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
    allowed = [f.name for f in dataclasses.fields(cls)]
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown parameter {name!r}: allowed are {', '.join(allowed) or 'none'}{hint}")


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type, without guessing (a string is never a number)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        return _coerce(name, value, rest[0])
    if origin is Literal:
        if value not in args:
            raise ValueError(f"parameter {name!r}: expected one of {', '.join(map(repr, args))}, got {value!r}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"parameter {name!r}: expected a list of {args[0].__name__}, got {value!r}")
        return tuple(_coerce(f"{name}[{i}]", v, args[0]) for i, v in enumerate(value))
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
    if value is None:
        return
    choices, low, high = meta.get("choices"), meta.get("min"), meta.get("max")
    if choices is not None and value not in choices:
        raise ValueError(f"parameter {name!r}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    below = low is not None and value < low
    above = high is not None and value > high
    if below or above:
        bounds = f"{'-inf' if low is None else low} to {'inf' if high is None else high}"
        raise ValueError(f"parameter {name!r}: expected {bounds}, got {value!r}")


def close_names(name: str, known: Sequence[str]) -> list[str]:
    """Return a few of the `known` names: those that contain `name`, else those spelt like it."""
    containing = [k for k in known if name and name.lower() in k.lower()]
    return containing[:8] or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
