"""
The final environment of one worker, composed in one visible order; later lines win. Pure.

    1. threads, unless the user has set them already          WorkerPlan.threads
       and HCCL's longest wait for its links
    2. inherited, launcher variables of others scrubbed,      LaunchPlan.base_env
       and the defaults that are the same for all workers;
       the rank table that the job was started from           Place.rank_table
    3. ranks, store, job                                      WorkerEnv
    4. the device's visibility                                LaunchPlan.visibility
    5. what the user asked for by name                        JobSpec.env
"""

from __future__ import annotations

from pdrun.endpoint import parse_endpoint
from pdrun.launcher.plan.model import LaunchPlan, WorkerPlan
from pdrun.rendezvous.protocol.messages import Assign
from pdrun.worker_env import WorkerEnv

HCCL_CONNECT_TIMEOUT = "600"
"""
Seconds; HCCL's own 120 are too few for workers that import torch at different speeds; torch_npu
warns below 300.
"""


def worker_env(
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
        **({"HCCL_CONNECT_TIMEOUT": HCCL_CONNECT_TIMEOUT} if plan.backend == "npu" else {}),
        **plan.base_env,
        **({"RANK_TABLE_FILE": plan.spec.place.rank_table} if plan.spec.place.rank_table else {}),
        **identity(plan, run, assign, worker, channel).to_env(),
        **plan.visibility.get(worker.local_rank, {}),
        **plan.spec.env,
    }


def identity(
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
