"""On a GPU: verifier, pytest plugin and cell magic tell a loop that reads on the host from one that does not."""

from __future__ import annotations

import pytest

from workbench.core.experiment import gpu_present

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_present(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module")
def step():
    from workbench.measure.block_loop import build

    step = build(blocks=4, width=1024, tokens=16384)
    step(False)
    step(True)
    return step


def test_verify_passes_long_blocks_and_names_the_line_of_a_read(step):
    import workbench

    free = workbench.verify(lambda: step(False), steps=3, warmup=3, idle_threshold_us=50)
    assert free.sync_free is True, str(free)
    item = workbench.verify(lambda: step(True), steps=3, warmup=3)
    assert item.sync_free is False
    assert sum(o["count"] for o in item.offences) >= 12
    assert any("block_loop.py" in (o["line"] or "") for o in item.offences), str(item)


def test_fixture_passes_without_a_read(sync_free, step):
    with sync_free():
        step(False)


def test_fixture_fails_with_the_line_of_the_read(sync_free, step):
    with pytest.raises(pytest.fail.Exception, match=r"block_loop\.py:\d+"), sync_free():
        step(True)


@pytest.mark.sync_free
def test_marker_passes_without_a_read(step):
    step(False)


def test_magic_shows_verdict_and_figure(step):
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    from workbench import magic

    interactive.user_ns["step"] = step
    shown: list = []
    import IPython.display

    original = IPython.display.display
    IPython.display.display = lambda *a, **k: shown.append(a[0])
    try:
        magic.headroom("-n 2 -w 1 --stacks", "for _ in range(2):\n    step(True)\n", interactive)
    finally:
        IPython.display.display = original
    assert "NOT synchronization-free" in shown[0]["text/plain"]
    assert len(shown) >= 2
