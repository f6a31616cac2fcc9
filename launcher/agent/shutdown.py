"""
What a node decides by itself: how it ends when the user, time or a lost scheduler says so. State
and times; no action.

    SIGINT, or SIGTERM of a job of fixed size     the whole job is to stop: the scheduler is asked, for a while
    SIGTERM in an elastic job                     this node is to go (its machine is taken away), the others go on
    again                                         everything here is killed at once
    no word of the scheduler for the lease        a new generation may begin without this node: its workers must be gone
                                                  before that, then it may come back as a new one

The node of the scheduler never departs: its end would be everybody's.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from pdrun.rendezvous.protocol.messages import Welcome

STOP_ANSWER = 2.0
"""Seconds that a running job's scheduler has to answer a stop, before this node acts alone."""
STOP_ANSWER_WAITING = 0.7
"""The same while the nodes are still coming together."""
RESTART_ANSWER = 10.0
"""The same, from the first stop on, where the scheduler's process is just being started again."""
MARGIN = 0.5
"""
Seconds by which the workers of a node that is cut off are gone before the others may begin without
it.
"""


@dataclass
class Leaving:
    """See the module."""

    may_depart: bool = True
    """Whether the job goes on without this node, as far as is known."""
    stops: int = 0
    last: int = int(signal.SIGINT)
    asked_at: float = 0.0
    """When the first stop came."""
    answer_by: float | None = None
    """Until when the scheduler has to answer."""
    code: int | None = None
    """The code to leave with once no worker is left; set where there will be no verdict."""
    judged: bool = False
    """Whether the verdict has come."""
    departing: bool = False
    returning: bool = False
    """
    This node was given up, or must take itself for it: once its workers have ended it joins as a
    new one.
    """
    lease: float = 0.0
    """Seconds without the scheduler that the workers may go on; 0: no limit."""
    last_grace: float = 0.0
    """Seconds from the end of the lease to the workers' end."""

    def welcomed(self, welcome: Welcome, *, serves: bool) -> None:
        """
        Take the terms of this run. Nothing can cut off the node that the scheduler itself is on.
        """
        self.lease = 0.0 if serves else welcome.lease
        self.last_grace = max(0.0, welcome.dead - welcome.lease - MARGIN)

    def departs(self, number: int) -> bool:
        """Whether a first signal to stop means this node alone."""
        return (
            number == signal.SIGTERM and self.may_depart and self.stops == 0 and self.code is None
        )

    def expired(self, silent: float) -> bool:
        """Whether a node whose workers run has been without its scheduler for too long."""
        return bool(self.lease) and silent > self.lease and not self.returning and self.code is None

    def absent(self) -> None:
        """
        The scheduler's process is being started again: it is to have the time for that, and to hear
        of the stop.
        """
        if self.answer_by is not None:
            self.answer_by = max(self.answer_by, self.asked_at + RESTART_ANSWER)

    def overdue(self, now: float) -> bool:
        """Whether the scheduler has not answered in time."""
        return self.answer_by is not None and now >= self.answer_by


def answer_time(*, started: bool, running: bool, again: bool, grace: float) -> float:
    """
    Return the seconds that the scheduler has to answer a stop: the others end first where this
    node's workers have.

    Args:
        started: workers of this node were started.
        running: some of them still run.
        again: the user has said it before.
        grace: the job's.
    """
    if not started:
        return STOP_ANSWER_WAITING
    return STOP_ANSWER if running or again else grace + 5 * STOP_ANSWER
