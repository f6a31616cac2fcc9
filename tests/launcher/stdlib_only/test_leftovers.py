"""The cleanup of a slot waits for an exiting process, whose children are still to come."""

import os
import time
from types import SimpleNamespace

from pdrun.launcher.stdlib_only.leftovers import Cleanup, step_cleanup
from pdrun.launcher.stdlib_only.process_tree import find_process


def test_an_exiting_child_without_a_known_slot_delays_the_answer():
    events = []
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie, not reaped
    other = SimpleNamespace(slot=1)
    supervisor = SimpleNamespace(
        own_process=find_process(os.getpid()),
        watchdog_pid=0,
        token="token",
        children={},
        slot_by_pid={},
        processes=lambda: [other],
        send_event=lambda **event: events.append(event),
    )
    cleanup = Cleanup(0, time.monotonic())
    try:
        assert not step_cleanup(supervisor, cleanup) and events == []
    finally:
        os.waitpid(pid, 0)
    assert step_cleanup(supervisor, cleanup)
    assert [(event["ev"], event["processes"]) for event in events] == [("swept", [])]
