"""Every notebook, executed by the suite's own runner on quick parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.suite import Notebook, find_notebooks, run_one
from workbench.suite.parameters import check
from workbench.suite.progress import describe_outcome


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.parametrize("notebook", find_notebooks(), ids=lambda n: n.slug)
def test_notebook_runs_and_its_claims_hold(notebook: Notebook, tmp_path: Path) -> None:
    if notebook.experiment is not None:
        try:
            notebook.experiment.choose("auto")
        except ValueError as error:
            pytest.skip(str(error))
    outcome = run_one(notebook.path, check(notebook, notebook.quick), tmp_path, timeout=240)
    assert outcome["status"] == "passed" and not outcome["html_error"], describe_outcome(outcome)
    assert outcome["checks"], "a notebook without a claim checks nothing"
