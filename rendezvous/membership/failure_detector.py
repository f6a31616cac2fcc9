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
from pdrun.rendezvous.protocol.events import GivenUp, SchedulerConfig, Silent
from pdrun.rendezvous.protocol.messages import Heartbeat

BUSY = 2500
"""Nodes that one scheduler hears each ``heartbeat``; of more, each beats less often."""


@dataclass(frozen=True)
class Times:
    """The detector's times for a job of its size, in seconds; heartbeat 0: nobody beats."""

    heartbeat: float
    suspect: float
    dead: float
    tick: float
    """Seconds in which a Tick is due."""


def times(config: SchedulerConfig) -> Times:
    """Return the times for a job of at most so many nodes as it may have."""
    beat = config.heartbeat * max(1.0, (config.nodes + config.spares) / BUSY)
    tick = beat / 4 if beat else min(1.0, config.waiting_every)
    return Times(beat, max(config.suspect, 3.0 * beat), max(config.dead, 3.5 * beat), tick)


class Watch:
    """
    Keeps the detector's clock. Members carry what it knows of each (`heard`, `gone_at`, in this
    clock's seconds).
    """

    def __init__(self, config: SchedulerConfig, now: float) -> None:
        self.times = times(config)
        self._reconnect = config.reconnect
        self._last = now
        self._stood = 0.0
        """Seconds for which the scheduler stood still, altogether."""
        self._woke = float("-inf")
        """When it last went on after standing still for longer than a node that beats is silent."""

    def passed(self, now: float) -> None:
        """
        Time has passed, or the scheduler stood still: more than a tick late is not the nodes'
        fault.
        """
        late = max(0.0, now - self._last - self.times.tick)
        self._stood += late
        if late > 2.5 * self.times.heartbeat:
            self._woke = now
        self._last = now

    def seen(self, now: float) -> None:
        """Something happened then, in another life: only the gap counts from there."""
        self._last = now

    def gap(self, now: float) -> float:
        """Seconds since the last thing that is known to have happened."""
        return max(0.0, now - self._last)

    def heard(self, member: Member, now: float) -> None:
        """A message has come from it."""
        member.heard = now - self._stood
        member.suspect = False

    def met(self, member: Member, now: float) -> None:
        """It has joined, or is back on a new connection."""
        self.heard(member, now)
        member.answered = member.heard

    def beaten(self, member: Member, beat: Heartbeat, now: float) -> None:
        """
        It beats, and says which of its beats it has seen answered; the last answer may still be on
        its way.
        """
        behind = max(0, beat.number - 1 - beat.echo) * self.times.heartbeat
        member.answered = max(member.answered, now - self._stood - behind)

    def cut(self, member: Member, between: bool, now: float) -> None:
        """Its connection has ended, by itself or with a relay ``between``."""
        # An agent with which all was well a moment ago has ended, or is back at once. One that was
        # silent before, as when its host stands still or packets are lost, has as long to be heard
        # again as without the cut. So has everybody when the scheduler itself has just stood still:
        # an agent may have dropped a connection that was silent, and be cut off by now with its
        # workers running.
        time = now - self._stood
        awake = now - self._woke >= self.times.dead
        talking = not self.times.heartbeat or (
            awake and time - member.answered < 2.5 * self.times.heartbeat
        )
        talking = talking and not between
        member.cut_at = now
        member.gone_at = max(
            time + self._reconnect, 0.0 if talking else member.answered + self.times.dead
        )

    def afresh(self, members: Iterable[Member], now: float) -> None:
        """
        A successor of the scheduler begins: everybody is cut off, and has the full time to come
        back.
        """
        self._last = now
        for member in members:
            member.suspect = False
            member.cut_at = now
            member.heard = member.answered = now - self._stood
            member.gone_at = member.heard + self.times.dead

    def overdue(
        self, members: Iterable[Member], now: float
    ) -> tuple[GivenUp | None, list[tuple[Member, float]]]:
        """
        Return whom to give up, or None, and who has become suspect, each with the seconds of its
        silence.

        Looks at each member once; a suspect is marked as one.
        """
        lost = []
        suspects = []
        time = now - self._stood
        limits = self.times
        for member in members:
            silent = time - member.heard
            unanswered = time - member.answered
            if member.peer is None:
                if time >= member.gone_at:
                    lost.append(
                        Silent(
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
                    Silent(
                        member.hello.agent, f"nothing was heard of it for {silent:.1f} s", cut_at
                    )
                )
            elif unanswered > limits.dead:
                why = f"it has heard nothing of the scheduler for {unanswered:.1f} s"
                lost.append(
                    Silent(member.hello.agent, why, now - unanswered + 2 * limits.heartbeat)
                )
            elif silent > limits.suspect and not member.suspect:
                member.suspect = True
                suspects.append((member, silent))
        return GivenUp(tuple(lost)) if lost else None, suspects
