"""
From JSON to a `RankTable`: one function a dialect, chosen by the keys as HCCL chooses, foreign
dialects named.

Shapes and rules after the tables' public documentation and HCCL's own parser; what HCCL would
refuse later, in each worker, is refused here at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrun.launcher.ranktables.jsontext import Path
from pdrun.launcher.ranktables.model import Device, Fault, RankTable, Server, SuperPod
from pdrun.launcher.ranktables.values import Reader, rest

FOREIGN: Mapping[str, str] = {
    "prefill_device_list": "a table of vllm-ascend for prefill and decode instances",
    "decode_device_list": "a table of vllm-ascend for prefill and decode instances",
    "server_group_list": "MindIE's global table",
    "edge_list": "a topology file of the same generation",
    "peer_list": "a topology file of the same generation",
}
"""A key that only another kind of file has, and what that is."""
_DEVICES = 64
"""Devices of a server, at most."""


def read(data: Any, *, lenient: bool = False) -> tuple[RankTable | None, list[Fault]]:
    """
    Return the table, and what is wrong with its shape; no table where it is none at all.

    Args:
        data: from `jsontext.parse`.
        lenient: numbers where text belongs (and the other way round) are warnings.
    """
    reader = Reader(lenient=lenient)
    if not isinstance(data, dict):
        return None, [Fault((), "is no object", "a rank table is { ... }")]
    for key, what in FOREIGN.items():
        if key in data and "rank_list" not in data and "server_list" not in data:
            hint = "give the table with ranks that HCCL reads"
            return None, [Fault((key,), f"this is {what}, not a rank table", hint)]
    version = data.get("version")
    if data.get("status") == "initializing" and not any(
        key in data for key in ("server_list", "group_list")
    ):
        return RankTable("1.0", "initializing", ()), []
    if version is None and "group_list" in data:
        table = _groups(data, reader)
    elif version in ("1.0", "1.2") and isinstance(version, str):
        table = _servers(data, version, reader)
    elif version == "1.1":
        table = _nodes(data, reader)
    elif version == "2.0":
        table = _ranks(data, reader)
    else:
        shown = (
            "is missing"
            if version is None
            else f"{str(version)[:40]!r} is no version that HCCL knows"
        )
        return None, [Fault(("version",), shown, "there are 1.0, 1.1, 1.2 and 2.0")]
    return table, reader.faults


def _status(data: Mapping[str, Any], reader: Reader, *, needed: bool = True) -> str:
    status = reader.text(data, "status", (), needed=needed)
    if status and status not in ("completed", "initializing"):
        reader.fault(("status",), f"{status!r} is neither completed nor initializing")
    return status


def _servers(data: Mapping[str, Any], version: str, reader: Reader) -> RankTable:
    """Dialects 1.0 and 1.2."""
    servers = []
    status = _status(data, reader)
    for path, item in reader.objects(data, "server_list", ()):
        devices = tuple(
            _device(one, at, reader, version) for at, one in reader.objects(item, "device", path)
        )
        servers.append(
            Server(
                reader.text(item, "server_id", path),
                devices,
                rest(item, "server_id", "device"),
                path,
            )
        )
    count = reader.count(data, "server_count", (), needed=False)
    if count >= 0 and count != len(servers):
        reader.fault(("server_count",), f"{count}, but server_list has {len(servers)}")
    pods = []
    if "super_pod_list" in data:
        for path, item in reader.objects(data, "super_pod_list", ()):
            ids = tuple(
                reader.text(one, "server_id", at)
                for at, one in reader.objects(item, "server_list", path)
            )
            name = reader.text(item, "super_pod_id", path)
            pods.append(SuperPod(name, ids, rest(item, "super_pod_id", "server_list")))
    extra = rest(data, "version", "status", "server_list", "server_count", "super_pod_list")
    return RankTable(
        "1.2" if version == "1.2" else "1.0", status, tuple(servers), tuple(pods), extra
    )


_PORTS = ("device_port", "host_port", "backup_device_port")


def _device(data: Mapping[str, Any], path: Path, reader: Reader, version: str) -> Device:
    rank = reader.count(data, "rank_id", path)
    device_id = reader.count(data, "device_id", path, most=_DEVICES - 1)
    ips = reader.addresses(data, "device_ip", path, needed=False)
    sdid = reader.text(data, "super_device_id", path, needed="super_device_id" in data)
    for key in _PORTS:
        if key in data and not reader.count(data, key, path, most=65535) >= 1:
            reader.fault((*path, key), "is no port", 'write "1" to "65535"')
    return Device(
        rank,
        device_id,
        ips,
        sdid,
        rest(data, "rank_id", "device_id", "device_ip", "super_device_id"),
        path,
    )


def _nodes(data: Mapping[str, Any], reader: Reader) -> RankTable:
    """Dialect 1.1: hosts by address, devices optional."""
    servers = []
    for path, item in reader.objects(data, "node_list", ()):
        devices = []
        for index, (at, one) in enumerate(reader.objects(item, "ranks", path)):
            device = reader.count(one, "device_id", at, needed=False, most=_DEVICES - 1)
            ips = reader.addresses(one, "rank_ip", at, needed=False)
            known = ("rank_id", "device_id", "rank_ip")
            devices.append(
                Device(
                    reader.count(one, "rank_id", at),
                    device if device >= 0 else index,
                    ips,
                    extra=rest(one, *known),
                    path=at,
                )
            )
        name = reader.text(item, "node_addr", path)
        servers.append(Server(name, tuple(devices), rest(item, "node_addr", "ranks"), path))
    return RankTable("1.1", "completed", tuple(servers), extra=rest(data, "version", "node_list"))


def _groups(data: Mapping[str, Any], reader: Reader) -> RankTable:
    """
    The dialects without a version: `lab` has an instance a device, with its rank; `group` one a
    host.
    """
    status = _status(data, reader)
    groups = reader.objects(data, "group_list", ())
    if len(groups) > 1:
        reader.fault(("group_list",), f"has {len(groups)} groups; one is supported")
    servers: dict[str, Server] = {}
    lab = False
    group_extra = {}
    known = ("device_count", "device_num", "instance_count", "server_num", "instance_list")
    for path, group in groups[:1]:
        instances = reader.objects(group, "instance_list", path)
        lab = any("rank_id" in item for _, item in instances)
        rank = 0
        for at, item in instances:
            devices = reader.objects(item, "devices", at)
            if lab and len(devices) != 1:
                reader.fault(
                    (*at, "devices"),
                    f"has {len(devices)} devices, and an instance with a rank has one",
                )
            name = reader.text(item, "server_id", at)
            made = tuple(
                _member(
                    one, place, reader, reader.count(item, "rank_id", at) if lab else rank + index
                )
                for index, (place, one) in enumerate(devices)
            )
            rank += len(devices)
            before = servers.get(name)
            if before is not None and not lab:
                reader.fault((*at, "server_id"), f"{name} stands twice")
            extra = rest(item, "server_id", "devices", "rank_id")
            servers[name] = Server(name, (*(before.devices if before else ()), *made), extra, at)
        total = sum(len(server.devices) for server in servers.values())
        _counted(
            group,
            path,
            reader,
            ("device_num" if lab else "device_count", total),
            ("instance_count", len(instances)),
            ("server_num", len(servers)),
        )
        group_extra = rest(group, *known)
    _counted(data, (), reader, ("group_count", len(groups)))
    extra = {**rest(data, "status", "group_count", "group_list"), "group": group_extra}
    return RankTable("lab" if lab else "group", status, tuple(servers.values()), extra=extra)


def _counted(
    data: Mapping[str, Any], path: Path, reader: Reader, *expected: tuple[str, int]
) -> None:
    for key, number in expected:
        count = reader.count(data, key, path, needed=False)
        if count >= 0 and count != number:
            reader.fault((*path, key), f"{count}, but there are {number}")


def _member(data: Mapping[str, Any], path: Path, reader: Reader, rank: int) -> Device:
    device_id = reader.count(data, "device_id", path, most=_DEVICES - 1)
    ips = reader.addresses(data, "device_ip", path, needed=False)
    return Device(rank, device_id, ips, extra=rest(data, "device_id", "device_ip"), path=path)


def _ranks(data: Mapping[str, Any], reader: Reader) -> RankTable:
    """
    Dialect 2.0: a flat list that names no hosts.

    A host ends where the device id does not rise any more from one rank to the next.
    """
    status = _status(data, reader, needed=False) or "completed"
    items = reader.objects(data, "rank_list", ())
    count = reader.number(data, "rank_count", ())
    if count >= 0 and count != len(items):
        reader.fault(("rank_count",), f"{count}, but rank_list has {len(items)}")
    devices = []
    for path, item in items:
        _levels(item, path, reader)
        reader.number(item, "local_id", path, most=_DEVICES)
        rank = reader.number(item, "rank_id", path)
        number = reader.number(item, "device_id", path, most=_DEVICES)
        devices.append(
            Device(
                rank, number, _level_ips(item), extra=rest(item, "rank_id", "device_id"), path=path
            )
        )
    servers: list[list[Device]] = []
    for device in sorted(devices, key=lambda one: one.rank):
        if servers and device.device_id > servers[-1][-1].device_id:
            servers[-1].append(device)
        else:
            servers.append([device])
    extra = rest(data, "version", "rank_count", "rank_list")
    return RankTable(
        "2.0", status, tuple(Server("", tuple(group)) for group in servers), extra=extra
    )


_DRAFT = {
    "level": "net_layer",
    "id": "net_instance_id",
    "fabric_type": "net_type",
    "rank_addrs": "rank_addr_list",
}
"""Names of a draft of dialect 2.0, and today's."""


def _levels(data: Mapping[str, Any], path: Path, reader: Reader) -> None:
    before = -1
    levels = reader.objects(data, "level_list", path)
    if len(levels) > 8:
        reader.fault((*path, "level_list"), f"has {len(levels)} layers; HCCL takes 8")
    for at, level in levels:
        old = [key for key in _DRAFT if key in level and _DRAFT[key] not in level]
        if old:
            reader.fault(
                (*at, old[0]), "is a name of a draft of dialect 2.0", f"write {_DRAFT[old[0]]}"
            )
            return
        layer = reader.number(level, "net_layer", at, most=7)
        if 0 <= layer <= before:
            reader.fault((*at, "net_layer"), f"{layer} does not rise")
        before = max(before, layer)
        kind = level.get("net_type")
        if layer == 0 and kind != "TOPO_FILE_DESC":
            reader.fault((*at, "net_type"), "of layer 0 is not TOPO_FILE_DESC")
        elif kind not in ("TOPO_FILE_DESC", "CLOS"):
            reader.fault(
                (*at, "net_type"), f"{str(kind)[:40]!r} is neither TOPO_FILE_DESC nor CLOS"
            )
        if not isinstance(level.get("net_instance_id"), str):
            reader.fault((*at, "net_instance_id"), "is no text")
        addresses = level.get("rank_addr_list")
        if not isinstance(addresses, list) or not all(isinstance(one, dict) for one in addresses):
            reader.fault((*at, "rank_addr_list"), "is no list of objects")
        elif len(addresses) > 24:
            reader.fault((*at, "rank_addr_list"), f"has {len(addresses)} addresses; HCCL takes 24")


def _level_ips(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The IP addresses of the lowest layer that has any."""
    levels = data.get("level_list")
    for level in levels if isinstance(levels, list) else ():
        addresses = level.get("rank_addr_list") if isinstance(level, dict) else None
        found = tuple(
            one["addr"]
            for one in (addresses if isinstance(addresses, list) else ())
            if isinstance(one, dict)
            and one.get("addr_type") in ("IPV4", "IPV6")
            and isinstance(one.get("addr"), str)
        )
        if found:
            return found
    return ()
