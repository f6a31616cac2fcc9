"""
The legal states of a job, as a table, and the legal messages in each state.

    gathering --full--> assigning --ready--> running --finished--> done
      | ^  ^             |  |  ^              |    \\
      | |  `--- short ---+  |  |              |     stop --> stopping --finished--> done
      | |           changed `--'              |               |  ^
      | |                      again     failed, changed      |  |
      | |                       ^             v               |  |
      | `------- short ---------+------- restarting <-changed-'  |
      |                                   |   `------ stop ------'
      `--end--> done                      `--finished--> done: no restart helps

    assigning --end--> done

For all other transitions the machine raises IllegalEvent, with event and state, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import get_args

from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.protocol.messages import (
    Depart,
    Finished,
    Heartbeat,
    Hello,
    Hung,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Stacks,
    StatusQuery,
    StopRequest,
    Unready,
    WorkerExit,
)


class JobState(Enum):
    """State of a job."""

    GATHERING = "gathering"
    ASSIGNING = "assigning"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DONE = "done"

    __hash__ = object.__hash__
    """By identity, as equality is: see `Phase`."""


class Trigger(Enum):
    """What changes the state of a job."""

    FULL = "enough nodes have joined"
    READY = "every node is ready"
    FAILED = "a worker failed and may be tried again"
    CHANGED = "the nodes have changed, and enough are left for another generation"
    SHORT = "too few nodes are left, others may take their places"
    STOP = "the workers must end for good"
    AGAIN = "every worker has ended, start the next generation"
    FINISHED = "every worker has ended for good"
    END = "the job ends before any worker started"
    ORPHANED = "the scheduler's own node is lost"


TRANSITIONS: Mapping[tuple[JobState, Trigger], JobState] = {
    (JobState.GATHERING, Trigger.FULL): JobState.ASSIGNING,
    (JobState.GATHERING, Trigger.END): JobState.DONE,
    (JobState.GATHERING, Trigger.ORPHANED): JobState.DONE,
    (JobState.ASSIGNING, Trigger.READY): JobState.RUNNING,
    (JobState.ASSIGNING, Trigger.CHANGED): JobState.ASSIGNING,
    (JobState.ASSIGNING, Trigger.SHORT): JobState.GATHERING,
    (JobState.ASSIGNING, Trigger.END): JobState.DONE,
    (JobState.ASSIGNING, Trigger.ORPHANED): JobState.DONE,
    (JobState.RUNNING, Trigger.FAILED): JobState.RESTARTING,
    (JobState.RUNNING, Trigger.CHANGED): JobState.RESTARTING,
    (JobState.RUNNING, Trigger.STOP): JobState.STOPPING,
    (JobState.RUNNING, Trigger.FINISHED): JobState.DONE,
    (JobState.RUNNING, Trigger.ORPHANED): JobState.DONE,
    (JobState.RESTARTING, Trigger.AGAIN): JobState.ASSIGNING,
    (JobState.RESTARTING, Trigger.SHORT): JobState.GATHERING,
    (JobState.RESTARTING, Trigger.STOP): JobState.STOPPING,
    (JobState.RESTARTING, Trigger.FINISHED): JobState.DONE,
    (JobState.RESTARTING, Trigger.ORPHANED): JobState.DONE,
    (JobState.STOPPING, Trigger.CHANGED): JobState.RESTARTING,
    (JobState.STOPPING, Trigger.FINISHED): JobState.DONE,
    (JobState.STOPPING, Trigger.ORPHANED): JobState.DONE,
}

_STARTED_STATES = frozenset(
    {JobState.RUNNING, JobState.RESTARTING, JobState.STOPPING, JobState.DONE}
)

MESSAGE_STATES: Mapping[type[Message], frozenset[JobState]] = {
    Ready: frozenset({JobState.ASSIGNING}) | _STARTED_STATES,
    Unready: frozenset({JobState.ASSIGNING, JobState.DONE}),
    WorkerExit: _STARTED_STATES,
    Finished: _STARTED_STATES,
    Progress: _STARTED_STATES,
    Hung: _STARTED_STATES,
    Stacks: _STARTED_STATES,
}
"""
Messages of the present generation, and the states in which it exists. Repeats after a reconnection
are legal and change nothing; so are messages of an older generation.
"""

GenerationMessage = Ready | Unready | WorkerExit | Finished | Progress | Hung | Stacks
"""Messages of a node about its part in one generation."""
_GENERATION_MESSAGES = get_args(
    GenerationMessage
)  # a union that is written in place is made anew at each message
_VIEWER_MESSAGES = (StatusQuery, StopRequest, Leave, Heartbeat)
_NODE_MESSAGES = (Join, Heartbeat, Leave, Depart, StopRequest, StatusQuery)


class IllegalEvent(Exception):
    """An event that the present state does not allow. Nothing was changed; the sender is wrong."""

    def __init__(self, event: str, state: JobState, why: str = "") -> None:
        super().__init__(
            f"{event} is not allowed while the job is {state.value}" + (f": {why}" if why else "")
        )
        self.event = event
        self.state = state


def next_state(state: JobState, trigger: Trigger) -> JobState:
    """Return the state after ``trigger``, or raise IllegalEvent."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalEvent(f"'{trigger.value}'", state) from None


def check_message(
    message: Message, state: JobState, generation: int, hello: Hello | None, member: Member | None
) -> None:
    """
    Raise IllegalEvent unless ``message`` is legal now. Nothing has been changed yet.

    Args:
        generation: number of the job's present generation; -1: before the first.
        hello: the connection's Hello, or None before it.
        member: the sender's node, if it has joined.
    """
    name = type(message).__name__
    if isinstance(message, Hello):
        if hello:
            raise IllegalEvent("Hello", state, "this connection has sent it before")
        return
    if hello is None:
        raise IllegalEvent(name, state, "the first message must be Hello")
    if hello.role == "view" and not isinstance(message, _VIEWER_MESSAGES):
        raise IllegalEvent(name, state, "a viewer cannot send it")
    if isinstance(message, StopRequest) and not 1 <= message.signal <= 64:
        raise IllegalEvent(name, state, f"{message.signal} is not a signal")
    if isinstance(message, _GENERATION_MESSAGES):
        _check_generation(message, state, generation, member)
    elif isinstance(message, Depart) and member is None:
        raise IllegalEvent(name, state, "the sender has not joined")
    elif not isinstance(message, _NODE_MESSAGES):
        raise IllegalEvent(name, state, "only the scheduler sends it")


def is_late(message: GenerationMessage, state: JobState, generation: int, member: Member) -> bool:
    """
    Return whether a message is about a generation that is over, or is over for its sender.

    A node that joined again repeats, after each reconnection, what it has reported before.
    """
    is_over = state is JobState.GATHERING or member.index < 0
    return message.generation < generation or (is_over and generation >= 0)


def _check_generation(
    message: GenerationMessage, state: JobState, generation: int, member: Member | None
) -> None:
    name = type(message).__name__
    if member is None:
        raise IllegalEvent(name, state, "the sender has not joined")
    if message.generation > generation:
        raise IllegalEvent(name, state, f"generation {message.generation} does not exist yet")
    if is_late(message, state, generation, member):
        return
    if state not in MESSAGE_STATES[type(message)]:
        raise IllegalEvent(name, state)
    if isinstance(message, (WorkerExit, Hung)) and message.rank not in member.ranks:
        raise IllegalEvent(name, state, f"rank {message.rank} is not on {member.name}")
