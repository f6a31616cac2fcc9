"""
The environment of a worker: inherited variables, then pdrun's own. Pure.

Variables of other launchers are removed. A worker would believe another launcher's RANK,
OMPI_COMM_WORLD_SIZE or PMI_FD, and so would every program that it starts. Variables that describe
the allocation (SLURM_JOB_ID, PBS_JOBID, LSB_JOBID) stay, because scripts use them for names and
checkpoints. A worker never gets the token.

The order, of which later steps override earlier ones:

1. OMP_NUM_THREADS from `WorkerPlan.threads`, HCCL's connection timeout, the network interface of
   this node (`LaunchPlan.interfaces`), and with ``--hang-timeout`` the pipe of torch's flight
   recorder.
2. `LaunchPlan.base_env`: the inherited variables. RANK_TABLE_FILE of a job from a rank table.
3. `WorkerEnv`: ranks, store, job.
4. `LaunchPlan.visibility`: the worker's device.
5. ``--env``: `JobSpec.env`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdrun.endpoint import parse_endpoint
from pdrun.topology import record_interface_variables, recorded_interface_variables
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    from pdrun.launcher.plan.model import LaunchPlan, WorkerPlan
    from pdrun.rendezvous.protocol.messages import Assign

LAUNCHER_VARIABLES = frozenset(
    {
        # torchrun and launchers compatible with it
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
        # a Slurm task: its rank in the step
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
"""Names of the variables that are removed."""

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
"""Name prefixes of the variables that are removed."""

WORKERS_OWN = frozenset({"PDRUN_PEAK_FLOPS"})
"""Names of variables of pdrun that workers read."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL|COOKIE|AUTH", re.IGNORECASE)


def is_launcher_variable(name: str) -> bool:
    """
    Return whether a variable belongs to another launcher's workers or is an option of pdrun.
    """
    if name in WORKERS_OWN:
        return False
    return name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES)


def remove_launcher_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the remaining environment, and the sorted names of the removed variables."""
    ours = recorded_interface_variables(environ)
    removed = tuple(sorted(name for name in environ if name in ours or is_launcher_variable(name)))
    return {name: value for name, value in environ.items() if name not in removed}, removed


def display_value(name: str, value: str) -> str:
    """
    Return a variable's value for display: hidden if the name is that of a secret, cut if long.
    """
    if _SECRET_NAME.search(name):
        return "(hidden)"
    if not value.isprintable():
        value = repr(value)[1:-1]
    if len(value) > 200:
        return value[:197] + "..."
    return value


def format_variables(env: Mapping[str, str]) -> str:
    """Return variables for display as ``NAME=VALUE NAME=VALUE``, or ``-`` without any."""
    return " ".join(f"{name}={display_value(name, value)}" for name, value in env.items()) or "-"


HCCL_CONNECT_TIMEOUT_SECONDS = "600"
"""
Seconds. HCCL's default of 120 is too short if workers import torch at different speeds. torch_npu
warns below 300.
"""


def _choose_device_index(plan: LaunchPlan, worker: WorkerPlan) -> int:
    """
    Return DEVICE_ID. CPUs have no index of their own: it is the one that the user has given (a rank
    table, ``host:4,5``), else the local rank, as under msrun.
    """
    if plan.backend == "cpu" and plan.spec.resources.indices is None:
        return worker.local_rank
    return worker.device_index


def build_worker_env(
    plan: LaunchPlan, run: str, assign: Assign, worker: WorkerPlan, channel: str = ""
) -> dict[str, str]:
    """
    Return the environment of a worker in a generation.

    Args:
        run: unique name of this run.
        channel: path of the agent's socket; empty: no socket.
    """
    env = {"OMP_NUM_THREADS": str(worker.threads)}
    if plan.backend == "npu":
        env["HCCL_CONNECT_TIMEOUT"] = HCCL_CONNECT_TIMEOUT_SECONDS
    if channel and plan.spec.policy.hang_timeout is not None:
        from pdrun.launcher.diagnosis.flight_recorder import trace_variables

        env |= trace_variables(channel.rpartition("/")[0])
    env |= plan.interfaces
    env |= record_interface_variables(plan.interfaces)  # not the user's, if a worker starts a job
    env |= plan.base_env
    if plan.spec.place.rank_table:
        env["RANK_TABLE_FILE"] = plan.spec.place.rank_table
    env |= make_worker_identity(plan, run, assign, worker, channel).to_env()
    env |= plan.visibility.get(worker.local_rank, {})
    env |= plan.spec.env
    return env


def make_worker_identity(
    plan: LaunchPlan, run: str, assign: Assign, worker: WorkerPlan, channel: str = ""
) -> WorkerEnv:
    """Return rank, world size and the other variables on which scripts rely."""
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
        device_index=_choose_device_index(plan, worker),
        collective=plan.collective,
        agreed_step=assign.agreed_step,
        agent=channel,
        run=run,
    )
