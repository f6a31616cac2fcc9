"""
The relay process: of the scheduler's host, or `pdrun relay` on another host.

``python -m pdrun.rendezvous.scheduler.relay_main`` is a relay of the scheduler's host, started by
the scheduler. Several of them accept from the job's one listening socket.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from pdrun import process_setup
from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol import codec
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.relay import Relay, RelayServer, RelayUplink
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.rendezvous.transport.reconnect import MAX_REFUSALS
from pdrun.text import quote_command

RETRY_SECONDS = 0.2
"""Time between two attempts to reach the scheduler."""
CONNECT_SECONDS = 10.0
"""Time for the scheduler to accept the relay."""
STATUS_SECONDS = 5.0
"""Time between two lines about a missing scheduler."""


def serve_relay(
    listen_fd: int,
    scheduler: Endpoint,
    secret: Secret | None,
    *,
    until: float | None = None,
    crowd: int = 0,
    is_standalone: bool = False,
    ping_fds: tuple[int, int] | None = None,
) -> bool:
    """
    Relay between the agents at ``listen_fd`` and ``scheduler`` until the scheduler is lost.

    Return whether that was the end of the job.

    Args:
        listen_fd: a listening TCP socket; a copy of it is used, and closed.
        crowd: number of agents that may connect at the same time.
        until: monotonic time by which the scheduler must accept the relay; None: CONNECT_SECONDS
            from now.
        is_standalone: whether agents know the relay's own address.
        ping_fds: see `Relay`.

    Raises:
        RendezvousError, AuthenticationError: the scheduler was not reached, or has another token.
    """
    uplink = RelayUplink(scheduler, secret)
    server: RelayServer | None = None
    try:
        if until is None:
            until = time.monotonic() + CONNECT_SECONDS
        _await_uplink(uplink, until)
        server = RelayServer(
            secret, listen_fd=os.dup(listen_fd), insecure=secret is None, crowd=crowd
        )
        relay = Relay(server, uplink, is_standalone=is_standalone, ping_fds=ping_fds)
        while relay.run_once():
            pass
        return relay.is_concluded
    finally:
        if server is not None:
            server.close(0.2)
        uplink.close()


def serve_standalone_relay(
    scheduler: Endpoint,
    listen: Endpoint,
    secret: Secret | None,
    *,
    patience: float,
    show_line: Callable[[str], None],
) -> int:
    """
    Run `pdrun relay` until the job is over (0), or the scheduler was lost for ``patience`` seconds
    (69).

    Raises:
        ConfigError: ``listen`` cannot be listened on.
        AuthenticationError: the scheduler has another token.
    """
    listener = bind_listener(listen, backlog=1024)
    here = Endpoint(*listener.getsockname()[:2])
    options = quote_command("--scheduler", here, "--no-serve")
    show_line(f"relay to {scheduler} on {here}: start the nodes with {options}")
    lost_at = time.monotonic()
    shown_at = lost_at
    refusals = 0  # in a row; a single one may have met the death of a scheduler
    with listener:
        while True:
            try:
                until = max(lost_at + patience, time.monotonic() + RETRY_SECONDS)
                if serve_relay(
                    listener.fileno(),
                    scheduler,
                    secret,
                    until=min(until, shown_at + STATUS_SECONDS),
                    is_standalone=True,
                ):
                    return 0
                refusals = 0
                lost_at = time.monotonic()
                shown_at = lost_at
                show_line(
                    f"the scheduler at {scheduler} was lost; waiting for it for {patience:g} s"
                )
            except AuthenticationError:
                refusals += 1
                if refusals >= MAX_REFUSALS:
                    raise
                time.sleep(RETRY_SECONDS)
            except RendezvousError as error:
                refusals = 0
                now = time.monotonic()
                if now - lost_at > patience:
                    show_line(f"error: {error}")
                    return error.exit_code
                if now >= shown_at + STATUS_SECONDS:
                    shown_at = now
                    left = patience - (now - lost_at)
                    show_line(
                        f"the scheduler at {scheduler} does not answer; waiting {left:.0f} s more"
                    )
                time.sleep(RETRY_SECONDS)


def _await_uplink(uplink: RelayUplink, until: float) -> None:
    from zmq import FD

    poll = select.poll()
    poll.register(int(uplink.monitor.getsockopt(FD)), select.POLLIN)
    while not uplink.is_up:
        uplink.read_items()
        if uplink.is_refused:
            raise AuthenticationError(
                "the token differs, or this is not a pdrun scheduler", where=str(uplink.endpoint)
            )
        if uplink.is_over or time.monotonic() >= until:
            raise RendezvousError("the scheduler was not reached", where=str(uplink.endpoint))
        if not uplink.is_up:
            poll.poll(50)


def main() -> int:
    """
    Relay as the scheduler's child.

    stdin: one JSON line {listen_fd, host, port, secret, crowd}, then a byte now and then that asks
    whether this process stands still. stdout: the answers, and one when the relay accepts agents.
    The relay ends with its connection to the scheduler.
    """
    process_setup.setup_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = codec.load_json(sys.stdin.buffer.readline(), limit=1 << 16)
    secret = Secret.from_hex(order["secret"]) if order["secret"] else None
    scheduler = Endpoint(order["host"], order["port"])
    try:
        serve_relay(order["listen_fd"], scheduler, secret, crowd=order["crowd"], ping_fds=(0, 1))
    except (RendezvousError, AuthenticationError) as error:
        # A scheduler that is killed during the handshake looks like one with another token.
        print(json.dumps({"error": str(error)}), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
