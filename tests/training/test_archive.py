"""Folders and files of anybody's histories: runs and segments found, tracker exports, hostile names, the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

pl = pytest.importorskip("polars")

from workbench.experiments import load  # noqa: E402
from workbench.training.archive import natural, read_archive, rename_metrics  # noqa: E402
from workbench.training.histories import window_median  # noqa: E402
from workbench.views.archives import reading_report  # noqa: E402

EVIL = "<img src=x onerror=alert(1)>"


def write(folder: Path, name: str, columns: dict) -> Path:
    """One history in the format that its suffix says."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pl.DataFrame(columns)
    {".csv": table.write_csv, ".jsonl": table.write_ndjson, ".parquet": table.write_parquet}[path.suffix](path)
    return path


def rows(run) -> list[dict]:
    return run.stitched()[0].drop("segment").to_dicts()


def test_numbered_segments_of_any_format_stitch_newest_wins(tmp_path):
    write(tmp_path, "seg_1.csv", {"step": [1, 2, 3], "loss": [9.0, 8.0, 7.0]})
    write(tmp_path, "seg_10.parquet", {"step": [3, 5], "loss": [3.0, 5.0]})
    write(tmp_path, "seg_2.jsonl", {"_step": [2, 3, 4], "loss": [2.0, 2.5, 4.0]})
    (tmp_path / "notes.txt").write_text("no history")
    write(tmp_path, ".hidden/x.csv", {"step": [1], "loss": [0.0]})
    (run,) = read_archive(tmp_path)
    assert [s.name for s in run.segments] == ["seg_1", "seg_2", "seg_10"], "numbers compare as numbers"
    assert [r["loss"] for r in rows(run)] == [9.0, 2.0, 3.0, 4.0, 5.0]
    lines = run.stitched()[1].lines()
    assert lines[0] == "seg_1: 3 rows, steps 1 to 3, 1 kept, 2 replaced by newer segments"
    assert lines[-1] == "3 segments, 3 overlapping steps, 0 gaps"


def test_order_by_first_step_is_asked_for(tmp_path):
    write(tmp_path, "b.csv", {"step": [1, 2], "loss": [1.0, 1.0]})
    write(tmp_path, "a.csv", {"step": [2, 3], "loss": [2.0, 2.0]})
    by_name, by_start = (read_archive(tmp_path, order=o)[0] for o in ("name", "start"))
    assert [r["loss"] for r in rows(by_name)] == [1.0, 1.0, 2.0]
    assert [r["loss"] for r in rows(by_start)] == [1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="order: expected 'name' or 'start', got 'newest'"):
        read_archive(tmp_path, order="newest")  # type: ignore[arg-type]


def test_a_column_or_a_subfolder_names_the_run(tmp_path):
    table = {"run": ["b", "a", "b"], "step": [1, 1, 2], "loss": [1.0, 5.0, 2.0]}
    one = read_archive(write(tmp_path, "all.csv", table))
    assert [(r.name, [x["loss"] for x in rows(r)]) for r in one] == [("a", [5.0]), ("b", [1.0, 2.0])]
    folder = tmp_path / "folders"
    write(folder, "original/part1.csv", {"step": [1], "loss": [1.0]})
    write(folder, "branch/part1.csv", {"step": [2], "loss": [2.0]})
    assert [r.name for r in read_archive(folder)] == ["branch", "original"]


def test_seeds_and_segments_in_columns(tmp_path):
    table = {
        "arm": ["x"] * 4,
        "seed": [0, 0, 1, 0],
        "segment": [10, 2, 1, 2],
        "step": [2, 1, 1, 2],
        "v": [9.0, 1.0, 4.0, 2.0],
    }
    first, second = read_archive(write(tmp_path, "t.csv", table))
    assert (first.seed, second.seed) == (0, 1)
    assert [s.name for s in first.segments] == ["segment 2", "segment 10"]
    assert [r["v"] for r in rows(first)] == [1.0, 9.0]


def test_panel_export_of_weights_and_biases(tmp_path):
    (tmp_path / "panel.csv").write_text(
        '"Step","fast - train/ce","fast - train/ce__MIN","fast - train/ce__MAX","slow - train/ce","slow - _step"\n'
        "0,3.5,3.4,3.6,,\n1,,,,4.5,1\n2,2.5,2.4,2.6,4.0,2\n"
    )
    fast, slow = read_archive(tmp_path / "panel.csv")
    assert (fast.name, slow.name) == ("fast", "slow")
    assert rows(fast) == [{"step": 0, "train/ce": 3.5}, {"step": 2, "train/ce": 2.5}]
    assert rows(slow) == [{"step": 1, "train/ce": 4.5}, {"step": 2, "train/ce": 4.0}]


def test_history_export_of_weights_and_biases(tmp_path):
    (tmp_path / "run.csv").write_text(
        ",_step,_runtime,_timestamp,train/ce,train/hist,note\n0,0,1.5,1e9,3.5,{},a\n1,10,2.5,1e9,NaN,{},b\n2,20,3.5,1e9,3.0,{},c\n"
    )
    (run,) = read_archive(tmp_path / "run.csv")
    table, _ = run.stitched()
    assert table.columns == ["step", "_runtime", "_timestamp", "train/ce", "segment"]
    assert table["step"].to_list() == [0, 10, 20] and run.stitched()[1].gaps == (), "ten steps are its usual distance"
    assert any("left out" in n and "note" in n for n in run.notes)


def test_scalar_exports_of_tensorboard(tmp_path):
    for tag, values in (("train_ce", [3.0, 2.0]), ("train_lbl", [1.2, 1.1])):
        text = "Wall time,Step,Value\n" + "".join(f"1.7e9,{i + 1},{v}\n" for i, v in enumerate(values))
        (tmp_path / f"run_a-tag-{tag}.csv").write_text(text)
    (tmp_path / "run_b-tag-train_ce.csv").write_text("Step,Value\n2,1.5\n3,1.0\n")
    (run,) = read_archive(tmp_path)
    assert [s.name for s in run.segments] == ["run_a", "run_b"]
    assert run.segments[0].table.to_dicts() == [
        {"step": 1, "train_ce": 3.0, "train_lbl": 1.2},
        {"step": 2, "train_ce": 2.0, "train_lbl": 1.1},
    ]
    assert [r["train_ce"] for r in rows(run)] == [3.0, 1.5, 1.0]
    assert "joined 2 files" in run.notes[0]


def test_nested_values_of_json_lines_are_left_out_and_said(tmp_path):
    lines = [{"step": i, "ce": 2.0 - i, "histogram": {"bins": [1, 2]}, "shape": [1, 2]} for i in (1, 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run,) = read_archive(tmp_path / "a.jsonl")
    assert rows(run) == [{"step": 1, "ce": 1.0}, {"step": 2, "ce": 0.0}]
    assert "left out 2 columns without numbers: histogram, shape" in run.notes[0]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="'nowhere' does not exist"):
        read_archive(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no history"):
        read_archive(tmp_path)
    (tmp_path / "bad.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(ValueError, match="history 'bad': no step column"):
        read_archive(tmp_path)
    (tmp_path / "bad.csv").write_text("Wall time,Step\n1,2\n")
    (tmp_path / "bad.csv").write_text("step,loss\n2020-01-01,2\n,3\n")
    with pytest.raises(ValueError, match="history 'bad': expected integer steps in 'step', got 2 rows without any"):
        read_archive(tmp_path)
    (tmp_path / "bad.csv").write_text("Wall time,Step\n1,2\n")
    with pytest.raises(ValueError, match="expected columns Step and Value"):
        read_archive(tmp_path)


def test_metrics_get_our_names_by_telling_or_by_habit():
    table = pl.DataFrame(
        {"step": [1], "train/CE loss": [2.0], "optim/learning rate": [0.1], "lbl": [1.0], "odd": [7.0]}
    )
    renamed, said = rename_metrics(table)
    assert renamed.columns == ["step", "ce", "lr", "lbl", "odd"]
    assert said == ["'train/CE loss' is read as ce", "'optim/learning rate' is read as lr"]
    told, _ = rename_metrics(table, ["lbl=odd"])
    assert told["lbl"].to_list() == [7.0] and told["lbl (archive)"].to_list() == [1.0]
    for wrong in ("lbl", "=odd", "lbl=absent"):
        with pytest.raises(ValueError, match=r"metrics: expected ours=theirs with a column of the archive .*odd"):
            rename_metrics(table, [wrong])


def test_natural_order_takes_any_text():
    names = ["s10", "s2", "s", "9" * 5000, "²", ""]
    assert sorted(names, key=natural)[-2:] == ["s2", "s10"] or sorted(names, key=natural)[-3:-1] == ["s2", "s10"]


def history(first: int, last: int, ce: float, every: int = 1) -> dict:
    steps = list(range(first, last + 1, every))
    return {"step": steps, "train/CE loss": [ce + 1 / s for s in steps], "lbl": [1.0 + ce / 10] * len(steps)}


def test_lbl_branch_analyses_an_archive_over_the_reports_windows(tmp_path):
    write(tmp_path, "original/run-1.csv", history(1, 20_000, 2.0))
    write(tmp_path, "original/run-2.parquet", history(19_990, 25_669, 2.0))
    write(tmp_path, "branch/run.jsonl", history(17_001, 26_000, 1.9))
    result = load("fig45_lbl_branch").run(archive=str(tmp_path))
    assert set(result.table["arm"]) == {"original", "branch"}
    assert result.badge == f"your archive: {tmp_path.name}"
    from workbench.experiments.fig45_lbl_branch import difference_table, window_table, windows

    assert windows(result.table, result.params) == ((17_001, 17_999), (24_000, 25_669))
    late = window_table(result).filter((pl.col("window") == "late") & (pl.col("metric") == "ce"))
    assert dict(zip(late["arm"], late["rows"])) == {"original": 1670, "branch": 1670}
    (paired,) = difference_table(result, ("ce",)).filter(pl.col("window") == "late").to_dicts()
    assert paired["median"] == pytest.approx(-0.1) and paired["high"] < -0.0999
    holds = {c.claim: c.holds for c in result.checks}
    assert holds["seed 0: the branch starts where the checkpoint was"]
    assert holds["the router grows more confident"] is None, "the archive has no such metric"
    assert holds["the load-balancing loss itself settles higher"] is False
    assert "11 overlapping steps" in reading_report(result)
    assert len(result.figure().data) == 4
    asked = load("fig45_lbl_branch").run(archive=str(tmp_path), window_steps=[17_001, 17_010, 20_000, 20_100])
    assert windows(asked.table, asked.params) == ((17_001, 17_010), (20_000, 20_100))


def test_lbl_branch_takes_two_paths_and_refuses_what_it_cannot_tell_apart(tmp_path):
    a = write(tmp_path, "a/x.csv", history(1, 100, 2.0))
    b = write(tmp_path, "b/y.csv", history(51, 100, 1.0))
    experiment = load("fig45_lbl_branch")
    result = experiment.run(archive=str(a), archive_branch=str(b))
    assert result.table.filter(pl.col("arm") == "branch")["step"].min() == 51
    assert experiment.run(archive=str(tmp_path)).table.equals(result.table), "the later first step is the branch"
    alone = [write(tmp_path, f"one/{i}.csv", {"step": [i, 9], "loss": [2.0, 1.0]}) for i in (1, 2)]
    one = experiment.run(archive=str(alone[0]), archive_branch=str(alone[1]))
    assert {t.yaxis for t in one.figure().data} == {"y"}, "one metric is one panel"
    with pytest.raises(ValueError, match=r"expected two runs.*got 1"):
        experiment.run(archive=str(a))
    shutil.rmtree(tmp_path / "one")
    write(tmp_path, "b/y.csv", history(1, 100, 1.0))
    with pytest.raises(ValueError, match="both runs start at step 1; name the branch"):
        experiment.run(archive=str(tmp_path))
    with pytest.raises(ValueError, match="window_steps: expected four steps"):
        experiment.run(archive=str(a), window_steps=[5, 1, 2, 3])
    with pytest.raises(ValueError, match="archive_branch: expected `archive`"):
        experiment.run(archive_branch=str(b))


def test_batch_warmup_analyses_an_archive_of_segments(tmp_path):
    write(
        tmp_path, "s1.csv", {"step": [1, 2, 3], "ce": [5.0, 4.0, 3.9], "batch_size": [8, 8, 8], "lr": [1.0, 1.0, 1.0]}
    )
    write(
        tmp_path, "s2.csv", {"step": [3, 4, 5], "ce": [3.0, 2.5, 2.4], "batch_size": [8, 16, 32], "lr": [1.0, 1.5, 3.0]}
    )
    experiment = load("fig66_batch_warmup")
    result = experiment.run(archive=str(tmp_path), multiples=[1, 2, 4], alpha=0.5)
    from workbench.experiments.fig66_batch_warmup import merge_table, stitched

    tables, _ = stitched(result)
    assert tables[tmp_path.name]["ce"].to_list() == [5.0, 4.0, 3.0, 2.5, 2.4]
    assert merge_table(result).select("segment", "kept", "replaced").rows() == [("s1", 2, 1), ("s2", 3, 0)]
    holds = {c.claim: c.holds for c in result.checks}
    assert holds["at every overlapping step the newest segment's value is retained"]
    assert holds["the batch grows through the printed multiples"]
    assert holds["the learning rate is multiplied by (B_new / B_old)^alpha at each increase"] is False
    scaled = experiment.run(archive=str(tmp_path), multiples=[1, 2, 4], alpha=1.0)
    assert {c.claim: c.holds for c in scaled.checks}[
        "the learning rate is multiplied by (B_new / B_old)^alpha at each increase"
    ]
    assert result.figure().data
    write(tmp_path, "s3.csv", {"step": [6], "accuracy": [0.5]})
    with pytest.raises(ValueError, match=r"'s3' has no cross-entropy.*accuracy"):
        experiment.run(archive=str(tmp_path))


def test_names_from_files_cannot_inject_markup(tmp_path):
    table = {"run": [EVIL, EVIL], "step": [1, 2], "ce": [2.0, 1.0], "tokens": [1, 2]}
    path = write(tmp_path, "evil.csv", table)
    result = load("fig66_batch_warmup").run(archive=str(path))
    assert EVIL not in result.figure().to_json() and "&lt;img" in result.figure().to_json()
    named = tmp_path / f"{EVIL.replace('/', '')}.csv"
    named.write_bytes(path.read_bytes())
    mine = load("fig66_batch_warmup").run(archive=str(named))
    assert mine.badge == f"your archive: {named.name}"
    assert "<img" not in mine.figure().layout.title.subtitle.text and "<img" not in mine._checks_html()
    write(tmp_path, "two/o.csv", {"step": [1, 2], "ce": [2.0, 1.0], EVIL: [1.0, 2.0]})
    write(tmp_path, "two/branch/o.csv", {"step": [2, 3], "ce": [2.0, 1.0], EVIL: [1.0, 2.0]})
    drawn = load("fig45_lbl_branch").run(archive=str(tmp_path / "two"), metrics=[f"<b>bold</b>={EVIL}"])
    assert len(drawn.figure().data) == 4
    axes = [drawn.figure().layout[a].title.text for a in ("yaxis", "yaxis2")]
    assert axes == ["cross-entropy", "&lt;b&gt;bold&lt;/b&gt;"]


def test_commands(tmp_path):
    from workbench.cli import app

    write(tmp_path, "in/s1.csv", {"step": [1, 2, 3], "ce": [3.0, 2.0, 9.0]})
    write(tmp_path, "in/s2.csv", {"step": [3, 4], "ce": [1.0, 0.5], "\x1b[31mred": [1.0, 2.0]})
    run, out = CliRunner(), tmp_path / "all.csv"
    told = run.invoke(app, ["history", "stitch", str(tmp_path / "in"), "--out", str(out)])
    assert (
        told.exit_code == 0 and "2 segments, 1 overlapping steps, 0 gaps" in told.output and "\x1b" not in told.output
    )
    assert pl.read_csv(out)["ce"].to_list() == [3.0, 2.0, 1.0, 0.5]
    assert told.output.endswith(f"wrote 4 rows to {out}\n")
    assert not list(tmp_path.glob(".all*"))
    found = run.invoke(
        app, ["history", "window", str(tmp_path / "in"), "-m", "ce", "--first", "2", "--last", "4", "--json"]
    )
    assert json.loads(found.output)[0]["median"] == 1.0
    assert run.invoke(
        app, ["history", "window", str(out), "-m", "ce", "--first", "2", "--last", "4"]
    ).output.startswith("in, seed 0, ce: median 1, 95 % interval ")
    report = json.loads(run.invoke(app, ["history", "stitch", str(tmp_path / "in"), "--json"]).output)
    assert report[0]["overlaps"] == 1 and report[0]["segments"][0]["replaced"] == 1
    for wrong, said in (
        (["stitch", str(tmp_path / "none")], "does not exist"),
        (["stitch", str(tmp_path / "in"), "--out", "x.txt"], "expected .csv or .parquet"),
        (["window", str(tmp_path / "in"), "-m", "ppl", "--first", "1", "--last", "2"], "no metric 'ppl'"),
        (["window", str(tmp_path / "in"), "-m", "ce", "--first", "3", "--last", "2"], "--first 3"),
    ):
        failed = run.invoke(app, ["history", *wrong])
        assert failed.exit_code == 2 and said in failed.output


def test_a_run_without_a_name_goes_by_its_archives(tmp_path, monkeypatch):
    from workbench.cli import app

    table = {"step": [1, 2], "ce": [3.0, 2.0]}
    write(tmp_path, "mine.v2/s1.csv", table)
    write(tmp_path, "mine.v2/s2.csv", {"step": [2, 3], "ce": [2.0, 1.0]})
    write(tmp_path, "both/both/a.csv", table)
    write(tmp_path, "both/a.csv", table)
    assert [r.title for r in read_archive(tmp_path / "mine.v2")] == ["mine.v2"]
    assert [r.title for r in read_archive(tmp_path / "mine.v2" / "s1.csv")] == ["s1"]
    assert [r.title for r in read_archive(tmp_path / "both")] == ["both (no subfolder)", "both"], "two runs, two titles"
    monkeypatch.chdir(tmp_path / "mine.v2")
    out = tmp_path / "out.csv"
    told = CliRunner().invoke(app, ["history", "stitch", ".", "--out", str(out)])
    assert told.output.startswith("run mine.v2, seed 0\n") and set(pl.read_csv(out)["run"]) == {"mine.v2"}
    report = json.loads(CliRunner().invoke(app, ["history", "stitch", ".", "--json"]).output)
    assert [r["run"] for r in report] == ["mine.v2"]
    asked = ["history", "window", ".", "-m", "ce", "--first", "1", "--last", "3"]
    assert CliRunner().invoke(app, asked).output.startswith("mine.v2, seed 0, ce: median 2, 95 % interval ")
    (row,) = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert row["run"] == "mine.v2"


def test_infinite_and_absent_values_come_out_as_json(tmp_path):
    from workbench.cli import app

    write(tmp_path, "s.csv", {"step": [1, 2, 3], "ce": [float("inf")] * 3, "lr": [1.0, None, None]})
    asked = [
        "history",
        "window",
        str(tmp_path / "s.csv"),
        "-m",
        "ce",
        "-m",
        "lr",
        "--first",
        "2",
        "--last",
        "3",
        "--json",
    ]
    ce, lr = json.loads(CliRunner().invoke(app, asked).output)
    assert (ce["median"], ce["rows"], lr["median"], lr["rows"]) == (None, 2, None, 0)


def test_the_plan_of_another_exponent_follows_the_batch():
    from workbench.experiments.fig66_batch_warmup import planned

    table = pl.DataFrame({"batch": [8, 8, 32], "lr": [0.5, 1.0, 2.0]})
    assert planned(table, 0.5, 0.5).to_list() == [1.0, 1.0, 2.0]
    assert planned(table, 1.0, 0.5).to_list() == [1.0, 1.0, 4.0]


def test_rates_are_tokens_between_reads():
    from workbench.experiments.fig66_batch_warmup import rates

    table = pl.DataFrame({"step": [1, 2, 3], "tokens": [10, 20, 40], "batch": [1, 1, 2], "seconds": [2.0, 2.0, 2.5]})
    assert rates(table)["tokens_per_s"].to_list() == [10.0, 40.0]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_brackets_and_stars_in_a_name_are_no_pattern(tmp_path, suffix):
    write(tmp_path, f"x[1]{suffix}", {"step": [1], "loss": [1.0]})
    write(tmp_path, f"run*{suffix}", {"step": [2], "loss": [2.0]})
    write(tmp_path, f"run1{suffix}", {"step": [3], "loss": [3.0]})
    assert rows(read_archive(tmp_path / f"x[1]{suffix}")[0]) == [{"step": 1, "loss": 1.0}]
    assert rows(read_archive(tmp_path / f"run*{suffix}")[0]) == [{"step": 2, "loss": 2.0}]


def test_json_lines_as_python_and_a_killed_run_leave_them(tmp_path):
    lines = ['{"step": 1, "loss": NaN, "n": 1}', '{"step": 2, "loss": Infinity, "n": "x"}', "[1]"]
    text = "\n".join([*lines, '{"step": 3, "loss": 2, "n": true}', '{"step": 4, "lo'])
    (tmp_path / "a.jsonl").write_text(text)
    (run,) = read_archive(tmp_path / "a.jsonl")
    table, _ = run.stitched()
    assert table["step"].to_list() == [1, 2, 3]
    assert table["loss"].is_nan().to_list() == [True, False, False] and table["loss"].to_list()[1:] == [
        float("inf"),
        2.0,
    ]
    assert run.notes[0] == "a: skipped 2 lines that are no JSON object"
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n7\n")
    with pytest.raises(ValueError, match="expected a JSON object a line, got none in 2 lines"):
        read_archive(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text(f'{{"step": 1, "loss": 1.5}}\n{{"step": {2**70}, "loss": {10**400}}}\n')
    assert rows(read_archive(tmp_path / "a.jsonl")[0]) == [{"step": 1, "loss": 1.5}]


def test_categories_are_words_and_times_are_no_numbers(tmp_path):
    import datetime

    when = [datetime.datetime(2020, 1, i) for i in (1, 2, 3)]
    table = pl.DataFrame(
        {"run": ["b", "a", "b"], "step": [1, 1, 2], "loss": [1.0, 5.0, 2.0], "at": when, "raw": [b"1"] * 3}
    )
    for kind in (pl.Categorical, pl.Enum(["a", "b"])):
        table.with_columns(pl.col("run").cast(kind), pl.col("run").cast(kind).alias("kind")).write_parquet(
            tmp_path / "t.parquet"
        )
        found = read_archive(tmp_path / "t.parquet")
        assert [(r.name, rows(r)) for r in found] == [
            ("a", [{"step": 1, "loss": 5.0}]),
            ("b", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]),
        ]
        assert "left out 3 columns without numbers: at, raw, kind" in found[0].notes[0]
    table.with_columns(step=pl.col("at")).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="expected integer steps in 'step', got Datetime"):
        read_archive(tmp_path / "t.parquet")


@pytest.mark.parametrize("name", ["step.csv", "x-tag-step.csv"])
def test_a_scalar_called_step_keeps_its_step(tmp_path, name):
    (tmp_path / name).write_text("Wall time,Step,Value\n1.0,3,7.0\n")
    assert rows(read_archive(tmp_path / name)[0]) == [{"step": 3, "metric_step": 7.0}]


def test_a_panel_of_bands_alone_is_refused(tmp_path):
    (tmp_path / "p.csv").write_text("Step,a - ce__MIN,a - ce__MAX\n1,2,3\n")
    with pytest.raises(ValueError, match="history 'p': expected a metric's own column"):
        read_archive(tmp_path / "p.csv")


def test_a_seed_that_is_no_number_is_seed_0(tmp_path):
    (tmp_path / "t.csv").write_text("step,ce,seed\n1,2.0,inf\n2,1.5,nan\n3,1.0,2\n")
    assert sorted(r.seed for r in read_archive(tmp_path / "t.csv")) == [0, 2]


def test_a_parquet_file_at_which_polars_panics_is_named(tmp_path, monkeypatch):
    def panic(*_, **__):
        raise pl.exceptions.PanicException("index out of bounds")

    monkeypatch.setattr(pl, "read_parquet", panic)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"'t.parquet' cannot be read as .parquet: index out of bounds"):
        read_archive(tmp_path / "t.parquet")


def test_a_window_over_words_is_refused():
    table = pl.DataFrame({"step": [1, 2], "segment": ["a", "b"]})
    with pytest.raises(ValueError, match="metric 'segment': expected numbers, got String"):
        window_median(table, "segment", 1, 2)


def test_the_stitched_rows_never_replace_or_join_the_archive(tmp_path):
    from workbench.cli import app

    segment = write(tmp_path, "in/seg_1.csv", {"step": [1, 2], "ce": [3.0, 2.0]})
    before = segment.read_bytes()
    for archive, out in ((segment, segment), (tmp_path / "in", segment), (tmp_path / "in", tmp_path / "in/all.csv")):
        told = CliRunner().invoke(app, ["history", "stitch", str(archive), "--out", str(out)])
        assert told.exit_code == 2 and "outside the archive" in told.output
    assert segment.read_bytes() == before and [p.name for p in (tmp_path / "in").iterdir()] == ["seg_1.csv"]
