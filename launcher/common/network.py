"""
This machine's addresses, and whether a host is this machine.

Names are compared by what they resolve to, never as strings: ``pod.svc``, an alias of /etc/hosts
and the host's own name may all be one machine. psutil and the resolver are loaded only when a job
has several nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError

if TYPE_CHECKING:
    from pdrun.launcher.hosts.selection import Host

LOOPBACK_INTERFACE = ("lo", "127.0.0.1")
RESOLVE_SECONDS = 0.5
NOTICE_SECONDS = 5.0
"""
Seconds between two questions to the resolver, and between two lines about a name that it does not
know yet.
"""
_DOCUMENTATION_ADDRESSES = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""
Addresses reserved for documentation: routed by default, never reached; nothing is sent to them.
"""


def list_addresses() -> tuple[tuple[str, str], ...]:
    """
    Return (interface, address) of every interface that is up; loopback first, IPv6 link-local with
    its zone.
    """
    import socket

    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return tuple(
        sorted(found, key=lambda item: (not is_loopback(item[1]), item[0], ":" in item[1], item[1]))
    )


def is_loopback(address: str) -> bool:
    """Return whether an address reaches this machine only."""
    return address.startswith("127.") or address == "::1"


def resolve_host(host: str) -> tuple[str, ...]:
    """Return the addresses of a host, each once; none when the name is not known here."""
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def find_name_error(host: str) -> str:
    """Return why a host's name leads nowhere, or the empty string."""
    from pdrun.rendezvous.transport import dns as lookup

    return lookup.name_fault(host)


def wait_for_name(scheduler: Endpoint, timeout: float, say: Callable[[str], None]) -> None:
    """
    Wait until the scheduler's host has an address: where names are made with the machines (a
    service of Kubernetes, a cloud's DNS), a node may be up before the name is.

    Raises:
        RendezvousError: not within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    again = 0.0
    while fault := find_name_error(scheduler.host):
        now = time.monotonic()
        if now >= end:
            raise RendezvousError(fault, where=str(scheduler), hint="check it, or give the address")
        if now >= again:
            say(f"waiting for the scheduler at {scheduler}: {fault}")
            again = now + NOTICE_SECONDS
        time.sleep(min(RESOLVE_SECONDS, end - now))


def is_this_machine(host: str, hostname: str, own: Iterable[tuple[str, str]]) -> bool:
    """Return whether ``host`` is this machine."""
    if host in (hostname, "localhost"):
        return True
    mine = {address.partition("%")[0] for _, address in own}
    return any(
        is_loopback(address) or address.partition("%")[0] in mine for address in resolve_host(host)
    )


def find_own_names(hosts: Iterable[Host], hostname: str) -> tuple[str, ...]:
    """
    Return the names of the hosts that are this machine.

    A name is looked up only when it could be ours: it is an address, or its first label is that of
    the host's name.
    """
    own = list_addresses()
    label = hostname.partition(".")[0]
    return tuple(
        host.name
        for host in hosts
        if any(
            (name.partition(".")[0] == label or name == "localhost" or _is_address(name))
            and is_this_machine(name, hostname, own)
            for name in (host.name, host.address)
            if name
        )
    )


def _is_address(host: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_zmtp_server(endpoint: Endpoint, timeout: float = 3.0) -> bool:
    """
    Return whether a ZeroMQ socket answers there: it greets every connection at once (RFC 23),
    others do not so.
    """
    import socket

    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout) as probe:
            greeting = probe.recv(10, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(greeting) == 10 and (greeting[0], greeting[9]) == (0xFF, 0x7F)


def find_local_address(scheduler: Endpoint | None) -> str:
    """
    Return the local address from which the scheduler, or else the world, is reached; empty where
    there is no route.

    A UDP socket is connected, which asks the routing table and sends nothing. A name that is
    loopback only here is meant by the others as another address: the one towards the world, or that
    of the first interface.
    """
    targets = (
        [(address, scheduler.port or 9) for address in resolve_host(scheduler.host)]
        if scheduler
        else list(_DOCUMENTATION_ADDRESSES)
    )
    if scheduler and is_loopback_name(scheduler.host):
        outward = [_find_source_address(*far) for far in _DOCUMENTATION_ADDRESSES] + [
            at for _, at in list_addresses() if not at.startswith("fe80:")
        ]
        if found := next(
            (address for address in outward if address and not is_loopback(address)), ""
        ):
            return found
    for host, port in targets:
        address = _find_source_address(host, port)
        if address:
            return address
    return ""


def is_loopback_name(host: str) -> bool:
    """
    Return whether a name, which says nothing of loopback, has only such addresses here: Debian's
    ``127.0.1.1``.
    """
    found = resolve_host(host)
    return (
        bool(found)
        and host != "localhost"
        and not is_loopback(host)
        and all(map(is_loopback, found))
    )


def _find_source_address(host: str, port: int) -> str:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
