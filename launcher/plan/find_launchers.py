"""
Find the mpirun or srun of this machine and Slurm's KillWait. It runs programs to ask them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdrun.errors import ConfigError
from pdrun.launcher.adapters.mpirun_command import MpirunProgram, identify_mpirun
from pdrun.launcher.config.spec import JobSpec
from pdrun.launcher.plan.model import ExternalLauncher

MPIRUN_PROGRAMS = ("mpirun", "mpiexec", "jsrun")
PROBE_TIMEOUT_SECONDS = 20.0


def find_external_launcher(
    kind: str, spec: JobSpec, environ: Mapping[str, str]
) -> ExternalLauncher | None:
    """Return the launcher that starts the agents, or its error; None if pdrun starts them."""
    if kind == "mpirun":
        return _find_mpirun(spec.reach.mpirun, environ)
    if kind == "srun":
        program = shutil.which("srun", path=environ.get("PATH"))
        if program is None:
            return ExternalLauncher("srun", error="srun was not found: use --launcher ssh")
        config = read_slurm_config(environ)
        return ExternalLauncher(
            "srun",
            program,
            kill_wait=parse_kill_wait(config),
            binds_tasks="TaskPlugin task/none" not in config,
        )
    return None


def _find_mpirun(named: str, environ: Mapping[str, str]) -> ExternalLauncher:
    names = (named,) if named else MPIRUN_PROGRAMS
    found = [path for name in names if (path := shutil.which(name, path=environ.get("PATH")))]
    if not found:
        return ExternalLauncher(
            "mpirun",
            error=f"{' or '.join(names)} was not found: set it with --mpirun PROGRAM",
        )
    try:
        mpi = identify_mpirun(found[0], _capture_output([found[0], "--version"], environ))
        return ExternalLauncher(
            "mpirun", found[0], _prefer_hydra(mpi, environ) if mpi.family == "mpich" else mpi
        )
    except ConfigError as error:
        return ExternalLauncher("mpirun", found[0], error=f"{error.what}; {error.hint}")


def _prefer_hydra(mpi: MpirunProgram, environ: Mapping[str, str]) -> MpirunProgram:
    """
    Return the mpiexec.hydra beside an mpirun of Intel MPI.

    Intel's mpirun is a script that runs the first mpiexec.hydra of PATH, which may be MPICH's.
    """
    path = shutil.which("mpiexec.hydra", path=str(Path(mpi.program).parent))
    if path is None:
        return mpi
    version_output = _capture_output([path, "--version"], environ)
    if "Intel(R) MPI Library" in version_output:
        return identify_mpirun(path, version_output)
    return mpi


def read_slurm_config(environ: Mapping[str, str]) -> frozenset[str]:
    """Return Slurm's configuration as ``NAME VALUE`` lines; empty if scontrol fails."""
    program = shutil.which("scontrol", path=environ.get("PATH"))
    if program is None:
        return frozenset()
    lines = set()
    for line in _capture_output([program, "show", "config"], environ).splitlines():
        name, equals, value = line.partition("=")
        if equals:
            lines.add(f"{name.strip()} {value.strip()}")
    return frozenset(lines)


def parse_kill_wait(config: Iterable[str]) -> float | None:
    """Return Slurm's KillWait in seconds; None: unknown."""
    for line in config:
        if match := re.fullmatch(r"KillWait ([0-9]{1,6}) sec", line):
            return float(match[1])
    return None


def _capture_output(argv: list[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")
