"""
The failure detector: who is cut off or silent, and for how long that is borne.

It never decides about the job; it names those who are to be given up (`GivenUp`). A node is well
when it is heard *and* hears us, which the echoes in its heartbeats prove: after a one-way cut it
would be heard for ever, and after a connection that it gave up itself it would pass for one that
had just been well. Its clock stands still while the scheduler itself stood still, so that a
scheduler which was stopped for a minute does not take its own sleep for the silence of everybody
else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.protocol.events import LostNode, NodesLost, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Heartbeat

MAX_NODES_AT_FULL_RATE = 2500
"""Nodes that one scheduler hears each ``heartbeat``; of more, each beats less often."""


@dataclass(frozen=True)
class DetectorTimes:
    """The detector's times for a job of its size, in seconds; heartbeat 0: nobody beats."""

    heartbeat: float
    suspect: float
    dead: float
    tick: float
    """Seconds in which a Tick is due."""


def detector_times(config: SchedulerConfig) -> DetectorTimes:
    """Return the times for a job of at most so many nodes as it may have."""
    beat = config.heartbeat * max(1.0, (config.nodes + config.spares) / MAX_NODES_AT_FULL_RATE)
    tick = beat / 4 if beat else min(1.0, config.waiting_every)
    return DetectorTimes(beat, max(config.suspect, 3.0 * beat), max(config.dead, 3.5 * beat), tick)


class FailureDetector:
    """
    Keeps the detector's clock. Members carry what it knows of each (`heard`, `gone_at`, in this
    clock's seconds).
    """

    def __init__(self, config: SchedulerConfig, now: float) -> None:
        self.times = detector_times(config)
        self._reconnect_seconds = config.reconnect
        self._last_event_at = now
        self._stalled_seconds = 0.0
        """Seconds for which the scheduler stood still, altogether."""
        self._stall_ended_at = float("-inf")
        """When it last went on after standing still for longer than a node that beats is silent."""

    def advance_clock(self, now: float) -> None:
        """
        Time has passed, or the scheduler stood still: more than a tick late is not the nodes'
        fault.
        """
        late = max(0.0, now - self._last_event_at - self.times.tick)
        self._stalled_seconds += late
        if late > 2.5 * self.times.heartbeat:
            self._stall_ended_at = now
        self._last_event_at = now

    def set_last_event(self, now: float) -> None:
        """Something happened then, in another life: only the gap counts from there."""
        self._last_event_at = now

    def seconds_since_event(self, now: float) -> float:
        """Seconds since the last thing that is known to have happened."""
        return max(0.0, now - self._last_event_at)

    def mark_alive(self, member: Member, now: float) -> None:
        """A message has come from it."""
        member.alive_at = now - self._stalled_seconds
        member.is_suspect = False

    def mark_reachable(self, member: Member, now: float) -> None:
        """It has joined, or is back on a new connection."""
        self.mark_alive(member, now)
        member.answered_at = member.alive_at

    def on_heartbeat(self, member: Member, beat: Heartbeat, now: float) -> None:
        """
        It beats, and says which of its beats it has seen answered; the last answer may still be on
        its way.
        """
        behind = max(0, beat.number - 1 - beat.echo) * self.times.heartbeat
        member.answered_at = max(member.answered_at, now - self._stalled_seconds - behind)

    def on_disconnect(self, member: Member, between: bool, now: float) -> None:
        """Its connection has ended, by itself or with a relay ``between``."""
        # An agent with which all was well a moment ago has ended, or is back at once. One that was
        # silent before, as when its host stands still or packets are lost, has as long to be heard
        # again as without the cut. So has everybody when the scheduler itself has just stood still:
        # an agent may have dropped a connection that was silent, and be cut off by now with its
        # workers running.
        time = now - self._stalled_seconds
        awake = now - self._stall_ended_at >= self.times.dead
        talking = not self.times.heartbeat or (
            awake and time - member.answered_at < 2.5 * self.times.heartbeat
        )
        talking = talking and not between
        member.cut_at = now
        member.lost_at = max(
            time + self._reconnect_seconds, 0.0 if talking else member.answered_at + self.times.dead
        )

    def reset_members(self, members: Iterable[Member], now: float) -> None:
        """
        A successor of the scheduler begins: everybody is cut off, and has the full time to come
        back.
        """
        self._last_event_at = now
        for member in members:
            member.is_suspect = False
            member.cut_at = now
            member.alive_at = member.answered_at = now - self._stalled_seconds
            member.lost_at = member.alive_at + self.times.dead

    def find_overdue(
        self, members: Iterable[Member], now: float
    ) -> tuple[NodesLost | None, list[tuple[Member, float]]]:
        """
        Return whom to give up, or None, and who has become suspect, each with the seconds of its
        silence.

        Looks at each member once; a suspect is marked as one.
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
                    lost.append(
                        LostNode(
                            member.hello.agent,
                            "its agent ended or its connection was cut",
                            member.cut_at,
                        )
                    )
            elif not limits.heartbeat:
                continue
            elif silent > limits.dead:
                cut_at = now - silent + 2 * limits.heartbeat
                lost.append(
                    LostNode(
                        member.hello.agent, f"nothing was heard of it for {silent:.1f} s", cut_at
                    )
                )
            elif unanswered > limits.dead:
                why = f"it has heard nothing of the scheduler for {unanswered:.1f} s"
                lost.append(
                    LostNode(member.hello.agent, why, now - unanswered + 2 * limits.heartbeat)
                )
            elif silent > limits.suspect and not member.is_suspect:
                member.is_suspect = True
                suspects.append((member, silent))
        return NodesLost(tuple(lost)) if lost else None, suspects
