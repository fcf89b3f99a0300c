"""The suite: every notebook executed headless through papermill, judged by what it shows, and reported on one page."""

from workbench.core.params import ParameterError
from workbench.suite.catalog import Notebook, NotebookError, SelectionError, find_notebooks, select
from workbench.suite.process import OutputError, run_one
from workbench.suite.runs import run_suite

__all__ = [
    "Notebook", "NotebookError", "OutputError", "ParameterError", "SelectionError", "find_notebooks", "run_one",
    "run_suite", "select",
]  # fmt: skip
