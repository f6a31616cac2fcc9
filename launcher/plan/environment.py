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
from typing import TYPE_CHECKING

from pdrun.endpoint import parse_endpoint
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    from pdrun.launcher.plan.model import LaunchPlan, WorkerPlan
    from pdrun.rendezvous.protocol.messages import Assign

LAUNCHER_VARIABLES = frozenset(
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

LAUNCHER_PREFIXES = (
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

_SECRET_NAME = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL|COOKIE|AUTH", re.IGNORECASE)


def is_launcher_variable(name: str) -> bool:
    """
    Return whether a variable is another launcher's word to its own workers, or an option of pdrun
    itself.
    """
    return name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES)


def remove_launcher_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that is left, and the names that were taken out, sorted."""
    gone = tuple(sorted(name for name in environ if is_launcher_variable(name)))
    return {name: value for name, value in environ.items() if name not in gone}, gone


def display_value(name: str, value: str) -> str:
    """
    Return a variable's value for a person: hidden when the name tells of a secret, cut when long.
    """
    if _SECRET_NAME.search(name):
        return "(hidden)"
    printable = value if value.isprintable() else repr(value)[1:-1]
    return printable if len(printable) <= 200 else printable[:197] + "..."


HCCL_CONNECT_TIMEOUT_SECONDS = "600"
"""
Seconds; HCCL's own 120 are too few for workers that import torch at different speeds; torch_npu
warns below 300.
"""


def build_worker_env(
    plan: LaunchPlan, run: str, assign: Assign, worker: WorkerPlan, channel: str = ""
) -> dict[str, str]:
    """
    Return the environment of a worker in a generation.

    Args:
        run: the unique name of this run.
        channel: path of the agent's socket; empty: there is none.
    """
    return {
        "OMP_NUM_THREADS": str(worker.threads),
        **({"HCCL_CONNECT_TIMEOUT": HCCL_CONNECT_TIMEOUT_SECONDS} if plan.backend == "npu" else {}),
        **plan.base_env,
        **({"RANK_TABLE_FILE": plan.spec.place.rank_table} if plan.spec.place.rank_table else {}),
        **make_worker_identity(plan, run, assign, worker, channel).to_env(),
        **plan.visibility.get(worker.local_rank, {}),
        **plan.spec.env,
    }


def make_worker_identity(
    plan: LaunchPlan, run: str, assign: Assign, worker: WorkerPlan, channel: str = ""
) -> WorkerEnv:
    """Return who the worker is: the contract with the script."""
    master = parse_endpoint(assign.master, where="the scheduler's assignment")
    return WorkerEnv(
        rank=assign.first_rank + worker.local_rank,
        world_size=assign.world_size,
        local_rank=worker.local_rank,
        local_world_size=len(plan.workers),
        node_rank=assign.node_rank,
        nodes=assign.nodes,
        master_addr=master.host,
        master_port=master.port,
        run_id=plan.spec.job or run,
        restart_count=assign.restarts,
        max_restarts=plan.spec.policy.max_restarts,
        generation=assign.generation,
        job=plan.spec.job or plan.job,
        node=plan.node,
        device_kind=plan.backend,
        device_index=worker.device_index,
        collective=plan.collective,
        agreed_step=assign.agreed_step,
        agent=channel,
    )
