"""
The end of a job whose scheduler is given up, reported by the agent of the scheduler's node.

That agent has the listening socket. The other agents reconnect to it every 0.1 s, and each gets the
verdict here, instead of waiting for a successor that will not come. The verdict is written to the
event log, too, so that `pdrun status` shows the end of the job.

This runs in a thread of the agent, which is busy ending its workers: another process might not
start on a machine that has just lost several.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pdrun.disk import BackgroundCall
from pdrun.eventlog import EventLog, LogEvent, read_last_events
from pdrun.rendezvous.policies.texts import verdict_data
from pdrun.rendezvous.protocol.events import FAREWELL_SECONDS, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Envelope, Hello, Message, Refuse, Verdict
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.base import EnvelopeArrived, TransportEvent
from pdrun.rendezvous.transport.timeouts import handshake_seconds
from pdrun.rendezvous.transport.zmq_server import ZmqServer

POLL_SECONDS = 0.1
MIN_SECONDS = 3.0
"""Time for the agents to reconnect, as long as some of the largest number are missing."""
QUIET_SECONDS = 1.5
"""No agent has come for so long: the job had fewer, or the others are out of reach."""
LOG_SECONDS = 2.0
"""Time for the disk of the event log to answer."""
MIN_OPEN_FILES = 40
"""Descriptors that a server needs. libzmq aborts the process without one."""
_TAIL_BYTES = 1 << 16


class Farewell:
    """
    Tells every agent that connects that the job is over. `close` ends it.

    Raises:
        OSError, RuntimeError, zmq.ZMQError: no descriptor, thread or memory is left for it. The
            listening socket is closed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        secret: Secret | None,
        listen_fd: int,
        verdict: Verdict,
        events_path: Path | None,
        *,
        is_insecure: bool,
    ) -> None:
        """``listen_fd``: the listening socket; it belongs to this object from now on."""
        self._config = config
        self._verdict = verdict
        self._events_path = events_path
        crowd = config.nodes + config.spares
        self._max_seconds = FAREWELL_SECONDS + handshake_seconds(crowd)
        try:
            _check_descriptors(listen_fd)
            self._transport = ZmqServer(
                secret, listen_fd=listen_fd, insecure=is_insecure, crowd=crowd
            )
        except Exception:
            with contextlib.suppress(OSError):  # it may be closed already
                os.close(listen_fd)
            raise
        self._sender = secrets.token_hex(16)
        self._answered: set[str] = set()
        """Agents that were sent the verdict."""
        self._began_at = self._answered_at = time.monotonic()
        self._closing = threading.Event()
        self._record = BackgroundCall(self._record_verdict)
        self._thread = threading.Thread(target=self._serve, name="pdrun-farewell", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # a limit on processes
            self._transport.close(0.0)
            raise

    def close(self, timeout: float) -> None:
        """Wait, at most ``timeout`` seconds, until the agents know the verdict."""
        self._closing.set()
        deadline = time.monotonic() + timeout
        self._thread.join(timeout)
        self._record.wait(max(0.0, min(LOG_SECONDS, deadline - time.monotonic())))

    def _serve(self) -> None:
        try:
            while not self._is_over(time.monotonic()):
                self._answer(self._transport.poll(POLL_SECONDS))
        finally:
            self._transport.close(1.0)

    def _is_over(self, now: float) -> bool:
        """Whether all agents know the verdict, or had the time to fetch it."""
        if not self._closing.is_set():
            return False
        config = self._config
        if len(self._answered) >= config.nodes + config.spares - 1:  # this agent knows it
            return True
        passed = now - self._began_at
        is_quiet = passed >= MIN_SECONDS and now - self._answered_at >= QUIET_SECONDS
        return is_quiet or passed >= self._max_seconds

    def _answer(self, events: Sequence[TransportEvent]) -> None:
        for event in events:
            if isinstance(event, EnvelopeArrived) and isinstance(event.envelope.body, Hello):
                hello = event.envelope.body
                self._transport.send(
                    event.peer, Envelope(self._sender, 0, 0, self._choose_answer(hello))
                )
                if hello.role == "agent":
                    self._answered.add(hello.agent)
                    self._answered_at = time.monotonic()

    def _choose_answer(self, hello: Hello) -> Message:
        key = self._config.job
        if hello.role == "agent" and (not key or hello.job in ("", key)):
            return self._verdict
        reason = f"job '{key}' (run {self._config.run}) is over: {self._verdict.reason}"
        return Refuse(self._verdict.code, reason)

    def _record_verdict(self) -> None:
        """Write the verdict to the event log, unless the scheduler has written one."""
        path = self._events_path
        if path is None or not path.exists():
            return
        if any(event.kind == "verdict" for event in read_last_events(path, _TAIL_BYTES)):
            return
        log = EventLog(path)
        log.append(LogEvent("verdict", time.time(), verdict_data(self._verdict)))
        log.close()


def _check_descriptors(descriptor: int) -> None:
    """Raise OSError unless this process can open MIN_OPEN_FILES more."""
    copies: list[int] = []
    try:
        while len(copies) < MIN_OPEN_FILES:
            copies.append(os.dup(descriptor))
    finally:
        for copy in copies:
            os.close(copy)
