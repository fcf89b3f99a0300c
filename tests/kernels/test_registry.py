"""Every public op stands in `moe_kernels.OPS`, and what stands there is tested, sanitized and has a sheet."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import moe_kernels
from moe_kernels import OPS
from test_refusals import CALLS, DIFFERENTIABLE, MOVES, WEIGHTED

from workbench.experiments import slugs

SANITIZE = Path(__file__).with_name("sanitize.py")


def exported() -> set[str]:
    """Return `package.name` of everything that a package of ours exports and that takes `impl`."""
    found = set()
    for package in (p.name for p in pkgutil.iter_modules(moe_kernels.__path__) if p.ispkg):
        module = importlib.import_module(f"moe_kernels.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and "impl" in inspect.signature(value).parameters:
                found.add(f"{package}.{name}")
    return found


def calls(source: str) -> set[str]:
    """Return the dotted names of what a source calls, as they are imported."""
    tree = ast.parse(source)
    homes = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            found.add(homes.get(head, head) + dot + rest)
    return found


def test_every_op_is_in_the_table_and_the_table_names_ops_only():
    assert exported() == set(OPS)


def test_every_op_has_a_refusal_case():
    assert {name.split(" ")[0] for name in (*CALLS, *MOVES, *WEIGHTED, *DIFFERENTIABLE)} == set(OPS)


def test_every_op_has_a_sanitizer_case():
    assert calls("from a.b import c as d, e\nd(e.f(1))\n") == {"a.b.c", "a.b.e.f"}
    called = calls(SANITIZE.read_text(encoding="utf-8"))
    assert [op for op in OPS if f"moe_kernels.{op}" not in called] == []


def test_every_op_has_a_sheet():
    assert {op: sheet for op, sheet in OPS.items() if sheet not in slugs() or not sheet.startswith("op_")} == {}
