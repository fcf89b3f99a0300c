"""The pytest plugin in a user's suite: skips without a GPU; with a trace of a wait it fails and names the line."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from workbench import pytest_plugin
from workbench.traces import read

sys.path.insert(0, str(Path(__file__).parent / "traces"))
from kineto_files import event, kernel, launch, write
from test_analysis import stacked

SUITE = """
import pytest

def test_fixture(sync_free):
    with sync_free():
        {body}

@pytest.mark.sync_free
def test_marker():
    {body}

def test_plain():
    pass
"""
FAKE = """
import contextlib, shutil
import torch
import workbench.measure.capture as capture

torch.cuda.is_available = lambda: True

class Profile(contextlib.AbstractContextManager):
    def __init__(self, path, *, stacks=False):
        self.path = path
    def __exit__(self, *error):
        shutil.copyfile({trace!r}, self.path)

capture.Profile = Profile
"""


def suite(
    folder: Path, body: str = "pass", trace: Path | None = None, *options: str, more: str = ""
) -> subprocess.CompletedProcess:
    (folder / "test_user.py").write_text(SUITE.format(body=body))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    if trace is not None:
        (folder / "conftest.py").write_text(FAKE.format(trace=str(trace)) + more)
    installed = any(e.value == "workbench.pytest_plugin" for e in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "workbench.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *plugin, *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(has_gpu(), reason="shows the skip of a machine without a GPU")
def test_without_a_gpu_they_skip_with_a_reason_and_others_run(tmp_path):
    done = suite(tmp_path)
    assert done.returncode == 0 and "1 passed, 2 skipped" in done.stdout, done.stdout
    assert "sync_free needs a CUDA GPU" in done.stdout


def test_a_wait_fails_both_with_the_source_line_and_keeps_the_trace(tmp_path):
    trace = write(tmp_path, stacked(), "recorded.json")
    done = suite(tmp_path, "pass", trace, "--sync-free-trace", str(tmp_path / "kept"))
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout, done.stdout
    assert done.stdout.count("model.py:57 (route)") >= 2
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_body_without_waits_passes_and_an_error_in_it_is_the_users_own(tmp_path):
    trace = write(tmp_path, [launch(0, 5000, 1), kernel(8000, 9000, 1)], "recorded.json")
    assert "3 passed" in suite(tmp_path, "pass", trace).stdout
    done = suite(tmp_path, "raise KeyError('mine')", trace)
    assert done.stdout.count("KeyError: 'mine'") >= 2 and "sync_free:" not in done.stdout


def test_judging_idle_only_where_a_threshold_is_given(tmp_path):
    late = read(
        write(
            tmp_path,
            [launch(0, 5000, 1), kernel(8000, 9000, 1), launch(100_000, 105_000, 2), kernel(108_000, 109_000, 2)],
        )
    )
    assert pytest_plugin.judge(late, None) == ""
    assert "submission-bound" in pytest_plugin.judge(late, 50.0)
    assert pytest_plugin.judge(read(write(tmp_path, [event("cpu_op", "aten::mm", 0, 5)])), None) == ""


@pytest.mark.parametrize(("works", "outcome"), [(True, "3 passed"), (False, "2 failed, 1 passed")])
def test_a_body_without_device_work_passes_only_where_the_profiler_would_see_some(tmp_path, works, outcome):
    trace = write(tmp_path, [event("cpu_op", "aten::mm", 0, 5000)], "recorded.json")
    probe = f"capture.records_device_work = lambda: {works}\n"
    done = suite(tmp_path, "pass", trace, more=probe)
    assert outcome in done.stdout, done.stdout
    assert ("not even a kernel of its own" in done.stdout) is not works


def test_a_threshold_given_by_position_counts(tmp_path):
    late = [launch(0, 5000, 1), kernel(8000, 9000, 1), launch(100_000, 105_000, 2), kernel(108_000, 109_000, 2)]
    trace = write(tmp_path, late, "recorded.json")
    (tmp_path / "test_more.py").write_text(
        "import pytest\n\n\n@pytest.mark.sync_free(50.0)\ndef test_more():\n    pass\n"
    )
    done = suite(tmp_path, "pass", trace)
    assert "1 failed, 3 passed" in done.stdout and "submission-bound" in done.stdout, done.stdout
