"""
The start of a scheduler: begin a job, with or without a journal, or resume one from its journal.

A scheduler inside the agent has no journal, and imports none of its modules.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdrun import eventlog
from pdrun.clock import Clock
from pdrun.errors import ConfigError, RendezvousError
from pdrun.eventlog import LogEvent
from pdrun.rendezvous.membership.machine import Membership
from pdrun.rendezvous.protocol.events import MembershipEvent, SchedulerConfig

if TYPE_CHECKING:
    from pdrun.rendezvous.journal.replay import JournalWriter, RestoredJob

TAIL_BYTES = 1 << 18
"""Bytes at the end of an event log that may be newer than the journal's last commit."""


@dataclass
class Recovery:
    """The machine, and the journal from which a successor can resume it."""

    machine: Membership
    scheduler: str
    """Incarnation of this scheduler."""
    clock_shift: float = 0.0
    """Added to the clock. The monotonic clock restarts with the host, and time must not go back."""
    is_resumed: bool = False
    last_commit: int = 0
    """Number of the last commit to the journal, 0 without one."""
    resumed_commit: int = 0
    """The last commit that a predecessor left in the journal."""
    past_events: tuple[LogEvent, ...] = ()
    """Events that predecessors had emitted for the event log."""
    unwritten: tuple[LogEvent, ...] = ()
    """Those of them at the end that are missing in the log."""
    warning: str = ""
    """A warning for the user: a half-written end, or no journal."""
    _writer: JournalWriter | None = None
    on_lost: Callable[[], None] = field(default=lambda: None)
    """Called when the journal is given up, before the scheduler acts on anything that it lacks."""

    def before_step(self, event: MembershipEvent) -> None:
        """Called before each step of the machine."""
        if self._writer is not None:
            self._writer.before_step(self.machine, event)

    def after_step(self, now: float) -> None:
        """Called after each step, before its actions are carried out."""
        if self._writer is not None:
            self._writer.after_step(self.machine, now)

    def commit(self) -> str:
        """
        Make the steps since the last call safe; return a warning if that is not possible any more.

        A disk that is full, removed or silent does not end a healthy job. The job only loses its
        way back from a second fault.
        """
        if self._writer is None:
            return ""
        try:
            self._writer.journal.commit()
            self.last_commit = self._writer.journal.group - 1
            return ""
        except OSError as error:
            path = self._writer.journal.path
            self.on_lost()
            self.discard_journal()
            return _unwritable_warning(path, error)

    def has_lost_commits(self, scheduler: str, commit: int) -> bool:
        """
        Whether a node has heard from a predecessor of a commit that the journal lacks.

        A predecessor acted only on what was in the journal. So it has lost its end since: an older
        copy, or a disk that did not keep what it had confirmed.
        """
        is_predecessor = self.is_resumed and scheduler not in ("", self.scheduler)
        return is_predecessor and commit > self.resumed_commit

    def discard_journal(self) -> None:
        """Remove the journal: the job is over, or no successor may resume it."""
        if self._writer is not None:
            self._writer.journal.discard()
            self._writer = None

    def close(self) -> None:
        """Close the journal; a successor may resume it."""
        if self._writer is not None:
            self._writer.journal.close()
            self._writer = None


def begin_job(config: SchedulerConfig, clock: Clock, journal: Path | None = None) -> Recovery:
    """Begin a job. A journal that cannot be written is a warning, not an error."""
    now = clock.monotonic()
    scheduler = os.urandom(16).hex()
    found = Recovery(Membership(config, scheduler, now), scheduler)
    if journal is not None:
        from pdrun.rendezvous.journal.file import create_journal
        from pdrun.rendezvous.journal.format import JournalHeader, config_digest
        from pdrun.rendezvous.journal.replay import JournalWriter

        header = JournalHeader(
            config.job, config.run, config_digest(config), scheduler, now, clock.wall()
        )
        try:
            found._writer = JournalWriter(create_journal(journal, header))
        except OSError as error:
            found.warning = _unwritable_warning(journal, error)
    return found


def resume_job(
    config: SchedulerConfig, clock: Clock, journal: Path, events: Path | None = None
) -> Recovery:
    """
    Resume the job of a journal.

    Args:
        config: equal to the predecessor's.
        events: the event log, to complete it.

    Raises:
        FileNotFoundError: the journal was removed just now: the job is over.
        ConfigError: the journal is another job's, or another scheduler writes it.
        RendezvousError: it is damaged, or cannot be read; names file and byte.
    """
    from pdrun.rendezvous.journal.file import reopen_journal
    from pdrun.rendezvous.journal.format import config_digest
    from pdrun.rendezvous.journal.replay import JournalWriter, find_unwritten, replay_journal

    writer, past = reopen_journal(journal)
    header = past.header
    if (header.job, header.run) != (config.job, config.run) or header.config != config_digest(
        config
    ):
        writer.close()
        # A standalone scheduler may not have known the job yet.
        named = f"job '{header.job}', " if header.job else ""
        raise ConfigError(
            f"the journal is of {named}run {header.run}, or of a scheduler with other settings",
            where=str(journal),
            hint="start the scheduler with the same options, or name another journal",
        )
    restored = replay_journal(config, past, journal)
    last_time = past.entries[-1].now if past.entries else header.now
    last_commit = past.entries[-1].group if past.entries else 0
    found = Recovery(
        restored.machine,
        os.urandom(16).hex(),
        clock_shift=max(0.0, last_time - clock.monotonic()),
        is_resumed=True,
        last_commit=last_commit,
        resumed_commit=last_commit,
        past_events=restored.events,
        unwritten=tuple(find_unwritten(restored, _read_log_end(restored, events))),
        _writer=JournalWriter(writer),
    )
    if past.torn_bytes:
        found.warning = (
            "the end of the scheduler's journal is half-written: "
            f"{past.torn_bytes} bytes of it were cut off"
        )
    return found


def _read_log_end(restored: RestoredJob, events: Path | None) -> list[LogEvent]:
    """Return the events at the end of the log that may be newer than the last commit."""
    if events is None or not events.exists():
        return []
    unsure = restored.events[len(restored.events) - restored.unsure_count :]
    length = sum(len(event.to_line()) + 1 for event in unsure)
    return list(eventlog.read_last_events(events, length + TAIL_BYTES))


def begin_or_resume(
    config: SchedulerConfig, clock: Clock, journal: Path | None, events: Path | None = None
) -> Recovery:
    """Resume if there is a journal with content, begin otherwise. Raises as `resume_job`."""
    if journal is not None and _has_content(journal):
        with contextlib.suppress(FileNotFoundError):  # while its lock was waited for
            return resume_job(config, clock, journal, events)
    return begin_job(config, clock, journal)


def adopt_run_name(config: SchedulerConfig, journal: Path | None) -> SchedulerConfig:
    """
    Return the configuration with the run of an existing journal, for a scheduler that invents the
    name of its run.

    Raises:
        RendezvousError: the journal is damaged, or cannot be read (a folder, for example).
    """
    from pdrun.rendezvous.journal.format import read_header

    try:
        if journal is None or not _has_content(journal):
            return config
        return replace(config, run=read_header(journal).run)
    except FileNotFoundError:  # a moment ago it was there
        return config
    except OSError as error:
        raise RendezvousError(
            f"the scheduler's journal cannot be read: {error.strerror}", where=str(journal)
        ) from None


def _has_content(journal: Path) -> bool:
    from pdrun.rendezvous.journal.format import is_blank

    return journal.exists() and not is_blank(journal)


def _unwritable_warning(path: Path, error: OSError) -> str:
    return (
        f"the scheduler's journal {path} cannot be written ({error.strerror or error}): "
        "the job continues, but ends if the scheduler dies"
    )
