"""Finds a job: by its run, its name or a prefix of one of them, or by its logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.jobs.registry import JobRecord, is_alive

EVENTS_FILE = "events.jsonl"
MAX_NAMED_JOBS = 8
"""Jobs that an error message names."""


def find_job(name: str, known: Iterable[JobRecord], *, newest: bool = False) -> JobRecord:
    """
    Return the registered job that `name` means: a run, the name of a job, a prefix of exactly one,
    or the folder of a run's logs.

    The name of a job means its running run, else its newest.

    Args:
        name: a run, the name of a job, a prefix, a folder, or an event log.
        known: the registered jobs.
        newest: return the newest when several runs of the job are running.

    Raises:
        UsageError: no job or several jobs match; the message names them. Or the name is empty,
            as an unset shell variable leaves it: it is no prefix of every job.
    """
    known = list(known)
    if not name:
        raise UsageError("the job's name is empty", hint=_describe_jobs(known))
    if is_log_path(name):
        job = find_job_of_log(find_event_log(name), known)
        if job is None:
            raise UsageError(
                f"no job of yours has its logs in {name!r}", hint=_describe_jobs(known)
            )
        return job
    for matches in (
        [job for job in known if job.run == name],
        [job for job in known if job.job == name],
        [job for job in known if job.run.startswith(name) or job.job.startswith(name)],
    ):
        if matches:
            return _choose_run(name, matches, newest)
    hints = [
        did_you_mean(name, [word for job in known for word in (job.job, job.run)]),
        _describe_jobs(known),
    ]
    raise UsageError(f"no job {name!r}", hint=" ".join(hint for hint in hints if hint))


def find_running_job(known: Iterable[JobRecord]) -> JobRecord:
    """
    Return the one running job.

    Raises:
        UsageError: no job runs, or several do; the message names them.
    """
    running = [job for job in known if is_alive(job)]
    if len(running) == 1:
        return running[0]
    if not running:
        raise UsageError("no job of yours is running here")
    hint = _describe_jobs(running, "name one:")
    raise UsageError(f"{len(running)} jobs are running", hint=hint)


def find_newest_job(name: str, known: list[JobRecord]) -> JobRecord:
    """
    Return the job to show for `name`: of several runs of one job a running one, else the newest.
    Of logs that no registered job has, the record has neither job nor host.

    If there are several runs, a note on stderr names the one that is shown.
    """
    job = _find_unregistered_log(name, known) or find_job(name, known, newest=True)
    if is_log_path(name) or not job.job:
        return job
    runs = [other for other in known if other.job == job.job]
    if name != job.run and len(runs) > 1:
        kind = "newest that runs" if is_alive(job) else "newest"
        print_note(f"{len(runs)} runs are called {job.job}; this is the {kind}, {job.run}")
    return job


def is_log_path(name: str) -> bool:
    """Return whether a name is the path of a folder or of an event log: no job has such a name."""
    return os.path.sep in name or name in (".", "..") or name.endswith(".jsonl")


def find_event_log(name: str) -> Path:
    """Return the event log of a path: itself, or the one in a folder."""
    path = Path(name)
    return path / EVENTS_FILE if path.is_dir() else path


def find_job_of_log(events: Path, known: Iterable[JobRecord]) -> JobRecord | None:
    """Return the registered job that writes an event log."""
    place = os.path.realpath(events)
    matches = (job for job in known if job.events and os.path.realpath(job.events) == place)
    return next(matches, None)


def _find_unregistered_log(name: str, known: list[JobRecord]) -> JobRecord | None:
    """
    Return a record of logs that no registered job has; None: the name means a registered job.

    Raises:
        UsageError: the name is a path, and there is no event log.
    """
    is_known = any(job.run.startswith(name) or job.job.startswith(name) for job in known)
    if not name or (not is_log_path(name) and is_known):
        return None
    events = find_event_log(name)
    if not events.is_file():
        if not is_log_path(name):
            return None
        hint = f"the folder of a run's logs, or its {EVENTS_FILE}"
        raise UsageError("there is no event log", where=str(events), hint=hint)
    if find_job_of_log(events, known):
        return None
    folder = events.absolute().parent
    return JobRecord(
        run=folder.name,
        job="",
        pid=0,
        ticks=0,
        host="",
        events=str(events.absolute()),
        log_dir=str(folder.parent),
    )


def print_note(text: str) -> None:
    """Print a line of pdrun on stderr."""
    print(f"pdrun: {text}", file=sys.stderr)


def _choose_run(name: str, matches: list[JobRecord], newest: bool) -> JobRecord:
    """
    Return the running run of a job, else its newest.

    Raises:
        UsageError: several jobs match, or several runs are running and `newest` is false.
    """
    running = [job for job in matches if is_alive(job)]
    if len(matches) == 1:
        return matches[0]
    if len(running) == 1:
        return running[0]
    candidates = running or matches
    is_one_job = len({job.job for job in candidates}) == 1
    if running and is_one_job and newest:
        return max(running, key=lambda job: job.made)
    if running or not is_one_job:
        hint = _describe_jobs(candidates, "name one run:")
        raise UsageError(f"{name!r} means more than one job", hint=hint)
    return matches[0]


def _describe_jobs(known: list[JobRecord], label: str = "known:") -> str:
    if not known:
        return "none is known here"
    names = [f"{job.job} (run {job.run})" for job in known[:MAX_NAMED_JOBS]]
    text = f"{label} {', '.join(names)}"
    if len(known) > MAX_NAMED_JOBS:
        text += f" and {len(known) - MAX_NAMED_JOBS} more"
    return text
