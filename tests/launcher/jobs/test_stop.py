"""`pdrun stop` of registered jobs: real processes."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.jobs import registry
from pdrun.launcher.jobs.status import (
    list_statuses,
)
from pdrun.launcher.jobs.stop import _signal_process, stop_job
from tests.launcher.jobs.helpers import TERM_ONCE, TERM_TWICE, register


def test_stop_ends_the_job_and_says_how(
    home: Path, process, capsys: pytest.CaptureFixture[str]
) -> None:
    child = process(TERM_ONCE)
    register(home, child.pid)
    assert stop_job("demo", timeout=20) == 0
    assert child.wait(10) == 143
    assert (
        "pdrun: job demo (run demo-1) has stopped: it ended without a verdict"
        in capsys.readouterr().err
    )
    assert stop_job("demo") == 0
    assert "is not running" in capsys.readouterr().err


def test_a_forced_stop_signals_twice(home: Path, process) -> None:
    child = process(TERM_TWICE)
    register(home, child.pid)
    assert stop_job("demo", timeout=0.5) == 69
    assert stop_job(None, force=True, timeout=20) == 0
    assert child.wait(10) == 143


def test_stop_never_signals_a_process_that_took_over_the_number(home: Path, process) -> None:
    child = process(TERM_ONCE)
    job = register(home, child.pid)
    registry.register_job(replace(job, ticks=job.ticks - 5))
    assert stop_job("demo") == 0
    _signal_process(replace(job, ticks=job.ticks - 5), 9)
    assert child.poll() is None


def test_where_the_kernel_has_no_handles_of_processes_the_start_time_must_do(
    home: Path, process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int):
        def pidfd_open(pid: int, flags: int = 0) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pidfd_open", pidfd_open)

    child = process(TERM_ONCE)
    job = register(home, child.pid)
    refuse(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        stop_job("demo", timeout=20)
    refuse(errno.ENOSYS)
    _signal_process(replace(job, ticks=job.ticks - 5), 9)
    assert child.poll() is None, "the number belongs to another process now"
    assert stop_job("demo", timeout=20) == 0
    assert child.wait(10) == 143


def test_stop_of_a_job_elsewhere_or_unknown_is_a_usage_error(home: Path) -> None:
    job = register(home, os.getpid())
    registry.register_job(replace(job, host="other-host"))
    with pytest.raises(
        UsageError, match=r"was started on other-host; stop it there, or give --scheduler"
    ):
        stop_job("demo")
    with pytest.raises(UsageError, match=r"no job 'dmo'; did you mean 'demo'\?"):
        stop_job("dmo")
    with pytest.raises(UsageError, match="no job of yours is running here"):
        stop_job()


def test_of_a_job_without_an_event_log_nobody_says_how_it_ended(
    home: Path, process, capsys: pytest.CaptureFixture[str]
) -> None:
    child = process(TERM_ONCE)
    registry.register_job(replace(register(home, child.pid), events=""))
    assert stop_job("demo", timeout=20) == 0
    assert capsys.readouterr().err.endswith(
        "has stopped: how it ended is not known: no event log\n"
    )
    assert list_statuses("demo")[0].state == "dead"
