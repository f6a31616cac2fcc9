"""
A job from Ascend's rank table: its servers are the nodes, its devices their workers, its ranks
theirs. Reads one file.

Hosts come from the table, or from ``--hosts`` in the same order where the table has only labels, or
none at all (dialect 2.0). With one server the job runs here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.config.settings import Level, Source, Wish
from pdrun.launcher.config.spec import Policy
from pdrun.launcher.hosts.selection import Host, host_name
from pdrun.launcher.ranktables import files
from pdrun.launcher.ranktables.model import Device, RankTable, Server


def with_table(
    wishes: Sequence[Wish], environ: Mapping[str, str]
) -> tuple[list[Wish], tuple[str, ...]]:
    """
    Return the wishes with what a rank table among them means, and notes.

    Raises:
        UsageError, ConfigError: the table is not there or no good, or contradicts what else was said.
        DeadlineExceeded: it was not complete within ``--start-timeout``.
    """
    tables = sorted(
        (wish for wish in wishes if wish.path == "place.rank_table"),
        key=lambda wish: wish.source.level,
    )
    if not tables:
        return list(wishes), ()
    asked = tables[0]
    path = str(tables[0].value)
    path = path if path.startswith("/") else str(Path.cwd() / path)
    wait = next(
        (wish.value for wish in wishes if wish.path == "policy.start_timeout"),
        Policy().start_timeout,
    )
    try:
        table = files.usable(asked.value, wait, _say)
    except UsageError as error:
        raise asked.source.blame_file(error) from None
    source = replace(asked.source, text=Path(path).name)
    made = [Wish("place.rank_table", path, source)]
    made.append(
        Wish("resources.backend", "npu", replace(source, level=Level.FOUND))
    )  # --backend cpu tries it out
    others = [wish for wish in wishes if wish.path not in ("place.rank_table", "hosts.all")]
    listed = next(
        (wish for wish in wishes if wish.path == "hosts.all" and wish.source.level < Level.FOUND),
        None,
    )
    servers = table.ordered
    if listed is not None:
        made.append(Wish("hosts.all", _zipped(listed, servers, asked.source), listed.source))
    elif len(servers) == 1:
        ids = tuple(one.device_id for one in _in_order(servers[0]))
        made += [
            Wish("resources.devices", len(ids), source),
            Wish("resources.indices", ids, source),
        ]
        made.append(Wish("resources.nodes", 1, source))
    else:
        made.append(
            Wish("hosts.all", tuple(_host(server, asked.source) for server in servers), source)
        )
        made += _place(servers, environ)
    return [*others, *made], (f"{source.said()}: {_summary(table)}",)


def _summary(table: RankTable) -> str:
    return (
        f"{len(table.devices)} rank(s) on {len(table.servers)} server(s), dialect {table.dialect}"
    )


def _say(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr, flush=True)


def _in_order(server: Server) -> list[Device]:
    return sorted(server.devices, key=lambda one: one.rank)


def _host(server: Server, source: Source) -> Host:
    """The host's own address to log in at, the pod's or container's to meet at."""
    name = server.named("host_ip", "server_ip", "server_id", "pod_ip", "container_ip")
    meet = server.named("container_ip", "pod_ip", "host_ip", "server_ip")
    try:
        host_name(name, source.label)
    except PdrunError:
        raise ConfigError(
            f"server {name!r} is no host name or address"
            if name
            else "this dialect names no hosts",
            where=source.label,
            hint="say --hosts with the servers' names, in the order of their ranks",
        ) from None
    ids = tuple(one.device_id for one in _in_order(server))
    return Host(name, len(ids), ids, source.label, address=meet if meet != name else "")


def _zipped(listed: Wish, servers: Sequence[Server], source: Source) -> tuple[Host, ...]:
    hosts: tuple[Host, ...] = listed.value
    if len(hosts) != len(servers):
        raise listed.source.error(
            f"{len(hosts)} host(s) for the {len(servers)} server(s) of {source.said()}",
            "name one host for each server",
        )
    made = []
    for host, server in zip(hosts, servers, strict=True):
        ids = tuple(one.device_id for one in _in_order(server))
        if host.devices not in (None, len(ids)):
            raise listed.source.error(
                f"{host.name} has {host.devices} devices here and {len(ids)} in {source.said()}"
            )
        made.append(replace(host, devices=len(ids), indices=ids))
    return tuple(made)


def _place(servers: Sequence[Server], environ: Mapping[str, str]) -> list[Wish]:
    """MindCluster tells a pod its host's address in XDL_IP: that server is this node."""
    own = environ.get("XDL_IP", "")
    found = [at for at, server in enumerate(servers) if own and own in server.names]
    if len(found) == 1:
        return [Wish("place.node_rank", found[0], Source("XDL_IP", Level.FOUND, own))]
    return []
