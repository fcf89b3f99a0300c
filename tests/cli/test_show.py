"""What `workbench show` prints for people: tables, columns, rounding, width; and how names are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from workbench.cli import app
from workbench.cli.show import show
from workbench.cli.table import LINES_IN_FULL, ROWS_OF_ALL, ROWS_OF_EACH, elided, flowed, overview, rounded, whole
from workbench.core.experiment import Check
from workbench.core.output import plain
from workbench.core.params import close_names
from workbench.experiments import load, slugs

MIXED = {
    "rank_step": pl.DataFrame([{"rank": i % 2, "step_ms": 300.123 + i, "device": "GPU"} for i in range(20)]),
    "call": pl.DataFrame([{"name": f"copy {i}", "bytes": 2**30 + i, "wrong": math.nan} for i in range(3)]),
}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: False)


def call(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == status, result.output
    return result.output


def test_tables_stand_one_below_the_other_with_the_columns_that_have_values() -> None:
    lines = list(overview(MIXED, 80))
    second = lines.index("call: 3 rows")
    assert lines[:3] == ["rank_step: 20 rows", "  in every row: device=GPU", "  rank  step_ms"]
    assert lines[3] == "     0    300.1" and len(lines[:second]) == 3 + ROWS_OF_EACH + 1 + 1
    assert lines[6] == "  … 14 more; --part rank_step prints all"
    assert lines[second + 1 :] == [
        "  name         bytes",
        "  copy 0  1073741824",
        "  copy 1  1073741825",
        "  copy 2  1073741826",
        "",
    ]


def test_one_part_is_printed_whole() -> None:
    lines = list(whole(MIXED, 80, "rank_step"))
    assert [x.split() for x in lines[3:-1]] == [[str(i % 2), f"{300.123 + i:.1f}"] for i in range(20)]
    assert not any("…" in x or "more" in x for x in lines)


def test_a_table_of_one_kind_shows_first_and_last_rows_and_names_the_columns_that_do_not_fit() -> None:
    wide = pl.DataFrame({"n": range(100)} | {f"quantity_{i}_us": [1.5 + n for n in range(100)] for i in range(9)})
    lines = list(overview({"table": wide}, 60))
    below = next(i for i, x in enumerate(lines) if x.startswith("  more columns (--all): "))
    assert lines[0] == "100 rows" and lines[2].split()[0] == "0" and lines[below - 1].split()[0] == "99"
    assert lines[2 + ROWS_OF_ALL // 2] == "  … 80 more; --all prints all"
    shown = re.findall(r"quantity_\d_us", lines[1])
    named = re.findall(r"quantity_\d_us", " ".join(lines[below:]))
    assert shown and named and shown + named == wide.columns[1:]


def test_a_small_wide_table_goes_on_below_with_its_rows_numbered() -> None:
    small = pl.DataFrame({"name": ["a", "b"]} | {f"quantity_{i}_us": [1.5, 2.5] for i in range(9)})
    lines = list(overview({"table": small}, 60))
    heads = [x for x in lines if x.startswith("  #")]
    assert len(heads) > 1 and all(x.split()[:2] == ["#", "name"] for x in heads)
    assert re.findall(r"quantity_\d_us", " ".join(heads)) == small.columns[1:]
    assert sum(x.split()[:2] == ["2", "b"] for x in lines) == len(heads)
    many = pl.concat([small] * (LINES_IN_FULL // 4))
    assert any(x.startswith("  more columns (--all)") for x in overview({"table": many}, 60))


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([335.7953, 88.01, 174.5], ["335.8", "88.0", "174.5"]),
        ([0.573, 3.26751, 1.0], ["0.573", "3.268", "1.000"]),
        ([3.2, 0.01449], ["3.2000", "0.0145"]),
        ([6325.781, 21716.064], ["6326", "21716"]),
        ([0.0005, 0.001], ["0.0005", "0.0010"]),
        ([0.99998756], ["1.0000"]),
        ([1.2047e-7, 0.0], ["1.205e-07", "0"]),
        ([0.00123, 21716.064], ["0.00123", "21716"]),
        ([8192.0, 2.0, None, math.nan], ["8192", "2", "–", "–"]),
        ([math.inf, -1.25], ["inf", "-1.25"]),
    ],
)
def test_numbers_are_rounded_for_their_column(values: list[float | None], shown: list[str]) -> None:
    assert rounded(values) == shown


ANY_NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8)
LIKE_NUMBERS = st.lists(st.floats(0.01, 90), min_size=1, max_size=8)


@given(ANY_NUMBERS | LIKE_NUMBERS)
def test_no_rounding_changes_a_number_by_half_a_percent(values: list[float]) -> None:
    for value, text in zip(values, rounded(values), strict=True):
        assert abs(float(text) - value) <= 0.005 * abs(value)


def test_text_is_cut_to_the_columns_that_it_takes() -> None:
    assert elided("one two three", 13) == "one two three"
    assert elided("one two three", 12) == "one two thr…"
    assert elided("幅" * 8, 9) == "幅" * 4 + "…"


CELLS = st.one_of(
    st.lists(st.integers() | st.none(), min_size=4, max_size=4).filter(lambda v: all(abs(x or 0) < 2**60 for x in v)),
    st.lists(st.floats(width=32) | st.none(), min_size=4, max_size=4),
    st.lists(st.text(max_size=90) | st.none(), min_size=4, max_size=4),
    st.lists(st.booleans() | st.none(), min_size=4, max_size=4),
)


@settings(max_examples=150)
@given(
    st.dictionaries(st.text(min_size=1, max_size=70), CELLS, max_size=9),
    st.sampled_from([None, ("a", "a", "b", "b"), ("a", "b", "a", "a")]),
    st.integers(1, 9),
    st.integers(40, 130),
)
def test_no_line_is_wider_than_asked(columns: dict, parts: tuple | None, times: int, width: int) -> None:
    table = pl.concat([pl.DataFrame(columns)] * times)
    tables = dict.fromkeys(parts or ["table"], table)
    for line in [*overview(tables, width), *whole(tables, width)]:
        assert min(len(line), cell_len(line)) <= width and line == line.rstrip(), line
        assert len(line.splitlines()) <= 1 and line == plain(line), line


def test_a_list_breaks_between_its_items() -> None:
    lines = list(flowed("  columns: ", ["alpha", "beta, gamma", "delta"], 22))
    assert lines == ["  columns: alpha,", "    beta, gamma, delta"]


def test_source_and_claims_come_before_the_rows_and_the_standing_comes_last() -> None:
    text = call("show", "op_expert_parallel")
    lines, result = text.splitlines(), load("op_expert_parallel").run("recorded")
    assert max(map(len, lines)) <= 80 and "null" not in text and len(lines) < 100
    at = {word: next(i for i, x in enumerate(lines) if x.startswith(word)) for word in ("source:", "start:")}
    folded = re.sub(r"\s+", " ", "\n".join(lines[at["source:"] : at["start:"]]))
    assert result.badge in folded and result.checks
    assert all(f" held {c.claim} [{c.value}]" in folded for c in result.checks)
    assert f"claims (above the table): {len(result.checks)} held" in lines[-3]
    for name, table in result.tables.items():
        assert f"{name}: {len(table)} rows" in lines


def test_a_failed_claim_is_named_in_the_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        Check("water is wet", True, 1),
        Check("pigs fly", False, "none did"),
        Check("known", False, 2 / 3, "gravity"),
    ]
    experiment = dataclasses.replace(load("fig31_blocks_ahead"), checks=lambda result: checks)
    show(experiment.run("model"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith("claims (above the table): 1 failed, 1 differs, 1 held; ")
    assert lines[-2] == "failed: pigs fly  [none did]"
    assert [x.split()[0] for x in lines if re.match(r" *(held|failed|differs)  ", x)] == ["held", "failed", "differs"]
    assert "differs  known  [0.6667]" in lines and "         gravity" in lines


def test_names_from_outside_are_text() -> None:
    lines = "\n".join(overview({"table": pl.DataFrame({"na\x1bme": ["a\x1b]0;x\x07b", "c\nd"]})}, 80))
    assert r"na\x1bme" in lines and r"a\x1b]0;x\x07b" in lines and "c d" in lines


def test_every_experiment_fits() -> None:
    for slug in slugs():
        experiment = load(slug)
        result = experiment.run(next(s for s in ("recorded", "model", "report") if s in experiment.sources()))
        wide = [x for x in overview(result.tables, 80) if len(x) > 80]
        assert not wide, (slug, wide)


def test_part_and_all_choose_what_is_read_and_leave_json_alone() -> None:
    parity = call("show", "op_expert_parallel", "--part", "parity")
    told = json.loads(call("show", "op_expert_parallel", "--json"))
    tables = told["tables"]
    assert f"parity: {len(tables['parity'])} rows" in parity
    assert "start: " not in parity and "more" not in parity.split("parity: ")[1].split("claims")[0]
    sizes = {n: t.height for n, t in load("op_expert_parallel").run("recorded").tables.items()}
    assert {n: len(rows) for n, rows in tables.items()} == sizes and told["table"] == tables["start"]
    whole_table = call("show", "op_expert_parallel", "--all")
    assert "start: " in whole_table and "… " not in whole_table
    assert "did you mean 'parity'?" in call("show", "op_expert_parallel", "--part", "party", status=2)
    assert "it has one table; --all prints it" in call("show", "op_router", "--part", "x", status=2)
    for option in (["--all"], ["--part", "parity"]):
        assert "--json prints every row" in call("show", "op_expert_parallel", "--json", *option, status=2)


@pytest.mark.parametrize("command", [["show"], ["run"], ["sweep"], ["record", "run"]])
@pytest.mark.parametrize(
    ("asked", "meant"), [("fig74", "fig74_submission_regimes"), ("FIG30", "fig30_"), ("op_routr", "op_router")]
)
def test_a_wrong_slug_is_answered_with_near_ones(command: list[str], asked: str, meant: str) -> None:
    assert re.search(
        rf"^workbench: no (experiment|notebook) '{asked}'; close: {meant}", call(*command, asked, status=2)
    )


def test_close_names_contain_what_was_asked_or_are_spelt_like_it() -> None:
    known = ["fig29_running_dry", "tab12_headroom_operations", "fig30_submission_headroom"]
    assert close_names("headroom", known) == known[1:]
    assert close_names("fig29_runing_dry", known) == known[:1]
    assert close_names("zzz", known) == close_names("", known) == []


def test_record_refuses_before_it_measures(tmp_path) -> None:
    assert "needs one CUDA GPU" in call("record", "run", "op_router", status=2)
    assert "expected a whole number" in call("record", "run", "op_router", "-p", "tokens=x", status=2)
    assert "has no source 'live'" in call("record", "run", "fig29_running_dry", status=2)
    assert "no such folder" in call("record", "list", "--root", str(tmp_path / "absent"), status=2)


def test_record_dry_run_refuses_the_same_and_measures_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs one CUDA GPU" in call("record", "run", "op_router", "--dry-run", status=2)
    monkeypatch.setattr("workbench.core.record.Recorder", lambda *_: pytest.fail("measured"))
    assert call("record", "run", "fig45_lbl_branch", "--dry-run", "--out", str(tmp_path)) == ""


def test_list_continues_below_the_title_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(call("list").splitlines()) >= len(slugs())
    monkeypatch.setattr("workbench.core.output._on_terminal", lambda: True)
    lines = call("list").splitlines()
    width = 2 + max(map(len, slugs())) + 2
    assert max(map(len, lines)) <= 80
    assert all(x[:width].isspace() or x.split()[0] in slugs() for x in lines if x.startswith("  "))
