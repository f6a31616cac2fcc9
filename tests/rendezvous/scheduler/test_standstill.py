"""A scheduler process that stands still is ended by its agent, and resumed from its journal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.rendezvous.scheduler import ping_counter
from pdrun.rendezvous.scheduler.ping_counter import (
    HURRIED_PINGS,
    MAX_UNANSWERED_PINGS,
    NODES_PER_PING,
    PingCounter,
)
from tests.rendezvous.conftest import Scheduler
from tests.rendezvous.helpers import until
from tests.rendezvous.scheduler.test_recovery import revived, tend

Start_ = Callable[..., Scheduler]


def test_pings_are_counted_until_one_is_answered() -> None:
    pings = PingCounter(8)
    for count in range(MAX_UNANSWERED_PINGS):
        assert not pings.is_frozen() and pings.is_frozen(is_hurried=True) == (
            count >= HURRIED_PINGS
        )
        pings.on_ping(100.0 + count)
    assert pings.is_frozen() and pings.silence == MAX_UNANSWERED_PINGS * ping_counter.PING_SECONDS
    assert pings.next_ping == 100.0 + MAX_UNANSWERED_PINGS - 1 + ping_counter.PING_SECONDS
    pings.on_answer()
    assert not pings.is_frozen() and not pings.is_frozen(is_hurried=True)
    pings.on_ping(200.0)
    pings.reset()
    assert pings.silence == 0.0 and pings.next_ping == 0.0


def test_a_large_job_is_given_more_time() -> None:
    pings = PingCounter(2 * NODES_PER_PING)
    for count in range(MAX_UNANSWERED_PINGS + 2):
        assert not pings.is_frozen()
        pings.on_ping(float(count))
    assert pings.is_frozen()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping_counter, "PING_SECONDS", 0.3)


def test_one_that_runs_answers(scheduler: Start_, tmp_path: Path, quick: None) -> None:
    child = scheduler(journal=tmp_path / "j")
    pid = child.pid
    end = time.monotonic() + 0.3 * (MAX_UNANSWERED_PINGS + 3)
    while time.monotonic() < end:
        assert tend(child) == "" and not child.is_restarting()
        time.sleep(0.02)
    assert child.pid == pid


@pytest.mark.parametrize("hurried", [False, True])
def test_one_that_stands_still_is_ended_and_resumed(
    scheduler: Start_, tmp_path: Path, quick: None, hurried: bool
) -> None:
    child = scheduler(journal=tmp_path / "j")
    pid = child.pid
    tend(child)
    os.kill(pid, signal.SIGSTOP)
    lines = list[str]()

    def turn() -> bool:
        if hurried:  # as an agent does whose user's stop is not answered
            child.kill_if_silent()
        lines.append(tend(child))
        return "restarting it" in lines[-1]

    began = time.monotonic()
    until(turn, "the end of the process")
    limit = HURRIED_PINGS if hurried else MAX_UNANSWERED_PINGS
    assert time.monotonic() - began > 0.3 * (limit - 2)
    assert "did not answer for" in lines[-1] and "was killed" in lines[-1]
    assert child.is_restarting()
    assert "is back" in revived(child)
    assert child.pid != pid and not child.is_restarting()


def test_one_without_a_successor_is_waited_for(scheduler: Start_, quick: None) -> None:
    """To end it would be the end of the job."""
    child = scheduler()
    os.kill(child.pid, signal.SIGSTOP)
    end = time.monotonic() + 0.3 * (MAX_UNANSWERED_PINGS + 2)
    while time.monotonic() < end:
        child.kill_if_silent()
        assert tend(child) == ""
        time.sleep(0.02)
    assert child.returncode is None
    os.kill(child.pid, signal.SIGCONT)
