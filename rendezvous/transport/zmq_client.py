"""
The agent's link over TCP: one ZeroMQ DEALER a connection, CURVE, heartbeats, and coming back after
a cut.

Each attempt is a socket of its own: libzmq's own reconnection would continue a conversation that the scheduler has
closed. All attempts share one epoll descriptor, so that `fileno` stays the same. ZeroMQ's descriptors only say that
*something* happened since they were last read empty; so every call reads until there is nothing left.

CURVE fails without a word; the socket monitor tells. Three handshakes refused, or one for
LONGEST_HANDSHAKE: another token, or no pdrun. Nobody at the port at all: agents may start before
their scheduler, so that is tried again until ``start_timeout``. After the first welcome a lost
scheduler is waited for (`pdrun.rendezvous.transport.reconnect`); a successor is known by job and
run, and told again all that holds.
"""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal

from pdrun.clock import Clock, SystemClock
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol import security
from pdrun.rendezvous.protocol.codec import CodecError, decode, encode
from pdrun.rendezvous.protocol.messages import (
    OPTIONAL_MESSAGES,
    PROTOCOL,
    Assign,
    Echo,
    Envelope,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    Verdict,
    Welcome,
)
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.transport.dns import NameLookup
from pdrun.rendezvous.transport.reconnect import (
    NO_LISTENER_TEXT,
    SILENT_LISTENER_TEXT,
    ReconnectPolicy,
)
from pdrun.rendezvous.transport.relay_frames import STANDALONE_RELAY_SENDER
from pdrun.rendezvous.transport.resend import DuplicateFilter, ResendBuffer
from pdrun.rendezvous.transport.timeouts import (
    handshake_seconds,
    keepalive_options,
    probe_milliseconds,
)
from pdrun.rendezvous.transport.zmq_util import (
    NEVER_RECONNECT_MS,
    end_context,
    open_monitor,
    read_monitor_event,
)

if TYPE_CHECKING:
    import zmq

RETRY_SECONDS = 0.2
RETRY_UNKNOWN_NAME_SECONDS = 1.0
RETRY_REFUSED_SECONDS = 0.5
RETRY_WELCOMED_SECONDS = 0.1
"""
Seconds between two attempts: when nobody listens, when the host's name is not known (yet), after a
refused handshake, and when one has succeeded before.
"""


class LinkStage(Enum):
    IDLE = "no socket"
    CONNECTING = "TCP"
    SHAKING = "handshake"
    GREETING = "Hello sent"
    UP = "welcomed"
    OVER = "closed, refused or after the verdict"


class ZmqLink:
    """A Link to the scheduler at ``endpoint``. Connects by itself inside `poll`; never blocks."""

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
            job: key of the job; empty: whichever the scheduler serves.
            start_timeout: seconds until a scheduler must have welcomed us.
            connect_timeout: seconds of one TCP attempt.
            on_status: is given a line every few seconds while nobody is there.
            command: what the sender runs, for the refusal of another job.
            hint: what to do where nobody listens, if this node knows better than to start the first
                one.
            needs_spec: hold the welcome back until the scheduler knows what the job runs, for
                ``start_timeout`` too.
            crowd: connections that may come at once, this one among them.
            patience: seconds for which a lost scheduler is waited for at least, whatever it said
                itself.
        """
        import zmq

        if (secret is None) != insecure:
            raise ConfigError(
                "either a secret or --insecure, not both and not neither", where=str(endpoint)
            )
        self._zmq = zmq
        self.endpoint = endpoint
        self._secret = secret
        self._insecure = insecure
        self._job = job
        self._role = role
        self._host = host
        self._command = command
        self._needs_spec = needs_spec
        self._connect_timeout = connect_timeout
        self._crowd = crowd
        self._clock = clock or SystemClock()
        self._agent = secrets.token_hex(16)
        self._incarnation = -1
        self._context = zmq.Context()
        self._epoll = select.epoll()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._stage = LinkStage.IDLE
        self._inbox: list[Message] = []
        self._doubted_beat = 0
        """
        Number of the heartbeat whose answer is awaited before anything else is believed: after a
        silence longer than the lease an order may have lain here, as while this process was frozen,
        until it was given up; 0: none.
        """
        self._doubted_messages: list[Message] = []
        self._resend_buffer = ResendBuffer()
        self._duplicate_filter = DuplicateFilter()
        self._welcome: Welcome | None = None
        self._beat_number = self._echo_number = self._confirm_number = 0
        now = self._clock.monotonic()
        self._reconnect_policy = ReconnectPolicy(
            endpoint, start_timeout, on_status, now, hint, crowd, min_patience=patience
        )
        self._retry_at = self._beat_at = self._attempt_at = now
        self._name_lookup = NameLookup(endpoint.host)
        self._sent_count = self._received_count = 0
        self.is_replaced = False
        """Whether another scheduler, of another job or run, answers at the address now."""
        self._open_connection(now)

    # The Link protocol
    # ------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """
        A descriptor that becomes readable when `poll` may have something; the same for the link's
        whole life.
        """
        return self._epoll.fileno()

    def send(self, message: Message) -> None:
        """
        Queue a message; what is said before the welcome, or while the connection is cut, goes out
        afterwards.
        """
        self._resend_buffer.add_message(message)
        if self._stage is LinkStage.UP:
            self._send_message(message)
            self._read_socket(self._clock.monotonic())

    def poll(self) -> Sequence[Message]:
        """
        Return what has arrived and keep the connection alive.

        Raises:
            AuthenticationError: the scheduler holds another token, or it is none.
            RendezvousError: nobody answered, or the scheduler was lost.
        """
        now = self._clock.monotonic()
        self._reconnect_policy.on_turn(now)
        self._read_monitor(now)
        self._read_socket(now)
        if self._stage is LinkStage.IDLE and now >= self._retry_at:
            self._open_connection(now)
        if self._stage is LinkStage.UP and self._welcome and now >= self._beat_at:
            self._beat_number += 1
            self._send_message(Heartbeat(self._beat_number, self._echo_number))
            self._beat_at = now + (self._welcome.heartbeat or 1.0)
            self._read_socket(now)
        if (
            self._stage is LinkStage.UP
            and self._welcome
            and self._reconnect_policy.is_silent(self._welcome, now)
        ):
            self._lose_connection(now, 0.0)
        result = self._inbox
        self._inbox = []
        if not result:
            self._check_absence(now)
        return result

    def silent_for(self) -> float:
        """
        Seconds since the scheduler was last heard, without those in which this process itself stood
        still.
        """
        return self._reconnect_policy.silent_for(self._clock.monotonic())

    def cut_off_for(self) -> float:
        """
        Seconds for which nothing of the scheduler's machine was heard, not even that it took a
        connection.
        """
        return self._reconnect_policy.cut_off_for(self._clock.monotonic())

    def renew(self) -> None:
        """
        Begin again as a new agent, after the old one was given up: another name, nothing to repeat,
        nothing known.

        The next `poll` has a Welcome, as the first one had. Only a scheduler of the same job and
        run is accepted.
        """
        now = self._clock.monotonic()
        self._drop_socket()
        self._agent = secrets.token_hex(16)
        self._incarnation = -1
        self._resend_buffer, self._duplicate_filter, self._inbox = (
            ResendBuffer(),
            DuplicateFilter(),
            [],
        )
        self._beat_number = self._echo_number = self._confirm_number = 0
        self._stage = LinkStage.IDLE
        self._retry_at = now
        self._reconnect_policy.on_disconnect(now)

    def request_confirmation(self) -> None:
        """
        Ask that the scheduler confirms all that was sent so far; `confirmed` tells, after some
        `poll`.
        """
        self._confirm_number = self._beat_number + 1
        self._beat_at = self._clock.monotonic()

    @property
    def is_confirmed(self) -> bool:
        """
        Whether the scheduler has read all that was sent before `confirm`: it answers heartbeats in
        their order.
        """
        return self._echo_number >= self._confirm_number

    def deadline(self) -> float | None:
        """Monotonic time at which `poll` wants to be called although nothing arrived."""
        now = self._clock.monotonic()
        if self._inbox:
            return now
        if self._stage is LinkStage.OVER:
            return None
        if self._stage is LinkStage.IDLE:
            return self._retry_at
        if self._stage is LinkStage.UP:
            return min(self._beat_at, now + 1.0)
        return now + 0.5

    def close(self, timeout: float = 1.0) -> None:
        """Hand over what is queued, for at most ``timeout`` seconds, and close."""
        if self._epoll.closed:
            return
        linger = timeout if self._stage in (LinkStage.UP, LinkStage.OVER) else 0.0
        self._stage = LinkStage.OVER
        self._drop_socket(int(linger * 1000))
        end_context(self._context, linger)
        self._epoll.close()

    # One connection
    # ---------------------------------------------------------------------------------------------------

    def _open_connection(self, now: float) -> None:
        zmq = self._zmq
        probe = probe_milliseconds(self._crowd)
        self._incarnation += 1
        sock = self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.RECONNECT_IVL, NEVER_RECONNECT_MS),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, Envelope.LIMIT),
            (zmq.SNDHWM, 0),
            (zmq.HANDSHAKE_IVL, int(handshake_seconds(self._crowd) * 1000)),
            (zmq.CONNECT_TIMEOUT, int(self._connect_timeout * 1000)),
            *keepalive_options(zmq),
            (zmq.HEARTBEAT_IVL, probe),
            (zmq.HEARTBEAT_TIMEOUT, 3 * probe),
        ):
            sock.setsockopt(option, value)
        # A name is looked up by libzmq, in its own thread, for one family an attempt.
        name_again = (
            self._reconnect_policy.no_listener_since is not None and self._incarnation % 2 == 1
        )
        sock.setsockopt(zmq.IPV6, int(":" in self.endpoint.host or name_again))
        if self._secret:
            keys = security.derive_key_pair(self._secret, self._role)
            sock.curve_publickey = keys.public
            sock.curve_secretkey = keys.private
            sock.curve_serverkey = security.derive_key_pair(self._secret, "server").public
        self._monitor = open_monitor(sock)
        sock.connect(self.endpoint.zmq_url)
        for one in (sock, self._monitor):
            self._epoll.register(int(one.getsockopt(zmq.FD)), select.EPOLLIN)
        self._stage = LinkStage.CONNECTING
        self._sent_count = 0
        self._received_count = 0
        self._attempt_at = now
        self._doubted_beat = 0
        self._doubted_messages = []
        self._send_message(
            Hello(
                PROTOCOL,
                self._role,
                self._job,
                self._agent,
                self._incarnation,
                self._host,
                os.getpid(),
                self._command,
            )
        )

    def _drop_socket(self, linger: int = 0) -> None:
        for one in (self._socket, self._monitor):
            if one is not None:
                self._epoll.unregister(int(one.getsockopt(self._zmq.FD)))
        if self._socket is not None and self._monitor is not None:
            self._socket.monitor(None, 0)
            self._monitor.close(linger=0)
            self._socket.close(linger=linger)
        self._socket = self._monitor = None

    def _lose_connection(self, now: float, wait: float) -> None:
        """
        The connection is over; try again in ``wait`` seconds, unless nothing is to be said any
        more.
        """
        if self._stage is not LinkStage.OVER:
            if self._welcome is not None:
                self._reconnect_policy.on_disconnect(now)
            self._drop_socket()
            self._stage = LinkStage.IDLE
            self._retry_at = now + wait

    def _send_message(self, message: Message) -> None:
        if self._socket is not None:
            counted = not isinstance(message, Heartbeat)
            try:
                data = encode(
                    Envelope(
                        self._agent, self._incarnation, self._sent_count if counted else 0, message
                    )
                )
            except CodecError as error:
                if not isinstance(message, OPTIONAL_MESSAGES):
                    self._stage = LinkStage.OVER
                    self._inbox.append(Refuse(70, f"this node cannot say what comes next: {error}"))
                return
            self._sent_count += counted
            try:
                self._socket.send(data, self._zmq.NOBLOCK)
            except self._zmq.Again:
                # Its pipe is gone already: a peer that closed at once. The monitor knows how;
                # nothing said is lost.
                now = self._clock.monotonic()
                self._read_monitor(now)
                if self._socket is not None:
                    self._lose_connection(now, RETRY_SECONDS)

    # What happened
    # ----------------------------------------------------------------------------------------------------

    def _read_monitor(self, now: float) -> None:
        zmq = self._zmq
        failed = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        )
        while self._monitor is not None and self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event, _ = read_monitor_event(self._monitor)
            if event == zmq.EVENT_CONNECTED:
                self._stage = LinkStage.SHAKING
                self._attempt_at = now
                self._reconnect_policy.on_connected(now)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stage = LinkStage.GREETING
                self._reconnect_policy.on_handshake()
            elif event in failed:
                self._on_handshake_refused(now)
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnect(now)
            elif (
                event in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)
                and self._stage is LinkStage.CONNECTING
            ):
                self._reconnect_policy.on_no_listener(now)
                self._name_lookup.start_lookup()
                named = (
                    event == zmq.EVENT_CLOSED
                )  # else there was no address to open a connection to
                self._lose_connection(
                    now,
                    RETRY_WELCOMED_SECONDS
                    if self._welcome
                    else RETRY_SECONDS
                    if named
                    else RETRY_UNKNOWN_NAME_SECONDS,
                )

    def _on_disconnect(self, now: float) -> None:
        if self._stage is LinkStage.SHAKING:
            return self._on_handshake_refused(now)
        self._read_socket(now)
        if self._stage is LinkStage.OVER:
            return self._drop_socket()
        return self._lose_connection(now, 0.0 if self._stage is LinkStage.UP else RETRY_SECONDS)

    def _on_handshake_refused(self, now: float) -> None:
        self._reconnect_policy.on_handshake_refused(now, self._attempt_at)
        self._lose_connection(
            now, RETRY_REFUSED_SECONDS if self._welcome is None else RETRY_WELCOMED_SECONDS
        )

    def _read_socket(self, now: float) -> None:
        zmq = self._zmq
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
                if self._socket.getsockopt(zmq.RCVMORE):
                    raise CodecError("a message has one frame")
                envelope = decode(data)
            except zmq.Again:
                return None
            except CodecError:
                return self._lose_connection(now, RETRY_SECONDS)
            counted = not isinstance(envelope.body, Echo)
            if envelope.sequence != (self._received_count if counted else 0):
                return self._lose_connection(now, RETRY_SECONDS)
            self._received_count += counted
            stale = (
                self._welcome
                and self._stage is LinkStage.UP
                and self._reconnect_policy.is_stale(self._welcome.lease, now)
            )
            if stale and not self._doubted_beat:
                self._doubted_beat = self._beat_number + 1
                self._beat_at = now
            body = envelope.body
            certain = not self._doubted_beat or (
                isinstance(body, Echo) and body.number >= self._doubted_beat
            )
            self._reconnect_policy.on_message(
                now, is_certain=certain
            )  # else what lay there would renew a lease that is over
            if not counted and envelope.sender == STANDALONE_RELAY_SENDER:
                self._reconnect_policy.is_through_relay = True
            self._on_message(envelope.body, now)
        return None

    def _on_message(self, message: Message, now: float) -> None:
        if isinstance(message, Echo):
            self._echo_number = message.number
            if self._doubted_beat and self._echo_number >= self._doubted_beat:
                held = self._doubted_messages
                self._doubted_messages = []
                self._doubted_beat = 0
                for each in held:
                    self._on_message(each, now)
            return
        if self._doubted_beat and not isinstance(message, Welcome | Refuse):
            self._doubted_messages.append(message)
            return
        if isinstance(message, Welcome):
            known = self._welcome
            if known and (known.run != message.run or known.job not in ("", message.job)):
                self._stage = LinkStage.OVER
                self.is_replaced = True
                self._inbox.append(
                    Refuse(69, f"the scheduler at {self.endpoint} is another one now")
                )
                return
            if self._welcome is None or message.spec:
                self._welcome = message
            if self._stage is not LinkStage.UP:
                self._stage = LinkStage.UP
                self._beat_at = now
                self._reconnect_policy.on_welcome(now)
                for again in self._resend_buffer.messages_to_repeat():
                    self._send_message(again)
            if self._needs_spec and not message.spec:
                return
        elif isinstance(message, Assign):
            self._resend_buffer.forget_before(message.generation)
        if self._duplicate_filter.is_new(message):
            self._inbox.append(message)
        if isinstance(message, Refuse):
            self._stage = LinkStage.OVER

    # Patience
    # ---------------------------------------------------------------------------------------------------------

    def _check_absence(self, now: float) -> None:
        """Raise what time has made certain."""
        if self._stage is LinkStage.OVER or isinstance(
            self._duplicate_filter.last_message(Verdict), Verdict
        ):
            return
        if self._welcome is None:
            self._reconnect_policy.check_start(self._name_lookup.fault, now)
            return
        self._reconnect_policy.check_lost(self._welcome, now)
        if self._needs_spec and not self._welcome.spec:
            self._reconnect_policy.check_spec(now)

    @property
    def absence_reason(self) -> str:
        """Why nobody answers, as far as that is known."""
        return self._name_lookup.fault or (
            NO_LISTENER_TEXT if self.is_port_closed else SILENT_LISTENER_TEXT
        )

    @property
    def is_port_closed(self) -> bool:
        """Whether the last attempt to connect was refused, or led nowhere."""
        return self._reconnect_policy.no_listener_since is not None
