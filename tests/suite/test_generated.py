"""README's index of notebooks and the parameters cells are the generated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.core.params import describe, meaning
from workbench.suite import Notebook, find_notebooks, select
from workbench.suite.generated import BEGIN, END, index_text, stale, with_index

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_generated_is_stale() -> None:
    assert [p.name for p in stale(ROOT / "README.md")] == [], "run: workbench sync"


def test_a_stale_cell_is_found_and_written(tmp_path: Path) -> None:
    (notebook,) = select(["fig30_submission_headroom"])
    copy = tmp_path / "s08_sync_free" / notebook.path.name
    copy.parent.mkdir()
    copy.write_text(notebook.path.read_text().replace("small_submit_cost: float = 2.0", "small_submit_cost = 3.0"))
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    assert stale(readme, [Notebook(copy)]) == {copy: notebook.path.read_text()}


def test_papermill_shows_type_and_meaning_of_every_parameter_of_every_notebook() -> None:
    from papermill.inspection import inspect_notebook

    for notebook in find_notebooks():
        shown = inspect_notebook(str(notebook.path))
        shown.pop("source")
        declared = {r["name"]: r for r in describe(notebook.experiment.params)}
        assert set(shown) == set(declared)
        for name, told in shown.items():
            assert told["inferred_type_name"] == declared[name]["type"], (notebook.slug, name)
            assert told["help"].strip() == meaning(declared[name])


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
