"""
How long a link waits for its scheduler, and what it says when that is over. Pure: time is an
argument.

Before the first welcome: a token that differs is told after a few refused handshakes, nobody at the
port after the start timeout. Afterwards: whoever is welcomed once waits for a lost scheduler, which
may be started again, for the ``patience`` of the Welcome. Time in which this process itself stood
still is nobody's silence.
"""

from __future__ import annotations

from collections.abc import Callable

from pdrun.endpoint import Endpoint
from pdrun.errors import AuthenticationError, RendezvousError
from pdrun.rendezvous.protocol.messages import Welcome
from pdrun.rendezvous.transport.timeouts import HANDSHAKE_SECONDS, handshake_seconds

MAX_REFUSALS = 3
REFUSAL_SECONDS = 1.5
"""
Seconds within which a handshake that was turned down has ended. One that ends later was not
answered, which libzmq tells by the same event, up to a fifth earlier than its HANDSHAKE_IVL of 3 s:
a scheduler whose machine stands still.
"""
MAX_HANDSHAKE_SECONDS = 4.5
"""Seconds from the first refused handshake to giving up."""
MAX_SILENCE_SECONDS = 20.0
"""
Seconds for which somebody may accept connections and say nothing: a scheduler that is still
starting.
"""
STATUS_SECONDS = 5.0
MIN_PATIENCE_SECONDS = 1.0
"""Seconds of a lost connection that also a link without patience bears: a cut is mended in less."""
RECHECK_SECONDS = 1.5
"""
Seconds that a process which stood still has to hear its scheduler before its lease counts, as
without the stall.
"""
STALL_SECONDS = 1.5
"""Seconds between two calls that are no stall of this process."""


class ReconnectPolicy:
    """What one link knows of its scheduler's silence."""

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
            start_timeout: seconds until a scheduler must have welcomed us.
            report: is given a line every few seconds while nobody is there.
            hint: what this node knows about why nobody may be there; empty: nothing.
            crowd: how many may wait for the scheduler's first word at once.
            least: seconds for which a lost scheduler is waited for, should it have said less.
        """
        self._endpoint = endpoint
        self._start_timeout = start_timeout
        self._show_line = report
        self._max_silence = MAX_SILENCE_SECONDS + handshake_seconds(crowd) - HANDSHAKE_SECONDS
        self._hint = hint
        self._min_patience = max(min_patience, MIN_PATIENCE_SECONDS)
        self._began_at = self._last_turn_at = now
        self._status_at = now + 1.0
        self._alive_at = self._certain_at = self._stall_ended_at = now
        self._lost_since: float | None = None
        """Since when a scheduler that had welcomed us is out of reach."""
        self._refusals = 0
        self._first_refusal: float | None = None
        self._silent_since: float | None = None
        self.no_listener_since: float | None = None
        """Since when nobody listens at the port."""
        self.is_through_relay = False
        """Whether the other end is a relay, and not the scheduler."""

    # What happened
    # ----------------------------------------------------------------------------------------------------

    def on_turn(self, now: float) -> None:
        """Called at each turn of the loop: excuses what this process slept through."""
        late = now - self._last_turn_at - STALL_SECONDS
        self._last_turn_at = now
        if late > 0:
            self._alive_at += late
            self._stall_ended_at = now
            if self._lost_since is not None:
                self._lost_since += late

    def on_message(self, now: float, *, is_certain: bool = True) -> None:
        """
        A message came; ``certain``: it was said now, and has not lain there since before a silence.
        """
        self._alive_at = now
        if is_certain:
            self._certain_at = now

    def silent_for(self, now: float) -> float:
        """
        Seconds since the scheduler was last heard, without those in which this process itself stood
        still.
        """
        late = max(0.0, now - self._last_turn_at - STALL_SECONDS)
        return max(0.0, now - self._alive_at - late)

    def cut_off_for(self, now: float) -> float:
        """
        Seconds since the last word of the scheduler, own stalls included: the others do not wait
        for this process. A process that has just stood still is told 0 for a moment, in which it
        can ask.

        A connection that the scheduler's machine took counts as a word: no network is cut then. Not
        so one that was refused or failed: that may have come from this machine.
        """
        if now - self._last_turn_at > STALL_SECONDS or now - self._stall_ended_at < RECHECK_SECONDS:
            return 0.0
        return max(0.0, now - self._certain_at)

    def is_stale(self, lease: float, now: float) -> bool:
        """
        Whether what is read now may have lain there longer than the lease: sent to one who was
        given up since.
        """
        return bool(lease) and now - self._certain_at > lease

    def on_no_listener(self, now: float) -> None:
        """Nobody listens, or is within reach; whoever has refused a handshake before is gone."""
        self.no_listener_since = self.no_listener_since or now
        self._refusals = 0
        self._first_refusal = None

    def on_connected(self, now: float) -> None:
        """Somebody took the connection."""
        self._certain_at = now
        self.no_listener_since = None

    def on_handshake(self) -> None:
        """The handshake succeeded: the token is right."""
        self._refusals = 0
        self._first_refusal = None
        self._silent_since = None

    def on_handshake_refused(self, now: float, began: float) -> None:
        """An attempt that began at ``began`` ended before the handshake did."""
        if now - began < REFUSAL_SECONDS:
            self._refusals += 1
            self._first_refusal = self._first_refusal or now
        else:
            self._silent_since = self._silent_since or began

    def on_welcome(self, now: float) -> None:
        """The scheduler has welcomed us."""
        self._lost_since = None

    def on_disconnect(self, now: float) -> None:
        """The connection to a scheduler that had welcomed us is gone."""
        if self._lost_since is None:
            self._lost_since = now
            self._status_at = now + STATUS_SECONDS

    # What follows
    # -----------------------------------------------------------------------------------------------------

    def is_silent(self, welcome: Welcome, now: float) -> bool:
        """
        Whether a connection that stands has been silent for so long that another one is to be made.
        """
        return bool(welcome.dead and welcome.heartbeat) and now - self._alive_at > welcome.dead

    def check_lost(self, welcome: Welcome, now: float) -> None:
        """
        Judge the absence of a scheduler that had welcomed us.

        Raises:
            RendezvousError: patience is over.
        """
        if self._lost_since is None:
            return
        gone = now - self._lost_since
        if gone > max(welcome.patience, self._min_patience):
            raise RendezvousError(
                f"{self._describe_lost_peer()}: nothing heard for {now - self._alive_at:.1f} s",
                where=str(self._endpoint),
            )
        self.report_status(
            f"{self._describe_lost_peer()} at {self._endpoint}: waiting for it to come back, for "
            f"{welcome.patience - gone:.0f} s more; the workers go on",
            now,
        )

    def _describe_lost_peer(self) -> str:
        if not self.is_through_relay:
            return "lost the scheduler"
        if self.no_listener_since is not None:
            return "lost the relay through which this node reaches the scheduler (pdrun relay)"
        return "lost the scheduler behind the relay"

    def check_start(self, fault: str, now: float) -> None:
        """
        Judge the absence of a scheduler that has not welcomed us yet.

        Args:
            fault: why the scheduler's name is not known; empty: it is.

        Raises:
            AuthenticationError: it holds another token, or it is none. RendezvousError: it never
                came.
        """
        where = str(self._endpoint)
        if self._refusals >= MAX_REFUSALS or (
            self._first_refusal and now - self._first_refusal > MAX_HANDSHAKE_SECONDS
        ):
            raise AuthenticationError(
                f"the token differs or {where} is no pdrun scheduler",
                hint="use the same token on every node (`pdrun token show`), and --insecure on all or on none",
            )
        if self._silent_since and now - self._silent_since > self._max_silence:
            raise AuthenticationError(
                f"{where} takes connections and says nothing: it is no pdrun scheduler"
            )
        if now - self._began_at > self._start_timeout:
            raise RendezvousError(
                fault or f"no scheduler there within {self._start_timeout:g} s",
                where=where,
                hint=self._hint or "start pdrun on the first node, and check the address",
            )
        if self.no_listener_since is not None:
            hint = f"; {self._hint}" if self._hint and not fault else ""
            self.report_status(
                f"waiting for the scheduler at {where}: {fault or NO_LISTENER_TEXT}{hint}", now
            )

    def check_spec(self, now: float) -> None:
        """
        Judge that the scheduler does not know yet what the job runs.

        Raises:
            RendezvousError: nobody said it in time.
        """
        if now - self._began_at > self._start_timeout:
            raise RendezvousError(
                f"nobody said within {self._start_timeout:g} s what the job runs",
                where=str(self._endpoint),
                hint=f"start one node with its script: pdrun --scheduler {self._endpoint} --no-serve SCRIPT",
            )
        self.report_status(
            f"the scheduler at {self._endpoint} does not know yet what the job runs: waiting for the node "
            "that is started with its script",
            now,
        )

    def report_status(self, line: str, now: float) -> None:
        """Say a line, unless one was said a moment ago."""
        if now >= self._status_at and self._show_line:
            self._status_at = now + STATUS_SECONDS
            self._show_line(line)


NO_LISTENER_TEXT = "nobody listens there yet"
SILENT_LISTENER_TEXT = "something takes connections there and says nothing"
