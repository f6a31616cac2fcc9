"""A forked worker dies with its keeper, by the kernel, as an executed one does."""

from __future__ import annotations

import signal
from pathlib import Path

from pdrun.launcher.supervisor.events import ForkServerStatus
from tests.launcher.stdlib_only.conftest import Bench, starter_of
from tests.lib.supervisor_driver import supervisor_driver

READ_DEATH_SIGNAL = """
import ctypes
number = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
print(number.value)
"""


def test_the_kernel_kills_a_forked_worker_with_its_keeper(script: Path) -> None:
    script.write_text(READ_DEATH_SIGNAL)
    with supervisor_driver() as driver:
        bench = Bench(driver)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("json",)))
        assert driver.wait(ForkServerStatus, None, 30).why == ""
        assert bench.run(str(script)).out == f"{int(signal.SIGKILL)}\n"
