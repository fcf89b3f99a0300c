"""Pytest plugin: the `sync_free` fixture and marker fail a test, with the source line, when the host waits for the GPU.

    def test_step(sync_free, model, batch):
        model(batch)                       # warm up outside
        with sync_free():
            model(batch)                   # an .item() in here fails the test

    @pytest.mark.sync_free                 # the whole test body
    def test_step_marked(): ...

Without a CUDA GPU such tests are skipped with a reason. `--sync-free-trace DIR` keeps the traces of failing tests.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sync-free-trace`."""
    parser.addoption(
        "--sync-free-trace", default=None, metavar="DIR", help="keep the traces of failed sync_free tests in DIR"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "sync_free(idle_threshold_us=None): fails when the test body makes the host wait for the GPU"
    )


@pytest.fixture
def sync_free(request: pytest.FixtureRequest) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """A context manager factory: `with sync_free(idle_threshold_us=None): ...` profiles its body and judges it.

    Waits always fail the test; submission-bound idle only where a threshold is given, since one pass over a body
    starts with an empty queue.
    """
    _skip_without_gpu()

    def check(idle_threshold_us: float | None = None) -> contextlib.AbstractContextManager[None]:
        return _watch(request.node.nodeid, request.config.getoption("--sync-free-trace"), idle_threshold_us)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Watch the whole body of a test that carries the marker."""
    marker = pyfuncitem.get_closest_marker("sync_free")
    if marker is None:
        return (yield)
    _skip_without_gpu()
    keep = pyfuncitem.config.getoption("--sync-free-trace")
    with _watch(pyfuncitem.nodeid, keep, *marker.args, **marker.kwargs):
        return (yield)


def _skip_without_gpu() -> None:
    needs_torch = "sync_free needs torch and a CUDA GPU; torch is not installed"
    torch = pytest.importorskip("torch", reason=needs_torch, exc_type=ImportError)
    if not torch.cuda.is_available():
        pytest.skip("sync_free needs a CUDA GPU: torch.cuda.is_available() is False")


@contextlib.contextmanager
def _watch(test: str, keep: str | None, idle_threshold_us: float | None = None) -> Iterator[None]:
    from workbench.measure.capture import Profile, records_device_work
    from workbench.traces.kineto import read_kineto

    with tempfile.TemporaryDirectory(prefix="sync-free-") as folder:
        path = Path(folder) / "trace.json"
        with Profile(path, stacks=True):
            yield
        trace = read_kineto(path)
        message = judge(trace, idle_threshold_us)
        if not message and not len(trace.ops) and not records_device_work():
            message = (
                "sync_free: cannot tell: the profiler records no device work on this machine, not even a kernel of its "
                "own (is another profiler running, or does CUPTI lack permission?)"
            )
        if message and keep:
            target = Path(keep)
            target.mkdir(parents=True, exist_ok=True)
            kept = target / (re.sub(r"[^A-Za-z0-9._-]+", "_", test)[-120:] + ".json")
            shutil.copyfile(path, kept)
            message += f"\ntrace kept as {kept}"
    if message:
        pytest.fail(message, pytrace=False)


def judge(trace: Any, idle_threshold_us: float | None = None) -> str:
    """The failure message for a trace of a test body, empty where it passes."""
    from workbench.traces.verify import IDLE_THRESHOLD_US, verify_trace

    if not len(trace.ops) and not trace.dropped:
        return ""  # a body without device work cannot wait for the device
    limit = IDLE_THRESHOLD_US if idle_threshold_us is None else idle_threshold_us
    verdict = verify_trace(trace, idle_threshold_us=limit, judge_idle=idle_threshold_us is not None)
    return "" if verdict.sync_free else f"sync_free: {verdict}"
