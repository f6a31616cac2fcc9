"""
The environment that workers start from: what was inherited, without the words of other launchers.

A worker of pdrun that sees another launcher's RANK, OMPI_COMM_WORLD_SIZE or PMI_FD believes it, and
so does every program that it starts. What only describes the allocation (SLURM_JOB_ID, PBS_JOBID,
LSB_JOBID) stays: scripts use it for names and checkpoints. The token never reaches a worker. Pure:
the environment is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WORDS = frozenset(
    {
        # torchrun, and every launcher that imitates it
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        # Ascend, MindSpore, msrun
        "RANK_ID",
        "RANK_SIZE",
        "DEVICE_ID",
        "MS_ROLE",
        "MS_SCHED_HOST",
        "MS_SCHED_PORT",
        "MS_WORKER_NUM",
        "MS_SERVER_NUM",
        "MS_NODE_ID",
        "MS_TOPO_TIMEOUT",
        "MSRUN_CPU_LIST",
        "MSRUN_BIND_FILE",
        "MSRUN_BIND_FILE_HASH",
        # MPICH, Intel MPI
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "HYDI_CONTROL_FD",
        # a Slurm task: its place among the step's tasks
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_TASK_PID",
        "SLURM_GTIDS",
        "SLURM_STEPID",
        "SLURM_LAUNCH_NODE_IPADDR",
        "SLURM_SRUN_COMM_HOST",
        "SLURM_SRUN_COMM_PORT",
    }
)
"""Variables that are taken out by name."""

BEGINNINGS = (
    "PDRUN_",
    "PET_",
    "TORCHELASTIC_",
    "OMPI_COMM_WORLD_",
    "OMPI_MCA_orte_",
    "OMPI_MCA_ess_",
    "OMPI_MCA_pmix",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_COMMAND",
    "OMPI_APP_CTX_",
    "OMPI_FIRST_RANKS",
    "OMPI_NUM_APP_CTX",
    "OMPI_FILE_LOCATION",
    "PRTE_",
    "PMI_",
    "PMI2_",
    "PMIX_",
    "PALS_",
    "HYDRA_",
    "I_MPI_HYDRA_",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME",
    "MV2_COMM_WORLD_",
    "JSM_NAMESPACE_",
    "FLUX_TASK_",
    "SLURM_STEP_",
    "SLURM_PMI",
    "SLURM_MPI_",
)
"""Variables that are taken out by the beginning of their name."""

_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL|COOKIE|AUTH", re.IGNORECASE)


def is_launchers(name: str) -> bool:
    """
    Return whether a variable is another launcher's word to its own workers, or an option of pdrun
    itself.
    """
    return name in WORDS or name.startswith(BEGINNINGS)


def scrub(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that is left, and the names that were taken out, sorted."""
    gone = tuple(sorted(name for name in environ if is_launchers(name)))
    return {name: value for name, value in environ.items() if name not in gone}, gone


def shown(name: str, value: str) -> str:
    """
    Return a variable's value for a person: hidden when the name tells of a secret, cut when long.
    """
    if _SECRET.search(name):
        return "(hidden)"
    printable = value if value.isprintable() else repr(value)[1:-1]
    return printable if len(printable) <= 200 else printable[:197] + "..."
