"""
Whether a message makes sense now: asked before anything is changed.

What an honest agent may repeat after a reconnection is legal and changes nothing; everything else raises.
"""

from __future__ import annotations

from pdrun.rendezvous.members import Member
from pdrun.rendezvous.messages import (
    Finished,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    Ready,
    StatusQuery,
    StopRequest,
    Unready,
    WorkerExit,
)
from pdrun.rendezvous.transitions import LEGAL, IllegalEvent, JobState


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
    if hello.role == "view" and not isinstance(message, StatusQuery | StopRequest | Leave | Heartbeat):
        raise IllegalEvent(name, state, "a viewer only looks")
    if isinstance(message, StopRequest) and not 1 <= message.signal <= 64:
        raise IllegalEvent(name, state, f"{message.signal} is no signal")
    if isinstance(message, Ready | Unready | WorkerExit | Finished):
        _check_progress(message, state, generation, member)
    elif not isinstance(message, Join | Heartbeat | Leave | StopRequest | StatusQuery):
        raise IllegalEvent(name, state, "only the scheduler says it")


def _check_progress(
    message: Ready | Unready | WorkerExit | Finished, state: JobState, generation: int, member: Member | None
) -> None:
    name = type(message).__name__
    if member is None:
        raise IllegalEvent(name, state, "the sender has not joined")
    if message.generation > generation:
        raise IllegalEvent(name, state, f"generation {message.generation} does not exist yet")
    if message.generation < generation:
        return
    if state not in LEGAL[type(message)]:
        raise IllegalEvent(name, state)
    if isinstance(message, WorkerExit) and message.rank not in member.ranks:
        raise IllegalEvent(name, state, f"rank {message.rank} is not on {member.name}")
