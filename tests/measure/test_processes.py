"""A function of a measurement in a process start of its own: its answer, or what ended it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from workbench.measure.processes import ProcessEndedError, in_new_process


def _crash(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_answer_is_that_of_another_process():
    assert in_new_process(divmod, 7, 2) == (3, 1)
    assert in_new_process(os.getpid) != os.getpid()


@pytest.mark.parametrize(
    "function, args, said",
    [
        (_crash, (signal.SIGSEGV,), r"_crash crashed: exit status -11"),
        (divmod, (1, 0), "divmod failed: ZeroDivisionError: .*zero"),
    ],
)
def test_what_ends_it_is_named(function, args, said):
    with pytest.raises(ProcessEndedError, match=said):
        in_new_process(function, *args)


def test_one_that_takes_too_long_is_ended():
    with pytest.raises(ProcessEndedError, match=r"sleep took longer than 0\.2 s"):
        in_new_process(time.sleep, 60, timeout_s=0.2)
