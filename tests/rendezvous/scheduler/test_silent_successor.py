"""A successor of the scheduler that starts and never says that it listens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.rendezvous.scheduler.child import SchedulerChild
from pdrun.rendezvous.transport.zmq_util import wait_readable
from tests.rendezvous.conftest import Scheduler
from tests.rendezvous.helpers import until


def tend(child: SchedulerChild) -> str:
    """One look at the child, as an agent's loop does."""
    due = child.deadline()
    told = child.fileno() >= 0 and wait_readable(child.fileno(), wait=0)
    if told or (due is not None and time.monotonic() >= due):
        return child.restart_if_dead()
    return ""


def next_line(child: SchedulerChild, seconds: float) -> str:
    """Tend the child until it has something to say; empty: it has not."""
    line, deadline = "", time.monotonic() + seconds
    while not line and time.monotonic() < deadline:
        line = tend(child)
    return line


SILENT_SUCCESSOR = """
read order
test -e {0} && exec sleep 60
touch {0}
echo '{{"endpoint": "127.0.0.1:1"}}'
read more
"""


def test_a_successor_that_never_answers_is_killed(
    scheduler: Callable[..., Scheduler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SILENT_SUCCESSOR.format(tmp_path / "marker")
    monkeypatch.setattr(SchedulerChild, "COMMAND", ("/bin/sh", "-c", script))
    (tmp_path / "j").write_text("as if a journal")
    child = scheduler(journal=tmp_path / "j")
    first = child.pid
    child._timeout = 0.1
    os.kill(first, signal.SIGKILL)
    assert "has died (killed by SIGKILL): restarting it" in next_line(child, 10.0)
    until(lambda: (tend(child), child.pid)[1] != first, "a successor")
    silent = child.pid
    assert "has died (killed by SIGKILL): restarting it" in next_line(child, 5.0), (
        "it is waited for"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(silent, 0)
