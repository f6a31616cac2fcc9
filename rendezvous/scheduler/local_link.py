"""
The agent's link to a scheduler in this process (`LocalLink`) or over TCP (`ZmqLink`).

Both have the shape of `pdrun.launcher.agent.interfaces.Link`. This module does not import ZeroMQ:
`ZmqLink` does when it is created (`pdrun.rendezvous.transport.zmq_client`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdrun import async_writer
from pdrun.clock import Clock, SystemClock
from pdrun.eventlog import EventLog, LogEvent
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import PROTOCOL, Envelope, Hello, Message
from pdrun.rendezvous.scheduler.service import Service
from pdrun.rendezvous.transport.base import MemoryHub

if TYPE_CHECKING:
    from pdrun.rendezvous.transport.zmq_client import ZmqLink as ZmqLink

__all__ = ["LocalLink", "ZmqLink"]


def __getattr__(name: str) -> object:
    """Import `ZmqLink`, and ZeroMQ with it, on first use."""
    if name == "ZmqLink":
        from pdrun.rendezvous.transport.zmq_client import ZmqLink

        return ZmqLink
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LocalLink:
    """A link to a scheduler in this process, for a job of one node. No port and no heartbeats."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        host: str = "",
        events_path: Path | str | None = None,
        record: Callable[[LogEvent], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            config: of the scheduler; its ``nodes`` should be 1.
            host: name of this host, for messages.
            events_path: file of the event log; None: no event log.
            record: called with each event, too.
        """
        self._clock = clock or SystemClock()
        self._log = EventLog(Path(events_path)) if events_path else None
        self._on_event = record
        self._service = Service(
            replace(config, heartbeat=0.0),
            MemoryHub(),
            clock=self._clock,
            record=self._record_events,
        )
        hub = self._service.transport
        assert isinstance(hub, MemoryHub)
        self._connection = hub.connect()
        self._agent = os.urandom(16).hex()
        self._sequence = 0
        self._job = config.job
        self._host = host
        self._inbox: list[Message] = []
        self.send(self._make_hello())

    def fileno(self) -> int:
        """Return -1: there is no descriptor, see `deadline`."""
        return -1

    def send(self, message: Message) -> None:
        """Send a message to the scheduler. `poll` then returns its answers."""
        self._connection.send(Envelope(self._agent, 0, self._sequence, message))
        self._sequence += 1
        self._run_service()

    def poll(self) -> Sequence[Message]:
        """Run the scheduler and return its messages."""
        self._run_service()
        result = self._inbox
        self._inbox = []
        return result

    def deadline(self) -> float | None:
        """
        Return when `poll` is due: now if there are messages, otherwise at the scheduler's next
        tick.
        """
        now = self._clock.monotonic()
        return now if self._inbox else now + self._service.machine.tick_every

    def silent_for(self) -> float:
        """Return 0: a scheduler in this process is never out of reach."""
        return 0.0

    def cut_off_for(self) -> float:
        """Return 0: a scheduler in this process is never cut off."""
        return 0.0

    def fence_at(self) -> float:
        """Return infinity: a scheduler in this process knows when this node stands still."""
        return float("inf")

    def renew(self) -> None:
        """Start again as a new agent, after this one was marked lost."""
        self._connection.close()
        self._service.poll_once(0.0)
        hub = self._service.transport
        assert isinstance(hub, MemoryHub)
        self._connection = hub.connect()
        self._inbox = []
        self._agent = os.urandom(16).hex()
        self._sequence = 0
        self.send(self._make_hello())

    def close(self, timeout: float = 1.0) -> None:
        """Close the link and the scheduler."""
        self._connection.close()
        self._service.poll_once(0.0)
        self._service.transport.close(0.0)
        if self._log and (missing := self._log.close()):
            async_writer.write_message(missing)

    def _make_hello(self) -> Hello:
        return Hello(PROTOCOL, "agent", self._job, self._agent, 0, self._host, os.getpid())

    def _run_service(self) -> None:
        self._service.poll_once(0.0)
        self._inbox += [envelope.body for envelope in self._connection.take_envelopes()]

    def _record_events(self, events: Sequence[LogEvent]) -> None:
        if self._log:
            self._log.extend(events)
        if self._on_event:
            for event in events:
                self._on_event(event)
