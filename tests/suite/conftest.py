"""Fixtures of the suite's tests."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_maker import marked_processes


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fails the test when a process that it started is left 10 seconds after its end, or a socket folder."""
    mark = f"orphan-check-{uuid.uuid4().hex}"
    sockets = Path(tempfile.mkdtemp(prefix="wbt-", dir="/tmp"))
    monkeypatch.setenv("WORKBENCH_ORPHAN_CHECK", mark)
    monkeypatch.setenv("TMPDIR", str(sockets))
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    yield mark
    end = time.monotonic() + 10
    while (left := marked_processes(mark) + list(sockets.glob("wb-*"))) and time.monotonic() < end:
        time.sleep(0.1)
    shutil.rmtree(sockets, ignore_errors=True)
    assert not left, f"left behind: {left}"
