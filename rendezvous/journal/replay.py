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

from pdrun.eventlog import Event
from pdrun.rendezvous.journal.file import Journal, Past, damage
from pdrun.rendezvous.membership.machine import IllegalEvent, Membership
from pdrun.rendezvous.protocol.events import (
    Action,
    Disconnected,
    Happening,
    Received,
    Record,
    SchedulerConfig,
    Send,
    Tick,
)
from pdrun.rendezvous.protocol.messages import Hello, Notice, Waiting


class Keeper:
    """Writes into a journal what the machine takes: `before` each step, `after` it."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._wanted = True

    def before(self, machine: Membership, event: Happening) -> None:
        """Look who an event is about; its step may forget that."""
        self._wanted = _of_agent(machine, event)

    def after(self, machine: Membership, now: float) -> None:
        """Collect the entries of a step that was taken."""
        if self._wanted and machine.lasting and not _only_told(machine):
            for event in machine.lasting:
                self.journal.add(now, event)


def _of_agent(machine: Membership, event: Happening) -> bool:
    """Whether an event is an agent's, or nobody's."""
    match event:
        case Received(_, Hello(role=role)):
            return role == "agent"
        case Received(peer) | Disconnected(peer):
            session = machine.sessions.get(peer)
            return session is not None and session.hello.role == "agent"
    return True


def _only_told(machine: Membership) -> bool:
    """Whether the last step was a tick that told somebody how things stand, and no more."""
    return (
        isinstance(machine.lasting[0], Tick)
        and len(machine.lasting) == 1
        and all(map(_tells, machine.out))
    )


def _tells(action: Action) -> bool:
    """Whether an action only tells how things stand."""
    match action:
        case Send(_, Waiting() | Notice()) | Record("progress" | "suspect" | "warning"):
            return True
    return False


@dataclass(frozen=True)
class Restored:
    """The machine as its predecessor left it."""

    machine: Membership
    said: tuple[Event, ...]
    """What it had said for the event log."""
    unsure: int
    """
    How many of them, at the end, may not have been written: the machine was killed while it carried
    them out.
    """


def replay(config: SchedulerConfig, past: Past, path: Path) -> Restored:
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
    said: list[Event] = []
    sure = taken = 0

    def events() -> Iterator[tuple[float, Happening]]:
        nonlocal sure, taken
        for entry in past.entries:
            yield entry.now, entry.event
            taken += 1
            records = [each for each in machine.out if isinstance(each, Record)]
            said.extend(Event(each.kind, began + entry.now, each.data) for each in records)
            if entry.group != newest:
                sure = len(said)

    try:
        machine.replay(events())
    except IllegalEvent as error:
        raise damage(path, past.offsets[taken], f"the job was not there: {error}") from error
    return Restored(machine, tuple(said), len(said) - sure)


def not_written(restored: Restored, written: Sequence[Event]) -> list[Event]:
    """
    Return what the predecessor had decided and did not live to write into the event log, whose end
    is given.
    """
    there = {(event.kind, _flat(event)) for event in written}
    unsure = restored.said[len(restored.said) - restored.unsure :]
    return [event for event in unsure if (event.kind, _flat(event)) not in there]


def _flat(event: Event) -> str:
    """The event's data as the log holds it."""
    return Event(event.kind, 0.0, event.data).to_line()
