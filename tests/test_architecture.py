"""The house rules, read from the sources: imports, the tree of ARCHITECTURE.md, thin notebooks, short files."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.experiments import load, slugs
from workbench.suite import Notebook, find_notebooks
from workbench.suite.catalog import GROUPS, source_of, tags_of

ROOT = Path(__file__).resolve().parent.parent
STDLIB = sys.stdlib_module_names
SOURCES = sorted([*(ROOT / "workbench").rglob("*.py"), *(ROOT / "kernels" / "moe_kernels").rglob("*.py")])


def module_of(path: Path) -> str:
    """Return a source file's import name."""
    base = ROOT / "kernels" if (ROOT / "kernels") in path.parents else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, top_only: bool) -> Iterator[tuple[str, int]]:
    """Yield the absolute names that a file imports; `top_only` leaves out functions and type checking."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if top_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parts = package.split(".")
                stem = ".".join(parts[: len(parts) - child.level + 1]) if child.level else ""
                name = ".".join(filter(None, (stem, child.module or "")))
                yield from ((f"{name}.{alias.name}", child.lineno) for alias in child.names)
            yield from walk(child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")))


def within(name: str, *roots: str) -> bool:
    """Whether a dotted name is one of `roots` or below one."""
    return any(name == r or name.startswith(r + ".") for r in roots)


# The rooms from the ground up: an import, in a function too, leads to a lower floor or stays in its room.
FLOORS = (
    ("moe_kernels",),
    ("core",),
    ("models",),
    ("traces",),
    ("measure", "training"),
    ("views",),
    ("experiments",),
    ("widgets",),
    ("suite",),
    ("cli", "magic", "pytest_plugin"),
    ("workbench",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
GPU = ("torch", "triton", "nvshmem", "moe_kernels")
PAGES = ("ipywidgets", "anywidget", "IPython")

# (who, anywhere in the file or at module level only, what it must not import)
FORBIDDEN = [
    ("workbench.traces", "anywhere", (*GPU, *PAGES)),
    ("workbench.measure", "anywhere", PAGES[:2]),
    ("workbench.training", "anywhere", PAGES[:2]),
    ("workbench.experiments", "anywhere", PAGES),
    ("workbench.views", "anywhere", (*GPU, *PAGES[:2])),
    ("workbench.core.record", "anywhere", PAGES),
    ("workbench", "module level", ("torch", "triton", "moe_kernels")),
    ("workbench.experiments", "module level", ("polars", "plotly", "pyarrow", "scipy", "msgspec", "pydantic")),
    ("workbench.measure", "module level", ("polars", "plotly", "pyarrow", "scipy", "msgspec", "pydantic")),
    ("workbench.core.record", "module level", ("polars", "plotly", "numpy", "msgspec")),
    ("workbench.core.experiment", "module level", ("polars", "plotly", "numpy", "IPython")),
    ("moe_kernels", "anywhere", ("workbench", "plotly", "polars", *PAGES[::2])),
]


def room_of(name: str) -> str:
    """Return the room of a dotted name: a folder or file of workbench, or the kernels."""
    parts = name.split(".")
    return parts[1] if parts[0] == "workbench" and len(parts) > 1 and parts[1] in FLOOR else parts[0]


def against_the_layers(path: Path) -> list[str]:
    """Return the imports of one file that lead upwards, or across a floor."""
    mine = room_of(module_of(path))
    bad = []
    for name, line in imports(path, top_only=False):
        other = room_of(name)
        if other in FLOOR and other != mine and FLOOR[other] >= FLOOR[mine]:
            bad.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return bad


def test_imports_lead_down_the_floors() -> None:
    assert {room_of(module_of(p)) for p in SOURCES} == set(FLOOR), "a room without a floor, or a floor without a room"
    assert [line for path in SOURCES for line in against_the_layers(path)] == []


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Return the names from which one comes back to oneself."""
    reach = {a: set(b) for a, b in arrows.items()}
    for over in arrows:
        for mine in reach.values():
            if over in mine:
                mine |= reach[over]
    return sorted(a for a, b in reach.items() if a in b)


def test_no_module_is_imported_in_a_circle() -> None:
    modules = {module_of(p): p for p in SOURCES}
    arrows: dict[str, set[str]] = {}
    for mine, path in modules.items():
        found = (name if name in modules else name.rpartition(".")[0] for name, _ in imports(path, top_only=False))
        arrows[mine] = {m for m in found if m in modules and m != mine}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circles(arrows) == []


def test_no_private_name_is_imported() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        for name, line in imports(path, top_only=False)
        # Inside moe_kernels an op may use the package's own helpers.
        if within(name, *({"workbench", "moe_kernels"} - {module_of(path).split(".")[0]} | {"workbench"}))
        and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))
    ]
    assert bad == []


def private_torch(tree: ast.AST) -> Iterator[str]:
    """Yield every name of torch's that begins with an underscore: of an attribute or of an import."""
    for node in ast.walk(tree):
        found = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in found:
            if re.fullmatch(r"torch\.[\w.]*", name) and re.search(r"\._[^_]", name):
                yield name


def test_private_names_of_torch_stand_in_one_module_of_each_package() -> None:
    """Torch may rename them in any release: one file to look at then."""
    seen = "torch._C.f()\nimport torch._dynamo\nfrom torch import _foreach_add\ntorch.__version__\nx._version\n"
    assert {*private_torch(ast.parse(seen))} == {"torch._C", "torch._C.f", "torch._dynamo", "torch._foreach_add"}
    where = {module_of(p) for p in SOURCES if any(private_torch(ast.parse(p.read_text(encoding="utf-8"))))}
    assert where == {"moe_kernels._compat", "workbench.measure.unstable"}


def test_kernels_refuse_second_derivatives_in_one_way() -> None:
    """A backward of kernels asks `check_first_order`; others are plain torch, differentiable any number of times."""
    plain = {"_PermuteRows", "_AtBackward"}
    refusing: dict[str, bool] = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert "once_differentiable" not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                refusing[node.name] = "check_first_order(" in ast.unparse(node)
    assert len(refusing) > 9 and {name for name, does in refusing.items() if not does} == plain


@pytest.mark.parametrize(("who", "where", "banned"), FORBIDDEN, ids=lambda v: v if isinstance(v, str) else "")
def test_imports_go_one_way(who: str, where: str, banned: tuple[str, ...]) -> None:
    mine = [p for p in SOURCES if within(module_of(p), who)]
    assert mine, f"nothing is called {who}"
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in mine
        for name, line in imports(path, top_only=where == "module level")
        if within(name, *banned) and not within(name, who)
    ]
    assert not bad, f"{who} must not import {', '.join(banned)} ({where}):\n" + "\n".join(bad)


def test_models_import_numpy_only() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in (ROOT / "workbench" / "models").rglob("*.py")
        for name, line in imports(path, top_only=False)
        if name.split(".")[0] not in STDLIB and not within(name, "numpy", "workbench.models")
    ]
    assert not bad, "\n".join(bad)


def test_backends_of_an_op_do_not_import_each_other() -> None:
    stems = {"triton", "cuda", "reference"}
    bad = []
    for path in (ROOT / "kernels" / "moe_kernels").glob("*/*.py"):
        if path.stem in stems:
            op = module_of(path.parent / "__init__.py")
            others = [f"{op}.{s}" for s in stems - {path.stem}]
            found = imports(path, top_only=False)
            bad += [f"{path.relative_to(ROOT)}:{line} imports {name}" for name, line in found if within(name, *others)]
    assert not bad, "\n".join(bad)


def test_opening_every_experiment_needs_no_heavy_package() -> None:
    heavy = ["torch", "triton", "polars", "plotly", "pyarrow", "ipywidgets", "IPython", "papermill", "dask"]
    code = (
        "import sys, workbench\nfor s in workbench.slugs(): workbench.load(s)\n"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_reader_of_imports_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that reads nothing would pass for ever."""
    path = ROOT / "workbench" / "models" / "not_there.py"
    text = "import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    import g\nif TYPE_CHECKING:\n    import h\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    everything = [name for name, _ in imports(path, top_only=False)]
    assert everything == ["a.b", "workbench.models.c", "workbench.d.e", "g"]
    assert [name for name, _ in imports(path, top_only=True)] == everything[:-1]


def tracked() -> set[str]:
    """Return the paths that git tracks."""
    try:
        found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return set(found.stdout.splitlines())


def written_tree() -> dict[str, str]:
    """Return path to purpose, from the tree in ARCHITECTURE.md."""
    block = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## Tree")[1].split("```")[1]
    found: dict[str, str] = {}
    folder = ""
    for line in block.strip("\n").splitlines():
        match = re.fullmatch(r"( *)(\S+) *(.*)", line)
        assert match, line
        indent, name, purpose = match.groups()
        if not indent:
            folder = name if name.endswith("/") else ""
        found[(folder if indent else "") + name] = purpose
    return found


def test_tree_is_true() -> None:
    files, tree = tracked(), written_tree()
    absent = [p for p in tree if not (any(f.startswith(p) for f in files) if p.endswith("/") else p in files)]
    assert not absent, f"ARCHITECTURE.md names what is not there: {absent}"
    silent = [p for p, purpose in tree.items() if len(purpose) < 4 and p != "workbench/"]
    assert not silent, f"no purpose in ARCHITECTURE.md: {silent}"
    top = {f.split("/")[0] + ("/" if "/" in f else "") for f in files}
    inner = {
        f"workbench/{f.split('/')[1]}" + ("/" if f.count("/") > 1 else "") for f in files if f.startswith("workbench/")
    }
    named = set(tree) | {p.split("/")[0] + "/" for p in tree if "/" in p}
    hidden = {p for p in top | inner if p.startswith(".") or p == "workbench/__init__.py"}
    missing = sorted((top | inner) - named - hidden)
    assert not missing, f"ARCHITECTURE.md does not name: {missing}"


def test_kernels_stays_a_plain_folder() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow the import name of another package"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_long_file_says_why(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if len(text.splitlines()) > 600:
        doc = ast.get_docstring(ast.parse(text)) or ""
        assert "600 lines" in doc, f"{path.name} has {len(text.splitlines())} lines: its docstring must say why"


NOTEBOOKS = find_notebooks(ROOT / "notebooks")


def code_cells(notebook: Notebook) -> list[dict]:
    """Return the code cells."""
    return [c for c in notebook.content["cells"] if c["cell_type"] == "code"]


def test_every_experiment_has_its_notebook() -> None:
    assert {n.slug for n in NOTEBOOKS} == set(slugs())


@pytest.mark.parametrize("slug", slugs())
def test_a_measurement_names_the_tests_that_guard_it(slug: str) -> None:
    experiment = load(slug)
    assert bool(experiment.tests) == (experiment.measure is not None)
    assert [t for t in experiment.tests if not (ROOT / t).is_file()] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.slug)
def test_nothing_is_left_to_fill_in(notebook: Notebook) -> None:
    """What `workbench new` writes says TODO where only its author knows."""
    files = [notebook.path, ROOT / "workbench" / "experiments" / f"{notebook.slug}.py",
             ROOT / "tests" / "experiments" / f"test_{notebook.slug}.py"]  # fmt: skip
    assert [f.name for f in files if f.is_file() and "TODO" in f.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.slug)
class TestNotebookRules:
    """Thin, stripped, in its group, honest about its limits."""

    def test_it_is_valid(self, notebook: Notebook) -> None:
        import nbformat

        nbformat.validate(nbformat.from_dict(notebook.content))
        assert notebook.group in GROUPS and notebook.group == load(notebook.slug).group

    def test_outputs_are_stripped(self, notebook: Notebook) -> None:
        dirty = [c for c in code_cells(notebook) if c["outputs"] or c["execution_count"] is not None]
        assert not dirty
        assert not {"widgets", "papermill"} & notebook.content["metadata"].keys()

    def test_it_is_thin(self, notebook: Notebook) -> None:
        cells = {source_of(c): tags_of(c) for c in code_cells(notebook)}
        assert len(cells) <= 8, f"{len(cells)} code cells"
        for text, tags in cells.items():
            # The parameters cell is generated: as long as the experiment has parameters.
            assert len(text.strip().splitlines()) <= 10 or "parameters" in tags, text
            kinds = {type(n) for n in ast.walk(ast.parse(text))}
            assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef}, f"belongs in the package:\n{text}"
            strings = [
                n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            paths = [s for s in strings if s.startswith(("/", "~", "./", "../"))]
            assert not paths, f"paths in a notebook: {paths}"

    def test_it_runs_with_its_parameters(self, notebook: Notebook) -> None:
        """That the cell is the generated one is tested beside its generator."""
        texts = list(map(source_of, code_cells(notebook)))
        assert sum("experiment.run_with(globals())" in text for text in texts) == 1
        assert not any("experiment.run(" in t for t in texts if "drops =" not in t)

    def test_it_says_what_it_claims_and_where_it_stops(self, notebook: Notebook) -> None:
        cells = notebook.content["cells"]
        assert cells[0]["cell_type"] == "markdown" and source_of(cells[0]).startswith("# ")
        text = "\n".join(source_of(c) for c in cells if c["cell_type"] == "markdown")
        assert "**Claim.**" in text and "**Kind.**" in text and "stops being true" in text
        assert ".report()" in "\n".join(map(source_of, code_cells(notebook)))

    def test_it_is_written_the_way_jupyter_writes(self, notebook: Notebook) -> None:
        raw = notebook.path.read_text(encoding="utf-8")
        assert raw.endswith("}\n") and json.loads(raw)["nbformat_minor"] >= 5, "cells need ids"


def test_a_kernel_has_a_name_of_its_own() -> None:
    """A trace shows kernels by these names: one that two ops share could not be told apart there."""
    where: dict[str, list[str]] = {}
    for path in sorted((ROOT / "kernels" / "moe_kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(where) > 15 and {name: files for name, files in where.items() if len(files) > 1} == {}


def test_no_test_asserts_a_time() -> None:
    """A shared machine may take any time; `make benchmarks` prints times, tests bound the work."""
    asserted = re.compile(r"assert\b.*\b(monotonic|perf_counter|time)(_ns)?\(\) - ")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if asserted.search(line)
    ]
    assert found == []
