"""A function of a measurement in a process start of its own: its answer, or what ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from workbench.measure.processes import ProcessCrashedError, ProcessEndedError, in_new_process


def _crash(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_answer_is_that_of_another_process():
    assert in_new_process(divmod, 7, 2) == (3, 1)
    assert in_new_process(os.getpid) != os.getpid()


@pytest.mark.parametrize(
    "function, args, said",
    [
        (_crash, (signal.SIGSEGV,), "_crash crashed: ended by SIGSEGV"),
        (divmod, (1, 0), "divmod failed: ZeroDivisionError: .*zero"),
    ],
)
def test_what_ends_it_is_named(function, args, said):
    with pytest.raises(ProcessEndedError, match=said) as raised:
        in_new_process(function, *args)
    assert isinstance(raised.value, ProcessCrashedError) == (function is _crash)


def test_one_that_takes_too_long_is_ended():
    with pytest.raises(ProcessEndedError, match=r"sleep took longer than 0\.2 s"):
        in_new_process(time.sleep, 60, timeout_s=0.2)


def test_a_script_without_a_guard_is_not_run_again(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("from workbench.measure.processes import in_new_process\nprint(in_new_process(divmod, 7, 2))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "(3, 1)\n", done.stderr
