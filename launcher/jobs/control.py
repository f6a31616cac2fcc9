"""
`pdrun status`, `logs` and `stop`, without the command line: each returns an exit code or raises a
PdrunError.

A job is found in the registry of this user (`pdrun.launcher.jobs.registry`), or reached through its
scheduler. How a status looks is the caller's: floors forbid this module to know the screens, so
`status` takes a `show`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdrun import eventlog
from pdrun.endpoint import Endpoint
from pdrun.errors import EXIT_OK, EXIT_UNAVAILABLE, RendezvousError, UsageError
from pdrun.eventlog import JobStatus
from pdrun.launcher.jobs.log_reader import LogReader
from pdrun.launcher.jobs.registry import Job, find, find_running, is_alive, jobs, start_ticks
from pdrun.launcher.output.console import ERR, OUT, Console

if TYPE_CHECKING:
    from pdrun.rendezvous.clients.viewer import Viewer

NEWEST = 20
"""Jobs that `status` lists; all that run are among them."""
STOP_TIMEOUT = 60.0
FIRST = 5.0
ANSWER = 2.0
LOOK = 0.2
"""
Seconds for a scheduler's first word, and for another; and between two looks at how it ends its job.
"""
UNKNOWN_END = "how it ended is not known"
_FORCE_AGAIN = 0.3
"""Seconds between the two signals of a forced stop: the job must see two."""

Show = Callable[[list[JobStatus]], None]
"""Shows statuses to people: one in full, several as a list (`pdrun.ui.status.show`)."""
Watch = Callable[[Callable[[], list[JobStatus]]], int]
"""
Shows again and again what its argument returns, until all have ended (`pdrun.ui.live.follow`).
"""


@dataclass(frozen=True)
class Remote:
    """A scheduler to ask instead of the registry."""

    endpoint: Endpoint
    token_file: str = ""
    """Where the token is, if not at its usual places."""
    insecure: bool = False


def status(
    name: str | None = None,
    *,
    json: bool = False,
    scheduler: Remote | None = None,
    show: Show | None = None,
    watch: Watch | None = None,
    all: bool = False,
) -> int:
    """
    Show one job, or without a name the one that runs, or else the newest that are known.

    Args:
        name: run, job name or a prefix; None: see above.
        json: print JSON, one object a job and line, whatever ``show`` is.
        scheduler: ask this scheduler instead of the registry.
        show: shows it to people; JSON is printed without it.
        watch: given for ``--follow``: shows it until the job has ended, instead of once.
        all: every job that is known, however old.

    Raises:
        UsageError: no job is called that, here or at the scheduler.
        RendezvousError, AuthenticationError: the scheduler could not be asked.
    """
    if scheduler is not None:
        with _view(scheduler) as viewer:
            _called(viewer, name)
            look = _Look(viewer)
            if watch is not None:
                return watch(look)
            return _print([look.first], json=json, show=show)
    found = job_statuses(name, all=all)
    if watch is not None:
        names = [one.run for one in found]
        return watch(lambda: [one for name in names for one in job_statuses(name)])
    return _print(found, json=json, show=show)


def _print(found: list[JobStatus], *, json: bool, show: Show | None) -> int:
    if json or show is None:
        for one in found:
            print(to_json(one))
    else:
        show(found)
    return EXIT_OK


def job_statuses(name: str | None, *, all: bool = False) -> list[JobStatus]:
    """
    Return what `status` shows of this user's own jobs; one that ended without a verdict has state
    ``dead``.
    """
    known = jobs()
    if name is not None:
        return [read_status(_newest(name, known))]
    running = [job for job in known if is_alive(job)]
    if len(running) == 1 and not all:
        return [read_status(running[0])]
    shown = [job for place, job in enumerate(known) if all or place < NEWEST or job in running]
    if len(shown) < len(known):
        _say(f"{len(known) - len(shown)} older job(s) are not listed; --all lists them")
    return [read_status(job) for job in shown]


def _newest(name: str, known: list[Job]) -> Job:
    """
    Return the job to look at: of several runs of one name the newest, one that runs before others;
    says which.
    """
    job = find(name, known, newest=True)
    namesakes = [other for other in known if other.job == job.job]
    if name != job.run and len(namesakes) > 1:
        word = "newest that runs" if is_alive(job) else "newest"
        _say(f"{len(namesakes)} runs are called {job.job}; this is the {word}, {job.run}")
    return job


def read_status(job: Job) -> JobStatus:
    """
    Return the status of a registered job from its event log; what the log does not say, the
    registry does.

    Where there is no log to read, the state is ``unknown`` while the job lives, and ``dead``
    afterwards.
    """
    silent = "" if job.events else "no event log"
    try:
        found = JobStatus() if silent else eventlog.replay(eventlog.read(Path(job.events)))
    except OSError as error:
        found = JobStatus()
        silent = f"event log {job.events}: {error.strerror}"
    if silent:
        found = replace(found, state="unknown", reason=silent)
    found = replace(
        found,
        job=found.job or job.job,
        run=found.run or job.run,
        started_at=found.started_at or job.made,
    )
    if found.state != "done" and not is_alive(job) and _is_here(job):
        reason = (
            f"{UNKNOWN_END}: {silent}"
            if silent
            else found.reason or "its agent ended without a verdict"
        )
        found = replace(found, state="dead", reason=reason, ended_at=_last_written(job.events))
    return found


def _last_written(events: str) -> float | None:
    """
    Return the wall clock time of an event log's last change: as long as its job is known to have
    lived.
    """
    try:
        return Path(events).stat().st_mtime if events else None
    except OSError:
        return None


def to_json(found: JobStatus) -> str:
    """Return a status as one line of JSON; nodes and ranks are lists."""
    data = asdict(found)
    return json.dumps(
        {**data, "nodes": list(data["nodes"].values()), "ranks": list(data["ranks"].values())}
    )


def logs(
    name: str | None = None,
    *,
    ranks: str = "all",
    follow: bool = False,
    lines: int | None = None,
    stdout: bool = True,
    stderr: bool = True,
    generation: int | Literal["all"] | None = None,
    console: Console | None = None,
) -> int:
    """
    Print the workers' logs of a job, each line behind ``host:rank|``.

    Args:
        name: run, job name or a prefix; None: the job that runs, else the newest.
        ranks: ``all`` or ``0,7-9``.
        follow: go on until the job has ended, through restarts.
        lines: of each file at most so many of its end; None: all.
        stdout: whether to show what the workers printed on stdout.
        stderr: the same for stderr.
        generation: which one, or all; None: the last, and it is said when there are others.
        console: the terminal; for tests.

    Returns:
        0; 130 after Ctrl-C, 141 when the reader of what is followed has gone away (``| head``).

    Raises:
        UsageError: no such job, rank or generation, or its logs are not on this machine.
    """
    known = jobs()
    if not known and name is None:
        raise UsageError("no job of yours is known here")
    job = (
        _newest(name, known)
        if name is not None
        else next((job for job in known if is_alive(job)), known[0])
    )
    console = console or Console()
    reader = LogReader(
        job,
        read_status,
        console,
        ranks=ranks,
        lines=lines,
        stdout=stdout,
        stderr=stderr,
        generation=generation,
    )
    try:
        while reader.step() and follow:
            if console.gone(OUT if stdout else ERR):
                return 128 + signal.SIGPIPE
            reader.pause()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        console.close()
    return EXIT_OK


def stop(
    name: str | None = None,
    *,
    force: bool = False,
    timeout: float = STOP_TIMEOUT,
    scheduler: Remote | None = None,
) -> int:
    """
    Stop a job and wait, at most ``timeout`` seconds, until it has gone; say what happened on
    stderr.

    Args:
        name: run, job name or a prefix; None: the one that runs.
        force: no grace for the workers.
        timeout: seconds to wait.
        scheduler: ask this scheduler to stop its job, instead of signalling a process here.

    Returns:
        0 when the job has gone (also when it had before), 69 when it is still ending, or nobody says whether it is.
    """
    if scheduler is not None:
        return _request_stop(scheduler, name, force=force, timeout=timeout)
    job = find_running(jobs()) if name is None else find(name, jobs())
    label = f"job {job.job} (run {job.run})"
    if not is_alive(job):
        if not _is_here(job):
            raise UsageError(
                f"{label} was started on {job.host}",
                hint="stop it there, or give --scheduler HOST:PORT",
            )
        _say(f"{label} is not running{_ended_text(job)}")
        return EXIT_OK
    if not _signal(job, force=force, timeout=timeout):
        _say(
            f"{label} is still ending after {timeout:g} s (pid {job.pid})"
            + ("" if force else "; --force kills it")
        )
        return EXIT_UNAVAILABLE
    _say(f"{label} has stopped{_ended_text(job)}")
    return EXIT_OK


# Through a scheduler
# --------------------------------------------------------------------------------------------------


def _view(remote: Remote, **how: Any) -> Viewer:
    from pdrun.rendezvous.clients.viewer import Viewer
    from pdrun.rendezvous.protocol.security import find_secret

    secret = None if remote.insecure else find_secret(remote.token_file)[0]
    return Viewer(remote.endpoint, secret, insecure=remote.insecure, **how)


def _called(viewer: Viewer, name: str | None) -> None:
    """
    Hold a name that was given against the one job that a scheduler has.

    Raises:
        UsageError: it is called otherwise.
    """
    if name and not viewer.job.startswith(name) and not viewer.run.startswith(name):
        job = f"job {viewer.job!r}" if viewer.job else "a job that no node has named yet"
        raise UsageError(
            f"no job here is called {name!r}: this is the scheduler of {job} (run {viewer.run})",
            where=str(viewer.endpoint),
            hint="leave the name out, or ask the scheduler of that job",
        )


def _told(viewer: Viewer, lines: list[str]) -> JobStatus:
    """
    Return what a scheduler's lines lead to: of a long job only the newest come, without its names.
    """
    found = eventlog.replay(eventlog.parse(lines))
    return replace(found, job=found.job or viewer.job, run=found.run or viewer.run)


class _Look:
    """
    Called again and again: the present status, or the last one known with a warning while nobody
    answers.
    """

    def __init__(self, viewer: Viewer) -> None:
        lines = viewer.lines()
        if lines is None:
            raise RendezvousError(
                "the scheduler has gone silent", where=str(viewer.endpoint), hint="ask again"
            )
        self._viewer = viewer
        self.first = _told(viewer, lines)
        self._last = self.first

    def __call__(self) -> list[JobStatus]:
        if self._last.state == "done":
            return [self._last]
        lines = self._viewer.lines(ANSWER)
        if lines is None:
            silent = f"no answer from the scheduler at {self._viewer.endpoint}; shown is what it said last"
            return [replace(self._last, warnings=(*self._last.warnings, silent))]
        self._last = _told(self._viewer, lines)
        return [self._last]


def _request_stop(remote: Remote, name: str | None, *, force: bool, timeout: float) -> int:
    """
    Have a scheduler stop its job; wait for its word that the job is over, or until it has gone
    after having heard us.

    Silence means neither: a scheduler, or the way to it, may be stuck while the job goes on.
    """
    deadline = time.monotonic() + timeout
    with _view(remote, stops=True, timeout=min(timeout, FIRST), patience=timeout) as viewer:
        _called(viewer, name)
        viewer.stop(signal.SIGTERM, f"pdrun stop on {socket.gethostname()}", force=force)
        heard = False
        lines = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                lines = viewer.lines(min(left, LOOK if heard else ANSWER))
            except RendezvousError:
                if not (heard and viewer.gone):
                    raise
                lines = None
            if lines is not None:
                heard = True
                found = _told(viewer, lines)
                if found.state == "done":
                    _say(
                        f"job {found.job} (run {found.run}) has stopped: exit code {found.code}, {found.reason}"
                    )
                    return EXIT_OK
                time.sleep(min(LOOK, left))
            elif heard and viewer.gone:
                _say(
                    f"the job at {remote.endpoint} has stopped: its scheduler was ending it, and has left"
                )
                return EXIT_OK
    where = f"the scheduler at {remote.endpoint}"
    if not heard:
        _say(f"{where} has not answered within {timeout:g} s: the job may go on")
    else:
        silent = f"; {where} does not answer any more" if lines is None else ""
        _say(f"the job at {remote.endpoint} is still ending after {timeout:g} s{silent}")
    return EXIT_UNAVAILABLE


# On this machine
# ------------------------------------------------------------------------------------------------------


def _signal(job: Job, *, force: bool, timeout: float) -> bool:
    """
    Send SIGTERM, twice when forced; return whether the process has gone within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    _kill(job, signal.SIGTERM)
    again = time.monotonic() + _FORCE_AGAIN if force else None
    while is_alive(job):
        now = time.monotonic()
        if now >= deadline:
            return False
        if again is not None and now >= again:
            _kill(job, signal.SIGTERM)
            again = None
        time.sleep(0.02)
    return True


def _kill(job: Job, number: int) -> None:
    """
    Signal the very process that was registered: its number may have been used again since it was
    looked up.
    """
    try:
        handle = os.pidfd_open(job.pid) if hasattr(os, "pidfd_open") else -1
    except ProcessLookupError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        # a kernel before 5.3, or a container that forbids what it does not know: its start time
        # must do
        handle = -1
    try:
        if job.ticks not in (0, start_ticks(job.pid)):
            pass
        elif handle < 0:
            os.kill(job.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise UsageError(f"may not signal process {job.pid} of job {job.job}") from error
    finally:
        if handle >= 0:
            os.close(handle)


def _ended_text(job: Job) -> str:
    found = read_status(job)
    if found.code is None:
        unknown = found.reason.startswith(UNKNOWN_END)
        if found.state != "dead":
            return ""
        return f": {found.reason if unknown else 'it ended without a verdict'}"
    return f": exit code {found.code}" + (f", {found.reason}" if found.reason else "")


def _is_here(job: Job) -> bool:
    return job.host == socket.gethostname()


def _say(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr)
