"""`pdrun logs`: the workers' log files of a registered job, once or as they grow."""

from __future__ import annotations

import signal
from typing import Literal

from pdrun.errors import EXIT_OK, UsageError
from pdrun.launcher.jobs.log_reader import LogReader
from pdrun.launcher.jobs.lookup import find_newest_job
from pdrun.launcher.jobs.registry import JobRecord, is_alive, list_jobs
from pdrun.launcher.jobs.status import StatusReader
from pdrun.launcher.output.console import STDERR, STDOUT, Console


def print_logs(
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
    Print the workers' logs of a job, each line with the prefix ``host:rank|``.

    Args:
        name: run, job name or a prefix; None: the running job, else the newest.
        ranks: ``all`` or ``0,7-9``.
        follow: continue until the job has ended, through restarts.
        lines: only the last lines of each file, at most this many; None: all.
        stdout: show what the workers printed on stdout.
        stderr: show what the workers printed on stderr.
        generation: a generation, or ``all``; None: the last one, with a note if there are others.
        console: the terminal; for tests.

    Returns:
        0; 130 after Ctrl-C; 141 when the reader of followed output has closed it (``| head``).

    Raises:
        UsageError: no such job, rank or generation, or its logs are not on this machine.
    """
    job = _find_logged_job(name)
    console = console or Console()
    reader = LogReader(
        job,
        StatusReader(job).read_status,
        console,
        ranks=ranks,
        lines=lines,
        stdout=stdout,
        stderr=stderr,
        generation=generation,
    )
    try:
        while reader.show_new() and follow:
            if console.is_closed(STDOUT if stdout else STDERR):
                return 128 + signal.SIGPIPE
            reader.wait_for_more()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        console.close()
    return EXIT_OK


def _find_logged_job(name: str | None) -> JobRecord:
    known = list_jobs()
    if name is not None:
        return find_newest_job(name, known)
    if not known:
        raise UsageError("no job of yours is known here")
    for job in known:
        if is_alive(job):
            return job
    return known[0]
