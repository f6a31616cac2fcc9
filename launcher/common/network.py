"""
Addresses of this machine, and whether a host name means this machine.

Names are compared by the addresses that they resolve to, never as strings. ``pod.svc``, an alias in
/etc/hosts and the host name may all mean one machine. psutil, socket and ipaddress are imported
inside functions, because a job of one node needs none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError

Answer = TypeVar("Answer")

LOOPBACK_INTERFACE = ("lo", "127.0.0.1")
RESOLVE_SECONDS = 0.5
"""Time between two attempts to resolve a name."""
LOOKUP_SECONDS = 2.0
"""Time in which the names of all listed hosts are looked up."""
JOIN_SECONDS = 0.5
"""Longest time for which Ctrl-C waits for a resolver."""
MAX_COMPARED_NAMES = 256
"""Number of listed hosts whose addresses are compared."""
NOTICE_SECONDS = 5.0
"""Time between two messages about a name that does not resolve yet."""
_DOCUMENTATION_ADDRESSES = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""
Addresses reserved for documentation (RFC 5737, RFC 3849). The default route leads to them. Nothing
is sent.
"""


def list_addresses() -> tuple[tuple[str, str], ...]:
    """
    Return (interface, address) of every interface that is up.

    Loopback comes first. IPv6 link-local addresses include their zone.
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


def find_physical(addresses: Iterable[tuple[str, str]], root: Path = Path("/")) -> tuple[str, ...]:
    """Return the names of the interfaces with an address that are hardware."""
    names = sorted({name.partition(":")[0] for name, _ in addresses})
    return tuple(name for name in names if (root / "sys/class/net" / name / "device").exists())


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return address.startswith("127.") or address == "::1"


def resolve_host(host: str) -> tuple[str, ...]:
    """Return the distinct addresses of a host; empty if the name does not resolve."""
    return _call_in_thread(_resolve_now, host)


def _resolve_now(host: str) -> tuple[str, ...]:
    import socket

    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _call_in_thread(lookup: Callable[[str], Answer], host: str) -> Answer:
    """
    Return ``lookup(host)``. A resolver may block for many seconds, and Ctrl-C must not wait for it.
    """
    import threading

    if host == "localhost" or ":" in host or host.replace(".", "").isdigit():
        return lookup(host)
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(lookup(host)), daemon=True)
    thread.start()
    while thread.is_alive():
        # A signal that comes just before this wait interrupts the next one only.
        thread.join(JOIN_SECONDS)
    return answers[0]


def find_name_error(host: str) -> str:
    """Return why a host name does not resolve, or the empty string."""
    from pdrun.rendezvous.transport import dns as lookup

    return _call_in_thread(lookup.name_fault, host)


def wait_for_host_names(names: Iterable[str], timeout: float, say: Callable[[str], None]) -> None:
    """
    Wait until all host names resolve: the names of pods exist only when the pods have started.

    Raises:
        RendezvousError: a name did not resolve within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    for name in names:
        left = max(0.0, end - time.monotonic())
        wait_for_name(Endpoint(name, 0), left, say, name)


def wait_for_name(
    scheduler: Endpoint, timeout: float, say: Callable[[str], None], what: str = ""
) -> None:
    """
    Wait until the scheduler's host name resolves.

    Where DNS names are created together with the machines (a Kubernetes service, a cloud's DNS), a
    node may start before the name exists. ``what`` is awaited by the message; default: the
    scheduler.

    Raises:
        RendezvousError: the name did not resolve within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    again = 0.0
    while fault := find_name_error(scheduler.host):
        now = time.monotonic()
        if now >= end:
            where = what or str(scheduler)
            raise RendezvousError(fault, where=where, hint="check it, or give the address")
        if now >= again:
            say(f"waiting for {what or f'the scheduler at {scheduler}'}: {fault}")
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


def find_own_names(hosts: Iterable[tuple[str, str]], hostname: str) -> tuple[str, ...]:
    """
    Return the names of the hosts that are this machine.

    A name is resolved only if it can mean this machine: it is an address, ``localhost``, or its
    first label is the first label of the host name.

    Args:
        hosts: (name, address) of each; the address may be empty.
    """
    own = list_addresses()
    label = hostname.partition(".")[0]

    def is_own(name: str) -> bool:
        if not name:
            return False
        if name.partition(".")[0] != label and name != "localhost" and not _is_address(name):
            return False
        return is_this_machine(name, hostname, own)

    return tuple(name for name, address in hosts if is_own(name) or is_own(address))


def find_same_machine(names: Iterable[str], wait: float = LOOKUP_SECONDS) -> tuple[str, ...]:
    """
    Return two of the names, and the address to which both resolve; empty: there are none.

    All names are looked up at the same time. A name that does not resolve within ``wait`` seconds
    is not compared: ssh may know it by another address.
    """
    import threading

    found: dict[str, tuple[str, ...]] = {}

    def look_up(name: str) -> None:
        found[name] = _resolve_now(name)

    listed = list(names)[:MAX_COMPARED_NAMES]
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in listed]
    for thread in threads:
        thread.start()
    end = time.monotonic() + wait
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    first: dict[str, str] = {}
    for name in listed:
        for address in found.get(name, ()):
            before = first.setdefault(address, name)
            if before != name:
                return before, name, address
    return ()


def _is_address(host: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_zmtp_server(endpoint: Endpoint, timeout: float = 3.0) -> bool:
    """
    Return whether a ZeroMQ socket listens at an endpoint.

    ZMTP sends its greeting before the client has sent anything (RFC 23); other protocols do not.
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
    Return the local address on the route to the scheduler, or on the default route.

    Connecting a UDP socket consults the routing table and sends nothing. If the scheduler's name
    resolves to loopback only on this machine, the other nodes resolve it to another address: the
    one on the default route, or that of the first interface.

    Returns:
        the empty string if there is no route.
    """
    if scheduler is None:
        targets = list(_DOCUMENTATION_ADDRESSES)
    else:
        targets = [(address, scheduler.port or 9) for address in resolve_host(scheduler.host)]
        if is_loopback_name(scheduler.host) and (outward := _find_outward_address()):
            return outward
    for host, port in targets:
        address = _find_source_address(host, port)
        if address:
            return address
    return ""


def is_loopback_name(host: str) -> bool:
    """
    Return whether a name other than ``localhost`` resolves to loopback addresses only.

    Debian maps the host name to ``127.0.1.1``.
    """
    if host == "localhost" or is_loopback(host):
        return False
    found = resolve_host(host)
    return bool(found) and all(map(is_loopback, found))


def _find_outward_address() -> str:
    """Return this machine's first address that other machines can reach, or the empty string."""
    candidates = [_find_source_address(*target) for target in _DOCUMENTATION_ADDRESSES]
    candidates += [at for _, at in list_addresses() if not at.startswith("fe80:")]
    for address in candidates:
        if address and not is_loopback(address):
            return address
    return ""


def _find_source_address(host: str, port: int) -> str:
    """Return the local address of the route to a host, or the empty string."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
