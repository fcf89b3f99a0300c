"""The judge trusts execution counts, error outputs and the reported result; papermill's metadata lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from notebook_maker import RESULT_MIME

from workbench.suite.verdict import judge, standing

RESULT = {"source": "model", "recording": None, "badge": "b", "checks": [{"claim": "c", "holds": True, "value": 1}]}


def executed(path: Path, *, result: Any = RESULT, count: int | None = 2, **change: Any) -> Path:
    """Write an executed notebook of two code cells that papermill calls completed."""
    done = {"papermill": {"exception": None, "status": "completed"}, "tags": []}
    first = {"cell_type": "code", "metadata": done, "source": "x = 1", "outputs": [], "execution_count": 1} | change
    outputs = [] if result is None else [{"output_type": "display_data", "data": {RESULT_MIME: result}, "metadata": {}}]
    second = {
        "cell_type": "code",
        "metadata": done,
        "source": ["result.report()"],
        "outputs": outputs,
        "execution_count": count,
    }
    blank = {"cell_type": "code", "metadata": done, "source": " \n", "outputs": [], "execution_count": None}
    path.write_text(json.dumps({"cells": [first, blank, second], "metadata": {"papermill": {"exception": None}}}))
    return path


def test_good_notebook_passes(tmp_path: Path) -> None:
    verdict = judge(executed(tmp_path / "n"), 0, None, limit_s=1)
    assert verdict == {"status": "passed", "error": None, **RESULT}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"execution_count": None}, "not_executed", "cell 1 of 2 was never executed"),
        ({"count": None}, "not_executed", "cell 2 of 2 was never executed"),
        ({"outputs": [{"output_type": "error", "ename": "E", "evalue": "v", "traceback": []}]}, "cell_error", "E: v"),
        ({"result": None}, "no_result", "reported no result"),
        ({"result": {"source": "model", "checks": [{"claim": "c", "holds": "yes"}]}}, "no_result", "malformed"),
        ({"result": {"source": None, "checks": []}}, "no_result", "malformed"),
        ({"result": {"source": "model"}}, "no_result", "malformed"),
    ],
)
def test_silent_failure_is_seen(tmp_path: Path, change: dict, kind: str, words: str) -> None:
    verdict = judge(executed(tmp_path / "n", **change), 0, None, limit_s=1)
    assert (verdict["status"], verdict["error"]["kind"]) == ("failed", kind)
    assert words in verdict["error"]["message"]


@pytest.mark.parametrize(("status", "kind"), [(None, "timeout"), (1, "runner"), (-9, "runner")])
def test_bad_exit_fails_a_notebook_that_looks_finished(tmp_path: Path, status: int | None, kind: str) -> None:
    verdict = judge(executed(tmp_path / "n"), status, None, limit_s=1)
    assert (verdict["status"], verdict["error"]["kind"]) == ("failed", kind)


def test_cut_off_output_fails(tmp_path: Path) -> None:
    path = executed(tmp_path / "n")
    path.write_text(path.read_text()[:-9])
    assert judge(path, 0, None, limit_s=1)["error"]["kind"] == "runner"
    assert judge(tmp_path / "absent", 0, None, limit_s=1)["status"] == "failed"


@pytest.mark.parametrize(
    ("check", "word", "status"),
    [
        ({"holds": True}, "held", "passed"),
        ({"holds": None}, "n/a", "passed"),
        ({"holds": False, "known": "other chip"}, "differs", "passed"),
        ({"holds": False, "known": ""}, "failed", "claim_failed"),
        ({"holds": False}, "failed", "claim_failed"),
    ],
)
def test_failed_claim_decides(tmp_path: Path, check: dict, word: str, status: str) -> None:
    check = {"claim": "c", "value": 1, **check}
    assert standing(check) == word
    verdict = judge(executed(tmp_path / "n", result={**RESULT, "checks": [check]}), 0, None, limit_s=1)
    assert verdict["status"] == status
