"""
``pdrun report``: find a job's event log and the logs of its failed workers, write the page.

The page itself is made in `pdrun.ui.report`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pdrun.errors import EXIT_OK, UsageError
from pdrun.launcher.jobs.lookup import (
    find_event_log,
    find_job_of_log,
    find_newest_job,
    is_log_path,
    print_note,
)
from pdrun.launcher.jobs.registry import list_jobs
from pdrun.launcher.output.log_names import ERR_SUFFIX, OUT_SUFFIX, rank_pattern
from pdrun.ui.report.communication import read_summary
from pdrun.ui.report.history import JobHistory, read_history
from pdrun.ui.report.page import LogTail, render_page

MAX_TAILS = 8
"""Failed workers whose last lines a report has: the first ones."""
MAX_TAIL_BYTES = 8_192
MAX_TAIL_LINES = 60


def write_report(name: str | None, out: str) -> int:
    """
    Write the report of a job.

    Args:
        name: a job, a run, a prefix, the folder of its logs, or its event log; None: the newest
            job.
        out: the file; ``-``: stdout; empty: RUN.html here.

    Raises:
        UsageError: there is no such job, its log cannot be read, or the file cannot be written.
    """
    events, folder, log_name = find_log(name)
    try:
        history = read_history(events)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot be read: {reason}", where=str(events)) from None
    tails = list(read_tails(history, folder, log_name))
    page = render_page(history, tails, read_summary(folder))
    if out == "-":
        sys.stdout.write(page)
        return EXIT_OK
    path = Path(out or f"{history.run or 'report'}.html")
    try:
        path.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be written: {reason}", where=str(path)) from None
    print_note(f"report written to {path}")
    return EXIT_OK


def find_log(name: str | None) -> tuple[Path, Path, str]:
    """Return the event log of a job, the folder of its workers' logs, and their names' template."""
    known = list_jobs()
    if name is not None and is_log_path(name):
        events = find_event_log(name)
        job = find_job_of_log(events, known)
        return events, events.parent, "rank_{rank}" if job is None else job.log_name
    if name is None and not known:
        raise UsageError("no jobs are known here", hint="give the folder of a job's logs")
    job = known[0] if name is None else find_newest_job(name, known)
    if not job.events:
        raise UsageError(f"{job.run} has no event log", hint="it ran with --no-files")
    return Path(job.events), Path(job.log_dir) / job.run, job.log_name


def read_tails(history: JobHistory, folder: Path, log_name: str) -> Iterator[LogTail]:
    """Yield the last lines of the failed workers whose logs are in the folder."""
    pattern = rank_pattern(log_name)
    if "rank" not in pattern.groupindex:
        return
    first = history.cause.get("rank")
    failures = sorted(history.failures, key=lambda failure: failure.rank != first)[:MAX_TAILS]
    wanted = dict.fromkeys((failure.generation, failure.rank) for failure in failures)
    for generation, rank in wanted:
        own = folder / str(generation)
        try:
            paths = sorted(path for path in own.rglob("*") if path.is_file())
        except OSError:
            continue
        for suffix in (ERR_SUFFIX, OUT_SUFFIX):
            texts = [
                (path, _read_tail(path))
                for path in paths
                if path.name.endswith(suffix)
                and (match := pattern.fullmatch(path.name.removesuffix(suffix)))
                and int(match["rank"]) == rank
            ]
            found = [(path, text) for path, text in texts if text.strip()]
            if found:
                path, text = found[0]
                yield LogTail(rank, str(path.relative_to(folder)), text)
                break


def read_rank_log(folder: Path, log_name: str, rank: int) -> list[str]:
    """Return the last lines of a rank in the newest generation that has logs of it."""
    pattern = rank_pattern(log_name)
    if "rank" not in pattern.groupindex:
        return []
    try:
        generations = [path for path in folder.iterdir() if path.name.isdecimal()]
        for own in sorted(generations, key=lambda path: int(path.name), reverse=True):
            lines: list[str] = []
            for path in sorted(own.rglob("*")):
                stem = path.name.removesuffix(OUT_SUFFIX).removesuffix(ERR_SUFFIX)
                match = pattern.fullmatch(stem) if stem != path.name else None
                if match and int(match["rank"]) == rank and path.is_file():
                    lines += [f"-- {path.name}", *_read_tail(path).splitlines()]
            if lines:
                return lines
    except OSError:
        pass
    return []


def _read_tail(path: Path) -> str:
    """Return the last lines of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-MAX_TAIL_LINES:])
