"""Folders of ranks: summaries, skew, outliers; damaged files and dying readers do not stop the others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from rank_files import make_ranks
from typer.testing import CliRunner

from workbench.core.record import data_root
from workbench.traces import TraceError
from workbench.traces import folder as folder_module
from workbench.traces.folder import (
    FAILED,
    OK,
    PARTIAL,
    FolderReport,
    RankSummary,
    analyse_folder,
    outlier_ranks,
    step_skew,
)


@pytest.fixture(scope="module")
def source() -> Path:
    """A recorded trace of this project."""
    return next((data_root() / "recorded" / "tool_first_look").glob("*/short_item_stacks.json.gz"))


@pytest.fixture
def ranks(source: Path, tmp_path: Path) -> Path:
    """Six ranks of which rank 2 takes 1.5 times as long."""
    make_ranks([source], tmp_path / "ranks", 6, slow={2: 1.5})
    return tmp_path / "ranks"


def test_one_rank_equals_the_plain_summary(source: Path, tmp_path: Path) -> None:
    from workbench.traces import read
    from workbench.traces.summary import summarise

    make_ranks([source], tmp_path, 1, jitter_us=0.0)
    (mine,) = analyse_folder(tmp_path).ranks
    report = summarise(read(source))
    assert mine.rank == 0 and mine.status == OK
    assert mine.operations == report["devices"][0]["ops"]
    assert mine.busy_us == pytest.approx(report["devices"][0]["busy_ns"] / 1e3, rel=1e-6)
    assert sum(mine.idle_by_cause_us.values()) == pytest.approx(mine.idle_us, abs=0.01)
    assert mine.waits == sum(w["blocking"] for w in report["waits"]) > 0


def test_copies_follow_each_other_and_keep_their_own_launches(source: Path, tmp_path: Path) -> None:
    from workbench.traces import read

    (once,), (path,) = make_ranks([source], tmp_path / "1", 1), make_ranks([source], tmp_path / "3", 1, repeat=3)
    one, three = read(once), read(path)
    assert len(three.ops) == 3 * len(one.ops) and len(three.calls) == 3 * len(one.calls)
    ids = lambda t: len(set(t.calls.correlation[t.calls.correlation > 0].tolist()))  # noqa: E731
    assert ids(three) == 3 * ids(one)
    lead = lambda t: (t.ops.start_ns - t.calls.start_ns[t.ops.launch])[t.ops.launch >= 0]  # noqa: E731
    assert len(lead(three)) == 3 * len(lead(one))
    assert lead(three).max() == pytest.approx(lead(one).max(), abs=1000) and lead(three).min() >= 0
    (summary,) = analyse_folder(tmp_path / "3").ranks
    assert [name for name, _, _ in summary.steps] == [f"ProfilerStep#{i}" for i in range(len(summary.steps))]


def test_two_processes_say_what_one_says(ranks: Path) -> None:
    one, two = analyse_folder(ranks), analyse_folder(ranks, processes=2)
    measured = ("seconds", "reader_peak_bytes")
    strip = lambda report: [{k: v for k, v in vars(r).items() if k not in measured} for r in report.ranks]  # noqa: E731
    assert strip(one) == strip(two)
    assert [r.rank for r in two.ranks] == list(range(6))
    assert one.skew == two.skew and one.outliers == two.outliers


def test_the_slow_rank_stands_out(ranks: Path) -> None:
    report = analyse_folder(ranks)
    assert {o["rank"] for o in report.outliers} == {2}
    assert {"step_us", "busy_us", "idle_us"} <= {o["quantity"] for o in report.outliers}
    assert all(s["slowest_rank"] == 2 and s["slowest_over_median"] == pytest.approx(1.5, rel=1e-3) for s in report.skew)
    assert all(s["ranks"] == 6 for s in report.skew)


def test_skew_by_hand() -> None:
    a = RankSummary("a", 0, steps=(("s", 1000, 4000), ("t", 9000, 1000)))
    b = RankSummary("b", 1, steps=(("s", 3500, 5000),))
    broken = RankSummary("c", 2, PARTIAL, steps=(("s", 900000, 1),))
    first, second = step_skew([a, b, broken])
    assert first == {
        "step": "s",
        "ranks": 2,
        "start_spread_us": 2.5,
        "duration_spread_us": 1.0,
        "slowest_rank": 1,
        "slowest_over_median": 5000 / 4500,
    }
    assert second["ranks"] == 1 and second["start_spread_us"] == 0.0


def test_equal_ranks_have_no_outlier_and_damaged_ones_are_not_compared() -> None:
    equal = [RankSummary(str(i), i, busy_us=100.0 + i % 3) for i in range(9)]
    assert outlier_ranks(equal) == []
    assert outlier_ranks([*equal, RankSummary("x", 9, PARTIAL, busy_us=1.0)]) == []
    spread = [RankSummary(str(i), i, busy_us=100.0 + 5 * i) for i in range(9)]
    assert outlier_ranks(spread) == [], "ranks that differ evenly have no outlier"
    (row,) = outlier_ranks([*equal, RankSummary("x", 9, busy_us=150.0)])
    assert (row["rank"], row["quantity"], row["median"]) == (9, "busy_us", 101.0)


def test_damaged_files_are_named_and_the_others_finish(ranks: Path) -> None:
    whole = (ranks / "rank00001.json.gz").read_bytes()
    (ranks / "rank00001.json.gz").write_bytes(whole[: len(whole) // 2])
    (ranks / "rank00004.json.gz").write_bytes(b"no trace at all")
    report = analyse_folder(ranks, processes=2)
    status = {r.file: r.status for r in report.ranks}
    assert status["rank00001.json.gz"] in (PARTIAL, FAILED) and status["rank00004.json.gz"] == FAILED
    assert sum(s == OK for s in status.values()) == 4
    assert {r.file for r in report.damaged} == {"rank00001.json.gz", "rank00004.json.gz"}
    assert all(r.error for r in report.damaged)
    assert {r.rank for r in report.damaged} == {1, 4}


def dies_at_rank_three(path: str, window: str | None = None) -> RankSummary:
    """Stands in for a reader that the system kills."""
    if "00003" in path:
        os.kill(os.getpid(), signal.SIGKILL)
    return RankSummary(Path(path).name, 0)


def test_a_reader_that_is_killed_costs_only_its_file(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "summarise_rank", dies_at_rank_three)
    report = analyse_folder(ranks, processes=2)
    assert len(report.ranks) == 6
    (lost,) = report.damaged
    assert lost.file == "rank00003.json.gz" and lost.rank == 3 and "died" in lost.error


def test_through_dask(ranks: Path) -> None:
    from distributed import Client, LocalCluster

    (ranks / "rank00004.json.gz").write_bytes(b"no trace at all")
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        report = analyse_folder(ranks, client=client)
    assert [r.rank for r in report.ranks] == list(range(6))
    assert [r.status for r in report.ranks].count(OK) == 5 and report.damaged[0].rank == 4


def test_what_cannot_be_analysed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        analyse_folder(tmp_path / "absent")
    with pytest.raises(TraceError, match="no trace files"):
        analyse_folder(tmp_path)
    with pytest.raises(ValueError, match="1 or more, got 0"):
        analyse_folder(tmp_path, processes=0)


def test_command_line(ranks: Path, tmp_path: Path) -> None:
    from workbench.cli.trace import app

    run = CliRunner().invoke(app, ["folder", str(ranks), "--processes", "1", "--out", str(tmp_path / "r.json")])
    assert run.exit_code == 0, run.output
    assert "slowest is rank 2" in run.output and "6 of 6 ranks whole" in run.output
    assert len(json.loads((tmp_path / "r.json").read_text())["ranks"]) == 6
    assert "is named by" not in run.output and "rank00003" not in run.output
    (ranks / "rank00004.json.gz").write_bytes(b"no trace at all")
    run = CliRunner().invoke(app, ["folder", str(ranks), "--processes", "1", "--json"])
    assert run.exit_code == 1


def test_ranks_named_twice_and_runs_apart_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.cli.folder import show_report

    twice = [RankSummary(f"{x}.json", 0, steps=(("lone " + x, 0, 5), ("both", at, 5)), wait_us=at / 1e3)
             for x, at in (("a", 0), ("b", 61_000_000_000))]  # fmt: skip
    show_report(FolderReport(twice, step_skew(twice), [{"rank": 0, "file": "b.json", "quantity": "wait_us",
                                                         "value": 6.0, "median": 1.0}], 1.0))  # fmt: skip
    shown = capsys.readouterr().out
    assert "rank 0 is named by 2 files" in shown and "stands out: b.json, wait_us" in shown
    assert "both: 2 ranks start more than a minute apart" in shown and "lone" not in shown
    assert "no profiler steps" not in shown


@pytest.mark.parametrize(("status", "said"), [(OK, True), (FAILED, False)])
def test_traces_without_profiler_steps_are_told(capsys: pytest.CaptureFixture[str], status: str, said: bool) -> None:
    from workbench.cli.folder import show_report

    show_report(FolderReport([RankSummary("a.json", 0, status=status)], [], [], 1.0))
    assert ("no profiler steps in these traces" in capsys.readouterr().out) == said


def test_the_report_never_replaces_a_trace(ranks: Path) -> None:
    from workbench.cli.trace import app

    trace = next(ranks.iterdir())
    before = trace.read_bytes()
    for out in (trace, ranks / "report.json"):
        run = CliRunner().invoke(app, ["folder", str(ranks), "--processes", "1", "--out", str(out)])
        assert run.exit_code == 2 and "not read as one of the traces" in run.output
    assert trace.read_bytes() == before and not (ranks / "report.json").exists()
