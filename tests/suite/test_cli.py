"""The command line: list, show, run, sync, and the groups that are mounted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebook_maker import make, result_cell
from typer.testing import CliRunner

from workbench.cli import app
from workbench.cli.suite import claims_line, default_out
from workbench.core.experiment import SOURCES
from workbench.core.record import tree_state
from workbench.experiments import load, slugs
from workbench.suite import find_notebooks

HELD = [{"claim": "c", "holds": True, "value": 1}]


def call(*args: str | Path, status: int = 0) -> str:
    """Run the command line in this process; return what it printed on either stream."""
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == status, result.output
    return result.output


def test_list_names_every_experiment_and_notebook() -> None:
    rows = json.loads(call("list", "--json"))
    assert {r["slug"] for r in rows} == set(slugs()) | {n.slug for n in find_notebooks()}
    assert not [r["error"] for r in rows if r["error"]]
    for row in rows:
        assert {"slug", "group", "title", "claim", "kind", "anchor", "sources", "params", "notebook", "error"} == set(
            row
        )
        assert set(row["sources"]) <= set(SOURCES)
    text = call("list")
    assert all(r["slug"] in text for r in rows)


def test_a_few_notebooks_do_not_replace_the_page_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_out([]) == Path("out/run")
    assert (
        default_out(["op_router"]) == default_out(["notebooks/s08_sync_free/op_router.ipynb"]) == Path("out/op_router")
    )
    assert default_out(["op_router", "op_swiglu"]) == Path("out/selection")

    asked: list[Path] = []

    def run_suite(*args: object, **_: object) -> dict[str, object]:
        asked.append(args[2])  # type: ignore[arg-type]
        checks = [{"holds": True}, {"holds": True}, {"holds": False, "known": "why"}, {"holds": None}]
        return {"counts": {"passed": 1}, "seconds": 1.0, "exit_status": 0, "notebooks": [{"checks": checks}]}

    monkeypatch.setattr("workbench.suite.run_suite", run_suite)
    told = call("run", "fig29_running_dry")
    assert told.startswith("1 passed in 1 s; claims: 2 held, 1 known to differ, 1 not decided; report: out/fig29_")
    assert claims_line([{"checks": []}]) == "" and claims_line([{"checks": [{"holds": False}]}]) == "claims: 1 FAILED"
    call("run", "fig29_running_dry", "--out", tmp_path)
    call("run", "--source", "model")
    assert asked == [Path("out/fig29_running_dry"), tmp_path, Path("out/run")]


@pytest.fixture(scope="module")
def shown() -> str:
    """Slug of an experiment whose table needs no GPU."""
    return next(s for s in slugs() if {"model", "recorded"} & set(load(s).sources()))


def test_show_json_has_the_promised_shape(shown: str) -> None:
    result = CliRunner().invoke(app, ["show", shown, "--json"])
    content = json.loads(result.output)
    assert list(content) == ["slug", "source", "recording", "table", "tables", "checks"]
    assert content["slug"] == shown and content["source"] in SOURCES
    assert content["table"] == next(iter(content["tables"].values())) and all(
        isinstance(row, dict) for row in content["table"]
    )
    for check in content["checks"]:
        assert {"claim", "holds", "value"} <= set(check) <= {"claim", "holds", "value", "known"}
        assert check["holds"] in (True, False, None)
    failed = any(c["holds"] is False and not c.get("known") for c in content["checks"])
    assert result.exit_code == int(failed)


def test_show_refuses_what_is_not_there(shown: str) -> None:
    assert "no experiment 'fig99'" in call("show", "fig99", status=2)
    assert "unknown parameter 'nope'" in call("show", shown, "-p", "nope=1", status=2)
    assert "unknown source 'moon'" in call("show", shown, "--source", "moon", status=2)
    missing = next(s for s in ("report", "model", "recorded") if s not in load(shown).sources())
    assert f"has no source '{missing}'" in call("show", shown, "--source", missing, status=2)


def test_value_that_no_recording_has_is_refused_before_anything_runs(tmp_path: Path) -> None:
    slug = "tab13_host_synchronization"
    words = "recorded with spin_us=3000.0, asked for 4000.0"
    assert words in call("show", slug, "--source", "recorded", "-p", "spin_us=4000", status=2)
    out = tmp_path / "out"
    assert words in call("run", slug, "--source", "recorded", "-p", "spin_us=4000", "--out", out, status=2)
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", "m=1"], "unknown parameter 'm'"),
        (["-p", "n=x"], "expected a whole number"),
        (["-p", "n"], "expected name=value"),
        (["--source", "moon"], "expected one of auto"),
        (["nothing_called_this"], "no notebook 'nothing_called_this'"),
        (["absent.ipynb"], "no notebook file"),
        (["-f", "absent.yaml"], "parameter file absent.yaml"),
    ],
)
def test_bad_request_stops_before_anything_runs(tmp_path: Path, args: list[str], words: str) -> None:
    path = make(tmp_path / "g", "tiny", result_cell(HELD), parameters="n = 1")
    assert words in call("run", path, *args, "--out", tmp_path / "out", status=2)
    assert not (tmp_path / "out").exists()


def test_unwritable_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    path = make(tmp_path / "g", "tiny", result_cell(HELD))
    assert "cannot write results to" in call("run", path, "--out", tmp_path / "out", status=2)


def test_run_with_a_parameter_file(tmp_path: Path) -> None:
    path = make(
        tmp_path / "g",
        "tiny",
        "assert (n, name) == (5, 'on'), (n, name)",
        result_cell(HELD),
        parameters="n = 1\nname = ''",
    )
    (tmp_path / "p.yaml").write_text("name: 'on'\nn: 4\ntiny:\n  n: 5\n")
    text = call("run", path, "-f", tmp_path / "p.yaml", "--out", tmp_path / "out")
    assert "tiny: cell 1/4" in text and "[1/1] tiny: passed" in text and "claims: 1 held" in text
    summary = json.loads((tmp_path / "out" / "run.json").read_text())
    assert summary["notebooks"][0]["params"] == {"n": 5, "name": "on"}
    assert (summary["commit"] is None) is (tree_state()[0] is None) and summary["machine"]["cores"] >= 1
    assert (summary["commit"] or "unknown")[:12] in (tmp_path / "out" / "index.html").read_text()


def test_same_slug_twice_is_refused(tmp_path: Path) -> None:
    paths = [make(tmp_path / g, "tiny", result_cell(HELD)) for g in "ab"]
    assert "two notebooks are called 'tiny'" in call("run", *paths, "--out", tmp_path / "out", status=2)


def test_every_module_of_the_command_line_is_mounted() -> None:
    folder = Path(__file__).parents[2] / "workbench" / "cli"
    names = {p.stem for p in folder.glob("*.py") if "\napp = typer.Typer(" in p.read_text()} - {"__init__", "suite"}
    text = call("--help")
    assert {"trace", "record", "audit", "history", "sweep", "launch", "new"} == names
    for name in names:
        assert f" {name} " in text
        call(name, "--help")


@pytest.mark.parametrize(("asked", "meant"), [("tarce", "trace"), ("hisotry", "history"), ("shwo", "show")])
def test_a_misspelt_command_is_answered_with_the_near_one(asked: str, meant: str) -> None:
    assert f"Did you mean '{meant}'?" in call(asked, status=2)
    assert "Did you mean" not in call("zzz", status=2)


@pytest.mark.parametrize("address", ["nonsense", "file"])
def test_a_scheduler_that_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "t.json").write_text("{}")
    (tmp_path / "file").write_text("no scheduler wrote this")
    told = str(tmp_path / "file") if address == "file" else address
    for command in (["trace", "folder", tmp_path / "ranks"], ["sweep", "fig29_running_dry", "--out", tmp_path / "o"]):
        assert f"scheduler '{told}': expected an address" in call(*command, "--scheduler", told, status=2)


def test_a_disk_that_fills_up_while_the_page_is_written_is_said(tmp_path: Path, monkeypatch) -> None:
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.suite.report_page.write_page", full)
    out = tmp_path / "out"
    told = call("run", "fig29_running_dry", "--out", out, status=2)
    assert f"results cannot be written to {out}: No space left on device" in told
    assert (out / "run.json").is_file()


def test_names_from_a_file_do_not_steer_the_terminal() -> None:
    from workbench.suite.progress import describe_outcome

    check = {"claim": "\x1b[2Jclaim", "holds": False, "value": "\u202evalue"}
    outcome = {"slug": "your_trace", "status": "claim_failed", "seconds": 1.0, "checks": [check], "error": None}
    told = describe_outcome(outcome | {"badge": "your trace: a\n[1/1] b: passed\x07"})
    assert told.count("\n") == 1 and "\\x1b[2Jclaim [\\x202evalue]" in told and "a [1/1] b: passed\\x07" in told
