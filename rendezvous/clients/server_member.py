"""
A parameter server of a dynamic cluster: it joins as a node without workers and ends with the job.

    worker 0 .. W-1, then server 0 .. S-1: the order of the nodes at the scheduler

If it is lost, the scheduler ends the job, as for a worker.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdrun import async_writer
from pdrun.endpoint import Endpoint, parse_endpoint
from pdrun.errors import ConfigError, PdrunError
from pdrun.rendezvous.clients.member import (
    LINGER_SECONDS,
    collect_facts,
    find_local_address,
    read_boot_id,
    wait_for_start,
)
from pdrun.rendezvous.protocol.messages import Finished, Join, Refuse, StopWorkers, Verdict
from pdrun.rendezvous.protocol.security import Secret, derive_server_key
from pdrun.rendezvous.scheduler.local_link import ZmqLink
from pdrun.rendezvous.transport.zmq_util import wait_readable

POLL_SECONDS = 0.5


@dataclass
class ServerMember:
    """A server's place in a dynamic cluster, and its connection."""

    number: int
    servers: int
    workers: int
    master: Endpoint
    """Address of the store of rank 0."""
    generation: int
    address: str
    """Address of this process on the route to the scheduler."""
    key: bytes
    """Key of the data channel."""
    _link: ZmqLink
    _show_line: Callable[[str], None]

    def wait_for_end(self, problem: Callable[[], PdrunError | None]) -> int:
        """
        Return the job's exit code when the job is over.

        Args:
            problem: returns why this server cannot serve, or None.

        Raises:
            PdrunError: the scheduler is lost, or this server cannot serve.
        """
        try:
            while True:
                due = self._link.deadline()
                wait = POLL_SECONDS if due is None else min(POLL_SECONDS, due - time.monotonic())
                wait_readable(self._link.fileno(), wait=max(0.0, wait))
                if (error := problem()) is not None:
                    raise error
                for message in self._link.poll():
                    if isinstance(message, StopWorkers):
                        self._link.send(Finished(self.generation))
                    elif isinstance(message, Verdict | Refuse):
                        if message.code:
                            self._show_line(f"job stopped: {message.reason}")
                        return message.code
        finally:
            self._link.close(LINGER_SECONDS)


def join_as_server(
    scheduler: Endpoint,
    secret: Secret,
    *,
    job: str,
    workers: int,
    servers: int,
    number: int | None = None,
    name: str = "",
    timeout: float = 600.0,
    show_line: Callable[[str], None] | None = None,
) -> ServerMember:
    """
    Join the job at ``scheduler`` and wait until all processes have joined.

    Args:
        workers, servers: the numbers that this process expects.
        number: the requested number of this server.
        name: of this process, unique in the job; empty: made from its number or process id.
        timeout: seconds to reach the scheduler.

    Raises:
        RendezvousError, AuthenticationError, ConfigError: with the scheduler's reason, if it gave
            one.
    """
    show_line = show_line or async_writer.write_message
    host = socket.gethostname()
    link = ZmqLink(
        scheduler, secret, job=job, host=host, start_timeout=timeout, on_status=show_line
    )
    own = f"server-{number}" if number is not None else f"server-{host}-{os.getpid():08d}"
    place = None if number is None else workers + number
    facts = {"host": f"{host}:{read_boot_id()}", **collect_facts()}
    try:
        address = find_local_address(scheduler)
        welcome, assign = wait_for_start(link, Join(name or own, place, 0, facts), show_line)
        found = (assign.world_size, assign.nodes - assign.world_size)
        if found != (workers, servers):
            raise ConfigError(
                f"this process expects {workers} workers and {servers} servers, the scheduler has "
                f"{found[0]} and {found[1]}",
                where="PDRUN_WORKERS or PDRUN_SERVERS",
            )
    except BaseException:
        link.close(0.5)
        raise
    return ServerMember(
        number=assign.node_rank - workers,
        servers=servers,
        workers=workers,
        master=parse_endpoint(assign.master, where="master"),
        generation=assign.generation,
        address=address,
        key=derive_server_key(secret, welcome.run),
        _link=link,
        _show_line=show_line,
    )
