"""
Managed services with one container or machine per node.

    SageMaker  SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-2 TRAINING_JOB_NAME=job-7
    AzureML    AZUREML_RUN_ID=run_1 MASTER_ADDR=10.0.0.4 NODE_RANK=1 AZUREML_NODE_COUNT=2
               (in mode MPI, mpirun is the inner launcher)
    Vertex AI  CLOUD_ML_JOB_ID=7 CLUSTER_SPEC={
                 "cluster": {"workerpool0": ["cmle-0:2222"], "workerpool1": ["cmle-1:2222"]},
                 "task": {"type": "workerpool1", "index": 0}}
    Determined DET_ALLOCATION_ID=7.1 and /run/determined/info/rendezvous.json
    TPU VM     TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=t1v-0,t1v-1; several slices: MEGASCALE_SLICE_ID,
               MEGASCALE_NUM_SLICES, MEGASCALE_COORDINATOR_ADDRESS=t1v-0:8080
    OpenPAI    PAI_CURRENT_TASK_ROLE_NAME=worker PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX=1
               PAI_TASK_ROLE_TASK_COUNT_worker=2 PAI_HOST_IP_worker_0=10.0.0.4
"""

from __future__ import annotations

import re
from typing import Any

from pdrun.errors import ConfigError
from pdrun.launcher.adapters.model import AllocatedHost, LauncherInfo, Probes
from pdrun.launcher.adapters.parsing import (
    Environ,
    LauncherAdapter,
    check_below,
    parse_host_names,
    read_host_list,
    read_json,
    read_number,
    require_number,
)
from pdrun.launcher.common.parsers import quote_text


def _read_sagemaker(environ: Environ, probes: Probes) -> LauncherInfo:
    names = read_json(environ, "SM_HOSTS")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError("must be a JSON list of host names", where="SM_HOSTS")
    hosts = tuple(AllocatedHost(host.name) for host in parse_host_names(names, "SM_HOSTS"))
    current = environ.get("SM_CURRENT_HOST", "")
    if current not in names:
        raise ConfigError(f"{quote_text(current)} is not in SM_HOSTS", where="SM_CURRENT_HOST")
    rank = names.index(current)
    return LauncherInfo.one_per_node(
        "sagemaker",
        "SageMaker",
        rank,
        len(hosts),
        hosts,
        job_id=environ.get("TRAINING_JOB_NAME", ""),
        sources={
            "rank": "SM_CURRENT_HOST",
            "node_rank": "SM_CURRENT_HOST",
            "world": "SM_HOSTS",
            "nodes": "SM_HOSTS",
            "hosts": "SM_HOSTS",
            "job_id": "TRAINING_JOB_NAME",
        },
    )


def _read_azureml(environ: Environ, probes: Probes) -> LauncherInfo:
    rank = require_number(environ, "NODE_RANK", "AZUREML_RUN_ID")
    nodes = read_number(environ, "AZUREML_NODE_COUNT", 1)
    check_below(rank, nodes, "NODE_RANK", "AZUREML_NODE_COUNT")
    local = read_number(environ, "LOCAL_RANK") or 0
    if local:
        raise ConfigError(
            f"is {local}: AzureML started several processes on this node, but pdrun needs one",
            where="LOCAL_RANK",
            hint="set process_count_per_instance: 1",
        )
    return LauncherInfo(
        "azureml",
        "AzureML (mode PyTorch)",
        "task",
        rank,
        nodes,
        0,
        1,
        rank,
        nodes,
        head=environ["MASTER_ADDR"],
        job_id=environ["AZUREML_RUN_ID"],
        sources={
            "rank": "NODE_RANK",
            "node_rank": "NODE_RANK",
            "nodes": "AZUREML_NODE_COUNT",
            "local_rank": "LOCAL_RANK",
            "world": "AZUREML_NODE_COUNT",
            "head": "MASTER_ADDR",
            "job_id": "AZUREML_RUN_ID",
        },
    )


_WORKER_POOLS = (
    "chief",
    "master",
    "workerpool0",
    "worker",
    "workerpool1",
    "workerpool2",
    "workerpool3",
)
"""In rank order. Parameter servers and evaluators are not nodes of the job."""


def _read_cluster_spec(environ: Environ, probes: Probes) -> LauncherInfo:
    """Read Vertex AI's CLUSTER_SPEC, or TF_CONFIG, which has the same structure."""
    name = _find_cluster_variable(environ)
    data = read_json(environ, name)
    if not isinstance(data, dict):
        data = {}
    cluster = data.get("cluster")
    task = data.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ConfigError("must have the objects cluster and task", where=name)
    names: list[str] = []
    rank = None
    for pool in _WORKER_POOLS:
        members = cluster.get(pool, [])
        if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
            raise ConfigError(f"cluster.{pool} must be a list of addresses", where=name)
        if task.get("type") == pool:
            rank = len(names) + _parse_task_index(task, len(members), name)
        names += [member.rpartition(":")[0] or member for member in members]
    if rank is None:
        raise ConfigError(
            f"task.type must be one of {', '.join(_WORKER_POOLS)},"
            f" got {quote_text(str(task.get('type')))}",
            where=name,
        )
    hosts = tuple(AllocatedHost(host.name) for host in parse_host_names(names, name))
    if len(hosts) != len(names):
        raise ConfigError("lists a host twice", where=name)
    return LauncherInfo.one_per_node(
        "vertex",
        "Vertex AI" if name == "CLUSTER_SPEC" else "TF_CONFIG",
        rank,
        len(hosts),
        hosts,
        job_id=environ.get("CLOUD_ML_JOB_ID", ""),
        sources={
            "rank": name,
            "node_rank": name,
            "world": name,
            "nodes": name,
            "hosts": name,
            "job_id": "CLOUD_ML_JOB_ID",
        },
    )


def _parse_task_index(task: dict[str, Any], count: int, name: str) -> int:
    index = task.get("index", 0)
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 9:
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(
            f"task.index must be 0 to {count - 1}, got {quote_text(str(index))}", where=name
        )
    return index


def _find_cluster_variable(environ: Environ) -> str:
    """Return CLUSTER_SPEC on Vertex AI, TF_CONFIG if it has a cluster, or an empty string."""
    if "CLUSTER_SPEC" in environ and "CLOUD_ML_JOB_ID" in environ:
        return "CLUSTER_SPEC"
    if '"cluster"' in environ.get("TF_CONFIG", "")[:1000]:
        return "TF_CONFIG"
    return ""


def _read_tpu(environ: Environ, probes: Probes) -> LauncherInfo:
    index = require_number(environ, "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
    hosts = read_host_list(environ, "TPU_WORKER_HOSTNAMES")
    check_below(index, len(hosts), "TPU_WORKER_ID", "the hosts of TPU_WORKER_HOSTNAMES")
    slices = read_number(environ, "MEGASCALE_NUM_SLICES", 1) or 1
    nodes = len(hosts)
    rank = index
    head = ""
    sources = {
        "rank": "TPU_WORKER_ID",
        "node_rank": "TPU_WORKER_ID",
        "nodes": "TPU_WORKER_HOSTNAMES",
        "world": "TPU_WORKER_HOSTNAMES",
        "hosts": "TPU_WORKER_HOSTNAMES",
    }
    if slices > 1:
        part = require_number(environ, "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES")
        check_below(part, slices, "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES")
        nodes = slices * len(hosts)
        rank = part * len(hosts) + index
        head = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").rpartition(":")[0]
        hosts = ()
        sources |= {
            "rank": "MEGASCALE_SLICE_ID, TPU_WORKER_ID",
            "node_rank": "MEGASCALE_SLICE_ID, TPU_WORKER_ID",
            "nodes": "MEGASCALE_NUM_SLICES, TPU_WORKER_HOSTNAMES",
            "hosts": "",
            "head": "MEGASCALE_COORDINATOR_ADDRESS",
        }
    return LauncherInfo.one_per_node(
        "tpu",
        "a TPU VM",
        rank,
        nodes,
        hosts,
        head=head,
        job_id=environ.get("CLOUD_TPU_TASK_ID", ""),
        sources={**sources, "job_id": "CLOUD_TPU_TASK_ID"},
    )


_RENDEZVOUS_FILE = "/run/determined/info/rendezvous.json"


def _read_determined(environ: Environ, probes: Probes) -> LauncherInfo:
    """
    Read the containers of a trial from the file that Determined writes into each of them. Other
    tasks have one container and no file.
    """
    names, rank = _read_containers(probes)
    if not names:
        _check_one_container(environ)
        names, rank = ["localhost"], 0
    hosts = tuple(AllocatedHost(host.name) for host in parse_host_names(names, _RENDEZVOUS_FILE))
    if len(hosts) != len(names):
        raise ConfigError(
            "has several containers on one host, but pdrun needs one per node",
            where=_RENDEZVOUS_FILE,
        )
    return LauncherInfo.one_per_node(
        "determined",
        "Determined",
        rank,
        len(hosts),
        hosts,
        job_id=environ.get("DET_ALLOCATION_ID", ""),
        sources={
            **dict.fromkeys(("rank", "node_rank", "world", "nodes", "hosts"), _RENDEZVOUS_FILE),
            "job_id": "DET_ALLOCATION_ID",
        },
    )


def _read_containers(probes: Probes) -> tuple[list[str], int]:
    """Return the addresses of all containers and the rank of this one; empty without the file."""
    try:
        text = probes.read_file(_RENDEZVOUS_FILE)
    except OSError:
        return [], 0
    except ValueError as error:
        raise ConfigError(str(error), where=_RENDEZVOUS_FILE) from None
    data = read_json({_RENDEZVOUS_FILE: text}, _RENDEZVOUS_FILE)
    names = data.get("container_addrs") if isinstance(data, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError("must have a list of container_addrs", where=_RENDEZVOUS_FILE)
    rank = data.get("container_rank")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < len(names):
        raise ConfigError(
            f"container_rank must be 0 to {len(names) - 1}, got {quote_text(str(rank))}",
            where=_RENDEZVOUS_FILE,
        )
    return names, rank


def _check_one_container(environ: Environ) -> None:
    """Refuse a trial of several containers that are not known."""
    if "DET_EXPERIMENT_CONFIG" not in environ or "DET_SLOT_IDS" not in environ:
        return
    config = read_json(environ, "DET_EXPERIMENT_CONFIG")
    slots = read_json(environ, "DET_SLOT_IDS")
    resources = config.get("resources") if isinstance(config, dict) else None
    wanted = resources.get("slots_per_trial") if isinstance(resources, dict) else None
    if isinstance(wanted, int) and isinstance(slots, list) and wanted > max(1, len(slots)):
        raise ConfigError(
            f"the trial has {wanted} slots, {len(slots)} of them here,"
            f" but {_RENDEZVOUS_FILE} does not exist",
            where="DET_EXPERIMENT_CONFIG",
            hint="set --nodes, --node-rank and --scheduler, with --launcher none",
        )


def _read_openpai(environ: Environ, probes: Probes) -> LauncherInfo:
    """
    Read the tasks of this container's role; other roles are not nodes of the job.

    Raises:
        ConfigError: the role, the count, the index or the address of task 0 is missing or wrong.
    """
    role = environ["PAI_CURRENT_TASK_ROLE_NAME"]
    if not re.fullmatch(r"[\w.~-]{1,64}", role, re.ASCII):
        raise ConfigError(
            f"{quote_text(role)} is no role's name", where="PAI_CURRENT_TASK_ROLE_NAME"
        )
    count_name = f"PAI_TASK_ROLE_TASK_COUNT_{role}"
    index_name = "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"
    nodes = require_number(environ, count_name, "PAI_CURRENT_TASK_ROLE_NAME")
    rank = require_number(environ, index_name, "PAI_CURRENT_TASK_ROLE_NAME")
    check_below(rank, nodes, index_name, count_name)
    head_name = f"PAI_HOST_IP_{role}_0"
    head = environ.get(head_name, "")
    if nodes > 1 and not head:
        raise ConfigError("is not set", where=head_name, hint="set --scheduler HOST:PORT")
    return LauncherInfo.one_per_node(
        "openpai",
        "OpenPAI",
        rank,
        nodes,
        head=head,
        job_id=environ.get("PAI_JOB_NAME", ""),
        sources={
            "rank": index_name,
            "node_rank": index_name,
            "world": count_name,
            "nodes": count_name,
            "head": head_name,
            "job_id": "PAI_JOB_NAME",
        },
    )


CLOUD_ADAPTERS = (
    LauncherAdapter(
        "sagemaker",
        "SageMaker",
        lambda environ: "SM_HOSTS" in environ,
        _read_sagemaker,
        prefixes=("SM_",),
    ),
    LauncherAdapter(
        "azureml",
        "AzureML",
        lambda environ: all(
            name in environ for name in ("AZUREML_RUN_ID", "NODE_RANK", "MASTER_ADDR")
        ),
        _read_azureml,
        prefixes=("AZUREML_", "AZ_BATCH"),
    ),
    LauncherAdapter(
        "vertex",
        "Vertex AI, TF_CONFIG",
        lambda environ: bool(_find_cluster_variable(environ)),
        _read_cluster_spec,
        prefixes=("CLUSTER_SPEC", "TF_CONFIG", "CLOUD_ML_"),
    ),
    LauncherAdapter(
        "determined",
        "Determined",
        lambda environ: "DET_ALLOCATION_ID" in environ and "DET_TASK_ID" in environ,
        _read_determined,
        prefixes=("DET_",),
    ),
    LauncherAdapter(
        "openpai",
        "OpenPAI",
        lambda environ: "PAI_CURRENT_TASK_ROLE_NAME" in environ,
        _read_openpai,
        prefixes=("PAI_",),
    ),
    LauncherAdapter(
        "tpu",
        "TPU",
        lambda environ: "TPU_WORKER_HOSTNAMES" in environ,
        _read_tpu,
        prefixes=("TPU_", "MEGASCALE_", "CLOUD_TPU_"),
    ),
)
