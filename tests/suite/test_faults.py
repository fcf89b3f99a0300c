"""What a nightly meets: each fault fails its notebook clearly, the rest go on, and no process is left behind.

Out of scope: an exception in a thread, an asyncio task or a widget callback that the notebook does not wait for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from notebook_maker import make, result_cell

from workbench.suite import Notebook, OutputError, process, run_one, run_suite

PASSING = [{"claim": "one is one", "holds": True, "value": 1}]
FAILING = [{"claim": "one is two", "holds": False, "value": 1}]
KNOWN = [{"claim": "one is two", "holds": False, "value": 1, "known": "arithmetic"}]

STUBBORN = "import os, signal, subprocess, time\nfor s in (2, 15):\n    signal.signal(s, signal.SIG_IGN)\n"

FAULTS = {
    "cell_error": (
        ["x = 1", "def deep(n):\n    return 1 / n\ndeep(0)", result_cell(PASSING)],
        "ZeroDivisionError: division by zero",
    ),
    "exit_zero": (["import sys\nsys.exit(0)", result_cell(PASSING)], "cell 1 left the kernel with sys.exit(0)"),
    "exit_last": ([result_cell(PASSING), "import sys\nsys.exit(0)"], "cell 2 left the kernel with sys.exit(0)"),
    "os_exit": (["import os\nos._exit(0)", result_cell(PASSING)], "the kernel died in cell 1 (exit status 0)"),
    "killed": (
        ["x = 1", "import os\nos.kill(os.getpid(), 9)", result_cell(PASSING)],
        "died in cell 2 (killed by SIGKILL",
    ),
    "asks": (["input('name? ')", result_cell(PASSING)], "StdinNotImplementedError"),
    "no_result": (["x = 1"], "reported no result"),
    "mixed": ([result_cell(PASSING), result_cell(PASSING, source="live")], "several sources: live, model"),
}


shared_run = pytest.mark.xdist_group("faulty_run")


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """One run over every fault, two good notebooks among them."""
    root = tmp_path_factory.mktemp("faults")
    folder = root / "notebooks" / "grün {braces}"
    paths = [make(folder, slug, *cells) for slug, (cells, _) in FAULTS.items()]
    paths += [make(folder, "good", "print('ä' * 3)", result_cell(PASSING)), make(folder, "claim", result_cell(FAILING))]
    paths += [make(folder, "known", result_cell(KNOWN)), make(folder, "julia", "1", kernel="julia-1.11")]
    for name, content in (
        ("corrupt", b'{"cells": ['),
        ("latin", b'{"caf\xe9": 1}'),
        ("old", b'{"nbformat": 3, "worksheets": []}'),
    ):
        paths.append(folder / f"{name}.ipynb")
        paths[-1].write_bytes(content)
    summary = run_suite([Notebook(p) for p in paths], {}, root / "out", jobs=2, timeout_s=60, page=False)
    return root / "out", {o["slug"]: o for o in summary["notebooks"]} | {"": summary}


@shared_run
@pytest.mark.parametrize("slug", FAULTS)
def test_fault_fails_its_notebook_and_says_why(faulty_run: tuple[Path, dict], slug: str) -> None:
    outcome = faulty_run[1][slug]
    assert outcome["status"] == "failed"
    assert FAULTS[slug][1] in outcome["error"]["message"]
    assert outcome["attempts"] == 1, "only a kernel that does not start is tried again"
    written = json.loads((faulty_run[0] / "notebooks" / f"{slug}.json").read_text())
    assert written == outcome


@shared_run
@pytest.mark.parametrize(
    ("slug", "words"),
    [
        ("corrupt", "corrupt, not JSON"),
        ("latin", "not UTF-8 text at byte 5"),
        ("old", "expected a notebook of format 4, got 3"),
        ("julia", "expected the kernel 'python3' in its metadata, got 'julia-1.11'"),
    ],
)
def test_unusable_notebook_is_refused_with_its_name(faulty_run: tuple[Path, dict], slug: str, words: str) -> None:
    outcome = faulty_run[1][slug]
    assert (outcome["status"], outcome["error"]["kind"]) == ("failed", "invalid_notebook")
    assert outcome["error"]["message"] == f"{slug}.ipynb: " + outcome["error"]["message"].split(": ", 1)[1]
    assert words in outcome["error"]["message"]


@shared_run
def test_the_rest_go_on(faulty_run: tuple[Path, dict]) -> None:
    out, outcomes = faulty_run
    good = outcomes["good"]
    assert (good["status"], good["source"], good["checks"], good["html_error"]) == ("passed", "model", PASSING, None)
    assert good["code_cells"] == 2 and 20 * 2**20 < good["peak_memory_bytes"] < 2 * 2**30 and good["seconds"] > 0
    assert "äää" in (out / "notebooks" / "good.html").read_text(encoding="utf-8")
    assert outcomes["claim"]["status"] == "claim_failed" and outcomes["known"]["status"] == "passed"
    assert outcomes[""]["exit_status"] == 1


@shared_run
def test_traceback_is_kept_without_colour_codes(faulty_run: tuple[Path, dict]) -> None:
    excerpt = faulty_run[1]["cell_error"]["error"]["excerpt"]
    assert "deep(0)" in excerpt and "return 1 / n" in excerpt and "\x1b" not in excerpt


@shared_run
def test_no_temporary_file_is_left(faulty_run: tuple[Path, dict]) -> None:
    endings = {p.suffix for p in (faulty_run[0] / "notebooks").iterdir()}
    assert endings == {".ipynb", ".html", ".json"}
    assert [p.name for p in faulty_run[0].glob(".*")] == [".lock"]


def test_time_out_names_the_cell_and_keeps_what_was_done(tmp_path: Path, no_orphans: str) -> None:
    stubborn = STUBBORN + "print('begun', flush=True)\ntime.sleep(600)"
    path = make(tmp_path / "g", "slow", "x = 1", stubborn, result_cell(PASSING))
    outcome = run_one(path, {}, tmp_path / "out", timeout=8)
    assert (outcome["status"], outcome["error"]["kind"], outcome["error"]["cell"]) == ("failed", "timeout", 2)
    assert "limit of 8 s" in outcome["error"]["message"]
    assert "begun" in (tmp_path / "out" / "slow.ipynb").read_text()


def test_outer_limit_ends_a_runner_that_hangs(tmp_path: Path, no_orphans: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 1.0)
    freeze = STUBBORN + "subprocess.Popen(['sleep', '600'])\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(600)"
    path = make(tmp_path / "g", "frozen", freeze, result_cell(PASSING))
    outcome = run_one(path, {}, tmp_path / "out", timeout=5)
    assert (outcome["status"], outcome["error"]["kind"]) == ("failed", "timeout")


@pytest.mark.parametrize("starts", [1, 99])
def test_only_a_kernel_that_does_not_start_is_tried_again(tmp_path: Path, no_orphans: str, starts: int) -> None:
    path = make(tmp_path / "g", "late", result_cell(PASSING))
    (path.parent / "ipykernel_launcher.py").write_text(
        f"import pathlib, runpy, sys\nmark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "n = int(mark.read_text()) if mark.exists() else 0\nmark.write_text(str(n + 1))\n"
        f"if n < {starts}:\n    sys.exit('address already in use')\n"
        "sys.path.remove(str(pathlib.Path.cwd())) if str(pathlib.Path.cwd()) in sys.path else sys.path.pop(0)\n"
        "del sys.modules['__main__']\nrunpy.run_module('ipykernel_launcher', run_name='__main__')\n"
    )
    outcome = run_one(path, {}, tmp_path / "out", timeout=60)
    assert outcome["attempts"] == 2 == int((tmp_path / "mark").read_text())
    if starts == 1:
        assert outcome["status"] == "passed", outcome["error"]
    else:
        assert (outcome["status"], outcome["error"]["kind"]) == ("failed", "kernel_start")
        assert "address already in use" in outcome["error"]["log"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_signal_keeps_finished_results_and_leaves_no_kernel(
    tmp_path: Path, no_orphans: str, number: signal.Signals
) -> None:
    first = make(tmp_path / "g", "first", result_cell(PASSING))
    second = make(
        tmp_path / "g", "second", STUBBORN + "subprocess.Popen(['sleep', '600'])\ntime.sleep(600)", result_cell(PASSING)
    )
    third = make(tmp_path / "g", "third", result_cell(PASSING))
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "workbench.cli",
        "run",
        *map(str, (first, second, third)),
        "--out",
        str(out),
        "--jobs",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("second: cell 1"):
                break
        run.send_signal(number)
        rest = run.stdout.read()
    folder = out / "notebooks"
    assert json.loads((folder / "first.json").read_text())["status"] == "passed"
    assert json.loads((folder / "first.ipynb").read_text())["cells"] and (folder / "first.html").stat().st_size > 1000
    assert not list(folder.glob("second*")) and not list(folder.glob("third*"))
    if number == signal.SIGKILL:
        assert run.returncode == -number
        return
    assert run.returncode == 128 + number, rest
    summary = json.loads((out / "run.json").read_text())
    assert [o["status"] for o in summary["notebooks"]] == ["passed", "interrupted", "interrupted"]
    assert "interrupted" in (out / "index.html").read_text()
    assert not list(folder.glob(".*"))


def test_kernel_is_this_interpreter_over_ipc_in_the_notebooks_folder(
    tmp_path: Path, no_orphans: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel spec of the user called python3 does not count; 10,000 small prints come through."""
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    facts = "import json, os, sys\nfrom ipykernel.connect import get_connection_info as info\n"
    facts += "facts = [json.loads(info())['transport'], sys.executable, os.getcwd(), os.environ['MPLBACKEND']]\n"
    path = make(
        tmp_path / "g",
        "facts",
        f"{facts}assert facts == {['ipc', sys.executable, str(tmp_path / 'g'), 'agg']!r}, facts",
        "for i in range(10_000):\n    print(i, flush=True)",
        result_cell(PASSING),
    )
    outcome = run_one(path, {}, tmp_path / "out", timeout=100)
    assert outcome["status"] == "passed", outcome["error"]
    assert "9999" in (tmp_path / "out" / "facts.ipynb").read_text()


def test_signal_while_pictures_are_drawn_ends_the_run_at_once(
    tmp_path: Path, no_orphans: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\ntouch {tmp_path / 'called'}\nexec sleep 600\n")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    show = "from IPython.display import display\n"
    show += "display({'application/vnd.plotly.v1+json': {'data': [], 'layout': {}}, 'text/plain': 'f'}, raw=True)"
    path = make(tmp_path / "g", "drawn", show, result_cell(PASSING))
    command = [sys.executable, "-m", "workbench.cli", "run", str(path), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        end = time.monotonic() + 60
        while not (tmp_path / "called").exists() and time.monotonic() < end:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(20) == 143, "the picture is waited for no longer"
    assert json.loads((tmp_path / "out" / "run.json").read_text())["notebooks"][0]["status"] == "passed"


def test_output_never_replaces_its_input(tmp_path: Path) -> None:
    path = make(tmp_path / "out" / "notebooks", "own", result_cell(PASSING))
    before = path.read_bytes()
    with pytest.raises(OutputError, match="choose another --out"):
        run_suite([Notebook(path)], {}, tmp_path / "out", page=False)
    with pytest.raises(OutputError, match="own folder"):
        run_one(path, {}, path.parent)
    assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["a_file", "a_file/below", "folder"])
def test_unwritable_folder_is_refused_before_anything_runs(tmp_path: Path, where: str) -> None:
    (tmp_path / "a_file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notebooks").write_text("in the way")
    path = make(tmp_path / "g", "never", "open('ran', 'w')", result_cell(PASSING))
    with pytest.raises(OutputError, match="cannot write results to"):
        run_suite([Notebook(path)], {}, tmp_path / where, page=False)
    assert not (path.parent / "ran").exists()


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    from workbench.suite.runs import _lock

    (tmp_path / "out" / "notebooks").mkdir(parents=True)
    path = make(tmp_path / "g", "tiny", result_cell(PASSING))
    with _lock(tmp_path / "out"), pytest.raises(OutputError, match=rf"another run \(process {os.getpid()}\)"):
        run_suite([Notebook(path)], {}, tmp_path / "out", page=False)


def test_notebooks_that_may_measure_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A neighbour on the same machine would change what is measured; models still run side by side."""
    from workbench.suite import runs

    monkeypatch.setattr(runs, "gpus", lambda: ("a GPU",))
    nap = "import time\ntime.sleep(1)"
    live = [make(tmp_path / "g", s, nap, result_cell(PASSING), parameters='source = "auto"') for s in ("a", "b")]
    model = [make(tmp_path / "g", s, nap, result_cell(PASSING), parameters='source = "model"') for s in ("c", "d")]
    run_suite([Notebook(p) for p in live + model], {}, tmp_path / "out", jobs=2, page=False)
    order = [
        line.split(" ")[0] if ": starts" in line else line.split(" ")[1]
        for line in capsys.readouterr().out.splitlines()
        if "starts" in line or "passed" in line
    ]
    assert order[:4] == ["a:", "a:", "b:", "b:"]
    assert sorted(order[4:6]) == ["c:", "d:"] == sorted(order[6:])


@pytest.mark.parametrize(
    ("change", "caught", "status"),
    [
        ({}, [], 0),
        ({"status": "skipped"}, [], 0),
        ({"status": "failed"}, [], 1),
        ({"status": "claim_failed"}, [], 1),
        ({"html_error": "no page"}, [], 1),
        ({}, [15], 143),
    ],
)
def test_exit_status(change: dict, caught: list[int], status: int) -> None:
    from workbench.suite.runs import exit_status

    good = {"status": "passed", "html_error": None}
    assert exit_status([good, good | change], caught) == status
