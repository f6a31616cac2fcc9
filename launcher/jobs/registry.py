"""
The registry: which jobs this user has, running and past, so that `pdrun status|logs|stop` need no address.

    $XDG_STATE_HOME/pdrun/jobs/RUN.json      (default ~/.local/state), folder 0700, files 0600, one a run

A convenience, never needed by a job: a home that cannot be written costs the three commands,
nothing else. An entry names a process by pid *and* start time *and* host, so that a number that was
used again is never taken for the job. Limits: jobs of this user whose first node's home is this
one. Start times come from /proc; elsewhere a pid must do.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pdrun.errors import UsageError
from pdrun.launcher.common.files import state_folder
from pdrun.text import check_name
from pdrun.disk import make_private_folder

MAX_ENDED_JOBS = 200
"""Entries of ended jobs that are kept, the newest."""


@dataclass(frozen=True)
class JobRecord:
    """One run of one job, as its first node wrote it down."""

    run: str
    job: str
    pid: int
    """Of the process that `pdrun stop` signals: the front's, or the first node's agent."""
    ticks: int
    """When that process started, in clock ticks since boot; 0 when it is not known."""
    host: str
    events: str
    """Path of the event log; empty when none is written."""
    log_dir: str
    """Folder that holds the run's folder."""
    scheduler: str = ""
    """``HOST:PORT``, or empty when nothing listens."""
    log_name: str = "rank_{rank}"
    """Template of the log files' names."""
    made: float = 0.0
    """Wall clock, for order and people."""


def registry_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return the folder of the registry; it need not exist. Raises OSError where there is neither home
    nor variable.
    """
    return state_folder(environ) / "jobs"


def make_job_record(
    run: str,
    job: str,
    *,
    events: str,
    log_dir: str,
    made: float,
    pid: int | None = None,
    **options: str,
) -> JobRecord:
    """
    Return the entry of process ``pid`` (this one by default) on this host; paths are made absolute.
    """
    pid = os.getpid() if pid is None else pid
    return JobRecord(
        run=run,
        job=job,
        pid=pid,
        ticks=read_start_ticks(pid) or 0,
        host=socket.gethostname(),
        events=str(Path(events).absolute()) if events else "",
        log_dir=str(Path(log_dir).absolute()),
        made=made,
        **options,
    )


def register_job(job: JobRecord, folder: Path | None = None) -> bool:
    """
    Write an entry, whole or not at all, and forget the oldest ended ones; False where that is
    impossible.
    """
    try:
        folder = folder or registry_folder()
        make_private_folder(folder)
        draft = folder / f".draft-{os.getpid()}-{os.urandom(6).hex()}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(asdict(job), file)
            draft.replace(folder / f"{check_name(job.run, where='run')}.json")
        finally:
            draft.unlink(missing_ok=True)
        prune_jobs(folder)
    except (OSError, UsageError):
        return False
    return True


def remove_jobs(log_dir: Path, folder: Path | None = None) -> None:
    """
    Remove the entries of runs whose logs lay in ``log_dir``, which is no more: nothing could be
    shown of them.
    """
    try:
        folder = folder or registry_folder()
        for job in list_jobs(folder):
            if job.log_dir == str(log_dir):
                (folder / f"{job.run}.json").unlink(missing_ok=True)
    except OSError:
        pass


def list_jobs(folder: Path | None = None) -> list[JobRecord]:
    """Return every entry, the newest first; what is no entry of this user is passed over."""
    try:
        found = [_read_record(path) for path in (folder or registry_folder()).glob("*.json")]
    except OSError:
        return []
    return sorted((job for job in found if job), key=lambda job: (job.made, job.run), reverse=True)


def prune_jobs(folder: Path, max_ended: int = MAX_ENDED_JOBS) -> None:
    """Forget the oldest ended jobs above ``kept``."""
    paths = list(folder.iterdir())
    if len(paths) <= max_ended:
        return
    ended = [job for job in list_jobs(folder) if not is_alive(job)]
    for job in ended[max_ended:]:
        (folder / f"{job.run}.json").unlink(missing_ok=True)
    for path in paths:
        if path.name.startswith(".draft-") and _age_days(path) > 1:
            path.unlink(missing_ok=True)


def is_alive(job: JobRecord) -> bool:
    """
    Whether the process of an entry runs; False for one of another host, of which nothing is known
    here.
    """
    if not is_on_this_host(job):
        return False
    ticks = read_start_ticks(job.pid)
    if ticks is not None:
        return ticks == job.ticks or job.ticks == 0
    return not Path("/proc/self/stat").exists() and _is_signalable(job.pid)


def is_on_this_host(job: JobRecord) -> bool:
    """Whether the process of an entry was started on this host."""
    return job.host == socket.gethostname()


def read_start_ticks(pid: int) -> int | None:
    """
    Return when a process started, in clock ticks since boot; None when it is gone, a zombie, or
    unknown.
    """
    try:
        after_name = (
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
        return None if after_name[0] in "ZX" else int(after_name[19])
    except (OSError, IndexError, ValueError):
        return None


def _read_record(path: Path) -> JobRecord | None:
    """Return an entry, or None for a file that is somebody else's or no entry."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, encoding="utf-8") as file:
            if os.fstat(fd).st_uid != os.geteuid():
                return None
            data: dict[str, Any] = json.loads(file.read(1 << 16))
        known = {item.name: data[item.name] for item in fields(JobRecord) if item.name in data}
        job = JobRecord(**known)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return job if _is_well_formed(job) and f"{job.run}.json" == path.name else None


def _is_well_formed(job: JobRecord) -> bool:
    """Whether every field has its type: the file may be of another version, or damaged."""
    numbers = (job.pid, job.ticks)
    texts = (job.run, job.job, job.host, job.events, job.log_dir, job.scheduler, job.log_name)
    whole = all(type(number) is int for number in numbers) and 0 < job.pid < 1 << 31
    texts_whole = all(isinstance(text, str) and "\0" not in text for text in texts)
    return (
        whole and texts_whole and isinstance(job.made, int | float) and abs(job.made) < 1e15
    )  # which no NaN is


def _age_days(path: Path) -> float:
    try:
        return (time.time() - path.stat().st_mtime) / 86400
    except OSError:
        return 0.0


def _is_signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
