"""
New tables: from hosts and the addresses of their network cards, and from other tables.

Pure: text in, a `RankTable` out. Addresses are read in two formats:

* /etc/hccn.conf (``address_0=192.168.1.8``)
* the output of ``hccn_tool -i N -ip -g`` (``ipaddr:192.168.1.8``): one block per device, in the
  order of the devices or behind a line that names the device
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.ranktables.model import RankTable, Server, SuperPod, TableDevice
from pdrun.text import quote_command

MERGEABLE_DIALECTS = ("1.0", "1.2", "group", "lab")
_CONF_LINE = re.compile(r"\s*address_([0-9]{1,3})\s*=\s*(\S*)\s*")
_TOOL_LINE = re.compile(r"\s*ipaddr\s*:\s*(\S*)\s*")
_DEVICE_LINE = re.compile(
    r".*?(?:hccn_tool\s+-i\s+|\b(?:device|npu)\s*[_:=]?\s*|^\s*\[)([0-9]{1,3})\b.*", re.IGNORECASE
)


def parse_addresses(text: str, name: str) -> dict[int, str]:
    """
    Return device id -> address, from the text of hccn.conf or the output of hccn_tool.

    Raises:
        ConfigError: there is no address, one is invalid, or a device has two. Names the line.
    """
    addresses: dict[int, str] = {}
    next_device = 0
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if match := _CONF_LINE.fullmatch(line):
            device = int(match[1])
            address = match[2]
        elif match := _TOOL_LINE.fullmatch(line):
            device = next_device
            address = match[1]
            next_device += 1
        else:
            if match := _DEVICE_LINE.fullmatch(line):
                next_device = int(match[1])
            continue
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise ConfigError(
                f"the address of device {device} must be an IP address, got {address[:60]!r}",
                where=where,
                hint="set it with hccn_tool -i N -ip -s address A netmask M",
            ) from None
        if device in addresses:
            raise ConfigError(
                f"device {device} already has the address {addresses[device]}", where=where
            )
        addresses[device] = address
    if not addresses:
        raise ConfigError(
            "contains no address",
            where=name,
            hint="use address_N=IP of /etc/hccn.conf, or the output of hccn_tool -i N -ip -g",
        )
    return addresses


def make_table(
    hosts: Sequence[Host],
    addresses: Mapping[str, Mapping[int, str]],
    device_count: int | None = None,
) -> RankTable:
    """
    Return a table of version 1.0: ranks in the order of the hosts and of their devices' numbers.

    Args:
        hosts: the hosts, in rank order.
        addresses: host -> device id -> address. May be empty if there is one host.
        device_count: devices of each host that does not give a number itself.

    Raises:
        UsageError: the devices of a host are unknown, or an address is missing in a table of
            several hosts.
    """
    servers = []
    rank = 0
    for host in hosts:
        known = addresses.get(host.name, {})
        needs_addresses = len(hosts) > 1 or bool(known)
        devices = []
        for device_id in _device_ids(host, known, device_count):
            if device_id not in known and needs_addresses:
                raise UsageError(
                    f"the address of device {device_id} of {host.name} is missing",
                    where="--hccn",
                    hint=(
                        f"add {quote_command('--hccn', f'{host.name}=FILE')}, "
                        "with that host's /etc/hccn.conf "
                        "or the output of hccn_tool"
                    ),
                )
            ips = (known[device_id],) if device_id in known else ()
            devices.append(TableDevice(rank, device_id, ips))
            rank += 1
        extra = {"host_ip": host.address} if host.address else {}
        servers.append(Server(host.name, tuple(devices), extra))
    return RankTable("1.0", "completed", tuple(servers))


def _device_ids(
    host: Host, addresses: Mapping[int, str], device_count: int | None
) -> tuple[int, ...]:
    """Return the device ids of a host: as listed, or by number, or those with addresses."""
    count = host.devices if host.devices is not None else device_count
    if host.indices:
        ids = tuple(host.indices)
    elif count is not None:
        ids = tuple(range(count))
    else:
        ids = tuple(sorted(addresses))
    if not ids:
        raise UsageError(
            f"the devices of {host.name} are unknown",
            where=host.where,
            hint=(
                f"write {host.name}:8 or --devices 8, "
                f"or give its addresses with {quote_command('--hccn', f'{host.name}=FILE')}"
            ),
        )
    return ids


def merge_tables(tables: Sequence[tuple[str, RankTable]]) -> RankTable:
    """
    Return one table with the servers of several, in their order; ranks are renumbered.

    Args:
        tables: (name of the file, table).

    Raises:
        ConfigError: a server or an address is in two of them, or their dialects differ.
    """
    first_name, first = tables[0]
    servers: dict[str, tuple[str, Server]] = {}
    file_of_ip: dict[str, str] = {}
    pods: dict[str, SuperPod] = {}
    rank = 0
    for name, table in tables:
        if table.dialect != first.dialect or table.dialect not in MERGEABLE_DIALECTS:
            raise ConfigError(
                f"has dialect {table.dialect}, but {first_name} has {first.dialect}",
                where=name,
                hint="convert them to 1.0 or 1.2 first (pdrun rank-table convert)",
            )
        for server in table.servers_by_rank:
            if server.id in servers:
                other_file = servers[server.id][0]
                raise ConfigError(f"server {server.id} is in {other_file} already", where=name)
            _add_addresses(server, name, file_of_ip)
            devices = tuple(
                replace(device, rank=rank + index) for index, device in enumerate(server.devices)
            )
            servers[server.id] = (name, replace(server, devices=devices))
            rank += len(devices)
        for pod in table.super_pods:
            earlier = pods.get(pod.id)
            if earlier is None:
                pods[pod.id] = pod
            else:
                pods[pod.id] = replace(earlier, servers=(*earlier.servers, *pod.servers))
    return RankTable(
        first.dialect,
        "completed",
        tuple(server for _, server in servers.values()),
        tuple(pods.values()),
        first.extra,
    )


def _add_addresses(server: Server, name: str, file_of_ip: dict[str, str]) -> None:
    """Record the file of each address; raise if another server has it already."""
    for device in server.devices:
        for ip in device.ips:
            if ip in file_of_ip:
                raise ConfigError(f"device_ip {ip} is in {file_of_ip[ip]} already", where=name)
            file_of_ip[ip] = name
