"""
The registry of this user's jobs, running and past: `pdrun status|logs|stop` need no address.

    $XDG_STATE_HOME/pdrun/jobs/RUN.json      (default ~/.local/state), one file per run

The folder has mode 0700, the files 0600. No job needs the registry: if the home directory is not
writable, only the three commands do not work. A record identifies a process by pid, start time and
host, so that a process that got the pid later is never taken for the job.

Limits: the registry knows only jobs of this user whose first node has this home directory. Start
times are read from /proc; without /proc the pid must do.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pdrun.disk import make_private_folder
from pdrun.errors import UsageError
from pdrun.launcher.common.files import state_folder
from pdrun.quick_dataclass import dataclass
from pdrun.text import check_name

MAX_ENDED_JOBS = 200
"""Ended jobs that the registry keeps: the newest ones."""


@dataclass(frozen=True)
class JobRecord:
    """One run of one job, recorded by its first node."""

    run: str
    job: str
    pid: int
    """The process that `pdrun stop` signals: the controller, or the first node's agent."""
    ticks: int
    """When that process started, in clock ticks since boot; 0: unknown."""
    host: str
    events: str
    """Path of the event log; empty: no event log."""
    log_dir: str
    """Folder that contains the run's folder."""
    scheduler: str = ""
    """``HOST:PORT``; empty: no scheduler listens."""
    log_name: str = "rank_{rank}"
    """Template of the log files' names."""
    made: float = 0.0
    """Wall clock time of the start."""


def registry_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """
    Return the folder of the registry; it need not exist.

    Raises:
        OSError: there is neither a home directory nor the variable.
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
    """Return the record of process ``pid`` (default: this one); its paths become absolute."""
    if pid is None:
        pid = os.getpid()
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
    Write a record atomically, and remove the oldest ended ones.

    Returns:
        Whether that was possible.
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
    """Remove the records of runs whose logs were in ``log_dir``, a folder that no longer exists."""
    try:
        folder = folder or registry_folder()
        for job in list_jobs(folder):
            if job.log_dir == str(log_dir):
                (folder / f"{job.run}.json").unlink(missing_ok=True)
    except OSError:
        pass


def list_jobs(folder: Path | None = None) -> list[JobRecord]:
    """Return all records of this user, the newest first; other files are ignored."""
    try:
        found = [_read_record(path) for path in (folder or registry_folder()).glob("*.json")]
    except OSError:
        return []
    return sorted((job for job in found if job), key=lambda job: (job.made, job.run), reverse=True)


def prune_jobs(folder: Path, max_ended: int = MAX_ENDED_JOBS) -> None:
    """Keep only the newest ``max_ended`` records of ended jobs."""
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
    """Return whether a job's process is running; False for another host, where it is unknown."""
    if not is_on_this_host(job):
        return False
    ticks = read_start_ticks(job.pid)
    if ticks is not None:
        return ticks == job.ticks or job.ticks == 0
    return not Path("/proc/self/stat").exists() and _is_signalable(job.pid)


def is_on_this_host(job: JobRecord) -> bool:
    """Return whether a job's process was started on this host."""
    return job.host == socket.gethostname()


def read_start_ticks(pid: int) -> int | None:
    """
    Return when a process started, in clock ticks since boot.

    None: it has ended, is a zombie, or its start time is unknown.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        after_name = text.rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else int(after_name[19])
    except (OSError, IndexError, ValueError):
        return None


def _read_record(path: Path) -> JobRecord | None:
    """Return the record in a file, or None if it is another user's or not a record."""
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
    if _is_well_formed(job) and f"{job.run}.json" == path.name:
        return job
    return None


def _is_well_formed(job: JobRecord) -> bool:
    """Return whether all fields have their types: the file may be damaged, or from elsewhere."""
    numbers = (job.pid, job.ticks)
    texts = (job.run, job.job, job.host, job.events, job.log_dir, job.scheduler, job.log_name)
    if not all(type(number) is int for number in numbers) or not 0 < job.pid < 1 << 31:
        return False
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        return False
    return isinstance(job.made, int | float) and abs(job.made) < 1e15  # also refuses NaN


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
