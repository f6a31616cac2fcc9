"""
How long a link waits for its scheduler, and its error after that. Pure: time is an argument.

Before the first Welcome: a few refused handshakes mean that the token differs; no listener until
the start timeout is an error, too. After it: a link waits for a lost scheduler, which may be
started again, for the ``patience`` of the Welcome. Stalls of this process do not
count as the scheduler's silence.
"""

from __future__ import annotations

from collections.abc import Callable

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol.messages import Welcome
from pdrun.rendezvous.transport.dns import REFUSED_TEXT
from pdrun.rendezvous.transport.timeouts import (
    HANDSHAKE_SECONDS,
    MAX_ROUND_TRIP_SECONDS,
    handshake_seconds,
)
from pdrun.text import quote_command

MAX_REFUSALS = 3
REFUSED_SHARE = 0.5
"""
A refused handshake ends within this share of its limit. One that ends later was not answered, which
libzmq reports by the same event, up to a fifth earlier than HANDSHAKE_IVL: the scheduler's machine
stands still, or the network is slow.
"""
MAX_REFUSAL_SECONDS = 3.5
"""The same in seconds: in large jobs the limit is that of a crowd."""
MAX_HANDSHAKE_SECONDS = 4.5
"""
Limit from the first refused handshake on, if another one was refused since. A single one may have
met the death of a scheduler, whose successor takes seconds to start.
"""
MAX_SILENCE_SECONDS = 20.0
"""
Limit for a listener that accepts connections and sends nothing: a scheduler that is still starting.
"""
STATUS_SECONDS = 5.0
MIN_PATIENCE_SECONDS = 1.0
"""
Minimum time that a link waits after a lost connection, also without patience. A reconnection takes
less.
"""
RECHECK_SECONDS = 1.5
"""
After a stall of this process: time to hear from the scheduler before the lease counts, as without
the stall.
"""
REFUSED_SECONDS = 5.0
"""
Time for which a host must refuse connections, until its agent has ended for certain. A firewall
that rejects packets for a moment looks the same.
"""
STALL_SECONDS = 1.5
"""A longer time between two calls is a stall of this process."""


class ReconnectPolicy:
    """What one link knows about the silence of its scheduler."""

    def __init__(
        self,
        endpoint: Endpoint,
        start_timeout: float,
        report: Callable[[str], None] | None,
        now: float,
        hint: str = "",
        crowd: int = 0,
        *,
        min_patience: float = MIN_PATIENCE_SECONDS,
    ) -> None:
        """
        Args:
            start_timeout: seconds until the first Welcome.
            report: called with a line every few seconds while the scheduler does not answer.
            hint: what the user can do if no process listens; empty: the usual hint.
            crowd: number of agents that may wait for the scheduler's first message at the same
                time.
            min_patience: minimum seconds to wait for a lost scheduler.
        """
        self._endpoint = endpoint
        self._start_timeout = start_timeout
        self._show_line = report
        self._max_silence = MAX_SILENCE_SECONDS + handshake_seconds(crowd) - HANDSHAKE_SECONDS
        self._hint = hint
        self._min_patience = max(min_patience, MIN_PATIENCE_SECONDS)
        self._began_at = now
        self._last_turn_at = now
        self._status_at = now + 1.0
        self._alive_at = now
        self._certain_at = now
        self._stall_ended_at = now
        self._lost_since: float | None = None
        """Time since which a known scheduler is out of reach."""
        self._refusals = 0
        self._first_refusal: float | None = None
        self._silent_since: float | None = None
        self.no_listener_since: float | None = None
        """Time since which no process listens at the port."""
        self._refused_since: float | None = None
        """Time since which the host refuses connections."""
        self._failure = ""
        self.is_through_relay = False
        """Whether the other side is a relay."""

    # What happened

    def on_turn(self, now: float) -> None:
        """Call at each turn of the loop: does not count this process's stalls."""
        late = now - self._last_turn_at - STALL_SECONDS
        self._last_turn_at = now
        if late > 0:
            self._alive_at += late
            self._stall_ended_at = now
            if self._lost_since is not None:
                self._lost_since += late
            if self._refused_since is not None:
                self._refused_since += late
            if self._silent_since is not None:
                self._silent_since += late

    def on_message(self, now: float, *, is_certain: bool = True) -> None:
        """
        A message has arrived. ``is_certain``: it was sent now, and has not waited since before a
        silence.
        """
        self._alive_at = now
        if is_certain:
            self._certain_at = now

    def silent_for(self, now: float) -> float:
        """Return the seconds since the scheduler's last message, without stalls of this process."""
        late = max(0.0, now - self._last_turn_at - STALL_SECONDS)
        return max(0.0, now - self._alive_at - late)

    def cut_off_for(self, now: float) -> float:
        """
        Return the seconds since the scheduler's last certain message, stalls of this process
        included: the other nodes do not wait for this process. For a moment after a stall this is
        0, so that the process can ask.

        A connection that the scheduler's machine accepts counts as a message: then the network is
        not cut. One that was refused or failed does not count: that may be this machine's doing.
        """
        if now - self._last_turn_at > STALL_SECONDS or now - self._stall_ended_at < RECHECK_SECONDS:
            return 0.0
        return max(0.0, now - self._certain_at)

    def is_stale(self, lease: float, now: float) -> bool:
        """
        Whether a message that is read now may be older than the lease: sent before this node was
        marked lost.
        """
        return bool(lease) and now - self._certain_at > lease

    def on_no_listener(self, now: float, failure: str = "") -> None:
        """
        No process listens or can be reached. Handshakes before that do not count any more, neither
        refused ones nor those without an answer: the network or the scheduler was at fault.

        ``failure``: what a connection met (`pdrun.rendezvous.transport.dns`), if that is known.
        REFUSED_TEXT: the host itself has answered that no process listens.
        """
        self._failure = failure
        if failure != REFUSED_TEXT:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        self.no_listener_since = self.no_listener_since or now
        self.on_handshake()

    def on_connected(self, now: float) -> None:
        """A connection was accepted: by the scheduler's machine, unless a relay is between."""
        if not self.is_through_relay:
            self._certain_at = now
        self.no_listener_since = None
        self._refused_since = None

    def on_handshake(self) -> None:
        """The handshake succeeded: the token is right. Earlier ones do not count any more."""
        self._refusals = 0
        self._first_refusal = None
        self._silent_since = None

    def on_handshake_failed(self, now: float, began: float, limit: float) -> bool:
        """
        A handshake that started at ``began``, with this limit in seconds, failed.

        Returns:
            whether there was no answer; False: it was refused.
        """
        if now - began < min(REFUSED_SHARE * limit, MAX_REFUSAL_SECONDS):
            self._refusals += 1
            self._first_refusal = self._first_refusal or now
            return False
        self._silent_since = self._silent_since or began
        self._refusals = 0
        self._first_refusal = None
        return True

    def on_welcome(self, now: float) -> None:
        """The scheduler has sent Welcome."""
        self._lost_since = None

    def on_disconnect(self, now: float) -> None:
        """The connection to a known scheduler has ended."""
        if self._lost_since is None:
            self._lost_since = now
            self._status_at = now + STATUS_SECONDS

    # What follows from it

    def is_silent(self, welcome: Welcome, now: float) -> bool:
        """Whether an open connection has been silent for so long that it must be replaced."""
        return bool(welcome.dead and welcome.heartbeat) and now - self._alive_at > welcome.dead

    def check_lost(self, welcome: Welcome, now: float) -> None:
        """
        Judge the absence of a known scheduler.

        Raises:
            RendezvousError: the time for its return is over.
        """
        if self._lost_since is None:
            return
        gone = now - self._lost_since
        if self._is_host_without_agent(welcome, now):
            raise RendezvousError(
                f"{self._describe_lost_peer()}: its host has refused connections for "
                f"{REFUSED_SECONDS:g} s, so pdrun on the first node has ended",
                where=str(self._endpoint),
            )
        if gone > max(welcome.patience, self._min_patience):
            raise RendezvousError(
                f"{self._describe_lost_peer()}: no message for {now - self._alive_at:.1f} s"
                f"{self._describe_attempts()}",
                where=str(self._endpoint),
            )
        left = welcome.patience - gone
        self.report_status(
            f"{self._describe_lost_peer()} at {self._endpoint}{self._describe_attempts()}: waiting"
            f" {left:.0f} s more for its return; the workers continue",
            now,
        )

    def _describe_attempts(self) -> str:
        """Return what the attempts to connect have met, to follow other words; may be empty."""
        if self._lost_since is None:
            return ""
        if self._refused_since is not None:
            return ", its host refuses connections"
        if self.no_listener_since is not None:
            return ", its host does not answer"
        return ", its host accepts connections, but no scheduler answers"

    def _is_host_without_agent(self, welcome: Welcome, now: float) -> bool:
        """Whether the scheduler cannot return, because the agent that restarts it has ended."""
        if self._refused_since is None or self.is_through_relay or not welcome.keeps_port:
            return False
        return now - self._refused_since >= REFUSED_SECONDS

    def _describe_lost_peer(self) -> str:
        if not self.is_through_relay:
            return "lost the scheduler"
        if self.no_listener_since is not None:
            return "lost the relay through which this node reaches the scheduler (pdrun relay)"
        return "lost the scheduler behind the relay"

    @property
    def absence_text(self) -> str:
        """What the last attempt to connect has met, if no process listens or can be reached."""
        if self._hint and self._failure == REFUSED_TEXT:  # the hint says what listens
            return REFUSED_TEXT
        if self._failure == REFUSED_TEXT:
            return NO_LISTENER_TEXT
        return self._failure or UNREACHED_TEXT

    def _describe_failure(self) -> str:
        is_known = self.no_listener_since is not None and self._failure
        return f": {self._failure}" if is_known else ""

    def check_start(self, fault: str, now: float) -> None:
        """
        Judge the absence of a scheduler before the first Welcome.

        Args:
            fault: why the scheduler's name cannot be resolved; empty: it can.

        Raises:
            AuthenticationError: it has another token, or is no pdrun scheduler.
            RendezvousError: it was not reached in time.
        """
        where = str(self._endpoint)
        is_late = self._first_refusal and now - self._first_refusal > MAX_HANDSHAKE_SECONDS
        if self._refusals >= MAX_REFUSALS or (self._refusals > 1 and is_late):
            raise AuthenticationError(
                f"the token differs or {where} is not a pdrun scheduler",
                hint="use the same token on every node (`pdrun token show`), "
                "and --insecure on all nodes or on none",
            )
        if self._silent_since and now - self._silent_since > self._max_silence:
            raise AuthenticationError(
                f"{where} accepts connections but sends nothing: it is not a pdrun scheduler"
                f", or a round trip takes more than {MAX_ROUND_TRIP_SECONDS:g} s"
            )
        if now - self._began_at > self._start_timeout:
            raise RendezvousError(
                fault
                or f"no scheduler there within {self._start_timeout:g} s{self._describe_failure()}",
                where=where,
                hint=self._hint or _hint_at_address(self._endpoint.host),
            )
        if self.no_listener_since is not None:
            hint = f"; {self._hint}" if self._hint and not fault else ""
            self.report_status(
                f"waiting for the scheduler at {where}: {fault or self.absence_text}{hint}", now
            )

    def check_spec(self, now: float) -> None:
        """
        Judge a scheduler that does not know the job's specification yet.

        Raises:
            RendezvousError: no node sent it in time.
        """
        if now - self._began_at > self._start_timeout:
            raise RendezvousError(
                f"no node brought the job's command within {self._start_timeout:g} s",
                where=str(self._endpoint),
                hint="start one node with the script: "
                + quote_command("pdrun", "--scheduler", self._endpoint, "--no-serve", "SCRIPT"),
            )
        self.report_status(
            f"the scheduler at {self._endpoint} does not know the job's command yet: "
            "waiting for the node that is started with the script",
            now,
        )

    def report_status(self, line: str, now: float) -> None:
        """Show a line, unless one was shown a moment ago."""
        if now >= self._status_at and self._show_line:
            self._status_at = now + STATUS_SECONDS
            self._show_line(line)


def _hint_at_address(host: str) -> str:
    """Return what to do where no scheduler answers."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return f"{host} is this machine: on other machines use the first node's name or address"
    return "start pdrun on the first node, and check the address"


NO_LISTENER_TEXT = "no process listens there yet"
UNREACHED_TEXT = "it is not reached yet"
SILENT_LISTENER_TEXT = "a process accepts connections there but sends nothing"
