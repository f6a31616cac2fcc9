"""
Settings of a job from an Ascend rank table: servers are nodes, devices are workers. It reads the
table's file.

The hosts are those of the table. If the table has labels only, or no names (dialect 2.0), the hosts
are those of ``--hosts`` in the same order. A table with one server is a job on this machine.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.config.settings import Priority, Setting, Source, conflict_error
from pdrun.launcher.config.spec import Policy
from pdrun.launcher.hosts.selection import Host, check_host_name
from pdrun.launcher.ranktables import files
from pdrun.launcher.ranktables.model import RankTable, Server, TableDevice
from pdrun.text import plural


def apply_rank_table(
    settings: Sequence[Setting], environ: Mapping[str, str]
) -> tuple[list[Setting], tuple[str, ...]]:
    """
    Return the settings with those of the rank table, and notes.

    Raises:
        UsageError, ConfigError: the table is missing or invalid, or contradicts other settings.
        DeadlineExceeded: the table was not complete within ``--start-timeout``.
    """
    tables = sorted(
        (setting for setting in settings if setting.path == "place.rank_table"),
        key=lambda setting: setting.source.priority,
    )
    if not tables:
        return list(settings), ()
    chosen = tables[0]
    path = str(chosen.value)
    if not path.startswith("/"):
        path = str(Path.cwd() / path)
    wait = next(
        (setting.value for setting in settings if setting.path == "policy.start_timeout"),
        Policy().start_timeout,
    )
    try:
        table = files.wait_for_table(chosen.value, wait, _print_progress)
    except UsageError as error:
        raise chosen.source.convert_file_error(error) from None
    source = replace(chosen.source, text=Path(path).name)
    _check_rank_count(len(table.devices), source, environ)
    derived = [Setting("place.rank_table", path, source)]
    # the lowest priority, so that --backend cpu can try the table on any machine
    derived.append(Setting("resources.backend", "npu", replace(source, priority=Priority.DETECTED)))
    others = [
        setting for setting in settings if setting.path not in ("place.rank_table", "hosts.all")
    ]
    listed = [
        setting
        for setting in settings
        if setting.path == "hosts.all" and setting.source.priority < Priority.DETECTED
    ]
    servers = table.servers_by_rank
    if listed:
        hosts = _match_hosts(listed[0], servers, chosen.source)
        derived.append(Setting("hosts.all", hosts, listed[0].source))
    elif len(servers) == 1:
        others = _drop_other_nodes(others)
        ids = tuple(device.device_id for device in _devices_by_rank(servers[0]))
        derived += [
            Setting("resources.devices", len(ids), source),
            Setting("resources.indices", ids, source),
            Setting("resources.nodes", 1, source),
        ]
    else:
        _check_node_count(others, len(servers), source)
        hosts = _make_hosts(servers, chosen.source)
        derived.append(Setting("hosts.all", hosts, source))
        derived += _node_rank_settings(servers, environ)
    return [*others, *derived], (f"{source.describe()}: {_summarize_table(table)}",)


def _drop_other_nodes(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings without another launcher's scheduler: one server needs none."""
    paths = ("place.serve", "place.node_rank", "scheduler.host", "scheduler.port")
    return [
        setting
        for setting in settings
        if setting.path not in paths or setting.source.priority < Priority.DETECTED
    ]


def _check_rank_count(ranks: int, source: Source, environ: Mapping[str, str]) -> None:
    """Refuse a RANK_SIZE that is not the number of the table's ranks."""
    text = environ.get("RANK_SIZE", "")
    if source.priority is Priority.COMMAND or not re.fullmatch("[0-9]{1,9}", text):
        return
    if int(text) != ranks:
        raise ConfigError(
            f"is {text}, but {source.describe()} has {plural(ranks, 'rank')}",
            where="RANK_SIZE",
            hint="unset one of them",
        )


def _check_node_count(settings: Sequence[Setting], servers: int, source: Source) -> None:
    """Refuse another launcher's number of nodes that differs from the table's servers."""
    for setting in settings:
        is_detected = setting.source.priority is Priority.DETECTED
        if setting.path == "resources.nodes" and is_detected and setting.value != servers:
            raise conflict_error(Setting(setting.path, servers, source), setting)


def _summarize_table(table: RankTable) -> str:
    return (
        f"{len(table.devices)} rank(s) on {len(table.servers)} server(s), dialect {table.dialect}"
    )


def _print_progress(text: str) -> None:
    print(f"pdrun: {text}", file=sys.stderr, flush=True)


def _devices_by_rank(server: Server) -> list[TableDevice]:
    return sorted(server.devices, key=lambda device: device.rank)


_NAME_KEYS = ("host_ip", "server_ip", "server_id", "pod_ip", "container_ip")
"""Entries of a server with its name for ssh. The first one that no other server has counts."""


def _make_hosts(servers: Sequence[Server], source: Source) -> tuple[Host, ...]:
    counts = Counter(
        (key, value)
        for server in servers
        for key in _NAME_KEYS
        if (value := server.first_text(key))
    )
    return tuple(
        _make_host(
            server,
            [key for key in _NAME_KEYS if counts[key, server.first_text(key)] == 1],
            source,
        )
        for server in servers
    )


def _make_host(server: Server, name_keys: Sequence[str], source: Source) -> Host:
    """Return a host with the address for ssh and, if it differs, the address for the rendezvous."""
    name = server.first_text(*name_keys)
    meet = server.meeting_address
    try:
        check_host_name(name, source.label)
    except PdrunError:
        what = "the rank table has no host names"
        if name:
            what = f"server {name!r} is not a host name or address"
        raise ConfigError(
            what,
            where=source.label,
            hint="list the servers in rank order with --hosts",
        ) from None
    ids = tuple(device.device_id for device in _devices_by_rank(server))
    if meet == name:
        meet = ""
    return Host(name, len(ids), ids, source.label, address=meet)


def _match_hosts(listed: Setting, servers: Sequence[Server], source: Source) -> tuple[Host, ...]:
    hosts: tuple[Host, ...] = listed.value
    if len(hosts) != len(servers):
        raise listed.source.make_error(
            f"{len(hosts)} host(s), but {source.describe()} has {len(servers)} server(s)",
            "list one host per server",
        )
    matched = []
    for host, server in zip(hosts, servers, strict=True):
        ids = tuple(device.device_id for device in _devices_by_rank(server))
        if host.devices not in (None, len(ids)):
            raise listed.source.make_error(
                f"{host.name} has {host.devices} devices, but {len(ids)} in {source.describe()}"
            )
        matched.append(replace(host, devices=len(ids), indices=ids))
    return tuple(matched)


def _node_rank_settings(servers: Sequence[Server], environ: Mapping[str, str]) -> list[Setting]:
    """Find this node by XDL_IP, in which MindCluster gives a pod the address of its host."""
    own = environ.get("XDL_IP", "")
    ranks = [rank for rank, server in enumerate(servers) if own and own in server.names]
    if len(ranks) == 1:
        return [Setting("place.node_rank", ranks[0], Source("XDL_IP", Priority.DETECTED, own))]
    return []
