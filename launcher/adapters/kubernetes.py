"""
Kubernetes: one pod per node. The variables in which operators give a pod its place.

    Trainer, PyTorchJob  PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8
                         PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500
    PyTorchJob, DLC      MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=2
                         (they count pods, not workers)
    Indexed Job          JOB_COMPLETION_INDEX=1 HOSTNAME=job-1 (no variable has the number of pods)
    JobSet               also JOB_INDEX, GLOBAL_REPLICAS and REPLICATED_JOB_NAME, if the template
                         sets them
    Volcano              VC_TASK_INDEX=1 VC_WORKER_NUM=2
                         VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job

`pdrun.launcher.adapters.ascend` has the operators for MindSpore and Ascend.
"""

from __future__ import annotations

import re

from pdrun.errors import ConfigError
from pdrun.launcher.adapters.model import HOST_NAME, LauncherInfo, Probes
from pdrun.launcher.adapters.parsing import (
    Environ,
    LauncherAdapter,
    check_below,
    find_own_host,
    read_host_list,
    read_number,
    read_port,
    require_number,
)
from pdrun.launcher.common.network import is_loopback
from pdrun.launcher.common.parsers import quote_text
from pdrun.topology import is_in_kubernetes

RANK_PER_POD = "pytorch-operator"
"""Name of the adapter that reads RANK as the number of a pod."""


def _read_pet(environ: Environ, probes: Probes) -> LauncherInfo:
    text = environ.get("PET_NNODES", "1")
    if not re.fullmatch(r"[0-9]{1,6}(?::[0-9]{1,6})?", text):
        raise ConfigError(f"must be N or MIN:MAX, got {quote_text(text)}", where="PET_NNODES")
    nodes = int(text.rpartition(":")[2])
    rank = read_number(environ, "PET_NODE_RANK")
    return LauncherInfo.one_per_node(
        "pet",
        "torchrun's variables (PET_*)",
        rank,
        nodes,
        head=environ.get("PET_MASTER_ADDR", ""),
        port=read_port(environ, "PET_MASTER_PORT"),
        job_id=environ.get("PET_RDZV_ID", ""),
        sources={
            "rank": "PET_NODE_RANK",
            "world": "PET_NNODES",
            "node_rank": "PET_NODE_RANK",
            "nodes": "PET_NNODES",
            "head": "PET_MASTER_ADDR",
            "port": "PET_MASTER_PORT",
            "job_id": "PET_RDZV_ID",
        },
    )


def _is_per_pod(environ: Environ) -> bool:
    """
    Return whether RANK counts pods.

    It does if an operator sets it. A LOCAL_RANK of one number means that another launcher set RANK,
    unless the pod has one worker.
    """
    has_rank = "RANK" in environ and "MASTER_ADDR" in environ
    has_list_or_none = "," in environ.get("LOCAL_RANK", "0,1")
    has_one = environ.get("LOCAL_RANK") == "0" and environ.get("LOCAL_WORLD_SIZE") == "1"
    return is_in_kubernetes(environ) and has_rank and (has_list_or_none or has_one)


def _read_per_pod(environ: Environ, probes: Probes) -> LauncherInfo:
    rank = require_number(environ, "RANK", "MASTER_ADDR")
    nodes = require_number(environ, "WORLD_SIZE", "RANK", 1)
    per_pod = read_number(environ, "LOCAL_WORLD_SIZE", 1)
    if per_pod is not None:
        # AscendJob: WORLD_SIZE counts workers, RANK pods or the first worker of each pod
        check_below(rank, nodes, "RANK", "WORLD_SIZE")
        if nodes % per_pod:
            raise ConfigError(
                f"must be a multiple of LOCAL_WORLD_SIZE={per_pod}, got {nodes}",
                where="WORLD_SIZE",
            )
        nodes = nodes // per_pod
        if rank >= nodes:
            rank = rank // per_pod
    check_below(rank, nodes, "RANK", "WORLD_SIZE")
    head, head_source = environ["MASTER_ADDR"], "MASTER_ADDR"
    if nodes > 1 and (head == "localhost" or is_loopback(head)):
        if rank:
            raise ConfigError(
                f"is {head}, this pod itself, but RANK is {rank}",
                where="MASTER_ADDR",
                hint="set it to the name of the pod with RANK 0",
            )
        # operators give the master pod this address, and its name to the others
        head, head_source = probes.address_for(probes.hostname), HOST_NAME
    return LauncherInfo.one_per_node(
        RANK_PER_POD,
        "an operator of PyTorch on Kubernetes",
        rank,
        nodes,
        head=head,
        port=read_port(environ, "MASTER_PORT"),
        job_id="",
        workers_per_node=per_pod,
        sources={
            "workers_per_node": "LOCAL_WORLD_SIZE",
            "rank": "RANK",
            "world": "WORLD_SIZE",
            "node_rank": "RANK",
            "nodes": "WORLD_SIZE",
            "head": head_source,
            "port": "MASTER_PORT",
        },
    )


def _find_pod_name(environ: Environ, probes: Probes) -> tuple[str, str]:
    """
    Return the name and the domain of this pod. /etc/hosts has the domain if the pod has a headless
    service.
    """
    pod = environ.get("HOSTNAME", "") or probes.hostname
    try:
        text = probes.read_file("/etc/hosts")
    except (OSError, ValueError):
        return pod, ""
    for line in text.splitlines():
        for word in line.partition("#")[0].split()[1:]:
            if word.startswith(pod + "."):
                return pod, word[len(pod) :]
    return pod, ""


def _read_indexed_job(environ: Environ, probes: Probes) -> LauncherInfo:
    index = require_number(environ, "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST")
    pod, domain = _find_pod_name(environ, probes)
    match = re.fullmatch(rf"(.+)-{index}(-[a-z0-9]{{5}})?", pod)
    first = f"{match[1]}-0{domain}" if match and domain else ""
    per_job = read_number(environ, "PODS_PER_JOB", 1)
    group = read_number(environ, "JOB_INDEX")
    jobs = None
    if "REPLICATED_JOB_NAME" in environ:
        jobs = read_number(environ, "GLOBAL_REPLICAS", 1)
    title = "an indexed Job of Kubernetes"
    nodes = None
    node_rank = index
    if jobs is not None:
        title = "a JobSet of Kubernetes"
        if jobs > 1:
            if group is None or per_job is None:
                raise ConfigError(
                    f"is {jobs}, but JOB_INDEX or PODS_PER_JOB is not set",
                    where="GLOBAL_REPLICAS",
                    hint="set both in the template, or use --nodes and --node-rank",
                )
            nodes = jobs * per_job
            node_rank = group * per_job + index
            check_below(node_rank, nodes, "JOB_INDEX", "GLOBAL_REPLICAS")
            match = re.fullmatch(rf"(.+)-{group}-{index}(-[a-z0-9]{{5}})?", pod)
            first = f"{match[1]}-0-0{domain}" if match and domain else ""
        else:
            nodes = per_job
    return LauncherInfo.one_per_node(
        "jobset" if jobs is not None else "indexed-job",
        title,
        node_rank,
        nodes,
        head=first,
        job_id=match[1] if match else "",
        sources={
            "rank": "JOB_COMPLETION_INDEX",
            "node_rank": "JOB_COMPLETION_INDEX",
            **dict.fromkeys(("nodes", "world"), "GLOBAL_REPLICAS, PODS_PER_JOB"),
            "head": "HOSTNAME, /etc/hosts",
            "job_id": "HOSTNAME",
        },
    )


_VOLCANO_HOSTS = re.compile(r"VC_([A-Z0-9_]+)_HOSTS")


def _read_volcano(environ: Environ, probes: Probes) -> LauncherInfo:
    """
    Return the hosts of this pod's task. Of two tasks called master and worker, master is first.
    """
    lists = {
        match[1]: read_host_list(environ, name)
        for name in sorted(environ)
        if (match := _VOLCANO_HOSTS.fullmatch(name))
    }
    index = read_number(environ, "VC_TASK_INDEX")
    if index is None:
        index = require_number(environ, "VK_TASK_INDEX", "VC_*_HOSTS")
    pod = environ.get("HOSTNAME", "") or probes.hostname
    own_tasks = []
    for task, hosts in lists.items():
        if any(host.name.partition(".")[0] == pod for host in hosts):
            own_tasks.append(task)
    if set(lists) == {"MASTER", "WORKER"}:
        hosts = (*lists["MASTER"], *lists["WORKER"])
        source = "VC_MASTER_HOSTS, VC_WORKER_HOSTS"
    elif len(lists) == 1 or len(own_tasks) == 1:
        task = own_tasks[0] if len(own_tasks) == 1 else next(iter(lists))
        hosts = lists[task]
        source = f"VC_{task}_HOSTS"
    else:
        raise ConfigError(
            f"{pod} is in none of the host lists",
            where=", ".join(f"VC_{task}_HOSTS" for task in lists)[:200],
            hint="set --nodes, --node-rank and --scheduler, with --launcher none",
        )
    node_rank = None
    for at, host in enumerate(hosts):
        if host.name.partition(".")[0] == pod:
            node_rank = at
            break
    else:
        node_rank = index if len(lists) == 1 else find_own_host(hosts, probes)
    check_below(node_rank, len(hosts), "VC_TASK_INDEX", source)
    return LauncherInfo.one_per_node(
        "volcano",
        "a Job of Volcano",
        node_rank,
        len(hosts),
        hosts,
        job_id=re.sub(r"-[a-z0-9]+-[0-9]+$", "", pod),
        sources={
            "rank": "VC_TASK_INDEX",
            "node_rank": "VC_TASK_INDEX",
            "nodes": source,
            "hosts": source,
            "world": source,
            "job_id": "HOSTNAME",
        },
    )


PET_ADAPTER = LauncherAdapter(
    "pet",
    "torchrun's variables (PET_*)",
    lambda environ: "PET_NNODES" in environ,
    _read_pet,
    prefixes=("PET_",),
)
POD_ADAPTERS = (
    LauncherAdapter(
        "volcano",
        "Volcano",
        lambda environ: (
            any(_VOLCANO_HOSTS.fullmatch(name) for name in environ)
            and ("VC_TASK_INDEX" in environ or "VK_TASK_INDEX" in environ)
        ),
        _read_volcano,
        prefixes=("VC_", "VK_"),
    ),
    LauncherAdapter(
        RANK_PER_POD,
        "an operator of PyTorch",
        _is_per_pod,
        _read_per_pod,
        prefixes=("MASTER_", "RANK", "WORLD_SIZE"),
    ),
    LauncherAdapter(
        "jobset",
        "JobSet",
        lambda environ: (
            is_in_kubernetes(environ)
            and "JOB_COMPLETION_INDEX" in environ
            and "REPLICATED_JOB_NAME" in environ
        ),
        _read_indexed_job,
        prefixes=("JOB_", "REPLICATED_JOB_", "GLOBAL_REPLICAS", "PODS_PER_JOB"),
    ),
    LauncherAdapter(
        "indexed-job",
        "an indexed Job",
        lambda environ: (
            is_in_kubernetes(environ)
            and "JOB_COMPLETION_INDEX" in environ
            and "REPLICATED_JOB_NAME" not in environ
        ),
        _read_indexed_job,
        prefixes=("JOB_COMPLETION_INDEX",),
    ),
)
