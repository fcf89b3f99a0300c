"""Every experiment's tables hold one kind of rows each, and what they are made from is read once."""

from __future__ import annotations

import polars as pl
import pytest

import workbench
import workbench.traces.idle
import workbench.views.trace
from workbench.core.tables import MAIN, grouped, split
from workbench.experiments import load, slugs

# Columns of which more than a fifth may be null, since null means that the thing is absent there.
ABSENT = {
    ("fig32_critical_microbatch", MAIN): {
        "launches": "a replay launches once", "wall_us_p50": "only eager calls are profiled",
        "idle_share": "only eager calls are profiled",
        "activation_bytes": "only of training", "waits": "only of the routed layer", "graphs": "only compiled layers",
        "graph_breaks": "only compiled layers",
    },
    ("fig45_lbl_branch", MAIN): {"tokens_per_s": "measured at some steps"},
    ("fig74_submission_regimes", "lane"): {"label": "joined kernels have no name"},
    ("fig74_submission_regimes_ep", "lane"): {"label": "joined kernels have no name"},
    ("tab12_headroom_operations", MAIN): dict.fromkeys(("row", "report"), "not an operation of the report's table"),
    ("tab13_host_synchronization", MAIN): {"report": "no pattern of the report's table", "instead": "none is needed"},
    ("tab48_submission_tax", MAIN): dict.fromkeys(
        ("submit_us_p50", "back_to_back_us_p50", "rotating_us_p50", "launches"), "measured of eager calls"
    ),
}  # fmt: skip


@pytest.mark.parametrize("slug", slugs())
def test_no_table_unions_kinds_of_rows(slug: str) -> None:
    experiment = load(slug)
    result = experiment.run("recorded" if experiment.recording else experiment.sources()[0])
    sparse = {
        (name, column.name)
        for name, table in result.tables.items()
        for column in table
        if column.null_count() > len(table) / 5
    }
    assert sparse == {(n, c) for (s, n), columns in ABSENT.items() if s == slug for c in columns}
    nested = [(n, c.name) for n, t in result.tables.items() for c in t if _holds_json(c)]
    assert not nested, "a list or an object in a cell: it has a table of its own"


def _holds_json(column: pl.Series) -> bool:
    if column.dtype.is_nested():
        return True
    return column.dtype == pl.String and bool(column.str.contains(r"^\s*[\[{]").any())


def test_kinds_come_apart_without_the_columns_of_others() -> None:
    rows = [
        {"kind": "a b", "x": 1, "y": None},
        {"kind": "c", "x": None, "y": 0.5},
        {"kind": "a b", "x": None, "y": None},
    ]
    parts = split(pl.DataFrame(rows), "kind")
    assert {name: table.to_dicts() for name, table in parts.items()} == {
        "a_b": [{"x": 1}, {"x": None}],
        "c": [{"y": 0.5}],
    }
    assert grouped(rows, "kind")["c"] == [{"x": None, "y": 0.5}]


@pytest.mark.parametrize("slug", ["your_trace", "tool_first_look"])
def test_a_notebook_reads_and_analyses_its_trace_once(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the notebook does: tables, figure, interactive view, panel, other parameters, claims."""
    from workbench.widgets.trace_panel import open_view, trace_panel

    reads, analyses = [], []
    read, made = workbench.views.trace.read, workbench.traces.idle.Analysis.__init__
    monkeypatch.setattr("workbench.views.trace.read", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr(
        "workbench.traces.idle.Analysis.__init__", lambda self, *a, **k: analyses.append(self) or made(self, *a, **k)
    )
    result = workbench.load(slug).run("recorded")
    result.figure()
    open_view(result)
    trace_panel(result)
    other = {"host_scale": 0.5} if slug == "your_trace" else {"size": "long"}
    result.with_params(**other).figure()
    assert result.checks
    assert (len(reads), len(analyses)) == (1, 1)


@pytest.mark.parametrize("slug", [s for s in slugs() if load(s).recording])
def test_a_recording_is_not_read_again_for_other_parameters(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = load(slug).run("recorded")
    monkeypatch.setattr("polars.read_csv", lambda *_, **__: pytest.fail("read again"))
    assert {n: t.shape for n, t in result.with_params().tables.items()} == {
        n: t.shape for n, t in result.tables.items()
    }
