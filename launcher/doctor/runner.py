"""Runs the checks of this machine, all at the same time; one that does not end is a finding."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pdrun.backends.base import ProbeEnvironment
from pdrun.backends.tools import make_tool_runner
from pdrun.errors import UsageError
from pdrun.launcher.doctor import device_checks, job_checks, system_checks, variable_checks
from pdrun.launcher.doctor.finding import Finding

LIMIT_SECONDS = 10.0
"""Longest time of all checks of a machine."""

Check = Callable[[ProbeEnvironment], Iterable[Finding]]

CHECKS: Mapping[str, Check] = {
    "versions": job_checks.check_versions,
    "jobs": job_checks.check_jobs,
    "limits": system_checks.check_limits,
    "shm": system_checks.check_shared_memory,
    "tmp": system_checks.check_temporary_folder,
    "clock": system_checks.check_clock,
    "quota": system_checks.check_quota,
    "disk": system_checks.check_disk,
    "variables": variable_checks.check_variables,
    "visibility": device_checks.check_visibility,
    "driver": device_checks.check_driver,
    "devices": device_checks.check_devices,
}
NODE_CHECKS = ("names", "ports", "latency", "bandwidth", "allreduce", "differs", "job")
"""Checks between nodes; see `node_checks`."""


def make_environment(environ: Mapping[str, str] = os.environ) -> ProbeEnvironment:
    """Return what checks of this machine read."""
    return ProbeEnvironment(
        Path("/"), environ, make_tool_runner(environ), sys.platform, platform.machine()
    )


def parse_check_names(text: str) -> tuple[str, ...]:
    """
    Return the names of ``--only``; empty: all.

    Raises:
        UsageError: there is no such check.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in CHECKS and name not in NODE_CHECKS:
            known = ", ".join((*CHECKS, *NODE_CHECKS))
            raise UsageError(f"no such check {name!r}", where="--only", hint=f"one of {known}")
    return names


def run_checks(
    here: ProbeEnvironment,
    only: Sequence[str] = (),
    *,
    limit: float = LIMIT_SECONDS,
    checks: Mapping[str, Check] = CHECKS,
) -> list[Finding]:
    """
    Return the findings of this machine.

    Args:
        here: what the checks read.
        only: names of checks; empty: all.
        limit: seconds after which checks are given up.
        checks: the checks, by name.
    """
    names = [name for name in checks if not only or name in only]
    results: dict[str, list[Finding]] = {}

    def run(name: str) -> None:
        try:
            results[name] = list(checks[name](here))
        except Exception as error:  # a check that fails must not hide the others
            what = f"the check failed: {type(error).__name__}: {error}"
            results[name] = [Finding(name, "warn", what, hint="please report this")]

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in names}
    deadline = time.monotonic() + limit
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    found: list[Finding] = []
    for name in names:
        if name in results:
            found += results[name]
        else:
            what = f"the check did not end in {limit:g} s"
            hint = "a disk, driver or name server hangs: look for processes in state D, and dmesg"
            found.append(Finding(name, "fail", what, hint=hint))
    return found
