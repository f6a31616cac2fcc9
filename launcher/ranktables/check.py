"""
What HCCL demands of a table beyond its shape: unique, complete, and in an order that a job can
have.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterable

from pdrun.launcher.ranktables.jsontext import Path, path_text
from pdrun.launcher.ranktables.model import Device, Fault, RankTable


def check(table: RankTable) -> list[Fault]:
    """Return what is wrong; empty for a table that a job can use."""
    if table.status == "initializing":
        what = "initializing: whoever writes this table is not done yet"
        return [Fault(("status",), what, "wait until it is completed")]
    faults = _ranks(table) + _servers(table)
    if table.dialect != "2.0":
        faults += _addresses(table)
    return faults + (_super_pods(table) if table.dialect == "1.2" or table.super_pods else [])


def _twice(items: Iterable[tuple[Hashable, Path]], what: str) -> list[Fault]:
    first: dict[Hashable, Path] = {}
    faults = []
    for value, path in items:
        if value in first:
            where = path_text(first[value])
            faults.append(
                Fault(path, f"{value} stands twice (first at {where})", f"{what} is unique")
            )
        first.setdefault(value, path)
    return faults


def _ranks(table: RankTable) -> list[Fault]:
    key = "rank_id"
    pairs = [(one.rank, (*one.path, key)) for one in table.devices if one.rank >= 0]
    faults = _twice(pairs, "a rank")
    if faults:
        return faults
    for expected, (rank, path) in enumerate(pairs):
        if rank != expected:
            return [
                Fault(
                    path,
                    f"{rank} follows {expected - 1}: rank {expected} is missing",
                    "ranks are 0 to n-1",
                )
            ]
    end = 0
    for server in table.ordered:
        ranks = sorted(one.rank for one in server.devices)
        if ranks and ranks != list(range(end, end + len(ranks))):
            text = ",".join(map(str, ranks[:20]))
            hint = "the ranks of a server stand together, without those of another between them"
            return [Fault(server.path or ("rank_list",), f"has the ranks {text}", hint)]
        end += len(ranks)
    return []


def _servers(table: RankTable) -> list[Fault]:
    faults = []
    if table.dialect != "2.0":
        ids = ((server.id, (*server.path, "server_id")) for server in table.servers if server.id)
        faults += _twice(ids, "a server's id")
    for server in table.servers:
        pairs = (
            (one.device_id, (*one.path, "device_id"))
            for one in server.devices
            if one.device_id >= 0
        )
        faults += _twice(pairs, "a device of a server")
    return faults


def _addresses(table: RankTable) -> list[Fault]:
    """
    Addresses of network cards: each once, one family, as many for each device; needed with several
    servers.
    """
    faults = _twice(
        ((ip, (*one.path, "device_ip")) for one in table.devices for ip in one.ips),
        "an address of a network card",
    )
    with_ip = [one for one in table.devices if one.ips]
    if len(table.servers) > 1 and table.dialect != "1.1":
        for server in table.servers:
            lacking = [one for one in server.devices if not one.ips]
            if lacking and not server.named("host_ip"):
                faults.append(
                    Fault(
                        (*lacking[0].path, "device_ip"),
                        "is missing, and several servers meet by these addresses",
                        "take it from hccn_tool -i N -ip -g or /etc/hccn.conf",
                    )
                )
                break
    if with_ip and len(with_ip) != len(table.devices):
        one = next(device for device in table.devices if not device.ips)
        if not faults:
            faults.append(Fault((*one.path, "device_ip"), "is missing, and other devices have one"))
    if not faults and with_ip:
        faults += _alike(with_ip)
    return faults


def _alike(devices: list[Device]) -> list[Fault]:
    version = ipaddress.ip_address(devices[0].ips[0]).version if _is_ip(devices[0].ips[0]) else 0
    for one in devices:
        if len(one.ips) != len(devices[0].ips):
            what = f"has {len(one.ips)} addresses, the first device {len(devices[0].ips)}"
            return [Fault((*one.path, "device_ip"), what)]
        if any(
            _is_ip(ip) and version and ipaddress.ip_address(ip).version != version for ip in one.ips
        ):
            return [
                Fault(
                    (*one.path, "device_ip"),
                    "is of another family (IPv4, IPv6) than the first device's",
                )
            ]
    return []


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _super_pods(table: RankTable) -> list[Fault]:
    faults = []
    ids = [name for pod in table.super_pods for name in pod.servers]
    path: Path = ("super_pod_list",)
    if table.dialect == "1.0" and table.super_pods:
        return [
            Fault(path, "does not belong into version 1.0", 'write "version": "1.2"', mild=True)
        ]
    faults += _twice(((pod.id, path) for pod in table.super_pods), "a super pod's id")
    faults += _twice(((name, path) for name in ids), "a server of a super pod")
    if table.super_pods:
        for name in sorted({server.id for server in table.servers} ^ set(ids))[:1]:
            where = "not in server_list" if name in ids else "in no super pod"
            faults.append(Fault(path, f"server {name} is {where}"))
    members = {name: pod.id for pod in table.super_pods for name in pod.servers}
    faults += _twice(
        (
            ((members.get(server.id, ""), one.super_device_id), (*one.path, "super_device_id"))
            for server in table.servers
            for one in server.devices
            if one.super_device_id
        ),
        "a device of a super pod",
    )
    lacking = [one for one in table.devices if not one.super_device_id]
    if table.super_pods and lacking and len(lacking) != len(table.devices):
        faults.append(
            Fault((*lacking[0].path, "super_device_id"), "is missing, and other devices have one")
        )
    order = [members.get(server.id, "") for server in table.ordered]
    runs = [name for at, name in enumerate(order) if at == 0 or name != order[at - 1]]
    if len(runs) != len(set(runs)):
        faults.append(Fault(path, "the servers of a super pod do not stand together in rank order"))
    return faults
