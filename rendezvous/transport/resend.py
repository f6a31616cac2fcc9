"""
An agent's conversation with its scheduler across several connections. No sockets here.

After a reconnection an agent repeats its messages of the present generation, and the scheduler
sends the present state again. Each side ignores what it knows. So no acknowledgements are needed.
"""

from __future__ import annotations

from collections import deque

from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Depart,
    Echo,
    Finished,
    Heartbeat,
    Hung,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Refuse,
    Standby,
    Start,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.transport.timeouts import fence_margin


class ResendBuffer:
    """The messages of an agent that a new connection must repeat, in order."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def add_message(self, message: Message) -> None:
        """Keep a message if it changes the scheduler's state."""
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
        """Drop messages of generations before ``generation``: they are never repeated."""
        self._messages = [
            message
            for message in self._messages
            if getattr(message, "generation", generation) >= generation
        ]

    def messages_to_repeat(self) -> tuple[Message, ...]:
        """Return the messages to send after Hello."""
        return tuple(self._messages)


class DuplicateFilter:
    """Hides messages that the scheduler repeats."""

    def __init__(self) -> None:
        self._last: dict[type[Message], Message] = {}

    def is_new(self, message: Message) -> bool:
        """Whether the agent has not received this message yet."""
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


class StaleGuard:
    """
    Holds messages that may be older than the lease, until the scheduler answers a new heartbeat.

    A process that was frozen for longer than its lease may find orders in its socket that were sent
    before it was marked lost. The answer to a heartbeat that is sent now proves that it was not.
    """

    def __init__(self) -> None:
        self._beat_number = 0
        """Number of the heartbeat whose answer is awaited; 0: none."""
        self._held: list[Message] = []

    @property
    def is_active(self) -> bool:
        """Whether messages are held."""
        return self._beat_number > 0

    def start(self, beat_number: int) -> None:
        """Hold messages until heartbeat ``beat_number`` is answered."""
        self._beat_number = beat_number

    def is_certain(self, message: Message) -> bool:
        """Whether a message that is read now proves that the scheduler is connected now."""
        if not self.is_active:
            return True
        return isinstance(message, Echo) and message.number >= self._beat_number

    def hold(self, message: Message) -> None:
        """Keep a message until `release`."""
        self._held.append(message)

    def release(self, echo_number: int) -> list[Message]:
        """Take the answer to a heartbeat; return the messages if it is the awaited one."""
        if not self.is_active or echo_number < self._beat_number:
            return []
        held = self._held
        self._held = []
        self._beat_number = 0
        return held


class FenceTimer:
    """
    The time by which the workers of this node must have ended if no newer contact moves it.

    The scheduler marks a node lost ``dead`` seconds after the last heartbeat that it can count as
    answered. So contact dates from when such a heartbeat was *sent*, not from when its answer was
    read: neither slow links nor messages that were read late make the time too long.
    """

    def __init__(self, now: float) -> None:
        self._contact_at = now
        self._hello_at = now
        self._grant_until = now
        self._sent_beats: deque[tuple[int, float]] = deque()
        """Unanswered heartbeats: number, and the contact that their answer proves."""

    def on_hello(self, now: float) -> None:
        """A connection was opened with Hello; what an earlier one sent may be lost."""
        self._hello_at = now
        self._sent_beats.clear()

    def on_welcome(self) -> None:
        """The scheduler has answered Hello."""
        self._contact_at = max(self._contact_at, self._hello_at)

    def on_heartbeat(self, beat: Heartbeat, interval: float, now: float) -> None:
        """A heartbeat was sent; the scheduler dates it back by what is unanswered in it."""
        behind = max(0, beat.number - 1 - beat.echo) * interval
        self._sent_beats.append((beat.number, now - behind))

    def on_echo(self, number: int) -> None:
        """The scheduler has answered a heartbeat, and read all before it."""
        while self._sent_beats and self._sent_beats[0][0] <= number:
            self._contact_at = max(self._contact_at, self._sent_beats.popleft()[1])

    def on_connected(self, until: float) -> None:
        """The scheduler's machine has accepted a connection: a moment for Hello and Welcome."""
        self._grant_until = until

    def fence_at(self, dead: float) -> float:
        """Return the time for a scheduler that waits ``dead`` seconds."""
        return max(self._contact_at + dead - fence_margin(dead), self._grant_until)


class Conversation:
    """
    What an agent's link knows across all of its connections. No sockets, no clock.

    Args:
        endpoint: of the scheduler, for messages.
        needs_spec: withhold the Welcome until it contains the job's specification.
        welcome: of the conversation before, whose job and run must be the same.
    """

    def __init__(
        self, endpoint: Endpoint, needs_spec: bool, welcome: Welcome | None = None
    ) -> None:
        self.needs_spec = needs_spec
        self.welcome = welcome
        self.resend_buffer = ResendBuffer()
        self.stale_guard = StaleGuard()
        self.inbox: list[Message] = []
        self.is_over = False
        """Whether the scheduler has refused the agent, or was replaced."""
        self.is_replaced = False
        """Whether a scheduler of another job or run answers at the address now."""
        self.scheduler = ""
        """Incarnation of the scheduler that was heard last."""
        self.commit = 0
        """The greatest commit to its journal that this scheduler has named."""
        self._endpoint = endpoint
        self._duplicate_filter = DuplicateFilter()
        self._beat_number = 0
        self._echo_number = 0
        self._confirm_number = 0

    def restart(self) -> Conversation:
        """Return the conversation of a new agent with the same job and run."""
        result = Conversation(self._endpoint, self.needs_spec, self.welcome)
        result.scheduler, result.commit = self.scheduler, self.commit
        return result

    def note_commit(self, scheduler: str, commit: int) -> None:
        """Note what the next Hello says of the journal: a successor may know less than this."""
        if scheduler != self.scheduler:
            self.scheduler, self.commit = scheduler, commit
        self.commit = max(self.commit, commit)

    def next_heartbeat(self) -> Heartbeat:
        """Return the next heartbeat."""
        self._beat_number += 1
        return Heartbeat(self._beat_number, self._echo_number)

    def request_confirmation(self) -> None:
        """Wait for the answer to the next heartbeat; see `is_confirmed`."""
        self._confirm_number = self._beat_number + 1

    @property
    def is_confirmed(self) -> bool:
        """Whether the heartbeat after the last `request_confirmation` was answered."""
        return self._echo_number >= self._confirm_number

    @property
    def has_verdict(self) -> bool:
        """Whether the verdict has arrived."""
        return self._duplicate_filter.last_message(Verdict) is not None

    def hold_until_next_heartbeat(self) -> None:
        """Hold messages until the next heartbeat is answered."""
        self.stale_guard.start(self._beat_number + 1)

    def take_inbox(self) -> list[Message]:
        """Return the messages for the agent since the last call."""
        result = self.inbox
        self.inbox = []
        return result

    def take_message(self, message: Message) -> None:
        """Take a message of the scheduler; add it to the inbox if it is new and certain."""
        if isinstance(message, Echo):
            self._echo_number = message.number
            for held in self.stale_guard.release(message.number):
                self._accept_message(held)
        elif self.stale_guard.is_active and not isinstance(message, Welcome | Refuse):
            self.stale_guard.hold(message)
        else:
            self._accept_message(message)

    def _accept_message(self, message: Message) -> None:
        if isinstance(message, Welcome):
            if not self._accept_welcome(message):
                return
        elif isinstance(message, Assign):
            self.resend_buffer.forget_before(message.generation)
        elif isinstance(message, Refuse):
            self.is_over = True
        if self._duplicate_filter.is_new(message):
            self.inbox.append(message)

    def _accept_welcome(self, message: Welcome) -> bool:
        """Note a Welcome; return whether the agent gets it."""
        known = self.welcome
        if known and (known.run != message.run or known.job not in ("", message.job)):
            self.is_over = True
            self.is_replaced = True
            reason = f"the scheduler at {self._endpoint} is another one now"
            self.inbox.append(Refuse(69, reason))
            return False
        if known is None or message.spec:
            self.welcome = message
        return bool(message.spec) or not self.needs_spec
