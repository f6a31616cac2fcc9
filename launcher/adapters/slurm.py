"""
Slurm: a task of a step (srun), and an allocation (the body of a batch script, a shell of salloc).

Values from tests/launcher/adapters/environments (22.05):

    task          SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=6
                  SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_NODEID=2
                  SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_TASKS_PER_NODE=2(x3)
                  SLURM_TASK_PID=11716 SLURMD_NODENAME=n3
    batch script  SLURM_JOB_ID=3 SLURM_JOB_NODELIST=n[1-3] SLURM_PROCID=0 SLURM_LOCALID=0
                  SLURM_NTASKS=6, no SLURM_STEP_ID

A batch script has SLURM_PROCID too. Only SLURM_STEP_ID with SLURM_STEP_NUM_TASKS identifies a task.
A step with one interactive task (``srun --pty bash``) and an outer step around mpirun look like
tasks. In the second case mpirun is the inner launcher.
"""

from __future__ import annotations

import re
from dataclasses import replace

from pdrun.errors import ConfigError
from pdrun.launcher.adapters.model import AllocatedHost, LauncherInfo, Probes
from pdrun.launcher.adapters.parsing import (
    Environ,
    LauncherAdapter,
    check_below,
    infer_node_ranks,
    read_host_list,
    read_number,
    require_number,
)
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts.nodelist import MAX_HOSTS

TASK_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
HET_NODE_LISTS = "SLURM_JOB_NODELIST_HET_GROUP_*"
"""Source of the hosts of a heterogeneous job."""
STEP_DAEMONS = ("slurmstepd",)
_SPECIAL_STEP_IDS = ("4294967290", "4294967291", "4294967292", "4294967293")
"""SLURM_STEP_ID of steps that srun did not start: interactive, batch, extern, pending."""


def parse_tasks_per_node(text: str, where: str) -> tuple[int, ...]:
    """
    Return the counts of ``2(x3),1``: 2 2 2 1.

    Raises:
        ConfigError: the text is malformed, or has more nodes than a job may have.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            raise ConfigError(f"{quote_text(text)} is not a list of counts", where=where)
        times = int(match[2] or 1)
        if times + len(counts) > MAX_HOSTS:
            raise ConfigError(f"{quote_text(text)} has more than {MAX_HOSTS} nodes", where=where)
        counts += [int(match[1])] * times
    return tuple(counts)


def _is_task(environ: Environ) -> bool:
    return (
        all(name in environ for name in TASK_VARIABLES)
        and environ["SLURM_STEP_ID"] not in _SPECIAL_STEP_IDS
    )


def _why_task_stale(environ: Environ, probes: Probes) -> str:
    """Require that the task that Slurm started is this process or an ancestor on this host."""
    pid = environ.get("SLURM_TASK_PID", "")
    if (
        re.fullmatch(r"[0-9]{1,9}", pid)
        and probes.is_ancestor(int(pid)) is False
        and not probes.is_under(STEP_DAEMONS)
    ):
        return f"SLURM_TASK_PID={pid} is not an ancestor of this process"
    return ""


def _read_task(environ: Environ, probes: Probes) -> LauncherInfo:
    job = require_number(environ, "SLURM_JOB_ID", "SLURM_STEP_ID")
    step = require_number(environ, "SLURM_STEP_ID", "SLURM_STEP_ID")
    rank = require_number(environ, "SLURM_PROCID", TASK_VARIABLES[0])
    world = require_number(environ, "SLURM_STEP_NUM_TASKS", TASK_VARIABLES[0], 1)
    if "SLURM_HET_SIZE" in environ and rank >= world:
        raise ConfigError(
            f"is {rank}, but SLURM_STEP_NUM_TASKS is {world}:"
            " a step over several groups of a heterogeneous job",
            where="SLURM_PROCID",
            hint="set --nodes, --node-rank and --scheduler, with --launcher none",
        )
    check_below(rank, world, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    hosts = read_host_list(environ, "SLURM_STEP_NODELIST")
    node_rank = read_number(environ, "SLURM_NODEID")
    check_below(node_rank, len(hosts) or None, "SLURM_NODEID", "the hosts of SLURM_STEP_NODELIST")
    local_size = None
    notes = ()
    if "SLURM_STEP_TASKS_PER_NODE" in environ:
        counts = _read_step_counts(environ, len(hosts), world)
        if node_rank is not None and node_rank < len(counts):
            local_size = counts[node_rank]
        if len(set(counts)) > 1 and local_size == 1:
            # other nodes have several tasks, so this step does not have one task per node
            local_size = max(counts)
        pairs = zip(hosts, counts, strict=False)
        hosts = tuple(AllocatedHost(host.name, count) for host, count in pairs)
    return infer_node_ranks(
        LauncherInfo(
            "slurm-step",
            "srun (a step of Slurm)",
            "task",
            rank,
            world,
            read_number(environ, "SLURM_LOCALID"),
            local_size,
            node_rank,
            len(hosts) or read_number(environ, "SLURM_STEP_NUM_NODES", 1),
            hosts,
            job_id=f"{job}.{step}",
            attempt=read_number(environ, "SLURM_RESTART_COUNT") or 0,
            time_limit=_read_time_limit(environ),
            ends_at=_read_seconds(environ, "SLURM_JOB_END_TIME"),
            notes=notes,
            sources={
                "rank": "SLURM_PROCID",
                "world": "SLURM_STEP_NUM_TASKS",
                "local_rank": "SLURM_LOCALID",
                "local_size": "SLURM_STEP_TASKS_PER_NODE",
                "node_rank": "SLURM_NODEID",
                "nodes": "SLURM_STEP_NODELIST" if hosts else "SLURM_STEP_NUM_NODES",
                "hosts": "SLURM_STEP_NODELIST",
                "job_id": "SLURM_JOB_ID, SLURM_STEP_ID",
                "attempt": "SLURM_RESTART_COUNT",
                "time_limit": "SLURM_JOB_END_TIME, SLURM_JOB_START_TIME",
                "ends_at": "SLURM_JOB_END_TIME",
            },
        )
    )


def _read_step_counts(environ: Environ, nodes: int, world: int) -> tuple[int, ...]:
    """Return the number of tasks of the step on each node."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = quote_text(environ[name])
    counts = parse_tasks_per_node(environ[name], name)
    if nodes and len(counts) != nodes:
        raise ConfigError(f"{text} has {len(counts)} nodes, but the step has {nodes}", where=name)
    if sum(counts) != world:
        raise ConfigError(f"{text} has {sum(counts)} tasks, but the step has {world}", where=name)
    return counts


def _has_allocation(environ: Environ) -> bool:
    return "SLURM_JOB_ID" in environ and (
        "SLURM_JOB_NODELIST" in environ or "SLURM_NODELIST" in environ
    )


def _read_job(environ: Environ, probes: Probes) -> LauncherInfo:
    name = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    job = require_number(environ, "SLURM_JOB_ID", name)
    groups = read_number(environ, "SLURM_HET_SIZE") or 0
    if groups > 1 and "SLURM_JOB_NODELIST_HET_GROUP_0" in environ:
        hosts: dict[str, AllocatedHost] = {}
        for group in range(min(groups, 1024)):
            for host in read_host_list(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{group}"):
                hosts.setdefault(host.name, host)
        name = HET_NODE_LISTS
        found = tuple(hosts.values())
    else:
        found = read_host_list(environ, name)
    if not found:
        raise ConfigError("has no host", where=name)
    if groups <= 1 and "SLURM_TASKS_PER_NODE" in environ:
        counts = parse_tasks_per_node(environ["SLURM_TASKS_PER_NODE"], "SLURM_TASKS_PER_NODE")
        if len(counts) == len(found):
            found = tuple(
                replace(host, slots=count) for host, count in zip(found, counts, strict=True)
            )
    return LauncherInfo(
        "slurm-job",
        "an allocation of Slurm",
        "allocation",
        nodes=len(found),
        hosts=found,
        job_id=str(job),
        attempt=read_number(environ, "SLURM_RESTART_COUNT") or 0,
        time_limit=_read_time_limit(environ),
        ends_at=_read_seconds(environ, "SLURM_JOB_END_TIME"),
        sources={
            "nodes": name,
            "hosts": name,
            "job_id": "SLURM_JOB_ID",
            "attempt": "SLURM_RESTART_COUNT",
            "time_limit": "SLURM_JOB_END_TIME, SLURM_JOB_START_TIME",
            "ends_at": "SLURM_JOB_END_TIME",
        },
    )


def _read_seconds(environ: Environ, name: str) -> float | None:
    value = read_number(environ, name)
    if not value:
        return None
    return float(value)


def _read_time_limit(environ: Environ) -> float | None:
    begin = _read_seconds(environ, "SLURM_JOB_START_TIME")
    end = _read_seconds(environ, "SLURM_JOB_END_TIME")
    if begin and end and end > begin:
        return end - begin
    return None


STEP_ADAPTER = LauncherAdapter(
    "slurm-step", "srun (a step of Slurm)", _is_task, _read_task, _why_task_stale, ("SLURM_",)
)
JOB_ADAPTER = LauncherAdapter(
    "slurm-job", "an allocation of Slurm", _has_allocation, _read_job, prefixes=("SLURM_",)
)
