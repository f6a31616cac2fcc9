"""
The words with which each kind of mpirun starts one task a node, and how each is known. Pure.

    Open MPI 4.1   "mpirun (Open MPI) 4.1.4"                 mpirun -np 2 --host a:1,b:1 --map-by ppr:1:node ... -x NAME
    Open MPI 5.0   "mpirun (Open MPI) 5.0.7"                 the same; parameters of PRRTE are called --prtemca
    MPICH 4, 5     "HYDRA build details:\\n Version: 4.0.2"   mpiexec -n 2 -hosts a,b -ppn 1; passes its environment on
    Intel MPI      "Intel(R) MPI Library ... Version 2021"   the same, and pins tasks unless I_MPI_PIN=0
    jsrun          "jsrun" in its name                       jsrun -n 2 -r 1 -a 1 -c ALL_CPUS -g ALL_GPUS -b none ...

Open MPI binds a task to a core and cuts host names at the first dot unless it is told not to, and
refuses root; values of variables are never words of a command: they go by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.hosts.selection import Host

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
    """An mpirun that was found."""

    program: str
    """As it is to be called: a path."""
    family: MpiFamily
    version: str = ""


def identify_mpirun(program: str, said: str) -> MpirunProgram:
    """
    Return which mpirun a program is, by what ``--version`` printed.

    Raises:
        ConfigError: it is none that is known.
    """
    if match := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (([0-9]+)\.[0-9.]+)", said):
        return MpirunProgram(
            program,
            "openmpi4" if int(match[2]) < 5 and "PRRTE" not in match[0] else "openmpi5",
            match[1],
        )
    if match := re.search(r"Intel\(R\) MPI Library.*Version ([0-9.]+)", said):
        return MpirunProgram(program, "intelmpi", match[1])
    if match := re.search(r"HYDRA build details:\s+Version:\s+([0-9.]+)", said):
        return MpirunProgram(program, "mpich", match[1])
    if program.rpartition("/")[2].startswith("jsrun"):
        return MpirunProgram(program, "jsrun", said.strip().splitlines()[0][:40] if said.strip() else "")
    first = said.strip().splitlines()[0][:80] if said.strip() else "nothing"
    raise ConfigError(
        f"{program} is no mpirun that pdrun knows: --version says {first!r}",
        where="--mpirun",
        hint="known are Open MPI, MPICH, Intel MPI and jsrun; or start the hosts with --launcher ssh",
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
        hosts: empty: the mpirun knows them (an allocation, its own hostfile).
        names: variables that the tasks get from mpirun's environment.
        options: more words for mpirun, before the program.
        root: whether the user is root.

    Raises:
        UsageError: a host has a port, or a user that this mpirun cannot be told.
    """
    for host in hosts:
        if host.port is not None or (host.user and not mpi.family.startswith("openmpi")):
            what = "port" if host.port is not None else "user"
            raise UsageError(
                f"{host.name} has a {what}, which {MPI_TITLES[mpi.family]} cannot be told",
                where=host.where or "--hosts",
                hint="say it in ~/.ssh/config, or use --launcher ssh",
            )
    words = {
        "openmpi4": _openmpi_args,
        "openmpi5": _openmpi_args,
        "mpich": _hydra_args,
        "intelmpi": _hydra_args,
        "jsrun": _jsrun_args,
    }
    return (mpi.program, *words[mpi.family](mpi, hosts, nodes, names, root), *options, *argv)


def mpirun_environment(mpi: MpirunProgram) -> dict[str, str]:
    """
    Return variables that mpirun itself needs: no pinning, for a task has all the workers of its
    node.
    """
    return {"I_MPI_PIN": "0"} if mpi.family == "intelmpi" else {}


def _openmpi_args(
    mpi: MpirunProgram, hosts: Sequence[Host], nodes: int, names: Sequence[str], root: bool
) -> list[str]:
    old = mpi.family == "openmpi4"
    whole = (
        ["--mca", "orte_keep_fqdn_hostnames", "1"]
        if old
        else ["--prtemca", "prte_keep_fqdn_hostnames", "1"]
    )
    listed = ",".join(f"{f'{host.user}@' if host.user else ''}{host.name}:1" for host in hosts)
    return [
        "-np",
        str(nodes),
        *(["--host", listed] if hosts else []),
        "--map-by",
        "ppr:1:node",
        "--bind-to",
        "none",
        *whole,
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
