"""`pdrun stop`: ends a job by a signal to its process on this host, or through its scheduler."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time

from pdrun.errors import EXIT_OK, EXIT_UNAVAILABLE, RendezvousError, UsageError
from pdrun.launcher.jobs.lookup import find_job, find_running_job, print_note
from pdrun.launcher.jobs.registry import (
    JobRecord,
    is_alive,
    is_on_this_host,
    list_jobs,
    read_start_ticks,
)
from pdrun.launcher.jobs.remote_scheduler import (
    RemoteScheduler,
    check_job_name,
    open_viewer,
    replay_status,
)
from pdrun.launcher.jobs.status import END_UNKNOWN, read_status

STOP_TIMEOUT_SECONDS = 60.0
CONNECT_SECONDS = 5.0
"""Longest wait for the scheduler's first answer."""
ANSWER_SECONDS = 2.0
"""Longest wait for each further answer, until the scheduler has confirmed the request."""
POLL_SECONDS = 0.2
"""Time between two questions about how the job ends."""
EXIT_POLL_SECONDS = 0.02
"""Time between two checks whether the process has ended."""
SECOND_SIGNAL_SECONDS = 0.3
"""Delay of the second signal of a forced stop: the job must receive two separate signals."""


def stop_job(
    name: str | None = None,
    *,
    force: bool = False,
    timeout: float = STOP_TIMEOUT_SECONDS,
    scheduler: RemoteScheduler | None = None,
) -> int:
    """
    Stop a job, wait until it has ended, and print the outcome on stderr.

    Args:
        name: run, job name or a prefix; None: the running job.
        force: kill the workers without a grace period.
        timeout: longest wait in seconds.
        scheduler: ask this scheduler to stop its job, instead of signalling a process here.

    Returns:
        0 if the job has ended (also if it had ended before); 69 if it is still ending, or if it is
        not known whether it is.

    Raises:
        UsageError: no such job, or it runs on another host.
        RendezvousError, AuthenticationError: the scheduler cannot be asked.
    """
    if scheduler is not None:
        return _stop_through_scheduler(scheduler, name, force=force, timeout=timeout)
    job = find_running_job(list_jobs()) if name is None else find_job(name, list_jobs())
    label = f"job {job.job} (run {job.run})"
    if not is_alive(job):
        if not is_on_this_host(job):
            raise UsageError(
                f"{label} was started on {job.host}",
                hint="stop it there, or give --scheduler HOST:PORT",
            )
        print_note(f"{label} is not running{_describe_end(job)}")
        return EXIT_OK
    if _end_process(job, force=force, timeout=timeout):
        print_note(f"{label} has stopped{_describe_end(job)}")
        return EXIT_OK
    hint = "" if force else "; --force kills it"
    print_note(f"{label} is still ending after {timeout:g} s (pid {job.pid}){hint}")
    return EXIT_UNAVAILABLE


# Through a scheduler
# --------------------------------------------------------------------------------------------------


def _stop_through_scheduler(
    scheduler: RemoteScheduler, name: str | None, *, force: bool, timeout: float
) -> int:
    """
    Ask a scheduler to stop its job, and wait until the job has ended.

    The job has ended when the scheduler says so, or when the scheduler has exited after it
    confirmed the request. Silence means neither: the scheduler, or the network, may be stuck while
    the job runs.
    """
    endpoint = scheduler.endpoint
    deadline = time.monotonic() + timeout
    first_timeout = min(timeout, CONNECT_SECONDS)
    is_confirmed = False
    lines = None
    with open_viewer(scheduler, stops=True, timeout=first_timeout, patience=timeout) as viewer:
        check_job_name(viewer, name)
        viewer.request_stop(signal.SIGTERM, f"pdrun stop on {socket.gethostname()}", force=force)
        while (left := deadline - time.monotonic()) > 0:
            wait = POLL_SECONDS if is_confirmed else ANSWER_SECONDS
            try:
                lines = viewer.fetch_lines(min(left, wait))
            except RendezvousError:
                if not (is_confirmed and viewer.is_gone):
                    raise
                lines = None
            if lines is not None:
                is_confirmed = True
                found = replay_status(viewer, lines)
                if found.state == "done":
                    end = f"exit code {found.code}, {found.reason}"
                    print_note(f"job {found.job} (run {found.run}) has stopped: {end}")
                    return EXIT_OK
                time.sleep(min(POLL_SECONDS, left))
            elif is_confirmed and viewer.is_gone:
                print_note(
                    f"the job at {endpoint} has stopped: its scheduler exited while ending it"
                )
                return EXIT_OK
    if not is_confirmed:
        print_note(
            f"the scheduler at {endpoint} has not answered within {timeout:g} s:"
            " the job may still be running"
        )
        return EXIT_UNAVAILABLE
    silent = ""
    if lines is None:
        silent = f"; the scheduler at {endpoint} does not answer any more"
    print_note(f"the job at {endpoint} is still ending after {timeout:g} s{silent}")
    return EXIT_UNAVAILABLE


# On this host
# --------------------------------------------------------------------------------------------------


def _end_process(job: JobRecord, *, force: bool, timeout: float) -> bool:
    """
    Send SIGTERM, twice if forced; return whether the process ended within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    _signal_process(job, signal.SIGTERM)
    second_at = time.monotonic() + SECOND_SIGNAL_SECONDS if force else None
    while is_alive(job):
        now = time.monotonic()
        if now >= deadline:
            return False
        if second_at is not None and now >= second_at:
            _signal_process(job, signal.SIGTERM)
            second_at = None
        time.sleep(EXIT_POLL_SECONDS)
    return True


def _signal_process(job: JobRecord, number: int) -> None:
    """
    Send a signal to the registered process, and to no other that has got its pid since.

    Raises:
        UsageError: the process belongs to another user.
    """
    handle = -1
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(job.pid)
        except ProcessLookupError:
            return
        except OSError as error:
            # a kernel before 5.3, or a container that forbids unknown system calls: the start time
            # must do
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
    try:
        if job.ticks not in (0, read_start_ticks(job.pid)):
            return
        if handle < 0:
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


def _describe_end(job: JobRecord) -> str:
    """Return how a job ended, to be added to a message; empty if it has not ended."""
    found = read_status(job)
    if found.code is not None:
        reason = f", {found.reason}" if found.reason else ""
        return f": exit code {found.code}{reason}"
    if found.state != "dead":
        return ""
    if found.reason.startswith(END_UNKNOWN):
        return f": {found.reason}"
    return ": it ended without a verdict"
