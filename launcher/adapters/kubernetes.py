"""
Kubernetes: one pod a node. What its operators tell a pod about its place.

    Trainer, PyTorchJob  PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=job-node-0-0.job
                         PET_MASTER_PORT=29500
    PyTorchJob, DLC      MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=2: they count pods, not workers
    Indexed Job          JOB_COMPLETION_INDEX=1 HOSTNAME=job-1; the number of pods is in no variable
    JobSet               JOB_INDEX, GLOBAL_REPLICAS and REPLICATED_JOB_NAME beside it, where the template asks for them
    Volcano              VC_TASK_INDEX=1 VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job VC_WORKER_NUM=2
    AscendJob, msrun     MS_ROLE=MS_WORKER MS_SCHED_HOST=10.0.0.1 MS_SCHED_PORT=8118 MS_WORKER_NUM=16 MS_NODE_RANK=1
                         MS_LOCAL_WORKER=8; MSJob has MS_NODE_ID and no MS_LOCAL_WORKER: one process a pod
    Ascend               RANK_TABLE_FILE=/user/serverid/devindex/config/hccl.json XDL_IP=10.0.0.5
"""

from __future__ import annotations

import re

from pdrun.endpoint import parse_port
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters.model import LauncherInfo, AllocatedHost, Probes
from pdrun.launcher.adapters.parsing import (
    Environ,
    LauncherAdapter,
    check_below,
    read_host_list,
    require_number,
    read_number,
    find_own_host,
)
from pdrun.launcher.common.parsers import quote_text


def _is_in_kubernetes(environ: Environ) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ


def read_port(environ: Environ, name: str) -> int | None:
    """Return the TCP port in a variable; ConfigError where it is none."""
    if name not in environ:
        return None
    try:
        return parse_port(environ[name], where=name)
    except UsageError as error:
        raise ConfigError(f"{quote_text(environ[name])} is not a port", where=name) from error


def _read_pet(environ: Environ, probes: Probes) -> LauncherInfo:
    text = environ.get("PET_NNODES", "1")
    if not re.fullmatch(r"[0-9]{1,6}(?::[0-9]{1,6})?", text):
        raise ConfigError(f"{quote_text(text)} is no number of nodes", where="PET_NNODES")
    nodes = int(text.rpartition(":")[2])
    rank = read_number(environ, "PET_NODE_RANK")
    return LauncherInfo(
        "pet",
        "torchrun's variables (PET_*)",
        "task",
        rank,
        nodes,
        None,
        1,
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
    RANK counts pods where an operator sets it: no launcher has set a LOCAL_RANK of one number yet.
    """
    local = environ.get("LOCAL_RANK", "0,1")
    return (
        _is_in_kubernetes(environ) and "RANK" in environ and "MASTER_ADDR" in environ and "," in local
    )


def _read_per_pod(environ: Environ, probes: Probes) -> LauncherInfo:
    rank = require_number(environ, "RANK", "MASTER_ADDR")
    nodes = require_number(environ, "WORLD_SIZE", "RANK", 1)
    local = read_number(environ, "LOCAL_WORLD_SIZE", 1) if "," in environ.get("LOCAL_RANK", "") else None
    if (
        local and nodes % local == 0
    ):  # AscendJob counts workers, and says so by a list of local ranks
        rank = rank // local
        nodes = nodes // local
    check_below(rank, nodes, "RANK", "WORLD_SIZE")
    return LauncherInfo(
        "pytorch-operator",
        "an operator of PyTorch on Kubernetes",
        "task",
        rank,
        nodes,
        None,
        1,
        rank,
        nodes,
        head=environ["MASTER_ADDR"],
        port=read_port(environ, "MASTER_PORT"),
        job_id="",
        sources={
            "rank": "RANK",
            "world": "WORLD_SIZE",
            "node_rank": "RANK",
            "nodes": "WORLD_SIZE",
            "head": "MASTER_ADDR",
            "port": "MASTER_PORT",
        },
    )


def _find_pod_name(environ: Environ, probes: Probes) -> tuple[str, str]:
    """
    (pod's name, domain behind it): the domain stands in /etc/hosts where the pod has a headless
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
    jobs = read_number(environ, "GLOBAL_REPLICAS", 1) if "REPLICATED_JOB_NAME" in environ else None
    title = "an indexed Job of Kubernetes"
    nodes = None
    node_rank = index
    if jobs is not None:
        title = "a JobSet of Kubernetes"
        if jobs > 1:
            if group is None or per_job is None:
                raise ConfigError(
                    f"is {jobs}, and JOB_INDEX or PODS_PER_JOB does not say where this pod stands",
                    where="GLOBAL_REPLICAS",
                    hint="set both in the template, or say --nodes and --node-rank",
                )
            nodes = jobs * per_job
            node_rank = group * per_job + index
            check_below(node_rank, nodes, "JOB_INDEX", "GLOBAL_REPLICAS")
            match = re.fullmatch(rf"(.+)-{group}-{index}(-[a-z0-9]{{5}})?", pod)
            first = f"{match[1]}-0-0{domain}" if match and domain else ""
        else:
            nodes = per_job
    return LauncherInfo(
        "jobset" if jobs is not None else "indexed-job",
        title,
        "task",
        node_rank,
        nodes,
        None,
        1,
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
    The hosts are those of this pod's task; a task called master stands before one called worker.
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
    mine = [
        task
        for task, hosts in lists.items()
        if any(host.name.partition(".")[0] == pod for host in hosts)
    ]
    if set(lists) == {"MASTER", "WORKER"}:
        hosts: tuple[AllocatedHost, ...] = (*lists["MASTER"], *lists["WORKER"])
        source = "VC_MASTER_HOSTS, VC_WORKER_HOSTS"
    elif len(lists) == 1 or len(mine) == 1:
        task = mine[0] if len(mine) == 1 else next(iter(lists))
        hosts = lists[task]
        source = f"VC_{task}_HOSTS"
    else:
        raise ConfigError(
            f"{pod} stands in none of the lists of hosts",
            where=", ".join(f"VC_{task}_HOSTS" for task in lists)[:200],
            hint="say --nodes, --node-rank and --scheduler, with --launcher none",
        )
    place = next((at for at, host in enumerate(hosts) if host.name.partition(".")[0] == pod), None)
    if place is None:
        place = index if len(lists) == 1 else find_own_host(hosts, probes)
    check_below(place, len(hosts), "VC_TASK_INDEX", source)
    return LauncherInfo(
        "volcano",
        "a Job of Volcano",
        "task",
        place,
        len(hosts),
        None,
        1,
        place,
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


def _read_mindspore(environ: Environ, probes: Probes) -> LauncherInfo:
    role = environ["MS_ROLE"]
    if role != "MS_WORKER":
        hint = (
            "run pdrun scheduler there"
            if role == "MS_SCHED"
            else "start only workers with pdrun run"
        )
        raise ConfigError(f"{quote_text(role)} is not the role of a worker", where="MS_ROLE", hint=hint)
    workers = require_number(environ, "MS_WORKER_NUM", "MS_ROLE", 1)
    each = read_number(environ, "MS_LOCAL_WORKER", 1) or 1
    if workers % each:
        raise ConfigError(
            f"{workers} is no multiple of MS_LOCAL_WORKER={each}", where="MS_WORKER_NUM"
        )
    name = "MS_NODE_RANK" if "MS_NODE_RANK" in environ else "MS_NODE_ID"
    text = environ.get(name, "")
    node_rank = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
    notes = (
        (f"{name}={text[:60]} is no number: nodes are ordered by name",)
        if text and node_rank is None
        else ()
    )
    check_below(node_rank, workers // each, name, "MS_WORKER_NUM")
    return LauncherInfo(
        "mindspore",
        "MindSpore's variables (MS_*)",
        "task",
        node_rank,
        workers // each,
        None,
        1,
        node_rank,
        workers // each,
        head=environ.get("MS_SCHED_HOST", ""),
        port=read_port(environ, "MS_SCHED_PORT"),
        notes=notes,
        sources={
            "node_rank": name if node_rank is not None else "",
            "rank": name,
            "world": "MS_WORKER_NUM",
            "nodes": "MS_WORKER_NUM, MS_LOCAL_WORKER" if each > 1 else "MS_WORKER_NUM",
            "head": "MS_SCHED_HOST",
            "port": "MS_SCHED_PORT",
        },
    )


def _read_ascend(environ: Environ, probes: Probes) -> LauncherInfo:
    """The table itself is read by `pdrun.launcher.ranktables`, with its own complaints."""
    if "RANK_ID" in environ:
        raise ConfigError(
            f"{environ['RANK_ID'][:20]!r}: this process is one rank of RANK_TABLE_FILE already",
            where="RANK_ID",
            hint="run pdrun once a server, or say --launcher none for a job of this node alone",
        )
    return LauncherInfo(
        "ascend",
        "a rank table of Ascend (RANK_TABLE_FILE)",
        "allocation",
        path=environ["RANK_TABLE_FILE"],
        sources={"hosts": "RANK_TABLE_FILE"},
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
        "mindspore",
        "MindSpore's variables",
        lambda environ: "MS_ROLE" in environ,
        _read_mindspore,
        prefixes=("MS_",),
    ),
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
        "pytorch-operator",
        "an operator of PyTorch",
        _is_per_pod,
        _read_per_pod,
        prefixes=("MASTER_", "RANK", "WORLD_SIZE"),
    ),
    LauncherAdapter(
        "jobset",
        "JobSet",
        lambda environ: (
            _is_in_kubernetes(environ)
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
            _is_in_kubernetes(environ)
            and "JOB_COMPLETION_INDEX" in environ
            and "REPLICATED_JOB_NAME" not in environ
        ),
        _read_indexed_job,
        prefixes=("JOB_COMPLETION_INDEX",),
    ),
)
ASCEND_ADAPTER = LauncherAdapter(
    "ascend",
    "a rank table of Ascend",
    lambda environ: "RANK_TABLE_FILE" in environ,
    _read_ascend,
    prefixes=("RANK_TABLE_FILE", "XDL_IP"),
)
