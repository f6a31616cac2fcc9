"""
What a process inherits from its parent: read in one process, adopted in another.

A supervisor that is a child of its agent has the agent's limits, priority, namespaces and cgroup. A
supervisor that was forked from a warm process (`warm_server`) has those of the shell in which
``pdrun warm start`` was run. Some can be set (`SETTABLE`). The others must be equal. `adopt_state`
does both and returns what cannot be adopted.

Loaded by path in the workers' interpreter. Standard library only. Limits: I/O priority, session
keyring and memory policy are compared only on x86-64 and aarch64, whose system call numbers are
known here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SETTABLE = ("umask", "nice", "scheduler", "cpus", "oom_score_adj", "limits", "ignored")
_STATUS_FIELDS = (
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Speculation_Store_Bypass",
    "SpeculationIndirectBranch",
    "THP_enabled",
    "Mems_allowed",
)
"""Fields of /proc/self/status that must be equal."""
_PROC_FILES = (
    "cgroup",
    "personality",
    "attr/current",
    "loginuid",
    "coredump_filter",
    "timerslack_ns",
)
"""Files of /proc/self that must be equal."""
_SYSCALL_NUMBERS = {"x86_64": (252, 250, 239), "aarch64": (31, 219, 236)}
"""Machine -> system call numbers of ioprio_get, keyctl, get_mempolicy."""
RESET_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGQUIT,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
"""Signals that a worker never inherits as ignored (`worker_exec.exec_child`)."""

_LIBC_SIGNALS = (32, 33)
"""Signals of the C library: posix_spawn leaves them ignored, and no program may change them."""


def read_state() -> dict[str, Any]:
    """Return what this process has inherited, as JSON values: SETTABLE and what must be equal."""
    status = dict(line.split(":", 1) for line in _read_proc("status").splitlines() if ":" in line)
    found: dict[str, Any] = {name: status.get(name, "").strip() for name in _STATUS_FIELDS}
    found.update({name: _read_proc(name) for name in _PROC_FILES})
    found.update(
        {
            f"namespace {name}": os.readlink(f"/proc/self/ns/{name}")
            for name in os.listdir("/proc/self/ns")
        }
    )
    root = os.stat("/")
    found.update(root=[root.st_dev, root.st_ino], calls=_read_syscalls())
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    kept = sum(1 << (number - 1) for number in (*RESET_SIGNALS, *_LIBC_SIGNALS))
    found.update(
        umask=int(status["Umask"], 8) if "Umask" in status else -1,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        scheduler=[os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        cpus=sorted(os.sched_getaffinity(0)),
        oom_score_adj=_read_proc("oom_score_adj").strip(),
        limits={name: list(resource.getrlimit(getattr(resource, name))) for name in names},
        ignored=int(status.get("SigIgn", "0"), 16) & ~kept,
    )
    return found


def find_difference(here: dict[str, Any], wanted: dict[str, Any], *, settable: bool = False) -> str:
    """Return the first name that differs, or empty. ``settable``: compare SETTABLE names, too."""
    for name in sorted({*here, *wanted}):
        if (settable or name not in SETTABLE) and here.get(name) != wanted.get(name):
            return name
    return ""


def adopt_state(wanted: dict[str, Any]) -> str:
    """
    Change this process to the state ``wanted`` (see `read_state`).

    Returns:
        the name of what cannot be adopted, or the empty string.
    """
    here = read_state()
    differs = find_difference(here, wanted)
    if differs:
        return differs
    for name in SETTABLE:
        if here[name] != wanted[name]:
            try:
                _SETTERS[name](wanted[name])
            except (OSError, ValueError, OverflowError):
                return name
    return find_difference(read_state(), wanted, settable=True)


def _read_proc(name: str) -> str:
    try:
        with open(f"/proc/self/{name}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _read_syscalls() -> list[str]:
    """Return I/O priority, session keyring and memory policy; empty on other machines."""
    numbers = _SYSCALL_NUMBERS.get(os.uname().machine)
    if numbers is None:
        return []
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    mode = ctypes.c_int(-1)
    nodes = (ctypes.c_ulong * 64)()
    policy = libc.syscall(
        numbers[2], ctypes.byref(mode), nodes, ctypes.c_ulong(64 * 64), None, ctypes.c_ulong(0)
    )
    return [
        str(libc.syscall(numbers[0], 1, 0)),
        str(libc.syscall(numbers[1], 0, -3, 0)),
        f"{mode.value}:{','.join(map(str, nodes))}" if policy == 0 else "",
    ]


def _set_umask(value: int) -> None:
    if value >= 0:
        os.umask(value)


def _set_scheduler(value: list[int]) -> None:
    os.sched_setscheduler(0, value[0], os.sched_param(value[1]))


def _set_oom_score_adj(value: str) -> None:
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(value)


def _set_limits(value: dict[str, list[int]]) -> None:
    for name, limit in value.items():
        number = getattr(resource, name)
        if list(resource.getrlimit(number)) != limit:
            resource.setrlimit(number, (limit[0], limit[1]))


def _set_ignored(mask: int) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *RESET_SIGNALS}:
        wanted = signal.SIG_IGN if mask >> (number - 1) & 1 else signal.SIG_DFL
        if signal.getsignal(number) not in (wanted, None):
            signal.signal(number, wanted)


_SETTERS: dict[str, Any] = {
    "umask": _set_umask,
    "nice": lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    "scheduler": _set_scheduler,
    "cpus": lambda value: os.sched_setaffinity(0, value),
    "oom_score_adj": _set_oom_score_adj,
    "limits": _set_limits,
    "ignored": _set_ignored,
}
