"""
What HCCL requires of a table beyond its shape: values are unique and complete, and the order of the
ranks is possible.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterable, Sequence

from pdrun.launcher.ranktables.jsontext import JsonPath, format_path
from pdrun.launcher.ranktables.model import MEETING_KEYS, Fault, RankTable, TableDevice

MAX_RANKS_SHOWN = 20
_SUPER_PODS: JsonPath = ("super_pod_list",)


def check_table(table: RankTable) -> list[Fault]:
    """Return the faults of a table; empty if a job can use it."""
    if table.status == "initializing":
        what = "initializing: the table is not complete yet"
        return [Fault(("status",), what, "wait until it is completed")]
    faults = _check_ranks(table) + _check_ids(table) + _check_meeting_addresses(table)
    if table.dialect != "2.0":
        faults += _check_addresses(table)
    if table.dialect == "1.2" or table.super_pods:
        faults += _check_super_pods(table)
    return faults


def _find_duplicates(items: Iterable[tuple[Hashable, JsonPath]], what: str) -> list[Fault]:
    """Return a fault for each value that is listed a second time."""
    first: dict[Hashable, JsonPath] = {}
    faults = []
    for value, path in items:
        if value in first:
            where = format_path(first[value])
            message = f"{value} is listed twice (first at {where})"
            faults.append(Fault(path, message, f"{what} must be unique"))
        first.setdefault(value, path)
    return faults


def _check_ranks(table: RankTable) -> list[Fault]:
    """Ranks are 0 to n-1, and those of a server are consecutive."""
    ranks = [
        (device.rank, (*device.path, "rank_id")) for device in table.devices if device.rank >= 0
    ]
    faults = _find_duplicates(ranks, "a rank")
    if faults:
        return faults
    for expected, (rank, path) in enumerate(ranks):
        if rank != expected:
            what = f"{rank} follows {expected - 1}: rank {expected} is missing"
            if expected == 0:
                what = f"the lowest rank is {rank}: rank 0 is missing"
            return [Fault(path, what, "ranks must be 0 to n-1")]
    next_rank = 0
    for server in table.servers_by_rank:
        own = sorted(device.rank for device in server.devices)
        if own and own != list(range(next_rank, next_rank + len(own))):
            text = ",".join(map(str, own[:MAX_RANKS_SHOWN]))
            hint = "the ranks of a server must be consecutive"
            return [Fault(server.path or ("rank_list",), f"has the ranks {text}", hint)]
        next_rank += len(own)
    return []


def _check_ids(table: RankTable) -> list[Fault]:
    """Servers, and the devices of a server, have unique ids."""
    faults = []
    if table.dialect != "2.0":
        ids = ((server.id, (*server.path, "server_id")) for server in table.servers if server.id)
        faults += _find_duplicates(ids, "a server's id")
    for server in table.servers:
        device_ids = (
            (device.device_id, (*device.path, "device_id"))
            for device in server.devices
            if device.device_id >= 0
        )
        faults += _find_duplicates(device_ids, "a device of a server")
    return faults


def _check_meeting_addresses(table: RankTable) -> list[Fault]:
    """The addresses of several servers are unique, and none is a loopback address."""
    if len(table.servers) < 2:
        return []
    addresses = []
    for server in table.servers:
        address = server.meeting_address
        key = next(
            (key for key in MEETING_KEYS if address and server.extra.get(key) == address), ""
        )
        path = (*server.path, key)
        if key and _is_loopback(address):
            what = f"{address} is a loopback address, but there are {len(table.servers)} servers"
            return [Fault(path, what, "write the address at which the others reach this server")]
        if key:
            addresses.append((address, path))
    return _find_duplicates(addresses, "the address of a server")


def _is_loopback(text: str) -> bool:
    """Whether text is an address that only its own machine reaches, or ``localhost``."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text == "localhost"
    return address.is_loopback or address.is_unspecified


def _check_addresses(table: RankTable) -> list[Fault]:
    """
    Check the addresses of network cards.

    Each is unique. All are of one family, and each device has as many as the others. A table of
    several servers requires them.
    """
    faults = _find_duplicates(
        ((ip, (*device.path, "device_ip")) for device in table.devices for ip in device.ips),
        "an address of a network card",
    )
    if len(table.servers) > 1 and table.dialect != "1.1":
        faults += _check_required_addresses(table)
    if faults:
        return faults
    with_ip = [device for device in table.devices if device.ips]
    without_ip = [device for device in table.devices if not device.ips]
    if with_ip and without_ip:
        path = (*without_ip[0].path, "device_ip")
        return [Fault(path, "is missing, but other devices have one")]
    return _check_same_kind(with_ip) if with_ip else []


def _check_required_addresses(table: RankTable) -> list[Fault]:
    """Every device of a table of several servers has an address, or its host has one."""
    for server in table.servers:
        lacking = [device for device in server.devices if not device.ips]
        if lacking and not server.first_text("host_ip"):
            return [
                Fault(
                    (*lacking[0].path, "device_ip"),
                    "is missing, but several servers need these addresses to connect",
                    "take it from hccn_tool -i N -ip -g or /etc/hccn.conf",
                )
            ]
    return []


def _check_same_kind(devices: Sequence[TableDevice]) -> list[Fault]:
    """All devices have the same number of addresses, of the same family."""
    expected = len(devices[0].ips)
    version = _ip_version(devices[0].ips[0])
    for device in devices:
        path = (*device.path, "device_ip")
        if len(device.ips) != expected:
            what = f"has {len(device.ips)} addresses, the first device has {expected}"
            return [Fault(path, what)]
        for ip in device.ips:
            if version and _ip_version(ip) not in (0, version):
                what = "is of another family (IPv4, IPv6) than the first device's"
                return [Fault(path, what)]
    return []


def _ip_version(text: str) -> int:
    """Return 4 or 6; 0 for text that is not an IP address."""
    try:
        return ipaddress.ip_address(text).version
    except ValueError:
        return 0


def _check_super_pods(table: RankTable) -> list[Fault]:
    """Super pods and their devices are unique, list every server once and are consecutive."""
    pods = table.super_pods
    if table.dialect == "1.0" and pods:
        what = "is not supported in version 1.0"
        return [Fault(_SUPER_PODS, what, 'write "version": "1.2"', is_warning=True)]
    listed = [name for pod in pods for name in pod.servers]
    faults = _find_duplicates(((pod.id, _SUPER_PODS) for pod in pods), "a super pod's id")
    faults += _find_duplicates(((name, _SUPER_PODS) for name in listed), "a server of a super pod")
    if pods:
        for name in sorted({server.id for server in table.servers} ^ set(listed))[:1]:
            where = "not in server_list" if name in listed else "in no super pod"
            faults.append(Fault(_SUPER_PODS, f"server {name} is {where}"))
    pod_of = {name: pod.id for pod in pods for name in pod.servers}
    faults += _find_duplicates(
        (
            (
                (pod_of.get(server.id, ""), device.super_device_id),
                (*device.path, "super_device_id"),
            )
            for server in table.servers
            for device in server.devices
            if device.super_device_id
        ),
        "a device of a super pod",
    )
    lacking = [device for device in table.devices if not device.super_device_id]
    if pods and lacking and len(lacking) != len(table.devices):
        path = (*lacking[0].path, "super_device_id")
        faults.append(Fault(path, "is missing, but other devices have one"))
    if not _are_consecutive([pod_of.get(server.id, "") for server in table.servers_by_rank]):
        what = "the servers of a super pod must be consecutive in rank order"
        faults.append(Fault(_SUPER_PODS, what))
    return faults


def _are_consecutive(names: Sequence[str]) -> bool:
    """Return whether equal names are next to each other."""
    finished = set()
    for index, name in enumerate(names):
        if name in finished:
            return False
        if index + 1 < len(names) and names[index + 1] != name:
            finished.add(name)
    return True
