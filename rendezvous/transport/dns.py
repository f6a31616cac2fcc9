"""
Why a host cannot be reached: its name cannot be resolved, or it refuses connections. libzmq
resolves and connects itself, and only reports that it failed.

The resolver may take longer than a caller should wait, so each look-up runs in a thread.
"""

from __future__ import annotations

import socket
import threading

from pdrun.endpoint import Endpoint

PROBE_SECONDS = 2.0
"""Time for a host to answer a connection."""
REFUSED_TEXT = "connections are refused"
NO_ANSWER_TEXT = "it does not answer"


class NameLookup:
    """
    The look-up of one endpoint. `start_lookup` may be called often; one look-up runs at a time.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._thread: threading.Thread | None = None
        self.fault = ""
        """Why the name cannot be resolved, by the last answer; empty: no answer yet, or it can."""
        self.failure = ""
        """What the last connection to the host met; empty: it was accepted, or there was none."""

    @property
    def is_refused(self) -> bool:
        """Whether the host refused a connection, by the last answer."""
        return self.failure == REFUSED_TEXT

    def start_lookup(self) -> None:
        """Start a look-up without waiting for the answer."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._resolve_name, name="pdrun-lookup", daemon=True
            )
            self._thread.start()

    def _resolve_name(self) -> None:
        self.fault = name_fault(self._endpoint.host)
        self.failure = "" if self.fault else connection_failure(self._endpoint)


def refuses_connections(endpoint: Endpoint) -> bool:
    """Return whether the host answers that no process listens; False: it accepts, or is silent."""
    return connection_failure(endpoint) == REFUSED_TEXT


def connection_failure(endpoint: Endpoint) -> str:
    """Return what a connection to an endpoint meets; empty: it is accepted."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return REFUSED_TEXT
    except TimeoutError:
        return NO_ANSWER_TEXT
    except (OSError, UnicodeError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()
    return ""


def name_fault(host: str) -> str:
    """
    Return why a host name cannot be resolved (``the name 'node1' is not known here: ...``); empty:
    it can.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if zone_fault := _find_zone_fault(host):
            return zone_fault
        return f"the name '{host}' is not known here: {getattr(error, 'strerror', None) or error}"
    return ""


def _find_zone_fault(host: str) -> str:
    """Return why the zone of an IPv6 address is wrong here; empty: it has none, or it is right."""
    _, percent, zone = host.partition("%")
    if not percent or zone.isdecimal():
        return ""
    try:
        socket.if_nametoindex(zone)
    except OSError:
        return f"'{zone}', the zone of {host}, is not a network interface of this machine"
    return f"{host}: this address has no zone; remove %{zone}"
