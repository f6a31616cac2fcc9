"""What watches over waits is gone before the interpreter is."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from pdrun.parallel import watch

class Slow:
    "A store of torch's that takes its time: a call of C++ without the interpreter's lock."
    store = dist.HashStore()

    def check(self, keys):
        print("asked", flush=True)
        try:
            self.store.wait(["never"], timedelta(seconds=0.3))
        except RuntimeError:
            pass
        return False

class Late:
    "Its end comes when Python is being taken down, and leaves a thread time to come back meanwhile."

    def __del__(self):
        time.sleep(1.0)

watch.POLL = 0.01
late = Late()
first = watch.start(100.0, 0, 2, Slow(), True)
{more}
time.sleep(0.2)
"""


@pytest.mark.parametrize("more", ["", "watch.start(100.0, 0, 2, Slow(), True)", "time.sleep(0.1); first.close()"])
def test_no_thread_is_in_a_call_when_python_is_taken_down(more: str) -> None:
    """It would end the process with SIGABRT: "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{more}", more)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and "asked" in done.stdout


def test_a_store_that_does_not_answer_is_not_waited_for_long() -> None:
    program = PROGRAM.replace("{more}", "watch.LEAVE = 0.2; Late.__del__ = lambda self: None")
    program = program.replace("seconds=0.3", "seconds=50")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
