"""Ports for programs that must be told one, and cannot take what the kernel gives."""

from __future__ import annotations

import itertools
import os
import socket

FIRST_PORT, PORTS = 10_000, 19_000
"""Below those that the kernel gives to outgoing connections and to whoever asks for port 0."""
PORTS_PER_PROCESS = 211
_numbers = itertools.count()


def free_port() -> int:
    """
    Return a port of loopback that is free.

    It stays free until its program is started: the kernel gives it to nobody, and each process of
    tests has ports of its own. One that was found by port 0 may be that
    of another connection by then.
    """
    while True:
        place = os.getpid() * PORTS_PER_PROCESS + next(_numbers)
        port = FIRST_PORT + place % PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
