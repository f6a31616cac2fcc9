"""
The relay processes of the scheduler. All accept from the job's one listening socket.

A relay that dies is started again. Its agents reconnect, to it or to another relay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.child import write_order

MIN_NODES = 2000
"""
Minimum size of a job with relays: one process accepts about 400 agents per second with CURVE, on
one core.
"""
MAX_RELAYS = 8
RESTART_SECONDS = 1.0
"""Time between two starts of one relay."""


def choose_relay_count(config: SchedulerConfig) -> int:
    """
    Return the number of relays: none, or one per core that the scheduler leaves free, at least 2.
    """
    if config.relays is not None:
        return config.relays
    if config.nodes + config.spares < MIN_NODES:
        return 0
    return max(2, min(MAX_RELAYS, len(os.sched_getaffinity(0)) - 1))


class RelayProcesses:
    """Running relay processes. Call `restart_dead` periodically."""

    def __init__(
        self, count: int, listen_fd: int, scheduler: Endpoint, secret: Secret | None, crowd: int
    ) -> None:
        """
        Start the relays.

        Args:
            listen_fd: the listening socket of the job; belongs to this object from now on.
            scheduler: the scheduler's own address, for relays.
            crowd: number of agents that may connect at the same time, to all relays together.
        """
        self._fd = listen_fd
        self._order = (
            json.dumps(
                {
                    "listen_fd": listen_fd,
                    "host": scheduler.host,
                    "port": scheduler.port,
                    "secret": secret.reveal().hex() if secret else None,
                    "crowd": crowd,
                }
            ).encode()
            + b"\n"
        )
        self._processes = [self._start_relay() for _ in range(count)]
        self._started_at = [time.monotonic()] * count

    def restart_dead(self) -> str:
        """
        Restart relays that have died; return a line about it for the event log, or an empty string.

        A relay that cannot be started, because no process or descriptor is left, is tried again at
        a later call.
        """
        now = time.monotonic()
        died = 0
        for index, process in enumerate(self._processes):
            if process.poll() is not None and now - self._started_at[index] >= RESTART_SECONDS:
                self._started_at[index] = now
                try:
                    self._processes[index] = self._start_relay()
                except OSError:
                    continue
                died += 1
        if died:
            return f"{died} of {len(self._processes)} relays had died and were started again"
        return ""

    def close(self, timeout: float = 1.0) -> None:
        """
        Wait for the relays, which end with the scheduler's connection; kill them after ``timeout``
        seconds.
        """
        deadline = time.monotonic() + timeout
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.close(self._fd)

    def _start_relay(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdrun.rendezvous.scheduler.relay_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._fd,),
            bufsize=0,
        )
        assert process.stdin is not None
        write_order(process.stdin.fileno(), self._order)
        process.stdin.close()
        return process
