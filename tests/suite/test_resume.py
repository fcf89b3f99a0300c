"""A run that finished with the same notebook, parameters, code, packages and data is not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebook_maker import make, result_cell

from workbench.suite import Notebook, fingerprint, run_suite
from workbench.suite.runs import _previous

HELD = [{"claim": "c", "holds": True, "value": 1}]


def test_finished_run_is_reused_until_something_changes(tmp_path: Path) -> None:
    path = make(tmp_path / "g", "tiny", result_cell(HELD), parameters="n = 1")
    out = tmp_path / "out"

    def run(n: int, force: bool = False) -> dict:
        summary = run_suite([Notebook(path)], {"tiny": {"n": n}}, out, force=force, page=False)
        assert summary["exit_status"] == 0
        return summary["notebooks"][0]

    first = run(2)
    written = (out / "notebooks" / "tiny.ipynb").stat().st_mtime_ns
    again = run(2)
    assert again == {**first, "reused": True} and "reused" not in first
    assert (out / "notebooks" / "tiny.ipynb").stat().st_mtime_ns == written
    assert "reused" not in run(3)
    assert "n = 3" in (out / "notebooks" / "tiny.ipynb").read_text()
    assert "reused" not in run(3, force=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    """A tiny notebook."""
    return Notebook(make(tmp_path / "g", "tiny", result_cell(HELD), parameters="n = 1"))


def test_everything_that_a_run_depends_on_changes_the_fingerprint(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fingerprint.fingerprint(notebook, {"n": 1})
    assert base == fingerprint.fingerprint(notebook, {"n": 1})
    seen = {base, fingerprint.fingerprint(notebook, {"n": 2})}
    for name in ("code_hash", "packages_hash", "data_hash", "gpus"):
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, name, lambda: ("other",))
            seen.add(fingerprint.fingerprint(notebook, {"n": 1}))
    trace = notebook.path.with_name("trace.json")
    for text in ("a", "b"):
        trace.write_text(text)
        seen.add(fingerprint.fingerprint(notebook, {"n": 1, "trace": str(trace)}))
    archive = notebook.path.with_name("archive")
    archive.mkdir()
    root = Path(__file__).resolve().parents[2]
    reads = type(notebook)(root / "notebooks" / "appendix_b" / "fig45_lbl_branch.ipynb")
    for text in ("a", "bc"):
        (archive / "segment.csv").write_text(text)
        seen.add(fingerprint.fingerprint(reads, {"archive": str(archive)}))
    notebook.path.write_text(notebook.path.read_text() + "\n")
    seen.add(fingerprint.fingerprint(notebook, {"n": 1}))
    assert len(seen) == 11


def test_tree_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    hashes = {fingerprint._tree_hash([tmp_path])}
    (tmp_path / "a.py").write_text("2")
    hashes.add(fingerprint._tree_hash([tmp_path]))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    hashes.add(fingerprint._tree_hash([tmp_path]))
    assert len(hashes) == 3
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    assert fingerprint._tree_hash([tmp_path], skip=("__pycache__",)) in hashes


@pytest.mark.parametrize(
    "change",
    [
        {"status": "claim_failed"},
        {"status": "failed"},
        {"fingerprint": "x"},
        {"html_error": "no"},
        "cut",
        "no_html",
        "no_ipynb",
    ],
)
def test_anything_but_a_whole_passed_run_runs_again(notebook: Notebook, tmp_path: Path, change: dict | str) -> None:
    outcome = {"fingerprint": fingerprint.fingerprint(notebook, {}), "status": "passed", "html_error": None}
    for ending in (".ipynb", ".html"):
        (tmp_path / f"tiny{ending}").write_text("x")
    written = tmp_path / "tiny.json"
    written.write_text(json.dumps(outcome))
    assert _previous(notebook, {}, tmp_path, force=False)[1] == {**outcome, "reused": True}
    assert _previous(notebook, {}, tmp_path, force=True)[1] is None
    if isinstance(change, dict):
        written.write_text(json.dumps(outcome | change))
    elif change == "cut":
        written.write_text(json.dumps(outcome)[:-5])
    else:
        (tmp_path / f"tiny.{change.split('_')[1]}").unlink()
    assert _previous(notebook, {}, tmp_path, force=False)[1] is None
