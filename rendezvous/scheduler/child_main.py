"""
The scheduler as the child of the first node's agent: ``python -m
pdrun.rendezvous.scheduler.child_main`` (see `main`).

`pdrun.rendezvous.scheduler.child` is the other end: it starts this process, and another one should
this one die.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from pdrun import async_writer, process_setup
from pdrun.clock import SystemClock
from pdrun.endpoint import Endpoint
from pdrun.eventlog import EventLog
from pdrun.rendezvous.journal.recovery import begin_or_resume
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.scheduler.relay_processes import RelayProcesses, choose_relay_count
from pdrun.rendezvous.scheduler.service import Service

MIN_OPEN_FILES = 40
JOURNAL_LOST = {"journal": "lost"}


def main() -> int:
    """
    Serve as an agent's child.

    stdin: one JSON line {config, secret, listen_fd, events, insecure, journal}, then nothing; its
    end means that the agent has died. stdout: one JSON line {"endpoint": "HOST:PORT"} or {"error":
    ..., "code": ...}; later on, should the journal be given up, {"journal": "lost"}. Where there is
    a journal already, this process goes on from it.
    """
    process_setup.setup_process()
    for number in (*process_setup.STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(
            number, signal.SIG_IGN
        )  # a terminal's and a batch system's signals are the agents' business
    try:
        order = _read_order(sys.stdin.buffer.readline())
        transport, service, log, relays = _start_service(order)
    except Exception as error:  # whatever it is, the agent says it to the user
        ours = process_setup.resource_limit_error(error, "the scheduler", MIN_OPEN_FILES) or error
        _send_answer({"error": str(ours), "code": getattr(ours, "exit_code", 70)})
        return 1
    _send_answer({"endpoint": order["endpoint"]})
    transport.watch(0)
    try:
        _serve_until_done(service, order["config"], relays)
        service.finish()
    finally:
        service.close()
        transport.close(1.0)
        if relays:
            relays.close()
        if log and (missing := log.close()):
            async_writer.write_message(missing)
    return 0


def _send_answer(what: dict[str, Any]) -> None:
    """Tell the agent; that it is gone already is told once more by the end of stdin."""
    import json

    data = (
        b"\n" + json.dumps(what).encode() + b"\n"
    )  # a line of its own, behind whatever a sitecustomize has printed
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass


def _read_order(line: bytes) -> dict[str, Any]:
    from pdrun.rendezvous.protocol import codec

    order = codec.load_json(line, limit=4 << 20)
    if not isinstance(order, dict):
        raise ValueError("the scheduler's order is no object")
    order["config"] = codec.from_plain(SchedulerConfig, order["config"], "config")
    return order


def _start_service(
    order: dict[str, Any],
) -> tuple[Any, Service, EventLog | None, RelayProcesses | None]:
    from pdrun.rendezvous.protocol.security import Secret
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

    events = Path(order["events"]) if order["events"] else None
    # before the port is opened: agents that come back must not be taken by a scheduler that cannot
    # go on
    recovery = begin_or_resume(
        order["config"], SystemClock(), Path(order["journal"]) if order["journal"] else None, events
    )
    recovery.on_lost = lambda: _send_answer(
        JOURNAL_LOST
    )  # on a disk that hangs an old one stays: nobody may go on from it
    secret = Secret.from_hex(order["secret"]) if order["secret"] else None
    listener: int = order["listen_fd"]
    count = choose_relay_count(order["config"])
    order["endpoint"] = str(_socket_address(listener))
    crowd = order["config"].nodes + order["config"].spares
    if count:  # the agents' door is the relays', the scheduler has one of its own
        transport = ZmqServer(secret, endpoint=Endpoint("127.0.0.1", 0), insecure=order["insecure"])
        relays = RelayProcesses(count, listener, transport.endpoint, secret, crowd)
    else:
        transport = ZmqServer(secret, listen_fd=listener, insecure=order["insecure"], crowd=crowd)
        relays = None
    log = EventLog(events) if events else None
    service = Service(
        order["config"], transport, record=log.extend if log else None, recovery=recovery
    )
    return transport, service, log, relays


def _socket_address(listener: int) -> Endpoint:
    copy = socket.socket(fileno=os.dup(listener))
    try:
        host, port = copy.getsockname()[:2]
        return Endpoint(host, port)
    finally:
        copy.close()


def _serve_until_done(
    service: Service, config: SchedulerConfig, relays: RelayProcesses | None
) -> None:
    clock = service.clock
    leave_at = float("inf")
    look_at = 0.0
    while service.exit_code is None and clock.monotonic() < leave_at:
        service.poll_once(0.25)
        if relays and clock.monotonic() >= look_at:
            look_at = clock.monotonic() + 0.5
            if died := relays.restart_dead():
                service.warn(died)
        if service.ready_fds and not os.read(0, 4096):
            service.transport.unwatch(0)  # type: ignore[attr-defined]
            if service.machine.shutdown.verdict is None:
                service.on_agent_lost(
                    f"the node of the scheduler{f' ({config.host})' if config.host else ''} was lost"
                )
                leave_at = clock.monotonic() + (0.9 if service.has_peers else 0.0)


if __name__ == "__main__":
    sys.exit(main())
