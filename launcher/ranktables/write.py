"""
From a `RankTable` to JSON, in any dialect.

What a dialect does not support is named, never dropped silently. A table that is written in the
dialect in which it was read is unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pdrun.launcher.ranktables.model import Dialect, RankTable, Server, TableDevice
from pdrun.launcher.ranktables.values import without_keys

LOWEST_LAYER = {"net_layer": 0, "net_type": "TOPO_FILE_DESC", "net_attr": ""}
BACKUP_KEYS = ("backup_device_ip", "backup_device_port")
"""Entries of a device that only dialect 1.2 has."""
_FLAT_OBJECT = re.compile(r"\{\s*((?:\"[^\"\\]*\": (?:\"[^\"\\]*\"|[0-9]+),?\s*)+)\}")


def format_table(table: RankTable) -> str:
    """Return a table as JSON in its own dialect: indented by two spaces, one line per device."""
    text = json.dumps(table_data(table), indent=2, ensure_ascii=False)
    return _FLAT_OBJECT.sub(_on_one_line, text) + "\n"


def _on_one_line(match: re.Match[str]) -> str:
    return "{" + re.sub(r",\s+", ", ", match[1].strip()) + "}"


def table_data(table: RankTable) -> dict[str, Any]:
    """Return a table as data of its dialect."""
    writers = {
        "1.0": _servers_data,
        "1.2": _servers_data,
        "1.1": _nodes_data,
        "2.0": _ranks_data,
        "group": _group_data,
        "lab": _lab_data,
    }
    return writers[table.dialect](table)


def convert_table(table: RankTable, dialect: Dialect) -> tuple[RankTable, list[str]]:
    """
    Return the table in another dialect, and the entries that this dialect does not support.

    * 1.0 and 1.2 differ by super pods.
    * The group dialects keep ids and addresses only.
    * 2.0 has no host names and requires ports of links, which 1.x does not have. From 2.0, hosts
      are named ``node0``, ``node1`` ...
    """
    if dialect == table.dialect:
        return table, []
    lost: list[str] = []
    source = _from_flat_list(table, lost) if table.dialect == "2.0" else table
    if dialect == "2.0":
        converted = _to_flat_list(source, lost)
    elif dialect in ("1.0", "1.2"):
        converted = _to_servers(source, dialect, lost)
    else:
        converted = _to_group(source, dialect, lost)
    return converted, list(dict.fromkeys(lost))


def _to_servers(table: RankTable, dialect: Dialect, lost: list[str]) -> RankTable:
    servers = tuple(
        _convert_server(server, table.dialect, dialect, lost) for server in table.servers
    )
    pods = table.super_pods if dialect == "1.2" else ()
    if table.super_pods and dialect == "1.0":
        lost.append("super_pod_list")
    extra: dict[str, Any] = {}
    if table.dialect in ("1.0", "1.2"):
        extra = dict(table.extra)
    else:
        lost += [key for key in table.extra if key not in ("group", "status")]
        lost += [key for key in table.extra.get("group", {}) if key != "group_name"]
    return RankTable(dialect, "completed", servers, pods, extra)


def _convert_server(server: Server, before: Dialect, dialect: Dialect, lost: list[str]) -> Server:
    """Return a server of server_list; in 1.0 without the entries of super pods."""
    devices = server.devices
    if dialect == "1.0":
        _note_super_device_ids(devices, lost)
        lost += [key for key in BACKUP_KEYS for device in devices if key in device.extra]
        devices = tuple(
            replace(device, super_device_id="", extra=without_keys(device.extra, *BACKUP_KEYS))
            for device in devices
        )
    if before == "1.1":
        lost += [f"ranks.{key}" for device in devices for key in device.extra]
        devices = _without_extra(devices)
    return replace(server, devices=devices)


def _note_super_device_ids(devices: Iterable[TableDevice], lost: list[str]) -> None:
    if any(device.super_device_id for device in devices):
        lost.append("super_device_id")


def _without_extra(devices: Iterable[TableDevice]) -> tuple[TableDevice, ...]:
    return tuple(replace(device, extra={}) for device in devices)


def _to_group(table: RankTable, dialect: Dialect, lost: list[str]) -> RankTable:
    servers = tuple(_to_group_server(server, lost) for server in table.servers_by_rank)
    if table.super_pods:
        lost.append("super_pod_list")
    extra = {"group": {"group_name": "worker"}}
    return RankTable(dialect, "completed", servers, extra=extra)


def _to_group_server(server: Server, lost: list[str]) -> Server:
    """Return a server with ids and addresses only."""
    lost += [key for key in server.extra if key != "pod_name"]
    lost += [key for device in server.devices for key in device.extra]
    _note_super_device_ids(server.devices, lost)
    devices = tuple(replace(device, extra={}, super_device_id="") for device in server.devices)
    extra = {}
    if "pod_name" in server.extra:
        extra = {"pod_name": server.extra["pod_name"]}
    return replace(server, devices=devices, extra=extra)


def _from_flat_list(table: RankTable, lost: list[str]) -> RankTable:
    """Return 2.0 as 1.0: of the layers only the addresses of the lowest one are kept."""
    for device in table.devices:
        lost += [key for key in device.extra if key not in ("local_id", "level_list")]
    lost.append("level_list: layers, ports and planes")
    servers = tuple(
        Server(f"node{index}", _without_extra(server.devices))
        for index, server in enumerate(table.servers)
    )
    return RankTable("1.0", table.status, servers)


def _to_flat_list(table: RankTable, lost: list[str]) -> RankTable:
    lost.append("server_id: dialect 2.0 has no host names")
    lost += [key for server in table.servers for key in server.extra]
    lost += [key for device in table.devices for key in device.extra]
    _note_super_device_ids(table.devices, lost)
    if table.super_pods:
        lost.append("super_pod_list")
    lost += [key for key in table.extra if key != "group"]
    servers = tuple(
        Server("", tuple(_to_flat_device(device, server) for device in server.devices))
        for server in table.servers_by_rank
    )
    return RankTable("2.0", "completed", servers, extra={"status": "completed"})


def _to_flat_device(device: TableDevice, server: Server) -> TableDevice:
    addresses: list[dict[str, Any]] = [
        {"addr_type": "IPV6" if ":" in ip else "IPV4", "addr": ip, "ports": []} for ip in device.ips
    ]
    layer = {**LOWEST_LAYER, "net_instance_id": server.id, "rank_addr_list": addresses}
    extra = {"local_id": device.device_id, "level_list": [layer]}
    return TableDevice(device.rank, device.device_id, device.ips, extra=extra)


# Data of each dialect
# --------------------------------------------------------------------------------------------------


def _device_data(device: TableDevice, *, has_rank: bool = True) -> dict[str, Any]:
    data: dict[str, Any] = {"device_id": str(device.device_id)}
    if device.ips:
        data["device_ip"] = ",".join(device.ips)
    if device.super_device_id:
        data["super_device_id"] = device.super_device_id
    if has_rank:
        data["rank_id"] = str(device.rank)
    return {**data, **device.extra}


def _servers_data(table: RankTable) -> dict[str, Any]:
    servers = []
    for server in table.servers:
        devices = [_device_data(device) for device in server.devices]
        servers.append({"server_id": server.id, **server.extra, "device": devices})
    data = {
        "status": table.status,
        "version": table.dialect,
        "server_count": str(len(table.servers)),
        "server_list": servers,
    }
    if table.super_pods:
        pods = []
        for pod in table.super_pods:
            names = [{"server_id": name} for name in pod.servers]
            pods.append({"super_pod_id": pod.id, "server_list": names, **pod.extra})
        data["super_pod_list"] = pods
    return {**data, **table.extra}


def _nodes_data(table: RankTable) -> dict[str, Any]:
    nodes = []
    for server in table.servers:
        ranks = []
        for device in server.devices:
            entry = {"rank_id": str(device.rank), "device_id": str(device.device_id)}
            if device.ips:
                entry["rank_ip"] = ",".join(device.ips)
            ranks.append({**entry, **device.extra})
        nodes.append({"node_addr": server.id, **server.extra, "ranks": ranks})
    return {"version": "1.1", "node_list": nodes, **table.extra}


def _ranks_data(table: RankTable) -> dict[str, Any]:
    ranks = [
        {"rank_id": device.rank, "device_id": device.device_id, **device.extra}
        for device in table.devices
    ]
    return {"version": "2.0", **table.extra, "rank_count": len(ranks), "rank_list": ranks}


def _in_one_group(table: RankTable, group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": table.status,
        "group_count": "1",
        "group_list": [{**table.extra.get("group", {}), **group}],
        **without_keys(table.extra, "group"),
    }


def _group_data(table: RankTable) -> dict[str, Any]:
    instances = []
    for server in table.servers:
        devices = [_device_data(device, has_rank=False) for device in server.devices]
        instances.append({**server.extra, "server_id": server.id, "devices": devices})
    group = {
        "device_count": str(len(table.devices)),
        "instance_count": str(len(instances)),
        "instance_list": instances,
    }
    return _in_one_group(table, group)


def _lab_data(table: RankTable) -> dict[str, Any]:
    instances = []
    for server in table.servers:
        for device in server.devices:
            instances.append(
                {
                    "devices": [_device_data(device, has_rank=False)],
                    "rank_id": str(device.rank),
                    "server_id": server.id,
                    **server.extra,
                }
            )
    group = {
        "device_num": str(len(instances)),
        "server_num": str(len(table.servers)),
        "instance_count": str(len(instances)),
        "instance_list": instances,
    }
    return _in_one_group(table, group)
