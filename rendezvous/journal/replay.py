"""
From the membership machine into a journal, and back: what has an entry, and what a successor must
still write.

The machine says what a journal must keep of each step (`Membership.lasting`) and takes it again
(`Membership.replay`). Left out here, so that a job which only runs writes nothing: viewers, the
ends of connections that never spoke, and ticks that only told somebody how things stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdrun.eventlog import LogEvent
from pdrun.rendezvous.journal.file import Journal
from pdrun.rendezvous.journal.format import JournalHistory, damage_error
from pdrun.rendezvous.membership.machine import IllegalEvent, Membership
from pdrun.rendezvous.protocol.events import (
    Action,
    MembershipEvent,
    MessageReceived,
    PeerDisconnected,
    RecordEvent,
    SchedulerConfig,
    SendMessage,
    Tick,
)
from pdrun.rendezvous.protocol.messages import Hello, Notice, Waiting


class JournalWriter:
    """Writes into a journal what the machine takes: `before` each step, `after` it."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._is_relevant = True

    def before_step(self, machine: Membership, event: MembershipEvent) -> None:
        """Look who an event is about; its step may forget that."""
        self._is_relevant = _concerns_agent(machine, event)

    def after_step(self, machine: Membership, now: float) -> None:
        """Collect the entries of a step that was taken."""
        if self._is_relevant and machine.journal_events and not _is_status_only(machine):
            for event in machine.journal_events:
                self.journal.add_entry(now, event)


def _concerns_agent(machine: Membership, event: MembershipEvent) -> bool:
    """Whether an event is an agent's, or nobody's."""
    match event:
        case MessageReceived(_, Hello(role=role)):
            return role == "agent"
        case MessageReceived(peer) | PeerDisconnected(peer):
            session = machine.roster.sessions.get(peer)
            return session is not None and session.hello.role == "agent"
    return True


def _is_status_only(machine: Membership) -> bool:
    """Whether the last step was a tick that told somebody how things stand, and no more."""
    return (
        isinstance(machine.journal_events[0], Tick)
        and len(machine.journal_events) == 1
        and all(map(_is_status_action, machine.outbox.actions))
    )


def _is_status_action(action: Action) -> bool:
    """Whether an action only tells how things stand."""
    match action:
        case SendMessage(_, Waiting() | Notice()) | RecordEvent("progress" | "suspect" | "warning"):
            return True
    return False


@dataclass(frozen=True)
class RestoredJob:
    """The machine as its predecessor left it."""

    machine: Membership
    events: tuple[LogEvent, ...]
    """What it had said for the event log."""
    unsure_count: int
    """
    How many of them, at the end, may not have been written: the machine was killed while it carried
    them out.
    """


def replay_journal(config: SchedulerConfig, past: JournalHistory, path: Path) -> RestoredJob:
    """
    Return the machine that a journal leads to.

    Args:
        config: with the run of the journal's header.
        path: of the journal, for messages.

    Raises:
        RendezvousError: the entries do not follow from each other.
    """
    machine = Membership(config, past.header.scheduler, past.header.now)
    began = past.header.wall - past.header.now
    newest = past.entries[-1].group if past.entries else 0
    said: list[LogEvent] = []
    sure = taken = 0

    def events() -> Iterator[tuple[float, MembershipEvent]]:
        nonlocal sure, taken
        for entry in past.entries:
            yield entry.now, entry.event
            taken += 1
            records = [each for each in machine.outbox.actions if isinstance(each, RecordEvent)]
            said.extend(LogEvent(each.kind, began + entry.now, each.data) for each in records)
            if entry.group != newest:
                sure = len(said)

    try:
        machine.replay(events())
    except IllegalEvent as error:
        raise damage_error(path, past.offsets[taken], f"the job was not there: {error}") from error
    return RestoredJob(machine, tuple(said), len(said) - sure)


def find_unwritten(restored: RestoredJob, written: Sequence[LogEvent]) -> list[LogEvent]:
    """
    Return what the predecessor had decided and did not live to write into the event log, whose end
    is given.
    """
    there = {(event.kind, _event_key(event)) for event in written}
    unsure = restored.events[len(restored.events) - restored.unsure_count :]
    return [event for event in unsure if (event.kind, _event_key(event)) not in there]


def _event_key(event: LogEvent) -> str:
    """The event's data as the log holds it."""
    return LogEvent(event.kind, 0.0, event.data).to_line()
