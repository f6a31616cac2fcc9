"""
The relays beside the scheduler: as many processes as it pays, all accepting from the one listening
socket of the job.

A relay that dies is started again; its agents come back by themselves, to it or to another.
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
Nodes from which on relays pay: one process takes in about 400 agents a second with CURVE, on one
core.
"""
MAX_RELAYS = 8
RESTART_SECONDS = 1.0
"""Seconds between two starts of one relay."""


def choose_relay_count(config: SchedulerConfig) -> int:
    """
    Return how many relays a job is to have: none, or one a core that the scheduler leaves free, at
    least 2.
    """
    if config.relays is not None:
        return config.relays
    if config.nodes + config.spares < MIN_NODES:
        return 0
    return max(2, min(MAX_RELAYS, len(os.sched_getaffinity(0)) - 1))


class RelayProcesses:
    """Running relay processes. Call `look` now and then."""

    def __init__(
        self, count: int, listen_fd: int, scheduler: Endpoint, secret: Secret | None, crowd: int
    ) -> None:
        """
        Start them.

        Args:
            listen_fd: the listening socket of the job; belongs to this object from now on.
            scheduler: where the scheduler itself listens, for relays.
            crowd: agents that may come at once, to all of them.
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
        Start again what has died; return a line about it for the event log, or the empty string.

        One that cannot be started, as no process or descriptor is left, is tried again at a later
        call.
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
        """They end with the scheduler's connection; after ``timeout`` seconds they are killed."""
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
