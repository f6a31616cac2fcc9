"""Finds a registered job by its run, its name or a prefix of one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.jobs.registry import JobRecord, is_alive

MAX_NAMED_JOBS = 8
"""Jobs that an error message names."""


def find_job(name: str, known: Iterable[JobRecord], *, newest: bool = False) -> JobRecord:
    """
    Return the job that `name` means: a run, the name of a job, or a prefix of exactly one.

    The name of a job means its running run, else its newest.

    Args:
        name: a run, the name of a job, or a prefix.
        known: the registered jobs.
        newest: return the newest when several runs of the job are running.

    Raises:
        UsageError: no job or several jobs match; the message names them. Or the name is empty,
            as an unset shell variable leaves it: it is no prefix of every job.
    """
    known = list(known)
    if not name:
        raise UsageError("the job's name is empty", hint=_describe_jobs(known))
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

    If there are several runs, a note on stderr names the one that is shown.
    """
    job = find_job(name, known, newest=True)
    runs = [other for other in known if other.job == job.job]
    if name != job.run and len(runs) > 1:
        kind = "newest that runs" if is_alive(job) else "newest"
        print_note(f"{len(runs)} runs are called {job.job}; this is the {kind}, {job.run}")
    return job


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
