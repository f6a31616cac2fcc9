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


class NameLookup:
    """
    The look-up of one endpoint. `start_lookup` may be called often; one look-up runs at a time.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._thread: threading.Thread | None = None
        self.fault = ""
        """Why the name cannot be resolved, by the last answer; empty: no answer yet, or it can."""
        self.is_refused = False
        """Whether the host refused a connection, by the last answer."""

    def start_lookup(self) -> None:
        """Start a look-up without waiting for the answer."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._resolve_name, name="pdrun-lookup", daemon=True
            )
            self._thread.start()

    def _resolve_name(self) -> None:
        self.fault = name_fault(self._endpoint.host)
        self.is_refused = not self.fault and refuses_connections(self._endpoint)


def refuses_connections(endpoint: Endpoint) -> bool:
    """Return whether the host answers that no process listens; False: it accepts, or is silent."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False
    return False


def name_fault(host: str) -> str:
    """
    Return why a host name cannot be resolved (``the name 'node1' is not known here: ...``); empty:
    it can.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"the name '{host}' is not known here: {getattr(error, 'strerror', None) or error}"
    return ""
