"""
New tables: from hosts and the addresses of their network cards, and from other tables. Pure: texts
in, a `RankTable` out.

Addresses come as /etc/hccn.conf has them (``address_0=192.168.1.8``) or as ``hccn_tool -i N -ip
-g`` prints them (``ipaddr:192.168.1.8``), one block a device in the order of the devices or behind
a line that names the device.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.ranktables.model import Device, RankTable, Server, SuperPod

_LINE = re.compile(r"\s*address_([0-9]{1,3})\s*=\s*(\S*)\s*")
_TOOL = re.compile(r"\s*ipaddr\s*:\s*(\S*)\s*")
_DEVICE = re.compile(
    r".*?(?:hccn_tool\s+-i\s+|\b(?:device|npu)\s*[_:=]?\s*|^\s*\[)([0-9]{1,3})\b.*", re.IGNORECASE
)


def addresses(text: str, name: str) -> dict[int, str]:
    """
    Return device id -> address from the text of hccn.conf or of hccn_tool.

    Raises:
        ConfigError: there is none, one is no address, or a device has two; names the line.
    """
    found: dict[int, str] = {}
    device = 0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if match := _LINE.fullmatch(line):
            index = int(match[1])
            address = match[2]
        elif match := _TOOL.fullmatch(line):
            index = device
            address = match[1]
            device = device + 1
        else:
            if match := _DEVICE.fullmatch(line):
                device = int(match[1])
            continue
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise ConfigError(
                f"{address[:60]!r} is no address of device {index}",
                where=where,
                hint="set it with hccn_tool -i N -ip -s address A netmask M",
            ) from None
        if index in found:
            raise ConfigError(f"device {index} has an address already: {found[index]}", where=where)
        found[index] = address
    if not found:
        raise ConfigError(
            "holds no address",
            where=name,
            hint="address_N=IP of /etc/hccn.conf, or what hccn_tool -i N -ip -g prints",
        )
    return found


def make(
    hosts: Sequence[Host], cards: Mapping[str, Mapping[int, str]], devices: int | None = None
) -> RankTable:
    """
    Return a table of version 1.0: ranks in the order of the hosts and of their devices' numbers.

    Args:
        cards: host -> device id -> address; hosts may be missing where there is only one.
        devices: how many each host has that does not say it itself.

    Raises:
        UsageError: nothing says which devices a host has, or an address is missing among several
            hosts.
    """
    servers = []
    rank = 0
    for host in hosts:
        known = cards.get(host.name, {})
        count = host.devices if host.devices is not None else devices
        ids = host.indices or (tuple(range(count)) if count is not None else tuple(sorted(known)))
        if not ids:
            raise UsageError(
                f"nothing says which devices {host.name} has",
                where=host.where,
                hint=f"write {host.name}:8, --devices 8, or give its addresses with --hccn {host.name}=FILE",
            )
        made = []
        for device in ids:
            if device not in known and (len(hosts) > 1 or known):
                raise UsageError(
                    f"nobody gives an address for device {device} of {host.name}",
                    where="--hccn",
                    hint=f"--hccn {host.name}=FILE, with /etc/hccn.conf of that host or the output of hccn_tool",
                )
            made.append(Device(rank, device, (known[device],) if device in known else ()))
            rank += 1
        extra = {"host_ip": host.address} if host.address else {}
        servers.append(Server(host.name, tuple(made), extra))
    return RankTable("1.0", "completed", tuple(servers))


def merge(tables: Sequence[tuple[str, RankTable]]) -> RankTable:
    """
    Return one table of several, in their order; ranks are counted anew.

    Raises:
        ConfigError: a server or an address stands in two of them, or their dialects differ.
    """
    first_name, first = tables[0]
    servers: dict[str, tuple[str, Server]] = {}
    ips: dict[str, str] = {}
    pods: dict[str, SuperPod] = {}
    rank = 0
    for name, table in tables:
        if table.dialect != first.dialect or table.dialect not in ("1.0", "1.2", "group", "lab"):
            raise ConfigError(
                f"dialect {table.dialect}, and {first_name} has {first.dialect}",
                where=name,
                hint="convert them to 1.0 or 1.2 first (pdrun rank-table convert)",
            )
        for server in table.ordered:
            if server.id in servers:
                raise ConfigError(
                    f"server {server.id} is in {servers[server.id][0]} already", where=name
                )
            for one in server.devices:
                for ip in one.ips:
                    if ip in ips:
                        raise ConfigError(f"device_ip {ip} is in {ips[ip]} already", where=name)
                    ips[ip] = name
            made = tuple(
                replace(one, rank=rank + index) for index, one in enumerate(server.devices)
            )
            servers[server.id] = name, replace(server, devices=made)
            rank += len(made)
        for pod in table.super_pods:
            before = pods.get(pod.id)
            pods[pod.id] = (
                replace(before, servers=(*before.servers, *pod.servers)) if before else pod
            )
    return RankTable(
        first.dialect,
        "completed",
        tuple(server for _, server in servers.values()),
        tuple(pods.values()),
        first.extra,
    )
