"""Sweeps: each point once, finished runs never again, failures apart, GPUs not shared, readable results."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fault_loop
import pytest
from typer.testing import CliRunner

import workbench.suite.sweep as sweep_module
from workbench.cli.sweep import app, parse_points, parse_resources
from workbench.suite import ParameterError, select
from workbench.suite.fingerprint import code_hash
from workbench.suite.sweep import OtherCodeError, default_resources, finished, grid, lacking, run_task
from workbench.views.sweep import compare, load_sweep, tidy

MARK = "a" * 64


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty results folder."""
    for name in ("runs", "failed"):
        (tmp_path / "out" / name).mkdir(parents=True)
    return tmp_path / "out"


def fake_runner(monkeypatch: pytest.MonkeyPatch, status: str = "passed", before: Any = None) -> list[Path]:
    """Replace the execution of notebooks; return where they were executed."""
    executed: list[Path] = []

    def run_one(notebook: str, params: dict, out: Path, timeout: float, *, fingerprint: str) -> dict:
        out.mkdir()
        executed.append(out)
        if before is not None:
            before()
        return {"status": status, "attempt": len(executed), "params": params, "fingerprint": fingerprint}

    monkeypatch.setattr(sweep_module, "run_one", run_one)
    return executed


def task(out: Path, code: str | None = None) -> dict:
    """Run the one point of these tests."""
    return run_task("some/light.ipynb", {"a": 1}, str(out), MARK, code or code_hash(), 10.0)


class TestTask:
    """What one worker does with one point."""

    def test_a_finished_point_is_not_run_again(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        executed = fake_runner(monkeypatch)
        assert task(runs) == task(runs)
        assert len(executed) == 1
        assert [p.name for p in (runs / "runs").iterdir()] == [MARK[:16]]

    def test_of_two_workers_the_first_rename_wins(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        meet = threading.Barrier(2)
        executed = fake_runner(monkeypatch, before=lambda: meet.wait(5))
        answers: list[dict] = []
        threads = [threading.Thread(target=lambda: answers.append(task(runs))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(executed) == 2 and answers[0] == answers[1] == finished(runs / "runs" / MARK[:16])
        assert len(list((runs / "runs").iterdir())) == 1

    def test_a_failure_lies_apart_and_is_run_again(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_runner(monkeypatch, status="failed")
        assert task(runs)["status"] == "failed" == task(runs)["status"]
        assert not list((runs / "runs").iterdir()) and [p.name for p in (runs / "failed").iterdir()] == [MARK[:16]]
        fake_runner(monkeypatch)
        assert task(runs)["status"] == "passed" and finished(runs / "runs" / MARK[:16])

    def test_a_run_that_dies_leaves_no_result(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_runner(monkeypatch, before=lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            task(runs)
        assert not list((runs / "runs").iterdir())

    def test_a_worker_with_other_code_refuses(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        executed = fake_runner(monkeypatch)
        with pytest.raises(OtherCodeError, match="another version of workbench"):
            task(runs, code="0" * 64)
        assert not executed

    def test_half_an_outcome_is_none(self, runs: Path) -> None:
        target = runs / "runs" / MARK[:16]
        target.mkdir()
        (target / "outcome.json").write_text('{"status": "pas')
        assert finished(target) is None


def client_with(*resources: dict[str, float]) -> Any:
    """A client whose scheduler knows workers with these resources."""
    workers = {str(i): {"resources": r} for i, r in enumerate(resources)}
    return SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})


class TestResources:
    """Runs that may measure take a GPU."""

    def test_gpu_is_taken_where_workers_offer_it_and_the_run_may_measure(self) -> None:
        measured, modelled = select(["tab13_host_synchronization"])[0], select(["fig31_blocks_ahead"])[0]
        offering = client_with({}, {"GPU": 2})
        assert default_resources(offering, measured, [{}]) == {"GPU": 1.0}
        assert default_resources(offering, measured, [{"source": "recorded"}]) == {}
        assert default_resources(client_with({}), measured, [{}]) == {}
        assert default_resources(offering, modelled, [{"source": "model"}]) == {}

    def test_what_is_lacking_is_said(self) -> None:
        assert lacking(client_with({"GPU": 1}), {"GPU": 1.0}) is None
        assert "no worker yet" in str(lacking(client_with(), {}))
        assert "no worker offers GPU=2" in str(lacking(client_with({"GPU": 1}), {"GPU": 2.0}))

    def test_two_runs_never_share_a_gpu(self) -> None:
        with sweep_module.cluster(None, workers=2, gpus=1) as client:
            futures = [client.submit(hold_gpu, i, resources={"GPU": 1}, pure=False) for i in range(3)]
            held = sorted(client.gather(futures))
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(held))
        assert {h[2] for h in held} == {"0"}

    def test_resources_are_read(self) -> None:
        assert parse_resources("GPU=1,MEM=2.5") == {"GPU": 1.0, "MEM": 2.5} and parse_resources(None) is None
        for bad in ("GPU", "GPU=x", "=1"):
            with pytest.raises(ValueError, match="expected NAME=AMOUNT"):
                parse_resources(bad)


def hold_gpu(number: int) -> tuple[float, float, str]:
    """Say when it ran and on which GPU."""
    import os

    begun = time.time()
    time.sleep(0.3)
    return begun, time.time(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_grid_and_points() -> None:
    assert grid({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    notebook = select(["fig29_running_dry"])[0]
    assert [p["submit_cost"] for p in parse_points(notebook, ["submit_cost=1.2, 1.5"], None)] == [1.2, 1.5]
    with pytest.raises(ParameterError, match="submit_costs"):
        parse_points(notebook, ["submit_costs=1"], None)
    with pytest.raises(ParameterError, match="at least one value"):
        parse_points(notebook, ["submit_cost=,"], None)


def summary_of(*runs: dict) -> dict:
    """A summary over parameter a."""
    return {"slug": "s", "names": ["a"], "runs": [{"key": str(i), "status": "passed", **r} for i, r in enumerate(runs)]}


class TestResults:
    """A sweep read back."""

    def test_one_table_with_one_type_a_column(self) -> None:
        table = tidy(
            summary_of(
                {"params": {"a": 1}, "rows": [{"v": 1, "w": 1, "a": 9}, {"v": 2.5, "w": "x"}]},
                {"params": {"a": 2}, "rows": [{"v": None, "w": [1, 2]}]},
                {"params": {"a": 3}, "status": "failed"},
            )
        )
        assert table["v"].to_list() == [1.0, 2.5, None, None]
        assert table["w"].to_list() == ["1", "x", "[1, 2]", None]
        assert table["a"].to_list() == [1, 1, 2, 3] and table["table_a"].to_list() == [9, None, None, None]
        assert table["status"].to_list() == ["passed", "passed", "passed", "failed"]

    def test_the_figure_shows_every_row_and_the_median(self) -> None:
        rows = [{"v": 1.0}, {"v": 3.0}, {"v": 8.0}]
        summary = summary_of({"params": {"a": 1}, "rows": rows}, {"params": {"a": 2}, "rows": [{"v": 5.0}]})
        dots, line = compare(summary).data
        assert sorted(dots.y) == [1.0, 3.0, 5.0, 8.0] and list(line.y) == [3.0, 5.0] and list(line.x) == [1, 2]
        with pytest.raises(ValueError, match="no column 'nope'"):
            compare(summary, y="nope")
        with pytest.raises(ValueError, match="'status' is not numeric"):
            compare(summary, y="status")
        assert not compare(summary_of({"params": {"a": 1}})).data

    def test_timelines_are_compared_by_the_idle_time_of_each_panel(self) -> None:
        def rows(idle: float) -> list[dict[str, object]]:
            bars = [("a", "idle", 1.0, 1.0 + idle), ("a", "idle", 5.0, 5.5), ("b", "gpu_execute", 0.0, 9.0)]
            return [dict(zip(("panel", "kind", "start", "end"), bar)) for bar in bars]

        runs = [{"params": {"a": a}, "rows": rows(a)} for a in (1, 2)]
        drawn = {t.name: list(t.y) for t in compare(summary_of(*runs)).data if t.showlegend}
        assert drawn == {"panel = a": [1.5, 2.5], "panel = b": [0.0, 0.0]}
        assert list(compare(summary_of(*runs), y="end").data[1].y) == [5.5, 5.5]
        two = [{"params": {"a": a, "c": c}, "rows": rows(a + c)} for a in (1, 2) for c in (0, 3)]
        drawn = {t.name: list(t.y) for t in compare(summary_of(*two) | {"names": ["a", "c"]}).data if t.showlegend}
        assert drawn["c = 3, panel a"] == [4.5, 5.5] and len(drawn) == 4

    def test_what_is_no_sweep_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"holds no sweep\.json"):
            load_sweep(tmp_path)
        for text in ("{", "[]", "{}", '{"slug": 1, "names": [], "runs": [{}]}'):
            (tmp_path / "sweep.json").write_text(text)
            with pytest.raises(ValueError, match="no summary of a sweep"):
                load_sweep(tmp_path)

    def test_names_are_escaped_on_the_page(self, tmp_path: Path) -> None:
        run = {"params": {"a": "<script>x</script>"}, "rows": [{"v": 1.0}], "folder": None}
        sweep_module.write_page(summary_of(run), tmp_path)
        page = (tmp_path / "index.html").read_text()
        assert '<td class="number"><script>x' not in page and "&lt;script&gt;x" in page


def test_a_sweep_from_the_command_line(tmp_path: Path) -> None:
    notebook, out = fault_loop.light_notebook(tmp_path), tmp_path / "out"
    ledger = tmp_path / "ledger.txt"

    def run(points: str, *more: str) -> Any:
        place = ["-p", f"point={points}", "-p", f"place={tmp_path}", "--workers", "2", "--out", str(out), *more]
        return CliRunner().invoke(app, [str(notebook), *place])

    first = run("1,2,2")
    assert first.exit_code == 0, first.output
    assert "2 points, 2 to run" in first.output and "dashboard http://127.0.0.1" in first.output
    noted = sorted(line.split()[:2] for line in ledger.read_text().splitlines())
    assert noted == [["end", "1"], ["end", "2"], ["start", "1"], ["start", "2"]]
    again = run("1,2")
    assert again.exit_code == 0 and "2 points, 0 to run" in again.output
    assert len(ledger.read_text().splitlines()) == 4
    summary = load_sweep(out)
    assert [(r["params"]["point"], r["rows"]) for r in summary["runs"]] == [(1, [{"square": 1}]), (2, [{"square": 4}])]
    page = (out / "index.html").read_text()
    for r in summary["runs"]:
        assert f'href="{r["folder"]}/light.html"' in page and (out / r["folder"] / "light.html").is_file()
    wrong = run("3", "-p", "seconds=-1")
    assert wrong.exit_code == 1, wrong.output
    failed = load_sweep(out)["runs"][0]
    assert failed["status"] == "failed" and failed["folder"].startswith("failed/")
    assert len(list((out / "runs").iterdir())) == 2


def test_no_scheduler_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    real = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda address, timeout: real(address=address, timeout="1s"))
    notebook = str(fault_loop.light_notebook(tmp_path))
    run = CliRunner().invoke(app, [notebook, "--scheduler", "tcp://127.0.0.1:9", "--out", str(tmp_path / "out")])
    assert run.exit_code == 2 and "sweep stopped" in run.output and "run the same command to go on" in run.output


@pytest.mark.slow
def test_killed_driver_worker_machine_and_scheduler(tmp_path: Path) -> None:
    # Enough points that work is left at the fourth kill, also on a quick machine.
    found = fault_loop.loop(tmp_path, points=10, kills=4, seed=3, limit_s=150, wait_s=(2.0, 4.0))
    assert found["kills"] == {"driver": 1, "worker": 1, "machine": 1, "scheduler": 1}
    assert found["holds"], found


def test_the_explorer_reads_a_folder_and_computes_its_example(tmp_path: Path) -> None:
    import workbench

    experiment = workbench.load("sweep_explorer")
    example = experiment.run()
    assert example.source == "model" and not any(c.fails for c in example.checks)
    assert len(example.figure().data) == 8
    run = {"params": {"a": 1}, "rows": [{"v": 1.0}], "source": "recorded", "badge": "recorded on X"}
    (tmp_path / "sweep.json").write_text(json.dumps(summary_of(run, {**run, "params": {"a": 2}, "status": "lost"})))
    read = experiment.run(folder=str(tmp_path))
    assert read.source == "recorded" and read.badge == "sweep of s, 2 runs: recorded on X"
    assert [c.holds for c in read.checks] == [True, False]
    assert read.with_params(y="v").figure().data


def test_a_killed_driver_takes_its_local_cluster_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = fault_loop.Stage(tmp_path, points=6)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv(fault_loop.MARK, stage.mark)
    command = [c for c in stage.commands()["driver"] if c not in ("--scheduler", stage.address)]
    driver = subprocess.Popen([*command, "--workers", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not stage.finished_runs() and time.monotonic() < end:
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    end = time.monotonic() + 10
    while (left := stage.left()) and time.monotonic() < end:
        time.sleep(0.1)
    before = stage.finished_runs()
    assert before and not left
    assert len(before) < 6, "the driver was too quick for this test"
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"6 points, {6 - len(before)} to run" in done.stdout
    after = stage.finished_runs()
    assert len(after) == 6 and all(after[k] == v for k, v in before.items())
    assert not list(scratch.glob("workbench-dask-*")) and not list((stage.out / "runs").glob(".*"))
