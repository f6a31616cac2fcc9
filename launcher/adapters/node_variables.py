"""
Launchers that give each node its numbers in variables: count of nodes, rank of the node, addresses.

    LeaderWorkerSet  LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=1 LWS_LEADER_ADDRESS=lws-0.lws.default
    SkyPilot         SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS (one per line)
    dstack           DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=1 DSTACK_NODES_IPS (one per line)
    AWS Batch        AWS_BATCH_JOB_NUM_NODES=2 AWS_BATCH_JOB_NODE_INDEX=1
                     AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS (not on the main node)
    Volcengine       MLP_WORKER_NUM=2 MLP_ROLE_INDEX=1 MLP_WORKER_0_HOST MLP_WORKER_0_PORT
    Beaker           BEAKER_REPLICA_COUNT=2 BEAKER_REPLICA_RANK=1 BEAKER_LEADER_REPLICA_HOSTNAME
    Metaflow         MF_PARALLEL_NUM_NODES=2 MF_PARALLEL_NODE_INDEX=1 MF_PARALLEL_MAIN_IP
    Base Command     NGC_ARRAY_SIZE=2 NGC_ARRAY_INDEX=1 NGC_MASTER_ADDR
    Paddle           PADDLE_TRAINERS_NUM=2 PADDLE_TRAINER_ID=1 PADDLE_TRAINER_ENDPOINTS=a:1,b:1
    by hand          NNODES=2 NODE_RANK=1 MASTER_ADDR=h1, RANK and WORLD_SIZE

A launcher with one variable for the host of node 0 has no list of hosts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pdrun.errors import ConfigError
from pdrun.launcher.adapters.model import HOST_NAME, AllocatedHost, LauncherInfo, Probes
from pdrun.launcher.adapters.parsing import (
    MAX_VALUE_CHARS,
    Environ,
    LauncherAdapter,
    check_below,
    parse_host_names,
    read_number,
    read_port,
    require_number,
)
from pdrun.launcher.common.parsers import quote_text
from pdrun.quick_dataclass import dataclass

NODE_COUNT_VARIABLES = ("NNODES", "NUM_NODES", "N_NODES", "NODE_COUNT")
"""Variables in which scripts keep the number of nodes."""


def _read_hosts(environ: Environ, name: str) -> tuple[AllocatedHost, ...]:
    """Return the hosts of a list that is separated by lines, commas or blanks."""
    text = environ.get(name, "")
    if len(text) > MAX_VALUE_CHARS:
        raise ConfigError(f"must have at most {MAX_VALUE_CHARS} characters", where=name)
    names = [part for part in re.split(r"[\s,]+", text) if part]
    hosts = parse_host_names(names, name)
    if len(hosts) != len(names):
        raise ConfigError("lists a host twice", where=name)
    return tuple(AllocatedHost(host.name) for host in hosts)


def _no_rank(environ: Environ, probes: Probes) -> int | None:
    """Default of ``guess_rank``: without its variable, the rank is unknown."""
    return None


@dataclass(frozen=True)
class NodeVariables:
    """Names of the variables in which a launcher gives each node its numbers. Empty: none."""

    name: str
    title: str
    nodes: str
    node_rank: str
    head: str = ""
    """Host of node 0."""
    hosts: str = ""
    """Hosts of all nodes, in rank order."""
    port: str = ""
    job: tuple[str, ...] = ()
    """The first one that is set has the job id. All nodes have the same."""
    first: str = ""
    """Index of the node that becomes node 0; others follow in order, then those before it."""
    guess_rank: Callable[[Environ, Probes], int | None] = _no_rank
    prefixes: tuple[str, ...] = ()

    def to_adapter(self) -> LauncherAdapter:
        """Return the adapter that reads these variables."""
        return LauncherAdapter(
            self.name, self.title, self.is_present, self.read, prefixes=self.prefixes
        )

    def is_present(self, environ: Environ) -> bool:
        """Return whether a count of nodes or a list of hosts is set."""
        return self.nodes in environ or (self.hosts in environ and self.node_rank in environ)

    def read(self, environ: Environ, probes: Probes) -> LauncherInfo:
        """Read the variables."""
        hosts = _read_hosts(environ, self.hosts)
        nodes = read_number(environ, self.nodes, 1) or len(hosts)
        if len(hosts) not in (0, nodes):
            raise ConfigError(
                f"lists {len(hosts)} host(s), but {self.nodes} is {nodes}", where=self.hosts
            )
        node_rank = self._read_rank(environ, probes, nodes)
        head, head_source = self._find_head(environ, probes, node_rank)
        job = next((name for name in self.job if environ.get(name)), "")
        port = read_port(environ, self.port) if self.port else None
        count = self.nodes if self.nodes in environ else self.hosts
        return LauncherInfo.one_per_node(
            self.name,
            self.title,
            node_rank,
            nodes,
            hosts,
            head=head,
            port=port,
            job_id=environ.get(job, "").rpartition("/")[2],
            sources={
                **dict.fromkeys(("rank", "node_rank"), self.node_rank),
                **dict.fromkeys(("world", "nodes"), count),
                "hosts": self.hosts,
                "head": head_source,
                "port": self.port,
                "job_id": job,
            },
        )

    def _read_rank(self, environ: Environ, probes: Probes, nodes: int) -> int:
        if nodes == 1 and self.node_rank not in environ:
            return 0
        index = None
        if self.node_rank not in environ:
            index = self.guess_rank(environ, probes)
        if index is None:
            index = require_number(environ, self.node_rank, self.nodes)
        check_below(index, nodes, self.node_rank, self.nodes)
        first = read_number(environ, self.first) or 0
        check_below(first, nodes, self.first, self.nodes)
        return (index - first) % nodes

    def _find_head(self, environ: Environ, probes: Probes, node_rank: int) -> tuple[str, str]:
        if environ.get(self.head):
            return environ[self.head], self.head
        if self.first and node_rank == 0:  # the address of the main node is not set there
            return probes.address_for(probes.hostname), HOST_NAME
        return "", self.head


def _guess_lws_rank(environ: Environ, probes: Probes) -> int | None:
    """
    Return the index of this pod from its name, before LWS 0.6: ``lws-0`` is the leader of group 0,
    ``lws-0-2`` its worker 2.
    """
    pod = environ.get("HOSTNAME", "") or probes.hostname
    leader = environ.get("LWS_LEADER_ADDRESS", "").partition(".")[0]
    if pod == leader:
        return 0
    match = re.fullmatch(rf"{re.escape(leader)}-([0-9]{{1,9}})", pod)
    return int(match[1]) if leader and match else None


NODE_ADAPTERS = tuple(
    row.to_adapter()
    for row in (
        NodeVariables(
            "lws",
            "a LeaderWorkerSet of Kubernetes",
            "LWS_GROUP_SIZE",
            "LWS_WORKER_INDEX",
            head="LWS_LEADER_ADDRESS",
            job=("LWS_LEADER_ADDRESS",),
            guess_rank=_guess_lws_rank,
            prefixes=("LWS_",),
        ),
        NodeVariables(
            "skypilot",
            "SkyPilot",
            "SKYPILOT_NUM_NODES",
            "SKYPILOT_NODE_RANK",
            hosts="SKYPILOT_NODE_IPS",
            job=("SKYPILOT_TASK_ID",),
            prefixes=("SKYPILOT_",),
        ),
        NodeVariables(
            "dstack",
            "dstack",
            "DSTACK_NODES_NUM",
            "DSTACK_NODE_RANK",
            head="DSTACK_MASTER_NODE_IP",
            hosts="DSTACK_NODES_IPS",
            job=("DSTACK_RUN_NAME",),
            prefixes=("DSTACK_",),
        ),
        NodeVariables(
            "aws-batch",
            "a multi-node job of AWS Batch",
            "AWS_BATCH_JOB_NUM_NODES",
            "AWS_BATCH_JOB_NODE_INDEX",
            head="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
            first="AWS_BATCH_JOB_MAIN_NODE_INDEX",
            prefixes=("AWS_BATCH_",),
        ),
        NodeVariables(
            "volcengine",
            "Volcengine's machine learning platform",
            "MLP_WORKER_NUM",
            "MLP_ROLE_INDEX",
            head="MLP_WORKER_0_HOST",
            port="MLP_WORKER_0_PORT",
            job=("MLP_TASK_ID",),
            prefixes=("MLP_",),
        ),
        NodeVariables(
            "beaker",
            "Beaker",
            "BEAKER_REPLICA_COUNT",
            "BEAKER_REPLICA_RANK",
            head="BEAKER_LEADER_REPLICA_HOSTNAME",
            job=("BEAKER_EXPERIMENT_ID", "BEAKER_WORKLOAD_ID"),
            prefixes=("BEAKER_",),
        ),
        NodeVariables(
            "metaflow",
            "a parallel step of Metaflow",
            "MF_PARALLEL_NUM_NODES",
            "MF_PARALLEL_NODE_INDEX",
            head="MF_PARALLEL_MAIN_IP",
            prefixes=("MF_PARALLEL_",),
        ),
        NodeVariables(
            "ngc",
            "a multi-node job of NVIDIA Base Command",
            "NGC_ARRAY_SIZE",
            "NGC_ARRAY_INDEX",
            head="NGC_MASTER_ADDR",
            job=("NGC_JOB_ID",),
            prefixes=("NGC_ARRAY_", "NGC_MASTER_"),
        ),
    )
)
"""Managed services and pods with one process per node."""


def _read_paddle(environ: Environ, probes: Probes) -> LauncherInfo:
    """Read Paddle's variables. Several endpoints of one host are several workers."""
    role = environ.get("TRAINING_ROLE", "TRAINER")
    if role != "TRAINER":
        raise ConfigError(
            f"must be TRAINER, got {quote_text(role)}",
            where="TRAINING_ROLE",
            hint="start only trainers with pdrun run",
        )
    name = "PADDLE_TRAINER_ENDPOINTS"
    rank = require_number(environ, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    endpoints = [part for part in environ.get(name, "")[:MAX_VALUE_CHARS].split(",") if part]
    names = [part.rpartition(":")[0] or part for part in endpoints]
    world = read_number(environ, "PADDLE_TRAINERS_NUM", 1) or len(names) or None
    if names and len(names) != world:
        raise ConfigError(
            f"lists {len(names)} endpoint(s), but PADDLE_TRAINERS_NUM is {world}", where=name
        )
    check_below(rank, world, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    hosts = parse_host_names(names, name)
    per_host = max((host.slots or 1 for host in hosts), default=1)
    head = environ.get("PADDLE_MASTER", "").rpartition(":")[0]
    is_per_node = per_host == 1
    return LauncherInfo(
        "paddle",
        "Paddle's variables (PADDLE_*)",
        "task",
        rank,
        world,
        None,
        per_host,
        rank if is_per_node else None,
        world if is_per_node else len(hosts),
        tuple(AllocatedHost(host.name) for host in hosts),
        head,
        job_id=environ.get("PADDLE_JOB_ID", ""),
        sources={
            **dict.fromkeys(("rank", "node_rank"), "PADDLE_TRAINER_ID"),
            **dict.fromkeys(("world", "nodes"), "PADDLE_TRAINERS_NUM"),
            **dict.fromkeys(("hosts", "local_size"), name),
            "head": "PADDLE_MASTER",
            "job_id": "PADDLE_JOB_ID",
        },
    )


PADDLE_ADAPTER = LauncherAdapter(
    "paddle",
    "Paddle's variables",
    lambda environ: (
        "PADDLE_TRAINER_ID" in environ
        and ("PADDLE_TRAINERS_NUM" in environ or "PADDLE_TRAINER_ENDPOINTS" in environ)
    ),
    _read_paddle,
    prefixes=("PADDLE_",),
)


def find_node_count(environ: Environ) -> tuple[int | None, str]:
    """Return the number of nodes that a script has exported, and its variable."""
    for name in NODE_COUNT_VARIABLES:
        if re.fullmatch(r"[0-9]{1,9}", environ.get(name, "")):
            return int(environ[name]), name
    return None, ""


def _read_hand_set(environ: Environ, probes: Probes) -> LauncherInfo:
    """Read what a script exports. `pdrun.launcher.config.detected` decides whether it suffices."""
    rank = read_number(environ, "RANK")
    world = read_number(environ, "WORLD_SIZE", 1)
    check_below(rank, world, "RANK", "WORLD_SIZE")
    nodes, count_name = find_node_count(environ)
    node_rank = read_number(environ, "NODE_RANK")
    check_below(node_rank, nodes or None, "NODE_RANK", count_name)
    local_rank = read_number(environ, "LOCAL_RANK")
    local_size = read_number(environ, "LOCAL_WORLD_SIZE", 1)
    check_below(local_rank, local_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    sources = {
        "rank": "RANK",
        "world": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_size": "LOCAL_WORLD_SIZE",
        "node_rank": "NODE_RANK",
        "nodes": count_name,
    }
    return LauncherInfo(
        "variables",
        "RANK and WORLD_SIZE, set by hand",
        "task",
        rank,
        world,
        local_rank,
        local_size,
        node_rank,
        nodes,
        head=environ.get("MASTER_ADDR", ""),
        sources={
            **{field: name for field, name in sources.items() if name in environ},
            "head": "MASTER_ADDR",
        },
    )


HAND_ADAPTER = LauncherAdapter(
    "variables",
    "RANK and WORLD_SIZE, set by hand",
    lambda environ: (
        ("RANK" in environ or "NODE_RANK" in environ)
        and "PDRUN_GENERATION" not in environ
        and "TORCHELASTIC_RUN_ID" not in environ
    ),
    _read_hand_set,
    prefixes=(
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_"),
        *NODE_COUNT_VARIABLES,
    ),
)
"""Variables that a script exports for torch's env:// or for torchrun, without a known launcher."""
