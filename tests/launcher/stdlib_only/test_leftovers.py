"""The cleanup of a slot waits for an exiting process, whose children are still to come."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, time
from types import SimpleNamespace
from pdrun.launcher.stdlib_only.leftovers import Cleanup, step_cleanup
from pdrun.launcher.stdlib_only.process_tree import find_process
events = []
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie, not reaped
supervisor = SimpleNamespace(
    own_process=find_process(os.getpid()), watchdog_pid=0, token="token", children={},
    slot_by_pid={}, processes=lambda: [SimpleNamespace(slot=1)],
    send_event=lambda **event: events.append(event),
)
cleanup = Cleanup(0, time.monotonic())
assert not step_cleanup(supervisor, cleanup) and events == []
os.waitpid(pid, 0)
assert step_cleanup(supervisor, cleanup)
assert [(event["ev"], event["processes"]) for event in events] == [("swept", [])], events
"""


def test_an_exiting_child_without_a_known_slot_delays_the_answer() -> None:
    """In its own process: a cleanup looks at all children, and those of pytest are not its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
