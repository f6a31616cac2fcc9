"""
Parameter servers of a job: how many, and on which node. Pure.

    --servers 3          spread over the nodes in order: with 2 nodes 2 and 1
    --servers 1/node     as many on each node

A server is a process of the supervisor like a worker, but it never runs the user's program. Its
number is decided by the node ranks of a generation, so every node knows it without a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdrun.launcher.common.rank_lists import format_ranks


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


def describe_servers(servers: str, nodes: int) -> str:
    """Return the servers of a job for a terminal; empty without servers."""
    count = count_servers(servers, nodes)
    if not count:
        return ""
    if nodes == 1:
        return f"{count}, on this node; workers reach them by unix sockets"
    per_node = [len(servers_of_node(servers, nodes, rank)) for rank in range(nodes)]
    least, most = min(per_node), max(per_node)
    spread = f"{most} per node" if least == most else f"{least} to {most} per node"
    return f"{count}, {spread}; by unix sockets on a host, by TLS between hosts"


def describe_node_servers(
    servers: str, nodes: int, node_rank: int | None, cpus: Sequence[tuple[int, ...]]
) -> list[str]:
    """
    Return a line for each server of a node.

    Args:
        node_rank: None: not known, unless the job has one node.
        cpus: of each server; empty: not bound.
    """
    rank = 0 if nodes == 1 else node_rank
    if rank is None:
        return []
    lines = []
    for index, server in enumerate(servers_of_node(servers, nodes, rank)):
        place = "not bound"
        if index < len(cpus):
            place = f"cpus {format_ranks(cpus[index])}"
        lines.append(f"  server {server}: {place}")
    return lines
