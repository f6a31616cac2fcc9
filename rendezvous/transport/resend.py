"""
What makes a cut connection whole again: what to repeat, and which repetitions to hide. Pure.

After a reconnection an agent says again everything of the present generation, and the scheduler
tells again everything that holds; each side ignores what it knows. So no acknowledgements are
needed.
"""

from __future__ import annotations

from pdrun.rendezvous.protocol.messages import (
    Assign,
    Depart,
    Finished,
    Hung,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Standby,
    Start,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    Welcome,
    WorkerExit,
)


class ResendBuffer:
    """The messages of an agent that a new connection must repeat, in order."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def add_message(self, message: Message) -> None:
        """Keep a message that changes the scheduler's state; others are let go."""
        if isinstance(
            message, Progress
        ):  # the last one tells what is saved; who moved before it moves again
            self._messages = [kept for kept in self._messages if not isinstance(kept, Progress)]
        if isinstance(message, Hung):  # told again while it lasts
            self._messages = [
                kept
                for kept in self._messages
                if not isinstance(kept, Hung) or kept.rank != message.rank
            ]
        if isinstance(
            message,
            Join
            | Ready
            | Unready
            | WorkerExit
            | Finished
            | Depart
            | Hung
            | Progress
            | StopRequest
            | Leave,
        ):
            self._messages.append(message)

    def forget_before(self, generation: int) -> None:
        """A new generation has begun: what belongs to older ones is never said again."""
        self._messages = [
            message
            for message in self._messages
            if getattr(message, "generation", generation) >= generation
        ]

    def messages_to_repeat(self) -> tuple[Message, ...]:
        """Return what a new connection says after Hello."""
        return tuple(self._messages)


class DuplicateFilter:
    """Hides from the agent what the scheduler tells a second time."""

    def __init__(self) -> None:
        self._last: dict[type[Message], Message] = {}

    def is_new(self, message: Message) -> bool:
        """Whether the agent has not had this message yet."""
        if not isinstance(message, Welcome | Assign | Standby | Start | StopWorkers | Verdict):
            return True
        before = self._last.get(type(message))
        self._last[type(message)] = message
        if isinstance(message, Assign):
            self._last.pop(Standby, None)  # to be left out once more, for the same reason, is news
        if isinstance(message, Welcome | Verdict):
            return before is None
        return message != before

    def last_message(self, kind: type[Message]) -> Message | None:
        """Return the last message of a kind that passed, or None."""
        return self._last.get(kind)
