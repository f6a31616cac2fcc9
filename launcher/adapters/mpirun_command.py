"""
The command that starts one task per node with each kind of mpirun. Pure.

The kind is identified by the output of ``--version``:

    Open MPI 4.1   "mpirun (Open MPI) 4.1.4"
                   mpirun -np 2 --host a:1,b:1 --map-by ppr:1:node ... -x NAME
    Open MPI 5.0   "mpirun (Open MPI) 5.0.7"
                   the same; the option for parameters of PRRTE is --prtemca
    MPICH 4, 5     "HYDRA build details:\\n Version: 4.0.2"
                   mpiexec -n 2 -hosts a,b -ppn 1; passes its environment on
    Intel MPI      "Intel(R) MPI Library ... Version 2021"
                   the same; pins tasks unless I_MPI_PIN=0
    jsrun          "jsrun" in the program's name
                   jsrun -n 2 -r 1 -a 1 -c ALL_CPUS -g ALL_GPUS -b none ...

By default Open MPI binds a task to a core, cuts host names at the first dot and refuses root. The
options here change that. Variables are passed by name, so that no value is visible in a command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.hosts.selection import Host
from pdrun.quick_dataclass import dataclass

MpiFamily = Literal["openmpi4", "openmpi5", "mpich", "intelmpi", "jsrun"]
MPI_TITLES = {
    "openmpi4": "Open MPI 4",
    "openmpi5": "Open MPI 5",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "jsrun": "jsrun",
}


@dataclass(frozen=True)
class MpirunProgram:
    """An mpirun on this machine."""

    program: str
    """Path of the program."""
    family: MpiFamily
    version: str = ""


def identify_mpirun(program: str, version_output: str) -> MpirunProgram:
    """
    Identify an mpirun by the output of ``--version``.

    Raises:
        ConfigError: it is not a known mpirun.
    """
    if match := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (([0-9]+)\.[0-9.]+)", version_output):
        family: MpiFamily = "openmpi5"
        if int(match[2]) < 5 and "PRRTE" not in match[0]:
            family = "openmpi4"
        return MpirunProgram(program, family, match[1])
    if match := re.search(r"Intel\(R\) MPI Library.*Version ([0-9.]+)", version_output):
        return MpirunProgram(program, "intelmpi", match[1])
    if match := re.search(r"HYDRA build details:\s+Version:\s+([0-9.]+)", version_output):
        return MpirunProgram(program, "mpich", match[1])
    first_line, *_ = version_output.strip().splitlines() or [""]
    if program.rpartition("/")[2].startswith("jsrun"):
        return MpirunProgram(program, "jsrun", first_line[:40])
    raise ConfigError(
        f"{program} is not a known mpirun: --version prints {first_line[:80]!r}",
        where="--mpirun",
        hint="use Open MPI, MPICH, Intel MPI or jsrun; or start the agents with --launcher ssh",
    )


def build_mpirun_command(
    mpi: MpirunProgram,
    hosts: Sequence[Host],
    nodes: int,
    names: Sequence[str],
    options: Sequence[str],
    argv: Sequence[str],
    *,
    root: bool,
) -> tuple[str, ...]:
    """
    Return the command that runs ``argv`` once on each node.

    Args:
        hosts: hosts of the job; empty: mpirun knows them (an allocation, its default hostfile).
        names: variables that the tasks get from mpirun's environment.
        options: additional options of mpirun, before the program.
        root: whether the user is root.

    Raises:
        UsageError: a host has a port, or a user that this mpirun does not support.
    """
    for host in hosts:
        setting = ""
        if host.port is not None:
            setting = "port"
        elif host.user and not mpi.family.startswith("openmpi"):
            setting = "user"
        if setting:
            raise UsageError(
                f"{host.name} has a {setting}, which {MPI_TITLES[mpi.family]} does not support",
                where=host.where or "--hosts",
                hint="set it in ~/.ssh/config, or use --launcher ssh",
            )
    arg_builders = {
        "openmpi4": _openmpi_args,
        "openmpi5": _openmpi_args,
        "mpich": _hydra_args,
        "intelmpi": _hydra_args,
        "jsrun": _jsrun_args,
    }
    return (mpi.program, *arg_builders[mpi.family](mpi, hosts, nodes, names, root), *options, *argv)


def mpirun_environment(mpi: MpirunProgram) -> dict[str, str]:
    """
    Return the variables that mpirun itself needs. They switch pinning off, because a task starts
    all workers of its node.
    """
    if mpi.family == "intelmpi":
        return {"I_MPI_PIN": "0"}
    return {}


def _openmpi_args(
    mpi: MpirunProgram, hosts: Sequence[Host], nodes: int, names: Sequence[str], root: bool
) -> list[str]:
    keep_fqdn = ["--prtemca", "prte_keep_fqdn_hostnames", "1"]
    if mpi.family == "openmpi4":
        keep_fqdn = ["--mca", "orte_keep_fqdn_hostnames", "1"]
    slots = []
    for host in hosts:
        login = f"{host.user}@{host.name}" if host.user else host.name
        slots.append(f"{login}:1")
    return [
        "-np",
        str(nodes),
        *(["--host", ",".join(slots)] if hosts else []),
        "--map-by",
        "ppr:1:node",
        "--bind-to",
        "none",
        *keep_fqdn,
        *(["--allow-run-as-root"] if root else []),
        *(word for name in names for word in ("-x", name)),
    ]


def _hydra_args(
    mpi: MpirunProgram, hosts: Sequence[Host], nodes: int, names: Sequence[str], root: bool
) -> list[str]:
    listed = ["-hosts", ",".join(host.name for host in hosts)] if hosts else []
    keep = ["-disable-auto-cleanup"] if mpi.family == "mpich" else []
    return ["-n", str(nodes), *listed, "-ppn", "1", *keep]


def _jsrun_args(
    mpi: MpirunProgram, hosts: Sequence[Host], nodes: int, names: Sequence[str], root: bool
) -> list[str]:
    return [
        "-n",
        str(nodes),
        "-r",
        "1",
        "-a",
        "1",
        "-c",
        "ALL_CPUS",
        "-g",
        "ALL_GPUS",
        "-b",
        "none",
        *(word for name in names for word in ("-E", name)),
    ]
