"""
The hosts of a job: ``--hosts``, and the selection by ``--include`` and ``--exclude``.

The full name identifies a host: ``n1.a.net`` and ``n1.b.net`` are two hosts, and nothing is cut at
a dot. The order of the list is the order of the node ranks. `pdrun.launcher.hosts.hostfile` reads
host files into the same values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdrun.endpoint import check_host
from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.common.network import is_loopback
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts import nodelist
from pdrun.quick_dataclass import dataclass

MAX_DEVICES = 4096
"""Per host. A larger number is a typing mistake."""


_PLAIN_NAME = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*"
    r"[A-Za-z](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
)
"""
Most names: they are certainly valid and not an address. `check_host` takes ten times as long, and
host files are long.
"""
USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str
    """As written, without user and count. It identifies the host."""
    devices: int | None = None
    """Workers on this host; None: see ``--devices``."""
    indices: tuple[int, ...] | None = None
    """Which visible devices they use, in order; None: the first ones."""
    where: str = ""
    """``hosts:3``, ``--hosts``, ``SLURM_JOB_NODELIST``."""
    user: str = ""
    """The user for ssh; empty: ssh decides."""
    port: int | None = None
    """The port for ssh; None: ssh decides."""
    address: str = ""
    """Where the other nodes reach it; empty: under its name."""

    @property
    def peer_address(self) -> str:
        """The address or name under which the other nodes reach it."""
        return self.address or self.name


def parse_hosts(text: str, where: str) -> tuple[Host, ...]:
    """
    Parse ``--hosts``: ``a,b``, ``node[01-04]:8``, ``user@host``, ``[::1]:2``.

    The number counts devices.

    Raises:
        UsageError: an item is malformed, a host is listed twice, or no host is listed.
    """
    found: list[Host] = []
    for word, _ in nodelist.split_items(_hide_ipv6_brackets(text), where):
        if len(found) > nodelist.MAX_HOSTS:
            break
        found += parse_host_item(_restore_brackets(word), where)
    if not found:
        raise UsageError("names no host", where=where, hint="write --hosts node1,node2")
    return check_distinct(found)


_OPEN_MARK = "\ue000"
_CLOSE_MARK = "\ue001"


def _hide_ipv6_brackets(text: str) -> str:
    """Replace the brackets of IPv6 addresses, which are not ranges."""
    return re.sub(r"\[([0-9A-Fa-f:.%]*:[0-9A-Za-z:.%]*)\]", rf"{_OPEN_MARK}\1{_CLOSE_MARK}", text)


def _restore_brackets(word: str) -> str:
    return word.replace(_OPEN_MARK, "[").replace(_CLOSE_MARK, "]")


def parse_host_item(word: str, where: str) -> tuple[Host, ...]:
    """
    Return the hosts of one word: ``[user@]NAME[:N]``, NAME with ranges or an IPv6 address.

    A name with several colons and no brackets is an IPv6 address without a count.
    """
    user, name, count = _split_item(word, where)
    devices = parse_device_count(count, where) if count is not None else None
    names = (name,) if ":" in name else nodelist.expand_nodelist(name, where)
    return tuple(Host(check_host_name(one, where), devices, None, where, user) for one in names)


def _split_item(word: str, where: str) -> tuple[str, str, str | None]:
    """Split ``user@name:count``."""
    user, at, rest = word.rpartition("@")
    if at and not USER_NAME.fullmatch(user):
        raise UsageError(
            f"{quote_text(word)}: {quote_text(user)} is not a valid user name", where=where
        )
    if match := re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", rest, re.DOTALL):
        return user, match[1], match[2]
    if rest.count(":") >= 2:
        return user, rest, None
    name, colon, count = rest.partition(":")
    return user, name, count if colon else None


def check_host_name(name: str, where: str) -> str:
    """
    Return a valid host name: not an option of ssh, without characters of the shell.

    Raises:
        UsageError: it is neither a host name nor an address.
    """
    if len(name) <= 253 and _PLAIN_NAME.fullmatch(name):
        return name
    try:
        return check_host(name, where=where)
    except UsageError:
        raise UsageError(
            f"{quote_text(name)} is neither a host name nor an IP address",
            where=where,
            hint="host names contain A-Z a-z 0-9 . - _ and do not begin with . or -",
        ) from None


def parse_device_count(text: str, where: str, least: int = 1) -> int:
    """Return a number of devices, written in plain digits."""
    return int(parsers.int_parser(least, MAX_DEVICES)(text, where))


def check_distinct(found: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts if each is listed once; the error names both places."""
    first: dict[str, Host] = {}
    for host in found:
        before = first.setdefault(host.name, host)
        if before is not host:
            places = f" (first in {before.where})" if before.where != host.where else ""
            raise UsageError(
                f"{host.name} is listed twice{places}",
                where=host.where,
                hint="write each host once",
            )
    return tuple(found)


def check_addresses(hosts: Sequence[Host]) -> None:
    """
    Refuse an address (``addr=``) that cannot be that of one host among several: a loopback address,
    or the address of another host.
    """
    if len(hosts) < 2:
        return
    first: dict[str, Host] = {}
    for host in hosts:
        if host.address and is_loopback(host.address):
            raise UsageError(
                f"addr={host.address} is a loopback address, which other hosts cannot reach",
                where=host.where,
                hint=f"write the address at which the others reach {host.name}",
            )
        before = first.setdefault(host.peer_address, host)
        if before is not host and (host.address or before.address):
            raise UsageError(
                f"{host.peer_address} is the address of {before.name}, too ({before.where})",
                where=host.where,
                hint="write each host once, with its own address",
            )


HostChoice = dict[str, tuple[int, ...]]
"""Host -> indices of its devices; empty: the whole host."""


def parse_host_choice(text: str, where: str) -> HostChoice:
    """
    Parse ``--include`` and ``--exclude`` in DeepSpeed's notation: ``a@b:0,2@node[3-4]:0-3``.

    ``@`` separates hosts.

    Raises:
        UsageError: an item is malformed, or a host is listed twice.
    """
    found: HostChoice = {}
    for part in text.split("@"):
        name = part
        chosen: tuple[int, ...] = ()
        if re.search(r":[0-9,-]*$", part):
            name, _, indices = part.rpartition(":")
            chosen = rank_lists.parse_rank_list(indices, where)
        if chosen and chosen[-1] >= MAX_DEVICES:
            raise UsageError(f"{chosen[-1]} is not a device index", where=where)
        for one in nodelist.expand_nodelist(name, where):
            if check_host_name(one, where) in found:
                raise UsageError(f"{one} is listed twice", where=where)
            found[one] = chosen
    if not found:
        raise UsageError(
            "names no host", where=where, hint="write host, or host:0,2, separated by @"
        )
    return found


def include_hosts(hosts: Iterable[Host], choice: HostChoice, where: str) -> tuple[Host, ...]:
    """Return the chosen hosts and devices, in the order of the list."""
    listed = tuple(hosts)
    _check_known_hosts(listed, choice, where)
    return tuple(
        _select_devices(host, choice[host.name], where) for host in listed if host.name in choice
    )


def exclude_hosts(
    hosts: Iterable[Host], choice: HostChoice, where: str, devices: int | None = None
) -> tuple[Host, ...]:
    """
    Return the hosts and devices that are not excluded.

    Args:
        hosts: the list.
        choice: the excluded hosts and devices.
        where: its source, for errors.
        devices: number of devices of a host without its own number.

    Raises:
        UsageError: an unknown host or device, no host is left, or the number of a host's devices is
            unknown.
    """
    listed = tuple(hosts)
    _check_known_hosts(listed, choice, where)
    left = []
    for host in listed:
        gone = choice.get(host.name)
        if gone is None:
            left.append(host)
        elif gone:
            have = _device_indices(host, devices, where)
            if missing := [index for index in gone if index not in have]:
                raise UsageError(f"{host.name} has no device {missing[0]} in this job", where=where)
            if kept := tuple(index for index in have if index not in gone):
                left.append(replace(host, devices=len(kept), indices=kept))
    if not left:
        raise UsageError("leaves no host", where=where)
    return tuple(left)


def _device_indices(host: Host, devices: int | None, where: str) -> tuple[int, ...]:
    if host.indices is not None:
        return host.indices
    count = host.devices if host.devices is not None else devices
    if count is None:
        raise UsageError(
            f"the number of devices of {host.name} is unknown, so none can be excluded",
            where=where,
            hint=f"write {host.name}:N in --hosts, slots=N in the file, or --devices N",
        )
    return tuple(range(count))


def _select_devices(host: Host, indices: tuple[int, ...], where: str) -> Host:
    if not indices:
        return host
    if host.devices is not None:
        have = host.indices or tuple(range(host.devices))
        if missing := [index for index in indices if index not in have]:
            raise UsageError(
                f"{host.name} has no device {missing[0]}: {host.where} gives it {host.devices}",
                where=where,
            )
    return replace(host, devices=len(indices), indices=indices)


def _check_known_hosts(hosts: Sequence[Host], choice: HostChoice, where: str) -> None:
    names = [host.name for host in hosts]
    known = set(names)
    for name in choice:
        if name not in known:
            hint = (
                did_you_mean(name, names[:1000])
                or f"there are {nodelist.compress_names(names)[:200]}"
            )
            raise UsageError(f"{name} is not a host of this job", where=where, hint=hint)
