"""Archived histories: reading, stitching, window medians."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pl = pytest.importorskip("polars")

from workbench.training.histories import History, read_table, smooth, stitch, tidy, window_median  # noqa: E402


def read_history(path):
    raw, notes = read_table(path)
    return tidy(raw, path.stem, notes=notes)


def test_reads_csv_with_words_gaps_and_duplicates(tmp_path):
    (tmp_path / "run.csv").write_text("_step,loss,note,lr\n1,3.5,a,0.1\n2,NaN,b,0.1\n2,3.25,c,\n5,inf,d,0.2\n,9,e,1\n")
    h = read_history(tmp_path / "run.csv")
    assert h.table["step"].to_list() == [1, 2, 5]
    assert h.table["loss"].to_list() == [3.5, 3.25, float("inf")]
    assert h.table["lr"].to_list() == [0.1, 0.1, 0.2]
    said = " / ".join(h.notes)
    assert "note" in said and "repeated steps" in said and "without a step" in said and "2 steps without a row" in said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((0, 10, 20, 30), ("one row every 10 steps, 0 to 30",)),
        ((0, 10, 30), ("28 steps without a row between 0 and 30",)),
        ((0, 10), ("9 steps without a row between 0 and 10",)),
        ((4, 5, 6), ()),
    ],
)
def test_a_regular_interval_of_logging_is_no_list_of_missing_steps(tmp_path, steps, said):
    (tmp_path / "run.csv").write_text("step,loss\n" + "".join(f"{s},1.0\n" for s in steps))
    assert read_history(tmp_path / "run.csv").notes == said


def test_reads_jsonl_with_mixed_rows_and_parquet(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "lbl": 1.1}, {"step": 2, "loss": 1.5, "lbl": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    h = read_history(tmp_path / "a.jsonl")
    assert h.table.to_dicts() == [{"step": 1, "loss": 2.0, "lbl": 1.1}, {"step": 2, "loss": 1.5, "lbl": None}]
    h.table.write_parquet(tmp_path / "b.parquet")
    assert read_history(tmp_path / "b.parquet").table.equals(h.table)


def test_reads_long_exports(tmp_path):
    (tmp_path / "t.csv").write_text("step,tag,value\n1,loss,3\n1,lbl,1.2\n2,loss,2\n")
    assert read_history(tmp_path / "t.csv").table.to_dicts() == [
        {"step": 1, "loss": 3.0, "lbl": 1.2},
        {"step": 2, "loss": 2.0, "lbl": None},
    ]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("x.csv", "epoch,loss\n1,2\n", "no step column"),
        ("x.csv", "step,name\n1,a\n", "no numeric metric"),
        ("x.bin", "", "expected one of"),
        ("x.parquet", "not parquet", "cannot be read"),
    ],
)
def test_names_what_is_wrong(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_history(tmp_path / name)


def test_newest_segment_wins_and_the_report_says_so():
    old = History("old", pl.DataFrame({"step": [1, 2, 3, 4], "loss": [9.0, 8.0, 7.0, 6.0]}))
    new = History("new", pl.DataFrame({"step": [3, 4, 5, 9], "loss": [1.0, 2.0, 3.0, 4.0], "lbl": [1.0] * 4}))
    table, report = stitch([old, new])
    assert table.select("step", "loss").rows() == [(1, 9.0), (2, 8.0), (3, 1.0), (4, 2.0), (5, 3.0), (9, 4.0)]
    assert report.overlaps == 2
    assert report.gaps == ((5, 9),)
    assert [(s["kept"], s["replaced"]) for s in report.segments] == [(2, 2), (4, 0)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6))
def test_stitching_equals_overwriting_in_order(spans):
    segments, expected = [], {}
    for i, (start, length) in enumerate(spans):
        steps = list(range(start, start + length))
        segments.append(History(f"s{i}", pl.DataFrame({"step": steps, "v": [float(i)] * length})))
        expected |= dict.fromkeys(steps, float(i))
    table, report = stitch(segments)
    assert dict(table.select("step", "v").rows()) == expected
    assert sum(s["kept"] for s in report.segments) == len(expected)
    assert report.overlaps == sum(n for _, n in spans) - len(expected)


def test_window_median_holds_the_median_and_ends():
    rng = np.random.default_rng(0)
    steps = np.arange(1, 2001)
    table = pl.DataFrame({"step": steps, "loss": rng.normal(2.0, 0.1, 2000) + (steps > 1000)})
    early = window_median(table, "loss", 1, 1000, level=0.999)
    assert early["rows"] == 1000 and early["low"] < 2.0 < early["high"] and early["high"] - early["low"] < 0.05
    assert window_median(table, "loss", 1001, 2000)["low"] > early["high"]
    assert window_median(table, "loss", 5000, 6000)["rows"] == 0
    with pytest.raises(ValueError, match="no metric 'ppl'"):
        window_median(table, "ppl", 1, 2)


def test_smooth_removes_a_spike_and_keeps_length():
    values = np.ones(20)
    values[7] = 100
    assert np.array_equal(smooth(values, 5), np.ones(20))
    assert np.array_equal(smooth(values, 1), values)
    values[[0, -1]] = 100
    assert np.array_equal(smooth(values, 5), np.ones(20)), "a spike at an end is one too"


def test_tidy_takes_a_named_step_column():
    assert tidy(pl.DataFrame({"t": [2, 1], "x": [1.0, 2.0]}), "n", step="t").table["step"].to_list() == [1, 2]


def test_steps_that_are_no_integers_are_dropped_with_a_note_or_refused():
    odd = tidy(pl.DataFrame({"step": [1.0, float("inf"), 1e30, float("nan"), 2.0], "loss": [1.0, 2, 3, 4, 5]}), "n")
    assert odd.table.rows() == [(1, 1.0), (2, 5.0)] and odd.notes == ("dropped 3 rows without a step",)
    with pytest.raises(ValueError, match="2 steps in 'step' are no integers"):
        tidy(pl.DataFrame({"step": [1.5, 1.7, 2.0], "loss": [1.0, 2.0, 3.0]}), "n")


def test_a_metric_called_step_does_not_replace_the_step():
    long = pl.DataFrame({"step": [1, 1, 2], "metric": ["step", "loss", "loss"], "value": [7.0, 3.0, 4.0]})
    assert tidy(long, "n").table.rows() == [(1, 3.0), (2, 4.0)]
    wide = tidy(pl.DataFrame({"t": [2, 1], "step": [9, 9], "x": [1.0, 2.0]}), "n", step="t")
    assert wide.table.rows() == [(1, 2.0), (2, 1.0)] and "left out the column" in wide.notes[0]


def test_metrics_named_like_our_columns_survive_stitching():
    table, _ = stitch([History("a", pl.DataFrame({"step": [1], "order": [7.0], "segment": [8.0]}))])
    assert table.to_dicts() == [{"step": 1, "metric_order": 7.0, "metric_segment": 8.0, "segment": "a"}]


def test_a_row_out_of_rhythm_makes_no_gaps():
    table = pl.DataFrame({"step": [0, 10, 20, 30, 31, 40, 60], "loss": [1.0] * 7})
    _, report = stitch([History("every ten", table)])
    assert report.gaps == ((40, 60),)
    assert report.lines()[-1] == "gap: no row between steps 40 and 60"


def test_categories_are_read_as_words(tmp_path):
    raw = pl.DataFrame({"step": [1, 2], "loss": ["1.5", "2.5"], "kind": ["a", "b"]})
    raw.with_columns(pl.col("loss", "kind").cast(pl.Categorical)).write_parquet(tmp_path / "run.parquet")
    found = read_history(tmp_path / "run.parquet")
    assert found.table["loss"].to_list() == [1.5, 2.5]
    assert found.notes == ("left out 1 columns without numbers: kind",)
