"""
Whether a message makes sense now: asked before anything is changed.

What an honest agent may repeat after a reconnection is legal and changes nothing; everything else
raises.
"""

from __future__ import annotations

from typing import get_args

from pdrun.rendezvous.membership.nodes import Member
from pdrun.rendezvous.membership.transitions import LEGAL, IllegalEvent, JobState
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

OfGeneration = Ready | Unready | WorkerExit | Finished | Progress | Hung | Stacks
"""What a node says about its part in one generation."""
_OF_GENERATION = get_args(
    OfGeneration
)  # a union that is written in place is made anew at each message
_VIEWERS = (StatusQuery, StopRequest, Leave, Heartbeat)
_NODES = (Join, Heartbeat, Leave, Depart, StopRequest, StatusQuery)


def check_message(
    message: Message, state: JobState, generation: int, hello: Hello | None, member: Member | None
) -> None:
    """
    Raise IllegalEvent unless ``message`` may come now.

    Args:
        generation: the job's present one; -1 before the first.
        hello: what the connection said first, or None when it has said nothing yet.
        member: the sender's node, when it has joined.
    """
    name = type(message).__name__
    if isinstance(message, Hello):
        if hello:
            raise IllegalEvent("Hello", state, "it was said before on this connection")
        return
    if hello is None:
        raise IllegalEvent(name, state, "nothing goes before Hello")
    if hello.role == "view" and not isinstance(message, _VIEWERS):
        raise IllegalEvent(name, state, "a viewer only looks")
    if isinstance(message, StopRequest) and not 1 <= message.signal <= 64:
        raise IllegalEvent(name, state, f"{message.signal} is no signal")
    if isinstance(message, _OF_GENERATION):
        _check_generation(message, state, generation, member)
    elif isinstance(message, Depart) and member is None:
        raise IllegalEvent(name, state, "the sender has not joined")
    elif not isinstance(message, _NODES):
        raise IllegalEvent(name, state, "only the scheduler says it")


def _check_generation(
    message: OfGeneration, state: JobState, generation: int, member: Member | None
) -> None:
    name = type(message).__name__
    if member is None:
        raise IllegalEvent(name, state, "the sender has not joined")
    if message.generation > generation:
        raise IllegalEvent(name, state, f"generation {message.generation} does not exist yet")
    over = (
        state is JobState.GATHERING and generation >= 0
    )  # the last one is, and the next is not yet formed
    if message.generation < generation or over:
        return
    if state not in LEGAL[type(message)]:
        raise IllegalEvent(name, state)
    if isinstance(message, (WorkerExit, Hung)) and message.rank not in member.ranks:
        raise IllegalEvent(name, state, f"rank {message.rank} is not on {member.name}")
