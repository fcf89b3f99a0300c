"""README's index of notebooks is the generated one."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.suite import find_notebooks
from workbench.suite.index import BEGIN, END, index_text, with_index

ROOT = Path(__file__).resolve().parent.parent


def test_index_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_index(text) == text, "run: workbench index --write"


def test_every_notebook_is_in_the_index_and_every_link_leads_somewhere() -> None:
    import re

    text = index_text()
    links = re.findall(r"\]\((notebooks/[^)]+)\)", text)
    assert sorted(links) == sorted(f"notebooks/{n.group}/{n.slug}.ipynb" for n in find_notebooks())
    assert all((ROOT / link).is_file() for link in links)
    assert all(line.count("|") - line.count("\\|") == 5 for line in text.splitlines() if line.startswith("|"))


def test_markers_are_needed() -> None:
    assert with_index(f"a{BEGIN}old{END}z") == f"a{BEGIN}\n\n{index_text()}\n\n{END}z"
    for text in ("none", END + BEGIN, BEGIN):
        with pytest.raises(ValueError, match="expected the markers"):
            with_index(text)
