"""What an agent is given and does not decide: real in production, fakes in a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdrun import async_writer as lane
from pdrun.clock import Clock, SystemClock
from pdrun.launcher.agent.interfaces import Keeper, WorkerOutput
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.messages import Welcome


class Child(Protocol):
    """The scheduler process, as far as the agent needs to know it."""

    def fileno(self) -> int:
        """Readable when `tend` is due; -1: see `deadline`."""
        ...

    def deadline(self) -> float | None:
        """
        Monotonic time at which `tend` is due although nothing is readable; None: no such time.
        """
        ...

    def tend(self) -> str:
        """
        Start it again when it has died; never waits. Return a line for the user, or the empty
        string.

        Raises:
            RendezvousError: it has ended for good.
        """
        ...


def _nothing(plan: LaunchPlan, welcome: Welcome) -> None:
    """The default of `Surroundings.welcomed`."""


def _unheard(mark: bytes) -> None:
    """The default of `Surroundings.reached`."""


@dataclass(frozen=True)
class Surroundings:
    """See the module."""

    keeper: Callable[[LaunchPlan], Keeper]
    output: Callable[[LaunchPlan], WorkerOutput]
    clock: Clock = field(default_factory=SystemClock)
    welcomed: Callable[[LaunchPlan, Welcome], None] = _nothing
    """Called once, when the run's name is known."""
    scheduler_child: Child | None = None
    """The scheduler process of this node, if it has it."""
    lifeline: int | None = None
    """
    A descriptor whose end means: whoever started this agent is gone, end everything at once. May
    say FOR_ALL.
    """
    stdin: int | None = None
    """What rank 0 reads as its standard input; None: nothing."""
    address: str = ""
    """``HOST:PORT`` by which other nodes join; for messages."""
    events: str = ""
    """
    Path of the event log that the scheduler process writes; what it notes is shown. Empty: none.
    """
    reached: Callable[[bytes], None] = _unheard
    """Called with UP once signals are taken, with RUNNING before workers are started."""
    say: Callable[[str], None] = lane.say
    """Says a line of pdrun's own before there is an output; must not block."""
    quiet: bool = False
    """Another agent prints what is printed once a job."""
