"""The files of a new experiment, each with what its author has to fill in."""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path

from workbench.core.files import replace_file
from workbench.suite.catalog import GROUPS, notebooks_root

NAME = r"[a-z][a-z0-9_]{1,31}"


def create(slug: str, group: str) -> list[Path]:
    """Write the module, notebook and test of an experiment into the checkout; return their paths.

    Its one claim fails until it is stated.

    Raises:
        ValueError: there is no checkout, the group is none, or the name is bad or taken.
    """
    root = notebooks_root().parent
    if not (root / "tests").is_dir():
        raise ValueError("an installed package takes no new experiment: expected a checkout with a folder 'tests'")
    if group not in GROUPS:
        raise ValueError(f"--group {group}: expected one of {', '.join(GROUPS)}")
    if not re.fullmatch(NAME, slug) or keyword.iskeyword(slug) or slug in GROUPS:
        raise ValueError(
            f"{slug!r}: expected a name of 2 to 32 small letters, digits and underscores that begins with a letter, "
            "and is neither a word of Python nor a group"
        )
    texts = {
        root / "workbench" / "experiments" / f"{slug}.py": _filled("new_experiment.py.j2", slug, group),
        root / "notebooks" / group / f"{slug}.ipynb": _notebook(_filled("new_notebook.md.j2", slug, group)),
        root / "tests" / "experiments" / f"test_{slug}.py": _filled("new_test.py.j2", slug, group),
    }
    taken = [p for p in texts if p.exists()] + list(root.glob(f"notebooks/*/{slug}.ipynb"))
    if taken:
        raise ValueError(f"{slug!r} is taken: {taken[0].relative_to(root)} exists")
    for path, text in texts.items():
        replace_file(path, text)
    return list(texts)


def _filled(template: str, slug: str, group: str) -> str:
    import jinja2

    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    words = {"slug": slug, "group": group, "title": slug.replace("_", " ").capitalize()}
    named = {"params": "".join(p.capitalize() for p in slug.split("_")) + "Params"}
    return jinja2.Template(text, keep_trailing_newline=True).render(words | named)


def _notebook(text: str) -> str:
    """Return a notebook of Markdown text, in which a fence ``python`` is a code cell."""
    cells = []
    for number, part in enumerate(re.split(r"^```(?=python)|^```\n", text, flags=re.MULTILINE)):
        kind, _, code = part.partition("\n") if part.startswith("python") else ("", "", "")
        cell = {"cell_type": "code" if kind else "markdown", "id": f"c{number:02}", "metadata": {}}
        if "parameters" in kind:
            cell["metadata"] = {"tags": ["parameters"]}
        cell["source"] = (code if kind else part).strip().splitlines(keepends=True)
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    content = {"cells": [c for c in cells if c["source"]], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
