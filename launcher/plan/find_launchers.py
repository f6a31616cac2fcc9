"""
Which mpirun and which srun this machine has, and how long Slurm waits: the only questions that run
a program.
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
    how: str, spec: JobSpec, environ: Mapping[str, str]
) -> ExternalLauncher | None:
    """Return what starts the agents, or why it cannot; None where nothing but pdrun does."""
    if how == "mpirun":
        return _find_mpirun(spec.reach.mpirun, environ)
    if how == "srun":
        program = shutil.which("srun", path=environ.get("PATH"))
        if program is None:
            return ExternalLauncher("srun", error="there is no srun here: use --launcher ssh")
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
            error=f"there is no {' or '.join(names)} here: say which with --mpirun PROGRAM",
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
    Return Intel MPI's own mpiexec.hydra where an mpirun is Intel's script: that runs any which PATH
    has.
    """
    path = shutil.which("mpiexec.hydra", path=str(Path(mpi.program).parent))
    said = _capture_output([path, "--version"], environ) if path else ""
    return identify_mpirun(path, said) if path and "Intel(R) MPI Library" in said else mpi


def read_slurm_config(environ: Mapping[str, str]) -> frozenset[str]:
    """Return Slurm's configuration as ``NAME VALUE`` lines; empty when it cannot be asked."""
    program = shutil.which("scontrol", path=environ.get("PATH"))
    text = _capture_output([program, "show", "config"], environ) if program else ""
    return frozenset(
        f"{name.strip()} {value.strip()}"
        for name, _, value in (line.partition("=") for line in text.splitlines() if "=" in line)
    )


def parse_kill_wait(config: Iterable[str]) -> float | None:
    """Return Slurm's KillWait in seconds, or None when it is not known."""
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
