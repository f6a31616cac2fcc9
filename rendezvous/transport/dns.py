"""
Whether a host's name can be resolved. libzmq resolves names itself and never reports that it
failed.

The resolver may take longer than a caller should wait, so each look-up runs in a thread.
"""

from __future__ import annotations

import socket
import threading


class NameLookup:
    """
    The look-up of one host name. `start_lookup` may be called often; one look-up runs at a time.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._thread: threading.Thread | None = None
        self.fault = ""
        """Why the name cannot be resolved, by the last answer; empty: no answer yet, or it can."""

    def start_lookup(self) -> None:
        """Start a look-up without waiting for the answer."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._resolve_name, name="pdrun-lookup", daemon=True
            )
            self._thread.start()

    def _resolve_name(self) -> None:
        self.fault = name_fault(self._host)


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
