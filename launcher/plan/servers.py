"""
Parameter servers of a job: how many, on which node, and the command of each. Pure.

    --servers 3          spread over the nodes in order: with 2 nodes 2 and 1
    --servers 1/node     as many on each node

A server is a process of the supervisor like a worker, but it never runs the user's program. Its
number is decided by the node ranks of a generation, so every node knows it without a message.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pdrun.endpoint import parse_endpoint
from pdrun.launcher.common.rank_lists import format_ranks
from pdrun.launcher.supervisor.events import WorkerCommand, slot_of_server

if TYPE_CHECKING:
    from pdrun.launcher.plan.model import LaunchPlan
    from pdrun.rendezvous.protocol.messages import Assign

MODULE = "pdrun.parallel.servers.main"


def count_servers(servers: str, nodes: int) -> int:
    """Return the number of servers of a job with so many nodes."""
    number, _, unit = servers.partition("/")
    if unit:
        return int(number) * nodes
    return int(number or 0)


def servers_of_node(servers: str, nodes: int, node_rank: int) -> range:
    """Return the numbers of the servers on a node."""
    whole, rest = divmod(count_servers(servers, nodes), nodes)
    first = node_rank * whole + min(node_rank, rest)
    return range(first, first + whole + (node_rank < rest))


def most_servers_of_node(servers: str, nodes: int) -> int:
    """Return the number of servers on the node that has most of them."""
    return len(servers_of_node(servers, nodes, 0))


def make_worker_variables(plan: LaunchPlan, assign: Assign, key: bytes) -> dict[str, str]:
    """Return the variables by which a worker finds the servers; empty without servers."""
    count = count_servers(plan.spec.resources.servers, assign.nodes)
    if not count:
        return {}
    return {"PDRUN_SERVERS": str(count), "PDRUN_SERVER_KEY": key.hex()}


def make_server_commands(
    plan: LaunchPlan, assign: Assign, key: bytes, folder: str
) -> list[WorkerCommand]:
    """
    Return the commands of this node's servers in a generation.

    Args:
        key: of the data channel.
        folder: a private folder for their unix sockets.
    """
    mine = servers_of_node(plan.spec.resources.servers, assign.nodes, assign.node_rank)
    if not mine:
        return []
    master = parse_endpoint(assign.master, where="the scheduler's assignment")
    common: dict[str, str] = {
        **plan.base_env,
        **plan.spec.env,
        **make_worker_variables(plan, assign, key),
        "PDRUN_SERVER_FOLDER": folder,
        "PDRUN_SERVER_LISTEN": plan.listen if assign.nodes > 1 else "",
        "PDRUN_GENERATION": str(assign.generation),
        "WORLD_SIZE": str(assign.world_size),
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
    }
    if plan.spec.place.port_range is not None:
        first, last = plan.spec.place.port_range
        common["PDRUN_PORT_RANGE"] = f"{first}-{last}"
    commands = []
    for index, server in enumerate(mine):
        cpus = plan.server_cpus[index] if index < len(plan.server_cpus) else ()
        env = {
            **common,
            "PDRUN_SERVER_RANK": str(server),
            "OMP_NUM_THREADS": str(max(1, len(cpus))),
        }
        # forked if workers are, since torch is imported there; -P: no module of the folder counts
        start: Literal["exec", "auto"] = "auto" if plan.start_method.how == "fork" else "exec"
        slot = slot_of_server(assign.generation, server)
        argv = (find_interpreter(plan), "-P", "-m", MODULE)
        commands.append(WorkerCommand(slot, argv, env, "/", cpus, start))
    return commands


def find_interpreter(plan: LaunchPlan) -> str:
    """Return the interpreter that has the workers' torch."""
    program = plan.workers[0].argv[0]
    if plan.spec.program.kind != "command" or Path(program).name.startswith("python"):
        return program
    return sys.executable


def describe_servers(plan: LaunchPlan) -> str:
    """Return the servers of a plan for a terminal; empty without servers."""
    servers = plan.spec.resources.servers
    count = count_servers(servers, plan.nodes)
    if not count:
        return ""
    if plan.nodes == 1:
        return f"{count}, on this node; workers reach them by unix sockets"
    per_node = [len(servers_of_node(servers, plan.nodes, rank)) for rank in range(plan.nodes)]
    least, most = min(per_node), max(per_node)
    spread = f"{most} per node" if least == most else f"{least} to {most} per node"
    return f"{count}, {spread}; by unix sockets on a host, by TLS between hosts"


def describe_node_servers(plan: LaunchPlan) -> list[str]:
    """Return a line for each server of a node whose rank is known."""
    rank = 0 if plan.nodes == 1 else plan.spec.place.node_rank
    if rank is None:
        return []
    lines = []
    for index, server in enumerate(servers_of_node(plan.spec.resources.servers, plan.nodes, rank)):
        cpus = "not bound"
        if index < len(plan.server_cpus):
            cpus = f"cpus {format_ranks(plan.server_cpus[index])}"
        lines.append(f"  server {server}: {cpus}")
    return lines
