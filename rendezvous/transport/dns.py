"""
Whether a host's name is known here: asked beside libzmq, which looks names up itself and never says
that it failed.

The resolver may take longer than anybody should wait, so each question is a thread; the answer is
there when it is.
"""

from __future__ import annotations

import socket
import threading


class NameLookup:
    """
    The state of one host's name. Ask with `begin` as often as wanted; one question runs at a time.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._thread: threading.Thread | None = None
        self.fault = ""
        """
        Why the name is not known, by the last answer; empty while there is none, and for a name
        that is known.
        """

    def start_lookup(self) -> None:
        """Ask, without waiting for the answer."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._resolve_name, name="pdrun-lookup", daemon=True
            )
            self._thread.start()

    def _resolve_name(self) -> None:
        self.fault = name_fault(self._host)


def name_fault(host: str) -> str:
    """
    Return why a host's name leads nowhere (``the name 'node1' is not known here: ...``), or the
    empty string.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"the name '{host}' is not known here: {getattr(error, 'strerror', None) or error}"
    return ""
