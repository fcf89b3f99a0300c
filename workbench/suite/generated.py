"""What is generated so that it cannot drift: the README's index of notebooks, and their parameters cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.params import describe, describe_line
from workbench.suite.catalog import GROUPS, Notebook, find_notebooks, tags_of

if TYPE_CHECKING:
    from workbench.core.experiment import Experiment

BEGIN, END = "<!-- notebook-index:begin -->", "<!-- notebook-index:end -->"

HEADINGS = {
    "s08_sync_free": "Synchronization-free training (report, Section 8)",
    "appendix_b": "Configurations, runs and metrics (report, Appendix B)",
    "tools": "Tools for your own traces and machines",
}


def index_text() -> str:
    """Return one Markdown table per group: notebook, what it shows, kind, where in the report."""
    blocks = []
    notebooks = find_notebooks()
    for group in (*GROUPS, *sorted({n.group for n in notebooks} - set(GROUPS))):
        rows = []
        for notebook in (n for n in notebooks if n.group == group):
            e = notebook.experiment
            link = f"[{_cell(notebook.title)}](notebooks/{group}/{notebook.slug}.ipynb)"
            rows.append(
                f"| {link} | {_cell(e.claim if e else '')} | {e.kind if e else ''} | {_cell(e.anchor if e else '')} |"
            )
        if rows:
            head = ["| notebook | what it shows | kind | report |", "|---|---|---|---|"]
            blocks.append("\n".join([f"### {HEADINGS.get(group, group)}", "", *head, *rows]))
    return "\n\n".join(blocks)


def with_index(text: str) -> str:
    """Return a README's `text` with the index between its markers brought up to date.

    Raises:
        ValueError: the markers are missing or out of order.
    """
    start, end = text.find(BEGIN), text.find(END)
    if start < 0 or end < start:
        raise ValueError(f"expected the markers {BEGIN} and {END}, in this order")
    return f"{text[: start + len(BEGIN)]}\n\n{index_text()}\n\n{text[end:]}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def parameters_cell(experiment: Experiment) -> str:
    """Return the source of a notebook's parameters cell: the source, then every parameter as it is declared."""
    sources = ", ".join(["auto", *experiment.sources()])
    source = f'source: str = "{experiment.default_source}"  # where the numbers come from: {sources}'
    return "\n".join([source, *map(describe_line, describe(experiment.params))])


def with_parameters(notebook: Notebook) -> str:
    """Return a notebook's text with the cell tagged ``parameters`` as its experiment declares it."""
    content = json.loads(notebook.path.read_text(encoding="utf-8"))
    assert notebook.experiment is not None
    for cell in content["cells"]:
        if "parameters" in tags_of(cell):
            cell["source"] = parameters_cell(notebook.experiment).splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def stale(readme: Path, notebooks: list[Notebook] | None = None) -> dict[Path, str]:
    """Return the files that differ from what is generated, with the text that they should have.

    Raises:
        ValueError: the README lacks the markers of its index.
    """
    found = find_notebooks() if notebooks is None else notebooks
    texts = {readme: with_index(readme.read_text(encoding="utf-8"))}
    texts |= {n.path: with_parameters(n) for n in found if n.experiment is not None}
    return {path: text for path, text in texts.items() if path.read_text(encoding="utf-8") != text}
