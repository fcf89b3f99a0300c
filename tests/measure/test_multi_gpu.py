"""The several-GPU script refuses numbers of CPU ranks that no machine should start."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "multi_gpu.py"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], list[int]]:
    """Run the script's `main` with so many CPU ranks; return the numbers of ranks that it would have started."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("multi_gpu_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    started: list[int] = []

    def run(options: object, ranks: int) -> list[dict]:
        started.append(ranks)
        return [{"rank": 0}]

    def with_ranks(ranks: int) -> list[int]:
        monkeypatch.setattr("workbench.measure.multi_gpu.run", run)
        command = ["multi_gpu.py", "--out", str(tmp_path), "--backend", "gloo", "--ranks", str(ranks)]
        monkeypatch.setattr(sys, "argv", command)
        assert script.main() == 0
        return started

    return with_ranks


@pytest.mark.parametrize("ranks", [-1, 0, 65, 100_000])
def test_too_few_or_too_many_cpu_ranks_are_named_and_none_starts(start, capsys, tmp_path, ranks):
    with pytest.raises(SystemExit) as stopped:
        start(ranks)
    assert stopped.value.code == 2 and list(tmp_path.iterdir()) == []
    assert f"--ranks: expected 1 to 64 with --backend gloo, got {ranks}" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 64])
def test_the_bounds_themselves_run(start, tmp_path, ranks):
    assert start(ranks) == [ranks]
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"rank": 0}]
