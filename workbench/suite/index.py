"""The README's index of notebooks, generated so that it cannot drift."""

from __future__ import annotations

BEGIN, END = "<!-- notebook-index:begin -->", "<!-- notebook-index:end -->"

HEADINGS = {
    "s08_sync_free": "Synchronization-free training (report, Section 8)",
    "appendix_b": "Configurations, runs and metrics (report, Appendix B)",
    "tools": "Tools for your own traces and machines",
}


def index_text() -> str:
    """Return one Markdown table per group: notebook, what it shows, kind, where in the report."""
    from workbench.suite.catalog import GROUPS, find_notebooks
    from workbench.suite.process import title_of

    blocks = []
    notebooks = find_notebooks()
    for group in (*GROUPS, *sorted({n.group for n in notebooks} - set(GROUPS))):
        rows = []
        for notebook in (n for n in notebooks if n.group == group):
            e = notebook.experiment
            link = f"[{_cell(title_of(notebook))}](notebooks/{group}/{notebook.slug}.ipynb)"
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
