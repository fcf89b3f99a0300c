"""Ranks through torchrun on the CPU: parity, refusals, a rank or the launcher that dies, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("torch")
from workbench.cli.launch import parse_tokens
from workbench.experiments import load
from workbench.measure.launch import PROGRAM_OF, check, describe, program_of
from workbench.measure.ranks import Job

MARK = "WORKBENCH_LAUNCH_TEST"


class Launched:
    """A `workbench launch` process whose ranks can be found."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out, self.mark = out, uuid.uuid4().hex
        command = [sys.executable, "-m", "workbench.cli", "launch", *arguments, "--backend", "gloo", "--out", str(out)]
        self.process = subprocess.Popen(
            command, env={**os.environ, MARK: self.mark}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def output(self, within_s: float = 120.0) -> str:
        """Wait for the end and return what was printed."""
        return self.process.communicate(timeout=within_s)[0]

    def running(self) -> list[int]:
        """Return all processes of this launch, whoever their parent is now."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """Wait until every rank works, and return their processes by rank."""
        end = time.monotonic() + 60
        while not all((self.out / f"rank{r}.json").is_file() for r in (0, 1)):
            assert self.process.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.1)
        found = [p for p in psutil.Process(self.process.pid).children() if "workbench.measure.ranks" in p.cmdline()]
        return sorted(found, key=lambda p: int(p.environ()["RANK"]))

    def nothing_left(self, within_s: float) -> None:
        """Fail when a process is left."""
        end = time.monotonic() + within_s
        while (left := self.running()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left


@pytest.fixture
def launched(tmp_path: Path) -> Iterator:
    """Start launches; whatever is left of them is ended."""
    started: list[Launched] = []

    def start(*arguments: str) -> Launched:
        started.append(Launched(tmp_path / "out", *arguments))
        return started[-1]

    yield start
    for one in started:
        for pid in one.running():
            os.kill(pid, signal.SIGKILL)


def test_four_ranks_agree_with_one(launched) -> None:
    run = launched("op_routed_block", "--nproc", "4", "--steps", "2")
    text = run.output()
    assert run.process.returncode == 0, text
    assert "4 ranks on cpu, transport shared_memory" in text and "parity with one rank holds" in text
    rows = json.loads((run.out / "rows.json").read_text())
    parity = [r for r in rows if r["section"] == "parity"]
    assert {(r["rank"], r["path"]) for r in parity} == {(k, p) for k in range(4) for p in ("synchronized", "rowwise")}
    assert all(0 <= r["error"] <= r["budget"] <= 1e-3 for r in parity)
    routes = [r for r in rows if r["section"] == "routes" and r["path"] == "rowwise"]
    assert sum(r["received"] for r in routes) == sum(r["accepted"] for r in routes) > 0
    assert {r["rank"] for r in rows if r["section"] == "step"} == {0, 1, 2, 3}
    assert sorted(p.name for p in (run.out / "traces").iterdir()) == [f"rank{r:05d}.json.gz" for r in range(4)]
    skew = re.findall(r"Table 51, ProfilerStep#\d: 4 ranks start within [\d.]+ us", text)
    assert len(skew) == 2 and "Table 51, rank skew of routes" in text
    run.nothing_left(5)


def test_training_steps_on_two_ranks(launched) -> None:
    run = launched("fig74_submission_regimes", "--nproc", "2", "--steps", "2")
    text = run.output()
    assert run.process.returncode == 0, text
    steps = [r for r in json.loads((run.out / "rows.json").read_text()) if r["section"] == "step"]
    assert {(r["rank"], r["path"]) for r in steps} == {(k, p) for k in range(2) for p in ("synchronized", "rowwise")}
    assert all(len(r["samples_us"]) == 2 and min(r["samples_us"]) > 0 for r in steps)


def test_unequal_t_is_refused_on_all_ranks(launched) -> None:
    run = launched("op_routed_block", "--nproc", "2", "--tokens", "32,24")
    text = run.output()
    assert run.process.returncode == 1
    assert "tokens per rank (T) must be equal on all 2 ranks, got rank 0: 32, rank 1: 24" in text
    run.nothing_left(5)


def test_a_rank_that_dies_ends_the_others(launched) -> None:
    run = launched("op_routed_block", "--nproc", "2", "--steps", "1000000", "--timeout", "20")
    victim = run.ranks()[1]
    victim.kill()
    text = run.output(within_s=20)
    assert run.process.returncode == 1
    assert "workbench launch: rank 1 was killed by SIGKILL; the other ranks were ended" in text
    run.nothing_left(5)


def test_a_rank_that_hangs_is_noticed_within_the_time_out(launched) -> None:
    run = launched("op_routed_block", "--nproc", "2", "--steps", "1000000", "--timeout", "3")
    hung, other = run.ranks()
    hung.suspend()
    other.wait(30)
    # The pending SIGTERM ends it; a process that stays stopped is killed half a minute later.
    hung.resume()
    text = run.output(within_s=20)
    assert run.process.returncode == 1 and "rank 1 failed" in text and "imed out" in text, text
    run.nothing_left(5)


def test_ranks_end_with_a_launcher_that_is_killed(launched) -> None:
    run = launched("op_routed_block", "--nproc", "2", "--steps", "1000000")
    assert len(run.ranks()) == 2
    run.process.kill()
    run.process.wait()
    run.nothing_left(5)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="one positive number, or 4"):
        check(Job(out="x", tokens=(8, 8)), 4)
    with pytest.raises(ValueError, match="nccl needs one GPU per rank: 99 asked for"):
        check(Job(out="x", backend="nccl"), 99)
    with pytest.raises(ValueError, match="expected nccl or gloo, got 'mpi'"):
        check(Job(out="x", backend="mpi"), 2)
    with pytest.raises(ValueError, match="expected whole numbers"):
        parse_tokens("8,x")
    assert parse_tokens("8,16") == (8, 16) and all(program_of(s) for s in PROGRAM_OF if load(s))
    with pytest.raises(ValueError, match="'fig29_running_dry' does not run on several ranks"):
        program_of("fig29_running_dry")


def test_the_rank_that_was_killed_is_named_before_those_that_miss_it() -> None:
    failure = lambda status, message: SimpleNamespace(exitcode=status, message=message)  # noqa: E731
    missed = failure(1, {"message": "RuntimeError: Connection closed by peer [127.0.0.1]:1"})
    text = describe({0: missed, 1: failure(-9, "Signal 9"), 2: missed}, Path("o"))
    assert text.startswith("rank 1 was killed by SIGKILL; the other ranks were ended (output")
    text = describe({0: missed, 1: failure(1, {"message": "ValueError: bad"}), 2: failure(-15, "SIGTERM")}, Path("o"))
    assert text.startswith("rank 1 failed: ValueError: bad; the other ranks were ended (output")
    assert describe({0: failure(124, "")}, Path("o")).startswith("rank 0 reached the limit")
    aborted = failure(-7, {"message": "ValueError: T differs"})
    assert describe({0: aborted, 1: aborted}, Path("o")).startswith("rank 0 failed: ValueError: T differs; the other")
