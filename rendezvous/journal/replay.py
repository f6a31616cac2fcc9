"""
Between the membership machine and a journal: which events are kept, and how they are replayed.

The machine names the events of each step that must be kept (`Membership.journal_events`) and takes
them again (`Membership.replay`). To write nothing while a job only runs, this leaves out: viewers,
the ends of connections without a Hello, and ticks that only sent status messages.
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
    """Writes the machine's events into a journal: `before_step` and `after_step` of each step."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._is_relevant = True

    def before_step(self, machine: Membership, event: MembershipEvent) -> None:
        """Note whose event it is; the step may forget the connection."""
        self._is_relevant = _concerns_agent(machine, event)

    def after_step(self, machine: Membership, now: float) -> None:
        """Collect the entries of a step."""
        if self._is_relevant and machine.journal_events and not _is_status_only(machine):
            for event in machine.journal_events:
                self.journal.add_entry(now, event)


def _concerns_agent(machine: Membership, event: MembershipEvent) -> bool:
    """Whether an event is an agent's, or of no connection."""
    match event:
        case MessageReceived(_, Hello(role=role)):
            return role == "agent"
        case MessageReceived(peer) | PeerDisconnected(peer):
            session = machine.roster.sessions.get(peer)
            return session is not None and session.hello.role == "agent"
    return True


def _is_status_only(machine: Membership) -> bool:
    """Whether the last step was a tick that only sent status messages."""
    return (
        isinstance(machine.journal_events[0], Tick)
        and len(machine.journal_events) == 1
        and all(map(_is_status_action, machine.outbox.actions))
    )


def _is_status_action(action: Action) -> bool:
    """Whether an action only reports status."""
    match action:
        case SendMessage(_, Waiting() | Notice()) | RecordEvent(
            "plan" | "progress" | "suspect" | "usage" | "warning"
        ):
            return True
    return False


@dataclass(frozen=True)
class RestoredJob:
    """The machine as its predecessor left it."""

    machine: Membership
    events: tuple[LogEvent, ...]
    """Events that it had emitted for the event log."""
    unsure_count: int
    """
    Number of events at the end that may not be written: the predecessor was killed while it carried
    out its last actions.
    """


def replay_journal(config: SchedulerConfig, past: JournalHistory, path: Path) -> RestoredJob:
    """
    Return the machine after the events of a journal.

    Args:
        config: with the run of the journal's header.
        path: of the journal, for errors.

    Raises:
        RendezvousError: an entry does not follow from those before it.
    """
    machine = Membership(config, past.header.scheduler, past.header.now)
    began = past.header.wall - past.header.now
    newest = past.entries[-1].group if past.entries else 0
    past_events: list[LogEvent] = []
    sure = 0
    taken = 0

    def events() -> Iterator[tuple[float, MembershipEvent]]:
        nonlocal sure, taken
        for entry in past.entries:
            yield entry.now, entry.event
            taken += 1
            records = [each for each in machine.outbox.actions if isinstance(each, RecordEvent)]
            past_events.extend(
                LogEvent(each.kind, began + entry.now, each.data) for each in records
            )
            if entry.group != newest:
                sure = len(past_events)

    try:
        machine.replay(events())
    except IllegalEvent as error:
        raise damage_error(path, past.offsets[taken], f"the job was not there: {error}") from error
    return RestoredJob(machine, tuple(past_events), len(past_events) - sure)


def find_unwritten(restored: RestoredJob, written: Sequence[LogEvent]) -> list[LogEvent]:
    """
    Return the events that the predecessor had emitted but not written; ``written`` is the log's
    end.
    """
    there = {(event.kind, _event_key(event)) for event in written}
    unsure = restored.events[len(restored.events) - restored.unsure_count :]
    return [event for event in unsure if (event.kind, _event_key(event)) not in there]


def _event_key(event: LogEvent) -> str:
    """The event's data as the log has it."""
    return LogEvent(event.kind, 0.0, event.data).to_line()
