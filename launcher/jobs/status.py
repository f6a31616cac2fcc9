"""
`pdrun status`: the status of a job, from its event log or from its scheduler.

A registered job is read from its event log; `--scheduler` asks the scheduler instead. The screens
are in `pdrun.ui`, which is imported when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdrun import process_setup
from pdrun.errors import EXIT_OK, RendezvousError
from pdrun.launcher.jobs.lookup import find_newest_job, print_note
from pdrun.launcher.jobs.registry import JobRecord, is_alive, is_on_this_host, list_jobs
from pdrun.launcher.jobs.remote_scheduler import (
    RemoteScheduler,
    check_job_name,
    open_viewer,
    replay_status,
)
from pdrun.ui.event_reader import EventLogReader
from pdrun.ui.job_status import JobStatus

if TYPE_CHECKING:
    from pdrun.rendezvous.clients.viewer import Viewer

MAX_LISTED_JOBS = 20
"""Jobs that `status` lists. Running jobs are always among them."""
POLL_ANSWER_SECONDS = 2.0
"""Longest wait for a scheduler's answer while a job is followed."""
END_UNKNOWN = "how it ended is not known"


def show_status(
    name: str | None = None,
    *,
    as_json: bool = False,
    follow: bool = False,
    all_jobs: bool = False,
    scheduler: RemoteScheduler | None = None,
) -> int:
    """
    Show one job, or without a name the one running job, else the newest known jobs.

    Args:
        name: run, job name or a prefix; None: see above.
        as_json: print one line of JSON per job instead of the screens of `pdrun.ui`.
        follow: show the status until the job has ended.
        all_jobs: show every known job, however old.
        scheduler: ask this scheduler instead of the registry.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        UsageError: no job has this name, here or at the scheduler.
        RendezvousError, AuthenticationError: the scheduler cannot be asked.
    """
    if scheduler is not None:
        with open_viewer(scheduler) as viewer:
            check_job_name(viewer, name)
            poller = StatusPoller(viewer)
            if follow:
                return _follow_statuses(poller.poll)
            _print_statuses([poller.first], as_json=as_json)
            return EXIT_OK
    readers = [StatusReader(job) for job in choose_jobs(name, all_jobs=all_jobs)]
    if follow:
        return _follow_statuses(lambda: [reader.read_status() for reader in readers])
    _print_statuses([reader.read_status() for reader in readers], as_json=as_json)
    return EXIT_OK


def _print_statuses(found: list[JobStatus], *, as_json: bool) -> None:
    if as_json:
        for one in found:
            print(encode_status(one))
        return
    from pdrun.ui import status as screen

    screen.show_status(found)


def _follow_statuses(read: Callable[[], list[JobStatus]]) -> int:
    from pdrun.ui import live

    # Ctrl-C must reach the screen, which restores the terminal
    process_setup.restore_sigint()
    return live.follow_status(read)


def list_statuses(name: str | None, *, all_jobs: bool = False) -> list[JobStatus]:
    """
    Return the statuses that `show_status` shows of the registered jobs.

    Raises:
        UsageError: no job has this name.
    """
    return [read_status(job) for job in choose_jobs(name, all_jobs=all_jobs)]


def choose_jobs(name: str | None, *, all_jobs: bool = False) -> list[JobRecord]:
    """
    Return the registered jobs that `show_status` shows.

    Raises:
        UsageError: no job has this name.
    """
    known = list_jobs()
    if name is not None:
        return [find_newest_job(name, known)]
    running = [job for job in known if is_alive(job)]
    if len(running) == 1 and not all_jobs:
        return running
    shown = [
        job
        for index, job in enumerate(known)
        if all_jobs or index < MAX_LISTED_JOBS or job in running
    ]
    if len(shown) < len(known):
        print_note(f"{len(known) - len(shown)} older job(s) are not listed; --all lists them")
    return shown


def read_status(job: JobRecord) -> JobStatus:
    """Return the status of a registered job; see `StatusReader.read_status`."""
    return StatusReader(job).read_status()


class StatusReader:
    """Reads the status of a registered job, again and again if needed."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._log = EventLogReader(Path(job.events))

    def read_status(self) -> JobStatus:
        """
        Return the status from the event log, completed from the registry entry.

        A job that ended without a verdict has the state ``dead``. If the event log cannot be read,
        the state is ``unknown`` while the job runs, and ``dead`` afterwards.
        """
        found = JobStatus()
        problem = ""
        if not self._job.events:
            problem = "no event log"
        else:
            try:
                found = self._log.read_status()
            except OSError as error:
                problem = f"event log {self._job.events}: {error.strerror}"
        return _complete_status(self._job, found, problem)


def _complete_status(job: JobRecord, found: JobStatus, problem: str) -> JobStatus:
    if problem:
        found = replace(found, state="unknown", reason=problem)
    if not (found.job and found.run and found.started_at):
        found = replace(
            found,
            job=found.job or job.job,
            run=found.run or job.run,
            started_at=found.started_at or job.made,
        )
    if found.state == "done" or is_alive(job) or not is_on_this_host(job):
        return found
    if problem:
        reason = f"{END_UNKNOWN}: {problem}"
    else:
        reason = found.reason or "its agent ended without a verdict"
    return replace(found, state="dead", reason=reason, ended_at=_last_write_time(job.events))


def _last_write_time(events: str) -> float | None:
    """Return the wall clock time of an event log's last change: the job was alive until then."""
    try:
        return Path(events).stat().st_mtime if events else None
    except OSError:
        return None


def encode_status(found: JobStatus) -> str:
    """Return a status as one line of JSON; nodes and ranks are lists."""
    data = {item.name: getattr(found, item.name) for item in fields(found)}
    data["nodes"] = [vars(node) for node in found.nodes.values()]
    data["ranks"] = [rank._asdict() for rank in found.ranks.values()]
    return json.dumps(data)


class StatusPoller:
    """Polls a scheduler for the status of its job, for `--follow`."""

    def __init__(self, viewer: Viewer) -> None:
        """
        Read the first status.

        Raises:
            RendezvousError: the scheduler does not answer.
        """
        lines = viewer.fetch_lines()
        if lines is None:
            raise RendezvousError(
                "the scheduler does not answer any more",
                where=str(viewer.endpoint),
                hint="try again",
            )
        self._viewer = viewer
        self.first = replay_status(viewer, lines)
        self._last = self.first

    def poll(self) -> list[JobStatus]:
        """Return the present status, or the last one with a warning if there is no answer."""
        if self._last.state == "done":
            return [self._last]
        lines = self._viewer.fetch_lines(POLL_ANSWER_SECONDS)
        if lines is None:
            warning = (
                f"no answer from the scheduler at {self._viewer.endpoint};"
                " this is its last known status"
            )
            return [replace(self._last, warnings=(*self._last.warnings, warning))]
        self._last = replay_status(self._viewer, lines)
        return [self._last]
