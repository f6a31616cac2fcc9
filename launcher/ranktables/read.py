"""
From JSON to a `RankTable`: one function per dialect. The keys decide about the dialect, as in HCCL.

Shapes and rules follow the public documentation of rank tables and HCCL's own parser. A table that
HCCL would refuse later, in each worker, is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrun.launcher.ranktables.jsontext import JsonPath
from pdrun.launcher.ranktables.model import Fault, RankTable, Server, SuperPod, TableDevice
from pdrun.launcher.ranktables.values import ValueReader, without_keys

FOREIGN_KEYS: Mapping[str, str] = {
    "prefill_device_list": "a table of vllm-ascend for prefill and decode instances",
    "decode_device_list": "a table of vllm-ascend for prefill and decode instances",
    "server_group_list": "MindIE's global table",
    "edge_list": "a topology file of the same generation",
    "peer_list": "a topology file of the same generation",
}
"""A key that only another kind of file has, and that kind."""
MAX_DEVICES = 64
"""Devices of a server."""
MAX_PORT = 65535
MAX_LAYERS = 8
MAX_LAYER_ADDRESSES = 24
PORT_KEYS = ("device_port", "host_port", "backup_device_port")
DRAFT_KEYS = {
    "level": "net_layer",
    "id": "net_instance_id",
    "fabric_type": "net_type",
    "rank_addrs": "rank_addr_list",
}
"""Keys of a draft of dialect 2.0, and the present ones."""


def read_table(data: Any, *, lenient: bool = False) -> tuple[RankTable | None, list[Fault]]:
    """
    Return the table and the faults of its shape; None if the data is not a rank table.

    Args:
        data: from `jsontext.parse_json`.
        lenient: numbers in the place of text, and text in the place of numbers, are warnings.
    """
    reader = ValueReader(lenient=lenient)
    if not isinstance(data, dict):
        return None, [Fault((), "must be an object", "a rank table is { ... }")]
    for key, what in FOREIGN_KEYS.items():
        if key in data and "rank_list" not in data and "server_list" not in data:
            hint = "use the table with ranks that HCCL reads"
            return None, [Fault((key,), f"this is {what}, not a rank table", hint)]
    version = data.get("version")
    has_list = "server_list" in data or "group_list" in data
    if data.get("status") == "initializing" and not has_list:
        return RankTable("1.0", "initializing", ()), []
    if version is None and "group_list" in data:
        table = _read_groups(data, reader)
    elif version in ("1.0", "1.2") and isinstance(version, str):
        table = _read_servers(data, version, reader)
    elif version == "1.1":
        table = _read_nodes(data, reader)
    elif version == "2.0":
        table = _read_ranks(data, reader)
    else:
        what = "is missing"
        if version is not None:
            what = f"{str(version)[:40]!r} is not a version of HCCL"
        return None, [Fault(("version",), what, "use 1.0, 1.1, 1.2 or 2.0")]
    return table, reader.faults


def _read_status(data: Mapping[str, Any], reader: ValueReader, *, required: bool = True) -> str:
    status = reader.read_text(data, "status", (), required=required)
    if status and status not in ("completed", "initializing"):
        what = f"must be completed or initializing, got {status!r}"
        reader.add_fault(("status",), what)
    return status


# Dialects 1.0 and 1.2
# --------------------------------------------------------------------------------------------------


def _read_servers(data: Mapping[str, Any], version: str, reader: ValueReader) -> RankTable:
    status = _read_status(data, reader)
    servers = []
    for path, item in reader.read_objects(data, "server_list", ()):
        devices = tuple(
            _read_device(device, at, reader)
            for at, device in reader.read_objects(item, "device", path)
        )
        name = reader.read_text(item, "server_id", path)
        servers.append(Server(name, devices, without_keys(item, "server_id", "device"), path))
    count = reader.read_count(data, "server_count", (), required=False)
    if count >= 0 and count != len(servers):
        what = f"is {count}, but server_list has {len(servers)} entries"
        reader.add_fault(("server_count",), what)
    pods = _read_super_pods(data, reader) if "super_pod_list" in data else ()
    extra = without_keys(data, "version", "status", "server_list", "server_count", "super_pod_list")
    dialect: Any = "1.2" if version == "1.2" else "1.0"
    return RankTable(dialect, status, tuple(servers), pods, extra)


def _read_super_pods(data: Mapping[str, Any], reader: ValueReader) -> tuple[SuperPod, ...]:
    pods = []
    for path, item in reader.read_objects(data, "super_pod_list", ()):
        servers = tuple(
            reader.read_text(server, "server_id", at)
            for at, server in reader.read_objects(item, "server_list", path)
        )
        name = reader.read_text(item, "super_pod_id", path)
        extra = without_keys(item, "super_pod_id", "server_list")
        pods.append(SuperPod(name, servers, extra))
    return tuple(pods)


def _read_device(data: Mapping[str, Any], path: JsonPath, reader: ValueReader) -> TableDevice:
    rank = reader.read_count(data, "rank_id", path)
    device_id = reader.read_count(data, "device_id", path, maximum=MAX_DEVICES - 1)
    ips = reader.read_addresses(data, "device_ip", path, required=False)
    super_device_id = reader.read_text(
        data, "super_device_id", path, required="super_device_id" in data
    )
    for key in PORT_KEYS:
        if key in data and reader.read_count(data, key, path, maximum=MAX_PORT) < 1:
            reader.add_fault((*path, key), "must be a port", f'write "1" to "{MAX_PORT}"')
    extra = without_keys(data, "rank_id", "device_id", "device_ip", "super_device_id")
    return TableDevice(rank, device_id, ips, super_device_id, extra, path)


# Dialect 1.1: hosts by address, devices optional
# --------------------------------------------------------------------------------------------------


def _read_nodes(data: Mapping[str, Any], reader: ValueReader) -> RankTable:
    servers = []
    for path, item in reader.read_objects(data, "node_list", ()):
        devices = []
        for index, (at, entry) in enumerate(reader.read_objects(item, "ranks", path)):
            device_id = reader.read_count(
                entry, "device_id", at, required=False, maximum=MAX_DEVICES - 1
            )
            devices.append(
                TableDevice(
                    device_id=device_id if device_id >= 0 else index,
                    ips=reader.read_addresses(entry, "rank_ip", at, required=False),
                    rank=reader.read_count(entry, "rank_id", at),
                    extra=without_keys(entry, "rank_id", "device_id", "rank_ip"),
                    path=at,
                )
            )
        name = reader.read_text(item, "node_addr", path)
        extra = without_keys(item, "node_addr", "ranks")
        servers.append(Server(name, tuple(devices), extra, path))
    extra = without_keys(data, "version", "node_list")
    return RankTable("1.1", "completed", tuple(servers), extra=extra)


# Dialects without a version: `lab` has one instance per device, with its rank; `group` one per host
# --------------------------------------------------------------------------------------------------


def _read_groups(data: Mapping[str, Any], reader: ValueReader) -> RankTable:
    status = _read_status(data, reader)
    groups = reader.read_objects(data, "group_list", ())
    if len(groups) > 1:
        reader.add_fault(("group_list",), f"must have one group, got {len(groups)}")
    servers: dict[str, Server] = {}
    is_lab = False
    group_extra = {}
    for path, group in groups[:1]:
        instances = reader.read_objects(group, "instance_list", path)
        is_lab = any("rank_id" in item for _, item in instances)
        servers = _read_instances(instances, reader, is_lab=is_lab)
        device_count = sum(len(server.devices) for server in servers.values())
        _check_count(group, path, reader, "device_num" if is_lab else "device_count", device_count)
        _check_count(group, path, reader, "instance_count", len(instances))
        _check_count(group, path, reader, "server_num", len(servers))
        group_extra = without_keys(
            group, "device_count", "device_num", "instance_count", "server_num", "instance_list"
        )
    _check_count(data, (), reader, "group_count", len(groups))
    extra = {**without_keys(data, "status", "group_count", "group_list"), "group": group_extra}
    dialect: Any = "lab" if is_lab else "group"
    return RankTable(dialect, status, tuple(servers.values()), extra=extra)


def _read_instances(
    instances: list[tuple[JsonPath, dict[str, Any]]], reader: ValueReader, *, is_lab: bool
) -> dict[str, Server]:
    """Return id -> server; several instances of `lab` make one server."""
    servers: dict[str, Server] = {}
    rank = 0
    for path, item in instances:
        entries = reader.read_objects(item, "devices", path)
        if is_lab and len(entries) != 1:
            what = f"an instance with a rank must have one device, got {len(entries)}"
            reader.add_fault((*path, "devices"), what)
        name = reader.read_text(item, "server_id", path)
        devices = []
        for index, (at, entry) in enumerate(entries):
            own_rank = reader.read_count(item, "rank_id", path) if is_lab else rank + index
            devices.append(_read_group_device(entry, at, reader, own_rank))
        rank += len(entries)
        earlier = servers[name].devices if name in servers else ()
        if name in servers and not is_lab:
            reader.add_fault((*path, "server_id"), f"{name} is listed twice")
        extra = without_keys(item, "server_id", "devices", "rank_id")
        servers[name] = Server(name, (*earlier, *devices), extra, path)
    return servers


def _check_count(
    data: Mapping[str, Any], path: JsonPath, reader: ValueReader, key: str, expected: int
) -> None:
    count = reader.read_count(data, key, path, required=False)
    if count >= 0 and count != expected:
        reader.add_fault((*path, key), f"must be {expected}, got {count}")


def _read_group_device(
    data: Mapping[str, Any], path: JsonPath, reader: ValueReader, rank: int
) -> TableDevice:
    device_id = reader.read_count(data, "device_id", path, maximum=MAX_DEVICES - 1)
    ips = reader.read_addresses(data, "device_ip", path, required=False)
    extra = without_keys(data, "device_id", "device_ip")
    return TableDevice(rank, device_id, ips, extra=extra, path=path)


# Dialect 2.0: a flat list without host names
# --------------------------------------------------------------------------------------------------


def _read_ranks(data: Mapping[str, Any], reader: ValueReader) -> RankTable:
    status = _read_status(data, reader, required=False) or "completed"
    items = reader.read_objects(data, "rank_list", ())
    count = reader.read_number(data, "rank_count", ())
    if count >= 0 and count != len(items):
        what = f"is {count}, but rank_list has {len(items)} entries"
        reader.add_fault(("rank_count",), what)
    devices = []
    for path, item in items:
        _check_layers(item, path, reader)
        reader.read_number(item, "local_id", path, maximum=MAX_DEVICES)
        devices.append(
            TableDevice(
                rank=reader.read_number(item, "rank_id", path),
                device_id=reader.read_number(item, "device_id", path, maximum=MAX_DEVICES),
                ips=_lowest_layer_ips(item),
                extra=without_keys(item, "rank_id", "device_id"),
                path=path,
            )
        )
    extra = without_keys(data, "version", "rank_count", "rank_list")
    return RankTable("2.0", status, _split_into_servers(devices), extra=extra)


def _split_into_servers(devices: list[TableDevice]) -> tuple[Server, ...]:
    """
    Return servers without names.

    A new server starts where the device id does not increase from one rank to the next, and where
    the instance of layer 0 changes, which is the network inside of a server.
    """
    groups: list[list[TableDevice]] = []
    for device in sorted(devices, key=lambda device: device.rank):
        last = groups[-1][-1] if groups else None
        is_same_instance = last is not None and _first_instance(last) == _first_instance(device)
        if last is not None and is_same_instance and device.device_id > last.device_id:
            groups[-1].append(device)
        else:
            groups.append([device])
    return tuple(Server("", tuple(group)) for group in groups)


def _first_instance(device: TableDevice) -> str:
    """Return the instance of layer 0 of a device; empty: none is named."""
    layers = device.extra.get("level_list")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("net_layer") == 0:
            return str(layer.get("net_instance_id", ""))
    return ""


def _check_layers(data: Mapping[str, Any], path: JsonPath, reader: ValueReader) -> None:
    layers = reader.read_objects(data, "level_list", path)
    if len(layers) > MAX_LAYERS:
        what = f"has {len(layers)} layers; HCCL supports {MAX_LAYERS}"
        reader.add_fault((*path, "level_list"), what)
    previous = -1
    for at, layer in layers:
        for key, present_key in DRAFT_KEYS.items():
            if key in layer and present_key not in layer:
                what = "is a name of a draft of dialect 2.0"
                reader.add_fault((*at, key), what, f"write {present_key}")
                return
        number = reader.read_number(layer, "net_layer", at, maximum=MAX_LAYERS - 1)
        if 0 <= number <= previous:
            what = f"must increase from entry to entry, got {number} after {previous}"
            reader.add_fault((*at, "net_layer"), what)
        previous = max(previous, number)
        _check_layer(layer, at, reader, number)


def _check_layer(
    layer: Mapping[str, Any], path: JsonPath, reader: ValueReader, number: int
) -> None:
    kind = layer.get("net_type")
    if number == 0 and kind != "TOPO_FILE_DESC":
        reader.add_fault((*path, "net_type"), "must be TOPO_FILE_DESC in layer 0")
    elif kind not in ("TOPO_FILE_DESC", "CLOS"):
        what = f"must be TOPO_FILE_DESC or CLOS, got {str(kind)[:40]!r}"
        reader.add_fault((*path, "net_type"), what)
    if not isinstance(layer.get("net_instance_id"), str):
        reader.add_fault((*path, "net_instance_id"), "must be text")
    addresses = layer.get("rank_addr_list")
    if not isinstance(addresses, list) or not all(isinstance(one, dict) for one in addresses):
        reader.add_fault((*path, "rank_addr_list"), "must be a list of objects")
    elif len(addresses) > MAX_LAYER_ADDRESSES:
        what = f"has {len(addresses)} addresses; HCCL supports {MAX_LAYER_ADDRESSES}"
        reader.add_fault((*path, "rank_addr_list"), what)


def _lowest_layer_ips(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the IP addresses of the lowest layer that has any."""
    layers = data.get("level_list")
    if not isinstance(layers, list):
        return ()
    for layer in layers:
        entries = layer.get("rank_addr_list") if isinstance(layer, dict) else None
        if not isinstance(entries, list):
            continue
        ips = [entry["addr"] for entry in entries if _is_ip_entry(entry)]
        if ips:
            return tuple(ips)
    return ()


def _is_ip_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("addr"), str):
        return False
    return entry.get("addr_type") in ("IPV4", "IPV6")
