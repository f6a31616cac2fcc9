"""
The failure detector: which nodes are cut off or silent, and for how long that is accepted.

It never decides about the job; it names nodes that are lost (`NodesLost`). A node is well if it
sends heartbeats *and* receives the answers, which the echo numbers in its heartbeats prove.
Otherwise a node behind a one-way cut would always look alive, and so would a node that gave its
connection up itself. The detector's clock stops while the scheduler itself stands still. So a
scheduler that was stopped for a minute does not take its own pause for the silence of all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.membership.nodes import CutKind, Member
from pdrun.rendezvous.protocol.events import LostNode, NodesLost, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Heartbeat, Hello

MAX_NODES_AT_FULL_RATE = 2500
"""Nodes that one scheduler can serve per ``heartbeat``. In a larger job each node sends fewer."""


@dataclass(frozen=True)
class DetectorTimes:
    """The detector's times for a job of this size, in seconds. heartbeat 0: no heartbeats."""

    heartbeat: float
    suspect: float
    dead: float
    tick: float
    """Longest time between two Ticks."""


def detector_times(config: SchedulerConfig) -> DetectorTimes:
    """Return the times for the largest size of the job."""
    beat = config.heartbeat * max(1.0, (config.nodes + config.spares) / MAX_NODES_AT_FULL_RATE)
    tick = beat / 4 if beat else min(1.0, config.waiting_every)
    return DetectorTimes(beat, max(config.suspect, 3.0 * beat), max(config.dead, 3.5 * beat), tick)


class FailureDetector:
    """
    The detector's clock and judgement.

    Its knowledge of each node is in `Member` (`alive_at`, `answered_at`, `lost_at`), in seconds of
    this clock.
    """

    def __init__(self, config: SchedulerConfig, now: float) -> None:
        self.times = detector_times(config)
        self._reconnect_seconds = config.reconnect
        self._last_event_at = now
        self._stalled_seconds = 0.0
        """Total time for which the scheduler stood still."""
        self._stall_ended_at = float("-inf")
        """End of the last standstill that was longer than the usual silence of a node."""

    def advance_clock(self, now: float) -> None:
        """
        Advance the clock. More than a tick late is a standstill of the scheduler, not of the nodes.
        """
        late = max(0.0, now - self._last_event_at - self.times.tick)
        self._stalled_seconds += late
        if late > 2.5 * self.times.heartbeat:
            self._stall_ended_at = now
        self._last_event_at = now

    def set_last_event(self, now: float) -> None:
        """Set the time of an event of the predecessor; `seconds_since_event` counts from there."""
        self._last_event_at = now

    def seconds_since_event(self, now: float) -> float:
        """Return the seconds since the last event."""
        return max(0.0, now - self._last_event_at)

    def mark_alive(self, member: Member, now: float) -> None:
        """A node has sent something."""
        member.alive_at = now - self._stalled_seconds
        member.is_suspect = False

    def mark_reachable(self, member: Member, now: float) -> None:
        """A node has joined or reconnected: it sends and receives."""
        self.mark_alive(member, now)
        member.answered_at = member.alive_at

    def on_heartbeat(self, member: Member, beat: Heartbeat, now: float) -> None:
        """
        A node has sent a heartbeat, with the last number that it saw answered. The next answer may
        still be on its way.
        """
        behind = max(0, beat.number - 1 - beat.echo) * self.times.heartbeat
        member.answered_at = max(member.answered_at, now - self._stalled_seconds - behind)

    def on_disconnect(self, member: Member, between: bool, now: float) -> None:
        """The connection of a node has ended, or that of a relay in ``between``."""
        # An agent that was well a moment ago has ended, or reconnects immediately. A node that was
        # silent before (its host stands still, packets are lost) gets the time that it has without
        # a cut. So do all nodes after a standstill of the scheduler: an agent may have dropped a
        # silent connection, and may be cut off now with its workers running.
        time = now - self._stalled_seconds
        awake = now - self._stall_ended_at >= self.times.dead
        talking = not self.times.heartbeat or (
            awake and time - member.answered_at < 2.5 * self.times.heartbeat
        )
        talking = talking and not between
        member.cut_at = now
        member.cut_kind = self._classify_cut(member, between, time)
        member.lost_at = max(
            time + self._reconnect_seconds, 0.0 if talking else member.answered_at + self.times.dead
        )

    def is_expired(self, member: Member, now: float) -> bool:
        """
        Return whether a node that is cut off has ended its workers, as far as can be known: it is
        lost within the time that any node has to reconnect.
        """
        time = now - self._stalled_seconds
        return member.peer is None and member.lost_at <= time + self._reconnect_seconds

    def may_have_ended(self, member: Member, rival: Hello, now: float) -> bool:
        """
        Return whether a connected node may have ended, for whose name or rank ``rival`` asks.

        A machine that loses power closes no connection, and an agent that is killed may do it by a
        packet that is lost. If the node was started again on the same host, only what the earlier
        one sends after the first request proves that there are two.
        """
        time = now - self._stalled_seconds
        beat = self.times.heartbeat
        if not beat or (rival.host != member.hello.host and time - member.alive_at < 2.5 * beat):
            return False
        who = (rival.host, rival.pid)
        if member.challenge is None or member.challenge[:2] != who:
            member.challenge = (*who, time)
            return True
        if member.alive_at <= member.challenge[2]:
            return True
        member.challenge = None
        return False

    def _classify_cut(self, member: Member, between: bool, time: float) -> CutKind:
        if between:
            return CutKind.RELAY
        usual = 2.5 * self.times.heartbeat
        if not usual or time - member.answered_at < usual:
            return CutKind.CLOSED
        return CutKind.SILENT if time - member.alive_at >= usual else CutKind.UNANSWERED

    def _describe_cut(self, member: Member, time: float) -> str:
        """Return what was seen of a node that has not reconnected in time."""
        away = time - (member.cut_at - self._stalled_seconds)
        match member.cut_kind:
            case CutKind.SILENT:
                silent = time - member.alive_at
                return f"no message for {silent:.1f} s, {member.cut_kind.value}"
            case CutKind.UNANSWERED:
                unanswered = time - member.answered_at
                return (
                    f"{member.cut_kind.value}, no answer of the scheduler has reached it for"
                    f" {unanswered:.1f} s"
                )
        return f"{member.cut_kind.value}, and it did not connect again for {away:.1f} s"

    def reset_members(self, members: Iterable[Member], now: float) -> None:
        """
        A successor of the scheduler starts: every node is cut off and gets the full time to
        reconnect.
        """
        self._last_event_at = now
        for member in members:
            member.is_suspect = False
            member.cut_at = now
            member.cut_kind = CutKind.RESUMED
            member.alive_at = now - self._stalled_seconds
            member.answered_at = member.alive_at
            member.lost_at = member.alive_at + self.times.dead

    def find_overdue(
        self, members: Iterable[Member], now: float
    ) -> tuple[NodesLost | None, list[tuple[Member, float]]]:
        """
        Return the nodes that are lost, or None, and new suspects with the seconds of their silence.

        Looks at each node once; a suspect is marked as one.
        """
        lost = []
        suspects = []
        time = now - self._stalled_seconds
        limits = self.times
        for member in members:
            silent = time - member.alive_at
            unanswered = time - member.answered_at
            if member.peer is None:
                if time >= member.lost_at:
                    why = self._describe_cut(member, time)
                    lost.append(LostNode(member.hello.agent, why, member.cut_at))
            elif not limits.heartbeat:
                continue
            elif silent > limits.dead:
                cut_at = now - silent + 2 * limits.heartbeat
                why = f"no message for {silent:.1f} s"
                lost.append(LostNode(member.hello.agent, why, cut_at))
            elif unanswered > limits.dead:
                why = (
                    "its messages arrive, but no answer of the scheduler has reached it for"
                    f" {unanswered:.1f} s"
                )
                lost.append(
                    LostNode(member.hello.agent, why, now - unanswered + 2 * limits.heartbeat)
                )
            elif silent > limits.suspect and not member.is_suspect:
                member.is_suspect = True
                suspects.append((member, silent))
        return NodesLost(tuple(lost)) if lost else None, suspects
