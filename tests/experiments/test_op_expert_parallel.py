"""The several-GPU sheet, over rows that two CPU ranks really produced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.experiment import Result, load

polars = pytest.importorskip("polars")
pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = load("op_expert_parallel")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(ROOT / "scripts" / "multi_gpu.py"), "--out", str(out), "--ranks", "2"]
    command += ["--backend", "gloo", "--small", "--repeats", "2", "--restarts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "rows.json").read_text())


def result(rows: list[dict]) -> Result:
    plain = [{k: v for k, v in row.items() if k != "samples_us"} for row in rows]
    table = polars.DataFrame(plain, infer_schema_length=None)
    return Result(experiment=EXPERIMENT, params=EXPERIMENT.params(), source="live", table=table)


def test_two_cpu_ranks_equal_one_and_run_every_section(rows):
    assert {row["section"] for row in rows} >= {"start", "parity", "bandwidth", "layer", "step", "metrics", "pool"}
    assert {row["rank"] for row in rows} == {0, 1}
    parity, *_ = result(rows).checks
    assert parity.holds is True
    assert len([row for row in rows if row["section"] == "parity"]) == 2 * 2 * 7


def with_waits(rows: list[dict], rowwise: int = 0, synchronized_step: int = 7) -> list[dict]:
    out = []
    for row in rows:
        row = dict(row)
        if row["section"] in ("layer", "step"):
            by_path = {"rowwise": rowwise, "synchronized": synchronized_step if row["section"] == "step" else 1}
            row |= {"waits": by_path[row["path"]], "pageable_d2h": 0}
        out.append(row)
    return out


def test_waits_decide_their_claims(rows):
    assert [c.holds for c in result(rows).checks][1:3] == [None, None], "CPU ranks count no waits"
    assert [c.holds for c in result(with_waits(rows)).checks][1:3] == [True, True]
    assert [c.holds for c in result(with_waits(rows, rowwise=1)).checks][1:3] == [False, True]
    assert [c.holds for c in result(with_waits(rows, synchronized_step=6)).checks][1:3] == [True, False]


def test_one_wrong_tensor_fails_parity(rows):
    wrong = [dict(row) for row in rows]
    next(row for row in wrong if row["section"] == "parity")["holds"] = False
    assert result(wrong).checks[0].holds is False


def test_the_figure_shows_the_slowest_rank(rows):
    figure = EXPERIMENT.figure(result(rows))
    assert len(figure.data) == 6
    shown = next(t for t in figure.data if t.name == "rowwise" and t.xaxis == "x2")
    measured = [r["time_us_p50"] for r in rows if (r["section"], r.get("path")) == ("step", "rowwise")]
    assert shown.y[0] == pytest.approx(max(measured) / 1e3)
