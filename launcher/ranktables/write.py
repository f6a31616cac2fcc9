"""
From a `RankTable` to JSON in any dialect. What a dialect has no place for is named, never dropped
in silence.

Written in the dialect that it was read in, a table says exactly what it said before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdrun.launcher.ranktables.model import Device, Dialect, RankTable, Server
from pdrun.launcher.ranktables.values import rest

_LEVEL = {"net_layer": 0, "net_type": "TOPO_FILE_DESC", "net_attr": ""}


def text_of(table: RankTable) -> str:
    """Return a table as JSON, in its own dialect: two blanks of indentation, one device a line."""
    data = data_of(table)
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return _compact(text) + "\n"


def _compact(text: str) -> str:
    """Put objects without further objects on one line, as people write devices."""
    import re

    return re.sub(
        r"\{\s*((?:\"[^\"\\]*\": (?:\"[^\"\\]*\"|[0-9]+),?\s*)+)\}",
        lambda match: "{" + re.sub(r",\s+", ", ", match[1].strip()) + "}",
        text,
    )


def data_of(table: RankTable) -> dict[str, Any]:
    """Return a table as the data of its dialect."""
    writers = {
        "1.0": _servers,
        "1.2": _servers,
        "1.1": _nodes,
        "2.0": _ranks,
        "group": _group,
        "lab": _lab,
    }
    return writers[table.dialect](table)


def convert(table: RankTable, dialect: Dialect) -> tuple[RankTable, list[str]]:
    """
    Return the table in another dialect, and what that one has no place for.

    1.0 and 1.2 differ by super pods. The group dialects keep ids and addresses only. 2.0 names no hosts and wants ports
    of links, which 1.x does not know; from 2.0, hosts are called ``node0``, ``node1`` ...
    """
    if dialect == table.dialect:
        return table, []
    lost: list[str] = []
    source = _from_flat(table, lost) if table.dialect == "2.0" else table
    if dialect == "2.0":
        return _to_flat(source, lost), lost
    if dialect in ("1.0", "1.2"):
        servers = tuple(_plain(server, source.dialect, dialect, lost) for server in source.servers)
        pods = source.super_pods if dialect == "1.2" else ()
        if source.super_pods and dialect == "1.0":
            lost.append("super_pod_list")
        return RankTable(dialect, "completed", servers, pods, _top(source, lost)), _once(lost)
    servers = tuple(_bare(server, lost) for server in source.ordered)
    if source.super_pods:
        lost.append("super_pod_list")
    return RankTable(
        dialect, "completed", servers, extra={"group": {"group_name": "worker"}}
    ), _once(lost)


def _once(lost: list[str]) -> list[str]:
    return list(dict.fromkeys(lost))


_GROUP_ONLY = (
    "group",
    "board_id",
    "chip_info",
    "deploy_mode",
    "para_plane_nic_location",
    "para_plane_nic_name",
    "para_plane_nic_num",
)


def _top(table: RankTable, lost: list[str]) -> dict[str, Any]:
    if table.dialect in ("1.0", "1.2"):
        return dict(table.extra)
    lost += [key for key in table.extra if key not in ("group", "status")]
    lost += [key for key in table.extra.get("group", {}) if key != "group_name"]
    return {}


def _plain(server: Server, before: Dialect, dialect: Dialect, lost: list[str]) -> Server:
    """A server of server_list: in 1.0 without what belongs to super pods."""
    devices = server.devices
    if dialect == "1.0":
        gone = ("backup_device_ip", "backup_device_port")
        lost += ["super_device_id"] * any(one.super_device_id for one in devices)
        lost += [key for key in gone for one in devices if key in one.extra]
        devices = tuple(
            replace(one, super_device_id="", extra=rest(one.extra, *gone)) for one in devices
        )
    if before == "1.1":
        lost += [f"ranks.{key}" for one in devices for key in one.extra]
        devices = tuple(replace(one, extra={}) for one in devices)
    return replace(server, devices=devices)


def _bare(server: Server, lost: list[str]) -> Server:
    lost += [key for key in server.extra if key != "pod_name"]
    lost += [key for one in server.devices for key in one.extra]
    lost += ["super_device_id"] * any(one.super_device_id for one in server.devices)
    devices = tuple(replace(one, extra={}, super_device_id="") for one in server.devices)
    extra = {"pod_name": server.extra["pod_name"]} if "pod_name" in server.extra else {}
    return replace(server, devices=devices, extra=extra)


def _from_flat(table: RankTable, lost: list[str]) -> RankTable:
    """2.0 as servers: the addresses of the lowest layer are kept, the layers themselves are not."""
    lost += [
        key for one in table.devices for key in one.extra if key not in ("local_id", "level_list")
    ]
    lost.append("level_list: layers, ports and planes")
    servers = tuple(
        Server(f"node{index}", tuple(replace(one, extra={}) for one in server.devices))
        for index, server in enumerate(table.servers)
    )
    return RankTable("1.0", table.status, servers)


def _to_flat(table: RankTable, lost: list[str]) -> RankTable:
    lost.append("server_id: dialect 2.0 names no hosts")
    lost += [key for server in table.servers for key in server.extra]
    lost += [key for one in table.devices for key in one.extra]
    lost += ["super_device_id"] * any(one.super_device_id for one in table.devices)
    lost += ["super_pod_list"] * bool(table.super_pods)
    lost += [key for key in table.extra if key != "group"]
    servers = []
    for server in table.ordered:
        servers.append(Server("", tuple(_flat(one, server) for one in server.devices)))
    lost[:] = _once(lost)
    return RankTable("2.0", "completed", tuple(servers), extra={"status": "completed"})


def _flat(one: Device, server: Server) -> Device:
    addresses: list[dict[str, Any]] = [
        {"addr_type": "IPV6" if ":" in ip else "IPV4", "addr": ip, "ports": []} for ip in one.ips
    ]
    level = {**_LEVEL, "net_instance_id": server.id, "rank_addr_list": addresses}
    return Device(
        one.rank, one.device_id, one.ips, extra={"local_id": one.device_id, "level_list": [level]}
    )


# writers
# --------------------------------------------------------------------------------------------------------------


def _scalars(one: Device, *, rank: bool = True) -> dict[str, Any]:
    return {
        "device_id": str(one.device_id),
        **({"device_ip": ",".join(one.ips)} if one.ips else {}),
        **({"super_device_id": one.super_device_id} if one.super_device_id else {}),
        **({"rank_id": str(one.rank)} if rank else {}),
        **one.extra,
    }


def _servers(table: RankTable) -> dict[str, Any]:
    pods = [
        {
            "super_pod_id": pod.id,
            "server_list": [{"server_id": name} for name in pod.servers],
            **pod.extra,
        }
        for pod in table.super_pods
    ]
    return {
        "status": table.status,
        "version": table.dialect,
        "server_count": str(len(table.servers)),
        "server_list": [
            {
                "server_id": server.id,
                **server.extra,
                "device": [_scalars(one) for one in server.devices],
            }
            for server in table.servers
        ],
        **({"super_pod_list": pods} if pods else {}),
        **table.extra,
    }


def _nodes(table: RankTable) -> dict[str, Any]:
    nodes = [
        {
            "node_addr": server.id,
            **server.extra,
            "ranks": [
                {
                    "rank_id": str(one.rank),
                    "device_id": str(one.device_id),
                    **({"rank_ip": ",".join(one.ips)} if one.ips else {}),
                    **one.extra,
                }
                for one in server.devices
            ],
        }
        for server in table.servers
    ]
    return {"version": "1.1", "node_list": nodes, **table.extra}


def _ranks(table: RankTable) -> dict[str, Any]:
    ranks = [
        {"rank_id": one.rank, "device_id": one.device_id, **one.extra} for one in table.devices
    ]
    return {"version": "2.0", **table.extra, "rank_count": len(ranks), "rank_list": ranks}


def _wrapped(table: RankTable, group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": table.status,
        "group_count": "1",
        "group_list": [group],
        **rest(table.extra, "group"),
    }


def _group(table: RankTable) -> dict[str, Any]:
    instances = [
        {
            **server.extra,
            "server_id": server.id,
            "devices": [_scalars(one, rank=False) for one in server.devices],
        }
        for server in table.servers
    ]
    counts = {"device_count": str(len(table.devices)), "instance_count": str(len(instances))}
    return _wrapped(table, {**table.extra.get("group", {}), **counts, "instance_list": instances})


def _lab(table: RankTable) -> dict[str, Any]:
    instances = [
        {
            "devices": [_scalars(one, rank=False)],
            "rank_id": str(one.rank),
            "server_id": server.id,
            **server.extra,
        }
        for server in table.servers
        for one in server.devices
    ]
    counts = {
        "device_num": str(len(instances)),
        "server_num": str(len(table.servers)),
        "instance_count": str(len(instances)),
    }
    return _wrapped(table, {**table.extra.get("group", {}), **counts, "instance_list": instances})
