"""Profiling a callable: one whose body does not run is refused; on a GPU the profiler sees a kernel."""

from __future__ import annotations

import pytest

from workbench.measure import capture


async def coroutine() -> None:
    raise AssertionError("runs only when awaited")


def generator():
    raise AssertionError("runs only when asked")
    yield


async def stream():
    raise AssertionError("runs only when asked")
    yield


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("fn", "kind"), [(coroutine, "coroutine"), (generator, "generator"), (stream, "async generator")]
)
def test_a_step_whose_body_does_not_run_is_refused(fn, kind):
    with pytest.raises(TypeError, match=f"returns a {kind}: its body did not run"):
        capture.ran(fn)


def test_a_step_may_return_anything_else_and_its_error_is_its_own():
    capture.ran(lambda: [1])
    with pytest.raises(KeyError, match="mine"):
        capture.ran(lambda: {}["mine"])


@pytest.mark.gpu
def test_the_profiler_records_device_work():
    assert capture.records_device_work()
