"""Checks of installed versions, and of jobs and workers that are left over."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pdrun.backends.base import ProbeEnvironment
from pdrun.launcher.doctor.finding import Finding
from pdrun.launcher.jobs import registry
from pdrun.text import quote_command

MIN_TORCH = (2, 11)
REQUIRED_PACKAGES = ("click", "rich", "pyzmq", "psutil", "pyyaml", "cloudpickle")
OLD_JOB_SECONDS = 7 * 86400.0
MAX_LISTED = 10


def check_versions(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the versions of Python, pdrun, torch and what pdrun needs."""
    missing = [name for name in REQUIRED_PACKAGES if not _find_version(name)]
    if missing:
        hint = "install pdrun again: pip install pdrun"
        yield Finding("versions", "fail", f"missing: {', '.join(missing)}", sys.prefix, hint)
    torch = _find_version("torch")
    python = ".".join(map(str, sys.version_info[:3]))
    if not torch:
        what = "torch is not installed in this Python"
        hint = "install it, or choose the Python of your scripts with --python"
        yield Finding("versions", "warn", what, sys.executable, hint)
    elif _parse_version(torch) < MIN_TORCH:
        what = f"torch {torch} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}"
        hint = "pdrun.parallelize needs a newer one; the launcher does not"
        yield Finding("versions", "warn", what, sys.prefix, hint)
    own = _find_version("pdrun")
    parts = [f"python {python}", f"version {own} of pdrun"]
    parts += [f"torch {torch}"] if torch else []
    yield Finding("versions", "ok", ", ".join(parts), sys.prefix)


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return ""


def _parse_version(text: str) -> tuple[int, ...]:
    numbers = text.partition("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdecimal, part)) or 0) for part in numbers)


def check_jobs(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check for jobs that run for long, and workers whose agent has ended."""
    found = list(_find_orphans(here.root))
    for pid, command in found[:MAX_LISTED]:
        what = f"process {pid} ({command}) is a worker of a job whose agent has ended"
        yield Finding("jobs", "warn", what, hint=f"end it: kill -9 {pid}")
    if len(found) > MAX_LISTED:
        what = f"{len(found) - MAX_LISTED} more workers without an agent"
        yield Finding("jobs", "warn", what, hint="end them, or reboot the node")
    running = [job for job in registry.list_jobs() if registry.is_alive(job)]
    for job in running:
        seconds = time.time() - job.made
        if seconds > OLD_JOB_SECONDS:
            stop = quote_command("pdrun", "stop", job.run)
            what = f"job {job.run} runs for {seconds / 86400:.0f} days"
            yield Finding("jobs", "warn", what, hint=f"if it is not needed: {stop}")
    yield Finding("jobs", "ok", f"{len(running)} of this user's jobs run here")


def _find_orphans(root: Path) -> Iterator[tuple[int, str]]:
    """Yield pid and command of this user's workers whose agent does not listen any more."""
    alive: dict[str, bool] = {}
    own = _find_namespace(root / "proc/self")
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.geteuid() or _find_namespace(folder) != own:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            agent = next((item[12:] for item in entries if item.startswith(b"PDRUN_AGENT=")), b"")
            path = os.fsdecode(agent)
            if not path.startswith("/") or f"{os.sep}pdrun-agent-" not in path:
                continue
            if alive.setdefault(path, _is_listening(path)):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").strip()
        except OSError:
            continue  # it has ended
        if command:
            yield int(folder.name), command.decode("utf-8", "replace")[:80]


def _find_namespace(folder: Path) -> str:
    """Return in which mount namespace a process is: another one has other socket files."""
    try:
        return str((folder / "ns/mnt").readlink())
    except OSError:
        return ""


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
