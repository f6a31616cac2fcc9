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
from pdrun.launcher.config.settings import Priority, Source, Setting
from pdrun.launcher.config.spec import Policy
from pdrun.launcher.hosts.selection import Host, host_name
from pdrun.launcher.ranktables import files
from pdrun.launcher.ranktables.model import Device, RankTable, Server


def apply_rank_table(
    wishes: Sequence[Setting], environ: Mapping[str, str]
) -> tuple[list[Setting], tuple[str, ...]]:
    """
    Return the wishes with what a rank table among them means, and notes.

    Raises:
        UsageError, ConfigError: the table is not there or no good, or contradicts what else was said.
        DeadlineExceeded: it was not complete within ``--start-timeout``.
    """
    tables = sorted(
        (wish for wish in wishes if wish.path == "place.rank_table"),
        key=lambda wish: wish.source.priority,
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
        table = files.usable(asked.value, wait, _print_progress)
    except UsageError as error:
        raise asked.source.convert_file_error(error) from None
    source = replace(asked.source, text=Path(path).name)
    made = [Setting("place.rank_table", path, source)]
    made.append(
        Setting("resources.backend", "npu", replace(source, level=Priority.DETECTED))
    )  # --backend cpu tries it out
    others = [wish for wish in wishes if wish.path not in ("place.rank_table", "hosts.all")]
    listed = next(
        (wish for wish in wishes if wish.path == "hosts.all" and wish.source.priority < Priority.DETECTED),
        None,
    )
    servers = table.ordered
    if listed is not None:
        made.append(Setting("hosts.all", _match_hosts(listed, servers, asked.source), listed.source))
    elif len(servers) == 1:
        ids = tuple(one.device_id for one in _devices_by_rank(servers[0]))
        made += [
            Setting("resources.devices", len(ids), source),
            Setting("resources.indices", ids, source),
        ]
        made.append(Setting("resources.nodes", 1, source))
    else:
        made.append(
            Setting("hosts.all", tuple(_make_host(server, asked.source) for server in servers), source)
        )
        made += _node_rank_settings(servers, environ)
    return [*others, *made], (f"{source.describe()}: {_summarize_table(table)}",)


def _summarize_table(table: RankTable) -> str:
    return (
        f"{len(table.devices)} rank(s) on {len(table.servers)} server(s), dialect {table.dialect}"
    )


def _print_progress(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr, flush=True)


def _devices_by_rank(server: Server) -> list[Device]:
    return sorted(server.devices, key=lambda one: one.rank)


def _make_host(server: Server, source: Source) -> Host:
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
    ids = tuple(one.device_id for one in _devices_by_rank(server))
    return Host(name, len(ids), ids, source.label, address=meet if meet != name else "")


def _match_hosts(listed: Setting, servers: Sequence[Server], source: Source) -> tuple[Host, ...]:
    hosts: tuple[Host, ...] = listed.value
    if len(hosts) != len(servers):
        raise listed.source.make_error(
            f"{len(hosts)} host(s) for the {len(servers)} server(s) of {source.describe()}",
            "name one host for each server",
        )
    made = []
    for host, server in zip(hosts, servers, strict=True):
        ids = tuple(one.device_id for one in _devices_by_rank(server))
        if host.devices not in (None, len(ids)):
            raise listed.source.make_error(
                f"{host.name} has {host.devices} devices here and {len(ids)} in {source.describe()}"
            )
        made.append(replace(host, devices=len(ids), indices=ids))
    return tuple(made)


def _node_rank_settings(servers: Sequence[Server], environ: Mapping[str, str]) -> list[Setting]:
    """MindCluster tells a pod its host's address in XDL_IP: that server is this node."""
    own = environ.get("XDL_IP", "")
    found = [at for at, server in enumerate(servers) if own and own in server.names]
    if len(found) == 1:
        return [Setting("place.node_rank", found[0], Source("XDL_IP", Priority.DETECTED, own))]
    return []
