"""
The agent's link over TCP: ZeroMQ with CURVE, heartbeats, and reconnection after a cut.

`Connector` opens the connections, `Conversation` knows what was sent and received over all of them,
and `ReconnectPolicy` decides how long the link waits for a scheduler.

libzmq reports a failed CURVE handshake only through the socket monitor. MAX_REFUSALS refused
handshakes in a row, or two for MAX_HANDSHAKE_SECONDS, mean another token, or no pdrun. If no
process listens at the port, the link tries again until ``start_timeout``, because agents may start
before their scheduler. After the first Welcome the link waits for a lost scheduler. A successor has
the same job and run, and sends the present state again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Literal

from pdrun.clock import Clock, SystemClock
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol.codec import CodecError
from pdrun.rendezvous.protocol.messages import (
    OPTIONAL_MESSAGES,
    PROTOCOL,
    Echo,
    Hello,
    Message,
    Refuse,
    Welcome,
)
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.reconnect import (
    SILENT_LISTENER_TEXT,
    ReconnectPolicy,
)
from pdrun.rendezvous.transport.relay_frames import STANDALONE_RELAY_SENDER
from pdrun.rendezvous.transport.resend import Conversation, FenceTimer, StaleGuard
from pdrun.rendezvous.transport.timeouts import handshake_seconds
from pdrun.rendezvous.transport.zmq_connection import (
    RETRY_SECONDS,
    ConnectionEvent,
    Connector,
    LinkStage,
)

GRANT_SECONDS = 8.5
"""
Time that an accepted connection gives the workers: for a slow handshake, and the next attempt. So
they continue while only the scheduler's process is absent, or its machine stands still.
"""


class ZmqLink:
    """A Link to the scheduler at ``endpoint``. `poll` connects and reconnects; no call blocks."""

    def __init__(
        self,
        endpoint: Endpoint,
        secret: Secret | None,
        *,
        job: str = "",
        role: Literal["agent", "view"] = "agent",
        host: str = "",
        start_timeout: float = 600.0,
        connect_timeout: float = 3.0,
        insecure: bool = False,
        on_status: Callable[[str], None] | None = None,
        clock: Clock | None = None,
        command: str = "",
        needs_spec: bool = False,
        hint: str = "",
        crowd: int = 0,
        patience: float = 0.0,
    ) -> None:
        """
        Args:
            job: key of the job; empty: any job.
            start_timeout: seconds until the first Welcome.
            connect_timeout: seconds of one TCP attempt.
            on_status: called with a line every few seconds while the scheduler does not answer.
            command: what the sender runs, for the refusal of another job.
            hint: what the user can do if no process listens; empty: start the first node.
            needs_spec: withhold the Welcome until it contains the job's specification, at most for
                ``start_timeout``.
            crowd: number of connections that may be opened at the same time, with this one.
            patience: minimum seconds to wait for a lost scheduler, also if its Welcome has less.
        """
        if (secret is None) != insecure:
            raise ConfigError("give either a secret or --insecure, not both", where=str(endpoint))
        self.endpoint = endpoint
        self._job = job
        self._role = role
        self._host = host
        self._command = command
        self._clock = clock or SystemClock()
        self._agent = secrets.token_hex(16)
        self._conversation = Conversation(endpoint, needs_spec)
        now = self._clock.monotonic()
        self._reconnect_policy = ReconnectPolicy(
            endpoint, start_timeout, on_status, now, hint, crowd, min_patience=patience
        )
        self._beat_at = now
        self._fence = FenceTimer(now)
        self._grant_seconds = max(GRANT_SECONDS, handshake_seconds(crowd) + 1.0)
        self._connector = Connector(
            endpoint,
            secret,
            role,
            self._reconnect_policy,
            crowd=crowd,
            connect_timeout=connect_timeout,
        )
        self._open_connection(now)

    # The Link protocol
    # -----------------

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has work. It stays the same."""
        return self._connector.fileno()

    def send(self, message: Message) -> None:
        """Send a message: now, or after the next Welcome if there is no connection."""
        self._conversation.resend_buffer.add_message(message)
        if self._connector.stage is LinkStage.UP:
            self._send_message(message)
            self._read_socket(self._clock.monotonic())

    def poll(self) -> Sequence[Message]:
        """
        Return the messages that have arrived, and keep the connection alive.

        Raises:
            AuthenticationError: the scheduler has another token, or is no pdrun scheduler.
            RendezvousError: no scheduler answered, or the scheduler was lost.
        """
        now = self._clock.monotonic()
        self._reconnect_policy.on_turn(now)
        self._read_monitor(now)
        self._read_socket(now)
        if self._connector.is_retry_due(now):
            self._open_connection(now)
        welcome = self._conversation.welcome
        if self._connector.stage is LinkStage.UP and welcome and now >= self._beat_at:
            beat = self._conversation.next_heartbeat()
            self._fence.on_heartbeat(beat, welcome.heartbeat, now)
            self._send_message(beat)
            self._beat_at = now + (welcome.heartbeat or 1.0)
            self._read_socket(now)
        is_up = self._connector.stage is LinkStage.UP
        if is_up and welcome and self._reconnect_policy.is_silent(welcome, now):
            self._connector.lose_connection(now, 0.0)
        result = self._conversation.take_inbox()
        if not result:
            self._check_absence(now)
        return result

    def silent_for(self) -> float:
        """Return the seconds since the scheduler's last message, without this process's stalls."""
        return self._reconnect_policy.silent_for(self._clock.monotonic())

    def cut_off_for(self) -> float:
        """Return the seconds since the scheduler's machine last sent or accepted anything."""
        return self._reconnect_policy.cut_off_for(self._clock.monotonic())

    def fence_at(self) -> float:
        """Return the time by which the workers must have ended without a newer contact."""
        welcome = self._conversation.welcome
        return self._fence.fence_at(welcome.dead if welcome else 0.0)

    def renew(self) -> None:
        """
        Start again as a new agent, after this one was marked lost: a new name, nothing to repeat.

        The next `poll` returns a Welcome, as the first one did. Only a scheduler of the same job
        and run is accepted.
        """
        now = self._clock.monotonic()
        self._agent = secrets.token_hex(16)
        self._conversation = self._conversation.restart()
        self._fence = FenceTimer(now)
        self._connector.restart(now)

    def request_confirmation(self) -> None:
        """Ask the scheduler to confirm all messages sent so far; see `is_confirmed`."""
        self._conversation.request_confirmation()
        self._beat_at = self._clock.monotonic()

    @property
    def is_confirmed(self) -> bool:
        """
        Whether the scheduler has read all messages sent before `request_confirmation`.

        It has if it answered a later heartbeat, because messages are read in order.
        """
        return self._conversation.is_confirmed

    @property
    def is_accepted(self) -> bool:
        """Whether a process has accepted the connection, but has not sent Welcome yet."""
        return self._connector.stage in (LinkStage.SHAKING, LinkStage.GREETING)

    @property
    def is_replaced(self) -> bool:
        """Whether a scheduler of another job or run answers at the address now."""
        return self._conversation.is_replaced

    def deadline(self) -> float | None:
        """Return the monotonic time at which `poll` is due even if nothing arrives."""
        now = self._clock.monotonic()
        if self._conversation.inbox:
            return now
        if self._connector.stage is LinkStage.OVER:
            return None
        if self._connector.stage is LinkStage.IDLE:
            return self._connector.retry_at
        if self._connector.stage is LinkStage.UP:
            return min(self._beat_at, now + 1.0)
        return now + 0.5

    def close(self, timeout: float = 1.0) -> None:
        """Close, after at most ``timeout`` seconds for queued messages."""
        is_open = self._connector.stage in (LinkStage.UP, LinkStage.OVER)
        self._connector.close(timeout if is_open else 0.0)

    # One connection
    # --------------

    def _open_connection(self, now: float) -> None:
        self._connector.open_connection(now)
        self._conversation.stale_guard = StaleGuard()
        self._fence.on_hello(now)
        self._send_message(
            Hello(
                PROTOCOL,
                self._role,
                self._job,
                self._agent,
                self._connector.incarnation,
                self._host,
                os.getpid(),
                self._command,
                self._conversation.scheduler,
                self._conversation.commit,
            )
        )

    def _send_message(self, message: Message) -> None:
        connector = self._connector
        if connector.connection is None:
            return
        try:
            is_sent = connector.connection.send(self._agent, connector.incarnation, message)
        except CodecError as error:
            if not isinstance(message, OPTIONAL_MESSAGES):
                self._connector.stage = LinkStage.OVER
                reason = f"this node cannot send its next message: {error}"
                self._conversation.inbox.append(Refuse(70, reason))
            return
        if not is_sent:
            # The scheduler closed the connection right away; the monitor has the reason. Nothing
            # is lost: the next connection repeats the message.
            now = self._clock.monotonic()
            self._read_monitor(now)
            if connector.connection is not None:
                connector.lose_connection(now, RETRY_SECONDS)

    # What arrives
    # ------------

    def _read_monitor(self, now: float) -> None:
        connector = self._connector
        while (event := connector.read_event()) is not None:
            is_open = connector.stage is not LinkStage.SHAKING
            if event is ConnectionEvent.DISCONNECTED and is_open:
                # What the scheduler sent before the end is still in the socket.
                self._read_socket(now)
            if event is ConnectionEvent.CONNECTED and not self._reconnect_policy.is_through_relay:
                # a relay accepts connections while its own way to the scheduler is cut
                self._fence.on_connected(now + self._grant_seconds)
            connector.handle_event(event, now)

    def _read_socket(self, now: float) -> None:
        connector = self._connector
        while connector.connection is not None:
            try:
                envelope = connector.connection.receive()
            except CodecError:
                self._connector.lose_connection(now, RETRY_SECONDS)
                return
            if envelope is None:
                return
            message = envelope.body
            if self._may_be_stale(now) and not self._conversation.stale_guard.is_active:
                self._conversation.hold_until_next_heartbeat()
                self._beat_at = now
            # A message that waited here must not renew a lease that is over.
            is_certain = self._conversation.stale_guard.is_certain(message)
            self._reconnect_policy.on_message(now, is_certain=is_certain)
            if isinstance(message, Echo) and envelope.sender == STANDALONE_RELAY_SENDER:
                self._reconnect_policy.is_through_relay = True
            if not isinstance(
                message, Echo | Refuse
            ):  # a relay, or whoever is left, may send those
                self._conversation.note_commit(envelope.sender, envelope.incarnation)
            self._on_message(message, now)

    def _may_be_stale(self, now: float) -> bool:
        """Whether a message that is read now may be older than the lease."""
        welcome = self._conversation.welcome
        if welcome is None or self._connector.stage is not LinkStage.UP:
            return False
        return self._reconnect_policy.is_stale(welcome.lease, now)

    def _on_message(self, message: Message, now: float) -> None:
        conversation = self._conversation
        conversation.take_message(message)
        if isinstance(message, Echo):
            self._fence.on_echo(message.number)
        elif isinstance(message, Welcome):
            self._fence.on_welcome()
        if conversation.is_over:
            self._connector.stage = LinkStage.OVER
        elif isinstance(message, Welcome) and self._connector.stage is not LinkStage.UP:
            self._connector.stage = LinkStage.UP
            self._beat_at = now
            self._connector.is_known = True
            self._reconnect_policy.on_welcome(now)
            for repeated in conversation.resend_buffer.messages_to_repeat():
                self._send_message(repeated)

    # A scheduler that does not answer
    # --------------------------------

    def _check_absence(self, now: float) -> None:
        """Raise if the scheduler does not answer in time."""
        conversation = self._conversation
        if self._connector.stage is LinkStage.OVER or conversation.has_verdict:
            return
        welcome = conversation.welcome
        if welcome is None:
            self._reconnect_policy.check_start(self._connector.name_fault, now)
            return
        self._reconnect_policy.check_lost(welcome, now)
        if conversation.needs_spec and not welcome.spec:
            self._reconnect_policy.check_spec(now)

    @property
    def absence_reason(self) -> str:
        """Why the scheduler does not answer, as far as known."""
        if self._connector.name_fault:
            return self._connector.name_fault
        policy = self._reconnect_policy
        return policy.absence_text if self.is_port_closed else SILENT_LISTENER_TEXT

    @property
    def is_port_closed(self) -> bool:
        """Whether the last attempt to connect found no listener."""
        return self._reconnect_policy.no_listener_since is not None
