"""`workbench trace summary | verify | whatif`: keys of the JSON, exit codes, messages, hostile names."""

from __future__ import annotations

import json

import pytest
from kineto_files import kernel, launch, write
from test_analysis import item, stacked, steps_events
from typer.testing import CliRunner

from workbench.cli import trace as trace_cli
from workbench.cli.trace import app
from workbench.core import output

K = 1_000


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_summary_json_has_exactly_the_documented_shape(tmp_path):
    path = write(tmp_path, stacked())
    done = run("summary", path, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["schema"] == 1
    assert set(found) == {"schema", "devices", "waits", "dropped", "warnings"}
    (device,) = found["devices"]
    assert set(device) == {
        "process",
        "device",
        "window_ns",
        "busy_ns",
        "idle_ns",
        "copy_only_ns",
        "idle_by_cause_ns",
        "ops",
        "launches",
        "headroom_us",
        "launch_to_start_us",
    }
    assert set(device["idle_by_cause_ns"]) == {
        "submission",
        "sync_blocked",
        "sync_rebuild",
        "turnaround",
        "dependency",
        "unknown",
    }
    assert set(device["headroom_us"]) == {"mean", "max"} and set(device["launch_to_start_us"]) == {"p50", "p95"}
    assert device["busy_ns"] + device["idle_ns"] == device["window_ns"][1] - device["window_ns"][0]
    assert all(
        type(v) is int
        for v in [*device["window_ns"], device["busy_ns"], device["idle_ns"], *device["idle_by_cause_ns"].values()]
    )
    assert set(found["waits"][0]) == {"kind", "start_ns", "duration_ns", "thread", "blocking", "line", "op", "range"}
    assert found["dropped"] == {} and isinstance(found["warnings"], list)


@pytest.mark.parametrize(
    ("events", "code"), [(stacked(), 1), (steps_events()[3:4], 2), ([launch(0, K, 1), kernel(2 * K, 3 * K, 1)], 0)]
)
def test_verify_exit_codes(tmp_path, events, code):
    path = write(tmp_path, events)
    assert run("verify", path).exit_code == code
    found = json.loads(run("verify", path, "--json").stdout)
    assert found["exit_code"] == code and found["reasons"]


def test_verify_names_calls_lines_counts_and_durations(tmp_path):
    done = run("verify", write(tmp_path, stacked()))
    assert "1 x blocking_d2h at model.py:57 (route): 160.0 us" in done.stdout
    (offence,) = json.loads(run("verify", write(tmp_path, stacked()), "--json").stdout)["offences"]
    assert (offence["call"], offence["line"], offence["count"], offence["total_ns"]) == (
        "cudaMemcpyAsync",
        "model.py:57 (route)",
        1,
        160 * K,
    )


def test_threshold_and_window(tmp_path):
    path = write(
        tmp_path,
        [launch(0, 5 * K, 1), kernel(8 * K, 18 * K, 1), launch(100 * K, 105 * K, 2), kernel(108 * K, 118 * K, 2)],
    )
    assert run("verify", path).exit_code == 1
    assert run("verify", path, "--idle-threshold", 90).exit_code == 0
    assert run("verify", path, "--window", "0:19000").exit_code == 0
    assert run("verify", path, "--idle-threshold", "-1").exit_code == 2
    bad = run("verify", path, "--window", "yesterday")
    assert bad.exit_code == 2 and "expected all, steps" in bad.output


def test_unreadable_input_is_status_2_with_a_message(tmp_path):
    for name in ("absent.json", "."):
        done = run("verify", tmp_path / name)
        assert done.exit_code == 2 and "trace" in done.output
    (tmp_path / "x.json").write_text("no")
    assert "x.json" in run("summary", tmp_path / "x.json").output


def test_whatif(tmp_path):
    path = write(tmp_path, item("Pageable"))
    answer = json.loads(run("whatif", path, "--remove-waits", "--json").stdout)
    assert {"measured_us", "replayed_us", "predicted_us", "assumptions"} <= set(answer)
    assert answer["measured_us"] == answer["replayed_us"] > answer["predicted_us"]
    some = json.loads(run("whatif", path, "--remove-wait", "cudaStreamSynchronize", "--json").stdout)
    assert some["removed_waits"] == 1 < answer["removed_waits"] == 2
    shown = run("whatif", path, "--host-scale", 0.5, "--device-scale", 0.5).stdout
    assert "assumptions:" in shown and "the window of `summary`" in shown
    bad = run("whatif", path, "--remove-wait", "nowhere.py")
    assert bad.exit_code == 2 and "no wait matches" in bad.output
    assert run("whatif", path, "--host-scale", -1).exit_code == 2


@pytest.mark.parametrize(
    ("words", "removed"),
    [
        (["{f}"], 0),
        (["{f}", "--remove-waits"], 2),
        (["--remove-waits", "{f}"], 2),
        (["--remove-waits", "--host-scale", "1", "{f}"], 2),
        (["{f}", "--remove-wait", "cudaStreamSynchronize"], 1),
        (["--remove-wait=cudaStreamSynchronize", "{f}"], 1),
        (["--remove-wait", "cudaStreamSynchronize", "--", "{f}"], 1),
        (["--window", "all", "{f}", "--remove-waits"], 2),
        (["--remove-wait", "cudaMemcpyAsync", "{f}"], 1),
        (["--remove-wait", "cudaMemcpyAsync", "--remove-wait", "cudaStreamSynchronize", "{f}"], 2),
    ],
)
def test_all_waits_or_those_of_a_line_are_removed(tmp_path, words, removed):
    path = write(tmp_path, item("Pageable"))
    done = run("whatif", "--json", *(w.format(f=path) for w in words))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["removed_waits"] == removed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--remove-wait="], "got an empty one"),
        (["--remove-waits", "--remove-wait", "a"], "got both"),
        (["--remove-waits", "absent.py"], "unexpected extra argument"),
        (["--remove-wait=absent.py"], "no wait matches"),
        (["--remove-wait=absent.py", "--remove-wait=cudaMemcpyAsync"], "no wait matches 'absent.py'"),
        (["--remove-wait=a", "--remove-wait="], "got an empty one"),
        (["a", "b"], "unexpected extra argument"),
    ],
)
def test_wrong_remove_waits_is_said(tmp_path, words, message):
    done = run("whatif", write(tmp_path, item("Pageable")), *words)
    assert done.exit_code == 2 and message in done.output


def test_folder_of_ranks(tmp_path):
    for rank in (0, 1):
        write(tmp_path, steps_events(), f"r{rank}.json", distributedInfo={"rank": rank})
    summary, folder = (json.loads(run(command, tmp_path, "--json").stdout) for command in ("summary", "folder"))
    assert [r["rank"] for r in summary["ranks"]] == [0, 1] and len(summary["skew"]) == 3
    assert summary.keys() == folder.keys() and summary["skew"] == folder["skew"]
    assert "2 ranks start within 0.0 us" in run("summary", tmp_path).stdout


HOSTILE = "[bold red]<img src=x onerror=alert(1)>[/]"


def renamed(name: str) -> list[dict]:
    return [dict(e, name=name) if e["cat"] == "user_annotation" and "block" in e["name"] else e for e in stacked()]


@pytest.mark.parametrize("command", ["summary", "verify"])
def test_names_are_printed_as_text_and_control_characters_are_shown(tmp_path, command):
    assert HOSTILE in run(command, write(tmp_path, renamed(HOSTILE))).stdout
    done = run(command, write(tmp_path, renamed("a\x1b]0;title\x07b\u202ec\rd")))
    assert r"a\x1b]0;title\x07b\x202ec\x0dd" in done.stdout and "\x1b" not in done.stdout


def test_summary_fits_80_columns_but_for_paths_and_notes(tmp_path):
    done = run("summary", write(tmp_path, stacked()))
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and max(len(x) for x in lines if not x.startswith(("note:", "    at "))) <= 80
    assert "  idle                       500.0 us   71.6 %" in lines and "    at model.py:57 (route)" in lines
    assert "    wait 160.0 us, launch gap 640.0 us, gpu idle 499.0 us" in lines


def test_summary_says_what_a_cause_means_and_lists_a_line_once_with_its_ranges(capsys):
    at = {"blocking": True, "kind": "blocking_d2h", "line": "model.py:57 (route)", "op": None}
    waits = [at | {"range": f"block {i}", "duration_ns": 1000 * i} for i in (1, 2, 3, 4)]
    lineless = {"blocking": True, "kind": "event_sync", "line": None, "op": None}
    waits += [lineless | {"range": r, "duration_ns": 100} for r in ("block 1", "block 2")]
    trace_cli._show_waits(waits)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  4 x blocking_d2h, 10.0 us, longest 4.0 us",
        "    at model.py:57 (route)",
        "    in block 4 (4.0 us), block 3 (3.0 us), block 2 (2.0 us) and 1 more",
        "  1 x event_sync, 0.1 us, longest 0.1 us",
        "    in block 1",
        "  1 x event_sync, 0.1 us, longest 0.1 us",
        "    in block 2",
    ]
    causes = {k.replace("_", " ") for k in idle_causes()}
    assert causes == set(trace_cli.MEANING)


def idle_causes() -> set[str]:
    from workbench.traces.idle import CAUSES

    return {c for c in CAUSES if c != "sync"} | {"sync_blocked", "sync_rebuild"}


def test_whatif_leads_with_the_gain_or_says_that_nothing_was_asked(tmp_path):
    path = write(tmp_path, item("Pageable"))
    answer = json.loads(run("whatif", path, "--host-scale", 0.5, "--json").stdout)
    ratio = answer["replayed_us"] / answer["predicted_us"]
    assert ratio > 1
    told = run("whatif", path, "--host-scale", 0.5).stdout.splitlines()[0]
    assert told == f"predicted: {ratio:.3g} times as fast, {100 * (1 / ratio - 1):+.1f} % time"
    assert run("whatif", path).stdout.startswith("nothing is changed: remove waits, scale")
    assert not run("whatif", path, "--remove-waits").stdout.startswith("nothing")


def test_long_lines_continue_on_a_terminal_only():
    line = "- " + "word " * 40 + "/a/long/path-with-hyphens/" + "x" * 90
    wrapped = output._wrapped(line.strip(), 80).splitlines()
    assert len(wrapped) > 3 and all(len(w) <= 80 for w in wrapped[:3]) and wrapped[1].startswith("    word")
    assert any("/a/long/path-with-hyphens/" + "x" * 90 in w for w in wrapped)


def test_verify_and_whatif_say_how_their_counts_differ(tmp_path):
    path = write(tmp_path, item("Pageable"))
    note = "not counted: 1 synchronise calls that had nothing left to wait for, or are the final synchronise"
    assert "1 blocking wait holds" in run("verify", path).stdout and note in run("verify", path).stdout
    text = run("whatif", path, "--remove-waits").stdout
    assert "2 waits are removed" in text and "(1 held the host, as `verify` counts; 1 had nothing left" in text
    answer = json.loads(run("whatif", path, "--remove-waits", "--json").stdout)
    assert (answer["removed_waits"], answer["removed_blocking_waits"]) == (2, 1)
