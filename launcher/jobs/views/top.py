"""``pdrun top``: finds a job, live or ended, and shows it on a full screen."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pdrun import process_setup
from pdrun.errors import EXIT_OK, UsageError
from pdrun.launcher.jobs.lookup import print_note
from pdrun.launcher.jobs.registry import JobRecord
from pdrun.launcher.jobs.remote_scheduler import (
    RemoteScheduler,
    check_job_name,
    open_viewer,
)
from pdrun.launcher.jobs.report import read_rank_log
from pdrun.launcher.jobs.status import StatusPoller, StatusReader, choose_jobs, show_status
from pdrun.launcher.jobs.stop import stop_job
from pdrun.ui.event_reader import read_log_lines
from pdrun.ui.job_status import JobStatus
from pdrun.ui.report.numbers import StepRow, read_rows

INSTALL_HINT = "pip install 'pdrun[screen]' has the full screen"


def show_top(name: str | None, scheduler: RemoteScheduler | None = None) -> int:
    """
    Show a job until the user quits; return the exit code.

    Without textual it shows what `pdrun status --follow` does.

    Args:
        name: a job, a run, a prefix, or the folder of its logs; None: the running or newest job.
        scheduler: ask this scheduler instead of the registry.

    Raises:
        UsageError: there is no such job, or no terminal.
        RendezvousError, AuthenticationError: the scheduler cannot be asked.
    """
    if not _has_terminal():
        raise UsageError("pdrun top needs a terminal", hint="use pdrun status --follow")
    if importlib.util.find_spec("textual") is None:
        print_note(f"textual is not installed: {INSTALL_HINT}")
        return show_status(name, follow=True, scheduler=scheduler)
    with ExitStack() as stack:
        if scheduler is not None:
            source = _open_scheduler(name, scheduler, stack)
        else:
            source = _open_job(_choose_job(name))
        process_setup.restore_sigint()
        from pdrun.ui.top.app import STOP, TopApp

        answer = TopApp(
            source.read_status, source.read_log, source.read_past, can_stop=bool(source.run)
        ).run()
    if answer == STOP:
        return stop_job(source.run)
    return EXIT_OK


@dataclass(frozen=True)
class TopSource:
    """Where the screen reads a job."""

    read_status: Callable[[], JobStatus]
    events: Path | None = None
    """The event log; None: on another host."""
    folder: Path | None = None
    """The folder of the workers' logs."""
    log_name: str = ""
    run: str = ""
    """The run that `pdrun stop` can stop."""

    def read_log(self, rank: int) -> Sequence[str]:
        """Return the last lines of a rank."""
        return [] if self.folder is None else read_rank_log(self.folder, self.log_name, rank)

    def read_past(self) -> Iterable[StepRow]:
        """Return the steps in the log so far."""
        try:
            return [] if self.events is None else list(read_rows(read_log_lines(self.events)))
        except OSError:
            return []


def _open_scheduler(name: str | None, scheduler: RemoteScheduler, stack: ExitStack) -> TopSource:
    viewer = stack.enter_context(open_viewer(scheduler))
    check_job_name(viewer, name)
    poller = StatusPoller(viewer)
    return TopSource(lambda: poller.poll()[0])


def _open_job(job: JobRecord) -> TopSource:
    events = Path(job.events) if job.events else None
    read = StatusReader(job).read_status
    run = job.run if job.job else ""  # of logs that no registered job has, nothing can be stopped
    return TopSource(read, events, Path(job.log_dir) / job.run, job.log_name, run)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _choose_job(name: str | None) -> JobRecord:
    """Return the job of a name; without one the running job, else the newest."""
    found = choose_jobs(name)
    if not found:
        raise UsageError("no jobs are known here", hint="give the folder of a job's logs")
    return found[0]
