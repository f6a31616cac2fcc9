"""The scheduler process as its agent sees it, and its successors; a shell stands in for both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.errors import RendezvousError
from pdrun.rendezvous.scheduler import child as children
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


LISTENING = """
read order
echo '{0}'
echo '{{"endpoint": "127.0.0.1:1"}}'
read more
"""


def start_shell(
    scheduler: Callable[..., Scheduler],
    monkeypatch: pytest.MonkeyPatch,
    journal: Path | None = None,
    first_line: str = "",
) -> SchedulerChild:
    """Start a shell that says that it listens; it ends with its stdin."""
    script = LISTENING.format(first_line)
    monkeypatch.setattr(SchedulerChild, "COMMAND", ("/bin/sh", "-c", script))
    monkeypatch.setattr(children, "BACKOFF_SECONDS", (0.0,))
    return scheduler(**({"journal": journal} if journal is not None else {}))


def test_it_is_started_again_three_times(
    scheduler: Callable[..., Scheduler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "j").write_text("as if a journal")
    child = start_shell(scheduler, monkeypatch, tmp_path / "j")
    for _ in range(children.MAX_RESTARTS):
        os.kill(child.pid, signal.SIGKILL)
        assert "restarting it" in next_line(child, 10.0)
        assert "is back" in next_line(child, 10.0)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RendezvousError, match="after 3 restarts in 60 s"):
        next_line(child, 10.0)


@pytest.mark.parametrize("content", [None, ""], ids=["no journal", "an empty one"])
def test_without_a_journal_it_has_no_successor(
    content: str | None,
    scheduler: Callable[..., Scheduler],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if content is not None:
        (tmp_path / "j").write_text(content)
    journal = None if content is None else tmp_path / "j"
    child = start_shell(scheduler, monkeypatch, journal)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RendezvousError, match="has died"):
        next_line(child, 10.0)


def test_from_a_journal_that_it_has_given_up_nobody_goes_on(
    scheduler: Callable[..., Scheduler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "j").write_text("as if a journal")
    child = start_shell(scheduler, monkeypatch, tmp_path / "j", '{"journal": "lost"}')
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RendezvousError, match="has died"):
        next_line(child, 10.0)


@pytest.mark.parametrize("line", ["[]", "1", "null", '{"level": "info"}', "no JSON", "[" * 99])
def test_what_a_sitecustomize_prints_is_no_answer(
    line: str, scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start_shell(scheduler, monkeypatch, first_line=line)
    assert str(child.endpoint) == "127.0.0.1:1"
