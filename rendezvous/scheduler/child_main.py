"""
The scheduler process of the first node's agent.

It runs as ``python -m pdrun.rendezvous.scheduler.child_main``. `pdrun.rendezvous.scheduler.child`
starts it, and another one if this one dies. `main` documents the pipes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdrun import async_writer, process_setup
from pdrun.clock import SystemClock
from pdrun.endpoint import Endpoint
from pdrun.eventlog import EventLog
from pdrun.rendezvous.journal.recovery import begin_or_resume
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.scheduler.relay_processes import RelayProcesses, choose_relay_count
from pdrun.rendezvous.scheduler.service import Service

if TYPE_CHECKING:
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

MIN_OPEN_FILES = 40
RELAY_CHECK_SECONDS = 0.5
FAREWELL_SECONDS = 0.9
"""Time for the last messages after the agent of this node has died."""
JOURNAL_LOST = {"journal": "lost"}
ALIVE = {"alive": True}


@dataclass
class _RunningScheduler:
    """The parts of the process, in the order in which they are closed."""

    service: Service
    transport: ZmqServer
    relays: RelayProcesses | None
    log: EventLog | None
    address: Endpoint
    """The address for agents."""

    def close(self) -> None:
        """Close all parts."""
        self.service.close()
        self.transport.close(1.0)
        if self.relays:
            self.relays.close()
        if self.log and (missing := self.log.close()):
            async_writer.write_message(missing)


def main() -> int:
    """
    Serve as an agent's child.

    stdin: one JSON line {config, secret, listen_fd, events, insecure, journal}, then a line now and
    then that asks whether this process stands still. Its end means that the agent has died.

    stdout: one JSON line {"endpoint": "HOST:PORT"} or {"error": ..., "code": ...}. Later
    {"alive": true} as the answer to lines, and {"journal": "lost"} if the journal is given up.

    If there is a journal already, this process resumes from it.
    """
    process_setup.setup_process()
    # Signals of a terminal or a batch system are handled by the agents.
    for number in (*process_setup.STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        order = _read_order(sys.stdin.buffer.readline())
        scheduler = _start_scheduler(order)
    except Exception as error:  # the agent shows any error to the user
        ours = process_setup.resource_limit_error(error, "the scheduler", MIN_OPEN_FILES) or error
        text = str(ours) or type(ours).__name__
        _send_answer({"error": text, "code": getattr(ours, "exit_code", 70)})
        return 1
    _send_answer({"endpoint": str(scheduler.address)})
    scheduler.transport.watch_fd(0)
    try:
        _serve_until_done(scheduler, order["config"])
        scheduler.service.finish()
    finally:
        scheduler.close()
    return 0


def _send_answer(what: dict[str, Any]) -> None:
    """Send a line to the agent. If the agent is gone, the end of stdin reports it, too."""
    import json

    # A line break first: a sitecustomize may have printed a part of a line.
    data = b"\n" + json.dumps(what).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass


def _read_order(line: bytes) -> dict[str, Any]:
    from pdrun.rendezvous.protocol import codec

    order = codec.load_json(line, limit=4 << 20)
    if not isinstance(order, dict):
        raise ValueError("the scheduler's order must be a JSON object")
    order["config"] = codec.from_plain(SchedulerConfig, order["config"], "config")
    return order


def _start_scheduler(order: dict[str, Any]) -> _RunningScheduler:
    from pdrun.rendezvous.protocol.security import Secret
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

    config: SchedulerConfig = order["config"]
    listener: int = order["listen_fd"]
    insecure: bool = order["insecure"]
    journal = Path(order["journal"]) if order["journal"] else None
    events = Path(order["events"]) if order["events"] else None
    # Before the port is opened: a scheduler that cannot resume must not accept agents that
    # reconnect.
    recovery = begin_or_resume(config, SystemClock(), journal, events)
    # If the disk hangs, the file stays. The agent must not start a successor from it.
    recovery.on_lost = lambda: _send_answer(JOURNAL_LOST)
    secret = Secret.from_hex(order["secret"]) if order["secret"] else None
    address = _socket_address(listener)
    count = choose_relay_count(config)
    crowd = config.nodes + config.spares
    relays: RelayProcesses | None = None
    if count:
        # The relays accept the agents; the scheduler has a port of its own for the relays.
        transport = ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0), insecure=insecure)
        relays = RelayProcesses(count, listener, transport.endpoint, secret, crowd)
    else:
        transport = ZmqServer(secret, listen_fd=listener, insecure=insecure, crowd=crowd)
    log = EventLog(events) if events else None
    record = log.extend if log else None
    service = Service(config, transport, record=record, recovery=recovery)
    return _RunningScheduler(service, transport, relays, log, address)


def _socket_address(listener: int) -> Endpoint:
    copy = socket.socket(fileno=os.dup(listener))
    try:
        host, port = copy.getsockname()[:2]
        return Endpoint(host, port)
    finally:
        copy.close()


def _serve_until_done(scheduler: _RunningScheduler, config: SchedulerConfig) -> None:
    """Serve until the job is over, or shortly after the death of the agent."""
    service = scheduler.service
    relays = scheduler.relays
    clock = service.clock
    leave_at = float("inf")
    check_relays_at = 0.0
    while service.exit_code is None and clock.monotonic() < leave_at:
        service.poll_once(0.25)
        if relays and clock.monotonic() >= check_relays_at:
            check_relays_at = clock.monotonic() + RELAY_CHECK_SECONDS
            if replaced := relays.replace_failed():
                service.warn(replaced)
        if not service.ready_fds:
            continue
        if os.read(0, 4096):
            _send_answer(ALIVE)
        else:
            scheduler.transport.unwatch_fd(0)
            if service.machine.shutdown.verdict is None:
                host = f" ({config.host})" if config.host else ""
                service.on_agent_lost(f"the agent of the scheduler's node{host} has ended")
                leave_at = clock.monotonic()
                if service.has_peers:
                    leave_at += FAREWELL_SECONDS


if __name__ == "__main__":
    sys.exit(main())
