"""What can be run: the notebooks, the parameters each one takes, and the experiment behind it."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.core.experiment import Experiment

GROUPS = ("s08_sync_free", "appendix_b", "tools")


class NotebookError(ValueError):
    """A notebook cannot be run as it stands; the message says which and why."""


class SelectionError(ValueError):
    """Nothing answers to a name; the message lists close ones."""


@dataclass(frozen=True)
class Notebook:
    """One notebook on disk.

    Attributes:
        path: absolute path of the ``.ipynb`` file.
        slug: file name without its ending.
        group: name of the folder that holds it.
    """

    path: Path
    slug: str = field(init=False)
    group: str = field(init=False)

    def __post_init__(self) -> None:
        path = Path(self.path).absolute()
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "slug", path.stem)
        object.__setattr__(self, "group", path.parent.name)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The notebook as plain JSON.

        Raises:
            NotebookError: not UTF-8, not JSON, not a version 4 notebook, or not for the ``python3`` kernel.
        """
        return read_notebook(self.path)

    @cached_property
    def declared(self) -> dict[str, Declared]:
        """Parameters that the cell tagged ``parameters`` assigns, by name."""
        return declared_parameters(self.content, self.slug)

    @cached_property
    def experiment(self) -> Experiment | None:
        """The experiment of the same slug; None for a notebook of one's own.

        Raises:
            NotebookError: the experiment's module does not import.
        """
        from workbench.experiments import load, slugs

        if self.slug not in slugs():
            return None
        try:
            return load(self.slug)
        except Exception as error:
            raise NotebookError(
                f"{self.slug}: its experiment does not load: {type(error).__name__}: {error}"
            ) from error

    def may_measure(self, params: Mapping[str, Any]) -> bool:
        """Whether a run would measure where a GPU is: its experiment can, and its source is auto or live."""
        try:
            experiment = self.experiment
            default = self.declared["source"].default if "source" in self.declared else "auto"
        except NotebookError:
            return False
        measures = experiment is None or "live" in experiment.sources()
        return measures and params.get("source", default) in ("auto", "live")

    @property
    def title(self) -> str:
        """The experiment's title, else the notebook's first heading, else its slug."""
        with contextlib.suppress(NotebookError):
            if self.experiment is not None:
                return self.experiment.title
            for cell in self.content["cells"]:
                text = source_of(cell).lstrip()
                if cell["cell_type"] == "markdown" and text.startswith("#"):
                    return text.splitlines()[0].lstrip("# ").strip()
        return self.slug

    @property
    def quick(self) -> dict[str, Any]:
        """Small parameters for tests, from the notebook's metadata ``workbench.quick``."""
        return dict(self.content.get("metadata", {}).get("workbench", {}).get("quick", {}))


@dataclass(frozen=True)
class Declared:
    """One assignment of a parameters cell.

    Attributes:
        name: the variable.
        default: its literal value; None when it is computed.
        literal: whether the value is a literal.
        annotation: its type annotation as written, or an empty string.
    """

    name: str
    default: Any
    literal: bool
    annotation: str = ""


def notebooks_root() -> Path:
    """Return the folder that holds the notebooks: the checkout's, else the copy inside the wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "notebooks"
    return checkout if checkout.is_dir() else package / "_bundled" / "notebooks"


def find_notebooks(root: Path | None = None) -> list[Notebook]:
    """Return every notebook below `root`, in index order: group, then slug."""
    root = root or notebooks_root()
    paths = (p for p in root.glob("*/*.ipynb") if not p.name.startswith("."))
    order = {name: i for i, name in enumerate(GROUPS)}
    return sorted(map(Notebook, paths), key=lambda n: (order.get(n.group, len(order)), n.group, n.slug))


def select(names: Sequence[str], root: Path | None = None) -> list[Notebook]:
    """Return the notebooks that `names` mean: slugs, groups or paths of ``.ipynb`` files; all of them for no name.

    Raises:
        SelectionError: a name means nothing, or two notebooks of the selection have one slug.
    """
    from workbench.core.params import close_names

    everything = find_notebooks(root)
    if not names:
        return everything
    chosen: dict[Path, Notebook] = {}
    for name in names:
        if name.endswith(".ipynb"):
            if not Path(name).is_file():
                raise SelectionError(f"no notebook file {name!r}")
            found: Iterable[Notebook] = [Notebook(Path(name))]
        else:
            found = [n for n in everything if name in (n.slug, n.group)]
        if not found:
            known = sorted({n.slug for n in everything} | {n.group for n in everything})
            near = close_names(name, known)
            raise SelectionError(
                f"no notebook {name!r}" + (f"; close: {', '.join(near)}" if near else "; see: workbench list")
            )
        chosen.update((n.path, n) for n in found)
    by_slug: dict[str, Path] = {}
    for notebook in chosen.values():
        other = by_slug.setdefault(notebook.slug, notebook.path)
        if other != notebook.path:
            raise SelectionError(f"two notebooks are called {notebook.slug!r}: {other} and {notebook.path}")
    return list(chosen.values())


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook and refuse what could not be executed honestly.

    Raises:
        NotebookError: not UTF-8, not JSON, not a version 4 notebook, or not for the ``python3`` kernel.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise NotebookError(f"{path.name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise NotebookError(f"{path.name}: not UTF-8 text at byte {error.start}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise NotebookError(f"{path.name}: corrupt, not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("nbformat") != 4:
        version = content.get("nbformat") if isinstance(content, dict) else type(content).__name__
        raise NotebookError(f"{path.name}: expected a notebook of format 4, got {version!r}")
    cells = content.get("cells")
    if not isinstance(cells, list) or not all(_is_cell(c) for c in cells):
        raise NotebookError(f"{path.name}: corrupt, its cells are not a list of code, markdown and raw cells")
    if not isinstance(content.setdefault("metadata", {}), dict):
        raise NotebookError(f"{path.name}: corrupt, its metadata is not a mapping")
    kernel = content["metadata"].get("kernelspec")
    name = kernel.get("name") if isinstance(kernel, dict) else None
    if name != "python3":
        raise NotebookError(f"{path.name}: expected the kernel 'python3' in its metadata, got {name!r}")
    return content


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict) or cell.get("cell_type") not in ("code", "markdown", "raw"):
        return False
    source = cell.get("source")
    return isinstance(source, str) or (isinstance(source, list) and all(isinstance(s, str) for s in source))


def source_of(cell: dict[str, Any]) -> str:
    """Return a cell's source text (notebooks keep it as one string or as a list of lines)."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def tags_of(cell: dict[str, Any]) -> list[str]:
    """Return a cell's tags."""
    return list(cell.get("metadata", {}).get("tags", []))


def declared_parameters(content: dict[str, Any], name: str) -> dict[str, Declared]:
    """Read the assignments of the cell tagged ``parameters`` without executing it.

    Raises:
        NotebookError: more than one such cell, or it is not plain assignments.
    """
    cells = [c for c in content["cells"] if c["cell_type"] == "code" and "parameters" in tags_of(c)]
    if not cells:
        return {}
    if len(cells) > 1:
        raise NotebookError(f"{name}: {len(cells)} cells are tagged 'parameters'; only the first would count")
    try:
        tree = ast.parse(source_of(cells[0]))
    except SyntaxError as error:
        raise NotebookError(f"{name}: its parameters cell does not parse: {error}") from None
    found: dict[str, Declared] = {}
    for statement in tree.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=target), value=value, annotation=hint):
                annotation = ast.unparse(hint)
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                annotation = ""
            case _:
                told = ast.unparse(statement)
                raise NotebookError(f"{name}: its parameters cell holds more than assignments: {told!r}")
        try:
            found[target] = Declared(target, ast.literal_eval(value) if value else None, value is not None, annotation)
        except ValueError:
            found[target] = Declared(target, None, False, annotation)
    return found
