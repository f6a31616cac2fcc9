"""Checks of a machine without devices: limits, memory, disks, clock, quota."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from pdrun.backends.affinity import read_cpus
from pdrun.backends.base import ProbeEnvironment
from pdrun.launcher.doctor.finding import Finding

MIN_FILES = 4096
MIN_PROCESSES = 4096
MIN_SHARED_BYTES = 1 << 30
MIN_FREE_BYTES = 1 << 30
MIN_FREE_INODES = 10_000
DISK_TEST_BYTES = 4 << 20
MIN_DISK_BYTES_PER_SECOND = 10e6
MEMORY_SHARE = 0.9
"""Part of a memory limit from which a job is likely to be killed."""
EARLIEST_YEAR = 2025
STA_UNSYNC = 0x40
TIMEX_BYTES = 208
TIMEX_STATUS = 40
"""Size of the kernel's ``struct timex``, and where its status is."""
MAX_SOCKET_PATH = 80


def check_limits(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the limits on files, processes and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < MIN_FILES:
        hint = f"raise it: ulimit -Hn {MIN_FILES * 16}, or limits.conf, or docker --ulimit nofile"
        yield Finding("limits", "warn", f"at most {hard} open files per process", "nofile", hint)
    count = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if 0 <= count < MIN_PROCESSES and os.geteuid() != 0:
        what = f"this user may have at most {count} processes and threads"
        yield Finding("limits", "warn", what, "nproc", f"raise it: ulimit -u {MIN_PROCESSES * 4}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if here.has_path("sys/class/infiniband") and locked != resource.RLIM_INFINITY:
        adapters = sorted(path.name for path in (here.root / "sys/class/infiniband").iterdir())
        if adapters:
            what = f"only {locked >> 10} KiB may be locked, but RDMA adapters are here"
            hint = "ulimit -l unlimited, or docker --ulimit memlock=-1: NCCL registers its buffers"
            yield Finding("limits", "fail", what, f"memlock, {adapters[0]}", hint)
    yield Finding("limits", "ok", f"open files {soft} (at most {hard})")


def check_shared_memory(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the size of /dev/shm."""
    path = here.root / "dev/shm"
    try:
        found = os.statvfs(path)
    except OSError as error:
        what = f"cannot be used: {error.strerror}"
        hint = "mount a tmpfs there: loaders of data and NCCL need it"
        yield Finding("shm", "fail", what, "/dev/shm", hint)
        return
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    what = f"{_format_bytes(free)} free of {_format_bytes(size)}"
    if size < MIN_SHARED_BYTES or free < MIN_SHARED_BYTES // 4:
        hint = "docker run --shm-size=16g or --ipc=host, a memory emptyDir in Kubernetes;"
        hint += (
            " remove files of ended jobs there: workers of data loaders and NCCL end with SIGBUS"
        )
        yield Finding("shm", "warn", what, "/dev/shm", hint)
    else:
        yield Finding("shm", "ok", what, "/dev/shm")


def check_temporary_folder(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the folder for temporary files."""
    name = here.environ.get("TMPDIR") or "/tmp"
    path = Path(name)
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        what = "is no folder that this user can write to"
        yield Finding("tmp", "fail", what, f"TMPDIR={name}", "unset TMPDIR, or make the folder")
        return
    if len(os.fsencode(name)) > MAX_SOCKET_PATH:
        what = "is too long for the path of a socket"
        yield Finding("tmp", "warn", what, f"TMPDIR={name}", "export TMPDIR=/tmp")
    yield from _check_space("tmp", path)


def check_clock(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check whether the clock is synchronized."""
    hint = "start chrony or systemd-timesyncd: tokens of Kubernetes, logs and TLS depend on it"
    year = time.gmtime().tm_year
    if year < EARLIEST_YEAR:
        yield Finding("clock", "fail", f"the clock is in the year {year}", hint=hint)
        return
    status = _read_clock_status()
    if status is not None and status & STA_UNSYNC:
        yield Finding("clock", "warn", "the clock is not synchronized", hint=hint)
    else:
        known = (
            "synchronized" if status is not None else "set; whether it is synchronized is unknown"
        )
        yield Finding("clock", "ok", f"the clock is {known}")


def _read_clock_status() -> int | None:
    """Return the status bits of the kernel's clock; None: they cannot be read."""
    data = (ctypes.c_ubyte * TIMEX_BYTES)()
    try:
        if ctypes.CDLL(None).adjtimex(ctypes.byref(data)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return int.from_bytes(bytes(data[TIMEX_STATUS : TIMEX_STATUS + 4]), "little")


def check_quota(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check the limits of the cgroup."""
    cpus = read_cpus(here.root)
    count = len(cpus.cpus)
    if cpus.quota is not None and cpus.quota < 1.0:
        what = f"the cgroup allows {cpus.quota:g} CPUs"
        yield Finding("quota", "warn", what, hint="raise the CPU limit of the container")
    else:
        quota = "" if cpus.quota is None else f", {cpus.quota:g} by the quota of the cgroup"
        yield Finding("quota", "ok", f"{count} CPUs{quota}")
    limit = here.read_text("sys/fs/cgroup/memory.max")
    used = here.read_text("sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal() and int(used) > MEMORY_SHARE * int(limit):
        what = f"{_format_bytes(int(used))} of the {_format_bytes(int(limit))} allowed are in use"
        hint = "end other processes of the container, or raise its memory limit"
        yield Finding("quota", "warn", what, "memory of the cgroup", hint)


def check_disk(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check space and speed of the folder in which a job's logs would be."""
    folder = Path(here.environ.get("PDRUN_LOG_DIR") or "pdrun-logs").absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        hint = "use --log-dir with a folder of yours"
        yield Finding("disk", "fail", "this user cannot write there", str(folder), hint)
        return
    yield from _check_space("disk", folder)
    try:
        speed = _measure_disk(folder)
    except OSError as error:
        hint = "free some space, or use --log-dir with another disk"
        yield Finding("disk", "fail", f"writing fails: {error.strerror}", str(folder), hint)
        return
    what = f"{speed / 1e6:,.0f} MB/s written and synced"
    if speed < MIN_DISK_BYTES_PER_SECOND:
        hint = "logs and checkpoints will be slow: use --log-dir with another disk"
        yield Finding("disk", "warn", what, str(folder), hint)
    else:
        yield Finding("disk", "ok", what, str(folder))


def _measure_disk(folder: Path) -> float:
    """Return the bytes per second of a small file that is written and synced."""
    path = folder / f".pdrun-doctor-{os.getpid()}"
    try:
        begin = time.monotonic()
        with path.open("xb") as file:
            file.write(bytes(DISK_TEST_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return DISK_TEST_BYTES / max(1e-6, time.monotonic() - begin)
    finally:
        path.unlink(missing_ok=True)


def _check_space(check: str, folder: Path) -> Iterator[Finding]:
    found = os.statvfs(folder)
    free = found.f_frsize * found.f_bavail
    hint = "remove old logs and checkpoints there, or use another folder"
    what = f"{_format_bytes(free)} free"
    if found.f_files and found.f_favail < MIN_FREE_INODES:
        inodes = f"room for {found.f_favail} more files"
        level = "fail" if found.f_favail == 0 else "warn"
        yield Finding(check, "fail" if level == "fail" else "warn", inodes, str(folder), hint)
    if free < MIN_FREE_BYTES:
        full = free < DISK_TEST_BYTES
        yield Finding(check, "fail" if full else "warn", what, str(folder), hint)
    else:
        yield Finding(check, "ok", what, str(folder))


def _format_bytes(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB"
