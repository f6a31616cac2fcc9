"""
The relay processes of the scheduler. All accept from the job's one listening socket.

A relay that dies is started again. One that stands still (SIGSTOP, a debugger) is killed first.
The agents reconnect, to it or to another relay.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.child import write_order
from pdrun.rendezvous.scheduler.ping_counter import PingCounter

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


@dataclass
class _RelayProcess:
    """One relay, and the pings that it owes answers for."""

    process: subprocess.Popen[bytes]
    pings: PingCounter
    started_at: float
    has_answered: bool = False
    """It accepts agents; before that it may wait for the scheduler."""

    def ping(self, now: float) -> None:
        """Read what it has answered; ask again if it is time to."""
        asks, answers = self.process.stdin, self.process.stdout
        assert asks is not None and answers is not None
        if answers.read():
            self.has_answered = True
            self.pings.on_answer()
        if self.has_answered and now >= self.pings.next_ping:
            self.pings.on_ping(now)
            with contextlib.suppress(OSError):  # it has ended, or does not read
                asks.write(b"\n")

    def end(self, timeout: float) -> None:
        """Wait for its end, and kill it after ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class RelayProcesses:
    """Running relay processes. Call `replace_failed` periodically."""

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
        self._nodes_per_relay = crowd // max(1, count)
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
        self._relays = [self._start_relay() for _ in range(count)]

    def replace_failed(self) -> str:
        """
        Restart relays that have died or stand still; return a line about it for the event log, or
        an empty string.

        A relay that cannot be started, because no process or descriptor is left, is tried again at
        a later call.
        """
        now = time.monotonic()
        died = frozen = 0
        for index, relay in enumerate(self._relays):
            is_frozen = False
            if relay.process.poll() is None:
                relay.ping(now)
                is_frozen = relay.pings.is_frozen()
                if not is_frozen:
                    continue
            if now - relay.started_at < RESTART_SECONDS:
                continue
            relay.started_at = now
            if is_frozen:
                relay.process.kill()  # its agents notice, and connect to another one
                relay.process.wait()
            try:
                self._relays[index] = self._start_relay()
            except OSError:
                continue
            relay.end(0.0)
            died += not is_frozen
            frozen += is_frozen
        count = len(self._relays)
        texts = []
        if died:
            texts.append(f"{died} of {count} relays had died and were started again")
        if frozen:
            texts.append(
                f"{frozen} of {count} relays did not answer (were they stopped?), were killed and"
                " started again"
            )
        return "; ".join(texts)

    def close(self, timeout: float = 1.0) -> None:
        """
        Wait for the relays, which end with the scheduler's connection; kill them after ``timeout``
        seconds.
        """
        deadline = time.monotonic() + timeout
        for relay in self._relays:
            relay.end(max(0.0, deadline - time.monotonic()))
        os.close(self._fd)

    def _start_relay(self) -> _RelayProcess:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdrun.rendezvous.scheduler.relay_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._fd,),
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        write_order(process.stdin.fileno(), self._order)
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return _RelayProcess(process, PingCounter(self._nodes_per_relay), time.monotonic())
