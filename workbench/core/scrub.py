"""Keep what identifies a person or a machine out of recordings: paths, user and host names, addresses, tokens.

Standard library only.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
from collections.abc import Mapping
from functools import cache
from typing import Any

_COMMON_NAMES = {"root", "user", "ubuntu", "runner", "admin", "localhost", "jovyan", "nobody", "test"}
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# The path rule comes after URLs (they hold slashes) and asks for a slash that starts a word, so "tokens/s/GPU" stays.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("URL", re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>\\]+", re.I)),
    ("token", re.compile(r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|xox[bap]-|sk-)[A-Za-z0-9_-]{8,}|\bAKIA[A-Z0-9]{12,}")),
    ("e-mail address", re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")),
    ("MAC address", re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5,}\b|\benx[0-9a-f]{12}\b", re.I)),
    (
        "IPv6 address",
        re.compile(r"(?<![\w:])(?:(?:[0-9a-f]{1,4}:){3,7}:?[0-9a-f]{1,4}|fe80::[0-9a-f:]+)(?![\w:])", re.I),
    ),
    ("IPv4 address", re.compile(rf"(?<![\w.]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w.]|-\w)")),
    ("device serial", re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]+", re.I)),
    ("path", re.compile(r"(?<![\w.~)\]])(?:~[\w-]*(?=/)|[A-Za-z]:(?=\\)|(?=/))(?:[/\\]{1,2}[\w.@+-]+){2,}/?")),
    ("path", re.compile(r"(?<![\w.])~/[\w.@+-]+")),
)
_LABEL = {"URL": "<url>", "token": "<token>", "path": "<path>", "device serial": "<device>"}


@cache
def _own_names() -> tuple[str, ...]:
    names = set()
    with contextlib.suppress(OSError):
        host = socket.gethostname()
        names |= {host, host.split(".")[0]}
    with contextlib.suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    return tuple(sorted((n for n in names if len(n) > 3 and n.lower() not in _COMMON_NAMES), key=len, reverse=True))


def _rules() -> list[tuple[str, re.Pattern[str]]]:
    own = [("host or user name", re.compile(rf"(?<![\w]){re.escape(n)}(?![\w])")) for n in _own_names()]
    return [*_PATTERNS, *own]


def scrub(value: Any) -> Any:
    """Return `value` (any nesting of dicts, lists, strings) with identifying text replaced by a ``<label>``."""
    if isinstance(value, str):
        for what, pattern in _rules():
            value = pattern.sub(_LABEL.get(what, "<name>" if "name" in what else "<address>"), value)
        return value
    if isinstance(value, Mapping):
        return {scrub(k) if isinstance(k, str) else k: scrub(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(v) for v in value]
    return value


def leaks(value: Any, where: str = "") -> list[str]:
    """Return one line per identifying text found in `value`, naming the field and the kind, never the text itself."""
    if isinstance(value, str):
        return [f"{where or 'text'} holds what looks like a {what}" for what, p in _rules() if p.search(value)]
    if isinstance(value, Mapping):
        found = [leaks(str(k), f"{where} key") + leaks(v, f"{where}.{k}".strip(".")) for k, v in value.items()]
        return [line for lines in found for line in lines]
    if isinstance(value, (list, tuple)):
        return [x for i, v in enumerate(value) for x in leaks(v, f"{where}[{i}]")]
    return []


def scrub_trace(text: str) -> str:
    """Return a profiler's trace (JSON text) without identifying text; the digits of its times are kept as written."""
    trace = json.loads(text, parse_float=_Digits)
    for key in list(trace):
        if key not in (
            "traceEvents",
            "schemaVersion",
            "deviceProperties",
            "displayTimeUnit",
            "baseTimeNanoseconds",
            "cuda_driver_version",
            "cuda_runtime_version",
            "cupti_version",
        ):
            del trace[key]
    kept = []
    for event in trace["traceEvents"]:
        if "name" in event:
            event["name"] = _relative(event["name"])
        if event.get("ph") == "M" and event.get("name") == "process_labels":
            continue
        args = event.get("args")
        if isinstance(args, dict):
            event["args"] = {
                k: v for k, v in args.items() if not isinstance(v, str) or k in ("name", "kind", "cuda_sync_kind")
            }
        kept.append(event)
    trace["traceEvents"] = kept
    return _dump(scrub(trace))


def _relative(name: Any) -> Any:
    """A Python frame's path from its package on, so that a line is named without a machine's folders."""
    if not isinstance(name, str) or "): " not in name or "/" not in name:
        return name
    path, rest = name.split("(", 1)
    if not path.startswith("/"):
        return name
    for root in ("site-packages/", "dist-packages/", "/lib/python3", "workbench/"):
        at = path.rfind(root)
        if at >= 0:
            start = at + len(root) if root.endswith("packages/") else at + root.startswith("/")
            return f"{path[start:]}({rest}"
    return f"{path.rsplit('/', 1)[-1]}({rest}"


class _Digits(float):
    """A float that remembers the digits it was written with."""

    text: str

    def __new__(cls, text: str):
        self = super().__new__(cls, text)
        self.text = text
        return self


def _dump(value: Any) -> str:
    if isinstance(value, _Digits):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_dump, value)) + "]"
    return json.dumps(value)


def scrub_notebook(value: Any) -> Any:
    """`scrub` on everything but base64 data, whose letters can look like a path."""
    if isinstance(value, dict):
        binary = value.get("encoding") == "base64"
        return {k: v if k == "bdata" or (binary and k == "data") else scrub_notebook(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub_notebook(v) for v in value]
    return scrub(value)
