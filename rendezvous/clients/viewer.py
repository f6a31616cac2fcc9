"""
A viewer: watches a job from outside, or stops it, over one connection.

A viewer keeps its connection for two reasons. It knows that the scheduler is still the same. And it
knows whether a silent scheduler is out of reach (the viewer waits) or has exited (its port refuses
connections). A viewer that has asked once gets the last status without asking when the job
is over (`pdrun.rendezvous.scheduler.service`).
"""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, PdrunError, RendezvousError
from pdrun.rendezvous.protocol.messages import (
    Leave,
    Refuse,
    StatusQuery,
    StatusReply,
    StopRequest,
    Welcome,
)
from pdrun.rendezvous.transport.dns import refuses_connections
from pdrun.rendezvous.transport.zmq_client import ZmqLink
from pdrun.rendezvous.transport.zmq_util import wait_readable

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.security import Secret

ANSWER_SECONDS = 5.0
"""Time for the scheduler's first message."""
SLOW_FACTOR = 3
"""
So many times that time is given to a process that has accepted the connection: in a network with
round trips of a second the first handshake is too slow.
"""
REPEAT_SECONDS = 1.0
"""Time after which a question is repeated: it may be lost with a connection that was cut."""
_Reply = TypeVar("_Reply", Welcome, StatusReply)


class Viewer:
    """See the module. A context manager, which closes the connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        secret: Secret | None,
        *,
        insecure: bool = False,
        stops: bool = False,
        timeout: float = ANSWER_SECONDS,
        patience: float = 0.0,
    ) -> None:
        """
        Connect, and wait for the scheduler's Welcome.

        Args:
            stops: `request_stop` will be called; a viewer's key does not permit that.
            timeout: seconds for the Welcome; three times as many in a slow network.
            patience: minimum seconds to wait for a scheduler that is lost later; default: the job's
                own.

        Raises:
            AuthenticationError: the token differs.
            RendezvousError: no scheduler answered, or it refused.
        """
        self.endpoint = endpoint
        self._link = ZmqLink(
            endpoint,
            secret,
            role="agent" if stops else "view",
            start_timeout=timeout * SLOW_FACTOR,
            insecure=insecure,
            patience=patience,
        )
        try:
            welcome = self._await_reply(
                Welcome, time.monotonic() + timeout, slow_seconds=timeout * (SLOW_FACTOR - 1)
            )
            if welcome is None:
                raise RendezvousError(
                    f"no answer within {timeout:g} s: {self._link.absence_reason}",
                    where=str(endpoint),
                )
        except BaseException:
            self._link.close(0.0)
            raise
        self.job = welcome.job
        self.run = welcome.run
        """Names of the run and of the job (empty: no node has named it yet)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave and close the connection."""
        self._link.send(Leave())
        self._link.close(0.5)

    def fetch_lines(self, timeout: float = ANSWER_SECONDS) -> list[str] | None:
        """
        Ask for the job's event lines, oldest first. None: no answer within ``timeout`` seconds; it
        may still arrive.

        Raises:
            RendezvousError: the scheduler was out of reach for too long, or another one answers.
        """
        reply = self._await_reply(StatusReply, time.monotonic() + timeout, asking=True)
        return None if reply is None else list(reply.lines)

    def request_stop(self, signal: int, by: str, *, force: bool = False) -> None:
        """
        Ask to stop the job. A later answer of `fetch_lines` proves that the scheduler has read
        this.
        """
        self._link.send(StopRequest(signal, by, force))

    @property
    def is_gone(self) -> bool:
        """
        Whether the scheduler has exited and is not only out of reach: no process listens at its
        address, or another scheduler does.
        """
        return self._link.is_replaced or (
            self._link.is_port_closed and refuses_connections(self.endpoint)
        )

    def _await_reply(
        self,
        kind: type[_Reply],
        deadline: float,
        *,
        asking: bool = False,
        slow_seconds: float = 0.0,
    ) -> _Reply | None:
        """
        Return the last message of a kind, or None after the deadline.

        Args:
            asking: ask for it.
            slow_seconds: seconds after the deadline in which a handshake may end.
        """
        ask_at = time.monotonic() if asking else math.inf
        while True:
            found: _Reply | None = None
            for message in self._link.poll():
                if isinstance(message, Refuse):
                    raise _refusal_error(message, self.endpoint)
                if isinstance(message, kind):
                    found = message  # of several answers the last
            now = time.monotonic()
            limit = deadline + slow_seconds * self._link.is_accepted
            if found is not None or now >= limit:
                return found
            if now >= ask_at:
                self._link.send(StatusQuery())
                ask_at = now + REPEAT_SECONDS
            due = min(self._link.deadline() or limit, limit, ask_at)
            wait_readable(self._link.fileno(), wait=due - time.monotonic())


def query_status(
    endpoint: Endpoint,
    secret: Secret | None,
    *,
    insecure: bool = False,
    timeout: float = ANSWER_SECONDS,
) -> list[str]:
    """
    Return the event lines of the job at ``endpoint``, oldest first: one question.

    Raises:
        AuthenticationError: the token differs.
        RendezvousError: no scheduler answered within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    with Viewer(endpoint, secret, insecure=insecure, timeout=timeout) as viewer:
        lines = viewer.fetch_lines(deadline - time.monotonic())
    if lines is None:
        raise RendezvousError(f"no answer within {timeout:g} s", where=str(endpoint))
    return lines


def _refusal_error(message: Refuse, endpoint: Endpoint) -> PdrunError:
    kind = AuthenticationError if message.code == AuthenticationError.exit_code else RendezvousError
    return kind(message.reason, where=str(endpoint))
