"""What /proc tells of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from pdrun.launcher.common import procfs
from tests.lib.supervisor_driver import wait_until

BURN = "import os\npid = os.fork()\nwhile os.times().user < 0.3: pass\nif pid == 0: os._exit(0)\n"


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)


def used(worker: subprocess.Popen[bytes]) -> float | None:
    return procfs.CpuMeter(worker.pid).read_seconds(0.0)


def test_a_meter_looks_for_new_descendants_now_and_then():
    code = "import subprocess, sys; print('x', flush=True); sys.stdin.read(1)\n" + BURN
    with subprocess.Popen(
        [sys.executable, "-S", "-c", f"{code}print('y', flush=True)\nsys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        try:
            assert worker.stdout.read(1) == b"x"
            meter = procfs.CpuMeter(worker.pid, scan_seconds=5.0)
            assert meter.read_seconds(100.0) < 0.4
            worker.stdin.write(b"-")
            worker.stdin.flush()
            wait_until(lambda: used(worker) >= 0.55, 60)  # its child has worked
            assert meter.read_seconds(104.0) < 0.4 <= meter.read_seconds(105.0)
        finally:
            worker.kill()


def test_cpu_time_counts_children_that_run_and_that_have_ended():
    for then in ("", "os.waitpid(pid, 0)\n"):
        with start(f"{BURN}{then}print('x', flush=True)\nimport time; time.sleep(600)") as worker:
            try:
                assert worker.stdout.read(1) == b"x"
                wait_until(lambda worker=worker: used(worker) >= 0.55, 60)
            finally:
                worker.kill()


def test_the_state_of_a_process():
    with start(
        "import signal, time\nsignal.signal(51, print)\nprint('x', flush=True)\ntime.sleep(600)"
    ) as worker:
        try:
            assert worker.stdout.read(1) == b"x"
            wait_until(lambda: procfs.read_state(worker.pid).letter == "S")
            found = procfs.read_state(worker.pid)
            assert (found.tracer_pid, found.description) == (0, "S (waiting)")
            assert found.caught_signals >> 50 & 1 and not found.caught_signals >> 51 & 1
            os.kill(worker.pid, signal.SIGSTOP)
            wait_until(lambda: procfs.read_state(worker.pid).letter == "T")
        finally:
            worker.kill()
    assert procfs.read_state(worker.pid) is None and used(worker) is None
    assert procfs.read_wait_channel(worker.pid) == procfs.read_kernel_stack(worker.pid) == ""


def test_which_files_a_process_holds(tmp_path):
    held = tmp_path / "held"
    with held.open("wb"):
        assert procfs.has_open_file(os.getpid(), str(held))
    assert not procfs.has_open_file(os.getpid(), str(held))
    assert not procfs.has_open_file(2**22, str(held))
