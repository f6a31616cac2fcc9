"""
The hosts of a job as users list them: ``--hosts``, and the choice that ``--include`` and
``--exclude`` make among them.

A full name is a host's identity: ``n1.a.net`` and ``n1.b.net`` are two hosts, and nothing is cut at
a dot. The order of the list is the order of node ranks. Files of hosts are read by
`pdrun.launcher.hosts.hostfile` into the same values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdrun.endpoint import check_host
from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts import nodelist as nodelist

MAX_DEVICES = 4096
"""Devices of a host, at most: more is a slip of the finger."""


_PLAIN_NAME = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
)
"""
Names that are surely no address, as nearly all are: `check_host` takes ten times as long, and files
are long.
"""


@dataclass(frozen=True)
class Host:
    """One host of a job."""

    name: str
    """As written, user and count taken off; the identity."""
    devices: int | None = None
    """Workers on this host; None: what ``--devices`` says."""
    indices: tuple[int, ...] | None = None
    """Which of its visible devices these workers use, in order; None: the first ones."""
    where: str = ""
    """``hosts:3``, ``--hosts``, ``SLURM_JOB_NODELIST``."""
    user: str = ""
    """Whom ssh logs in as; empty: as ssh decides."""
    port: int | None = None
    """Of its ssh server; None: as ssh decides."""
    address: str = ""
    """Where the other nodes reach it, when that is not its name."""

    @property
    def peer_address(self) -> str:
        """The address or name by which other nodes reach it."""
        return self.address or self.name


def parse_hosts(text: str, where: str) -> tuple[Host, ...]:
    """
    Read ``--hosts``: ``a,b``, ``node[01-04]:8``, ``user@host``, ``[::1]:2``; the number counts
    devices.

    Raises:
        UsageError: an item is malformed, a host stands twice, or there is none.
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
    """Return the text with the brackets of IPv6 addresses hidden from the parser of ranges."""
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
    if at and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user):
        raise UsageError(f"{quote_text(word)}: {quote_text(user)} is no user's name", where=where)
    if match := re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", rest, re.DOTALL):
        return user, match[1], match[2]
    if rest.count(":") >= 2:
        return user, rest, None
    name, colon, count = rest.partition(":")
    return user, name, count if colon else None


def check_host_name(name: str, where: str) -> str:
    """
    Return a host's name when it may be one: nothing that ssh would take for an option, no shell's
    characters.
    """
    if len(name) <= 253 and _PLAIN_NAME.fullmatch(name):
        return name
    try:
        return check_host(name, where=where)
    except UsageError:
        raise UsageError(
            f"{quote_text(name)} is neither a host name nor an IP address",
            where=where,
            hint="host names are of A-Z a-z 0-9 . - _ and begin with none of . -",
        ) from None


def parse_device_count(text: str, where: str, least: int = 1) -> int:
    """Return a number of devices in plain digits."""
    return int(parsers.int_parser(least, MAX_DEVICES)(text, where))


def check_distinct(found: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts when each stands once, else raise with both places."""
    first: dict[str, Host] = {}
    for host in found:
        before = first.setdefault(host.name, host)
        if before is not host:
            places = f" (first in {before.where})" if before.where != host.where else ""
            raise UsageError(
                f"{host.name} stands twice{places}", where=host.where, hint="write each host once"
            )
    return tuple(found)


# choosing among them
# ---------------------------------------------------------------------------------------------

HostChoice = dict[str, tuple[int, ...]]
"""Host -> indices of its devices; none: the whole host."""


def parse_host_choice(text: str, where: str) -> HostChoice:
    """
    Read ``--include`` and ``--exclude`` as DeepSpeed has them: ``a@b:0,2@node[3-4]:0-3``; ``@``
    separates hosts.

    Raises:
        UsageError: an item is malformed or a host stands twice.
    """
    found: HostChoice = {}
    for part in text.split("@"):
        name, colon, indices = (
            part.rpartition(":") if re.search(r":[0-9,-]*$", part) else (part, "", "")
        )
        chosen = rank_lists.parse_rank_list(indices, where) if colon else ()
        if chosen and chosen[-1] >= MAX_DEVICES:
            raise UsageError(f"{chosen[-1]} is no device's index", where=where)
        for one in nodelist.expand_nodelist(name, where):
            if check_host_name(one, where) in found:
                raise UsageError(f"{one} stands twice", where=where)
            found[one] = chosen
    if not found:
        raise UsageError(
            "names no host", where=where, hint="write host, or host:0,2, separated by @"
        )
    return found


def include_hosts(hosts: Iterable[Host], choice: HostChoice, where: str) -> tuple[Host, ...]:
    """Return the hosts and devices that are named, in the order of the list."""
    listed = tuple(hosts)
    _check_known_hosts(listed, choice, where)
    return tuple(
        _select_devices(host, choice[host.name], where) for host in listed if host.name in choice
    )


def exclude_hosts(
    hosts: Iterable[Host], choice: HostChoice, where: str, devices: int | None = None
) -> tuple[Host, ...]:
    """
    Return the hosts and devices that are left.

    Args:
        devices: how many each host has that does not say it itself.

    Raises:
        UsageError: a host or device is not there, nothing is left, or nobody says how many devices
            a host has.
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
            f"nothing says how many devices {host.name} has, so none can be taken away",
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
            raise UsageError(f"{name} is none of the hosts of this job", where=where, hint=hint)
