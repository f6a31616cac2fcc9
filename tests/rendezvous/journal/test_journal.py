"""
The journal: the same state out of it as went in, nothing lost at any byte of a torn end, and damage
named.
"""

from __future__ import annotations

import json
import os
import random
import stat
import threading
import time
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun import eventlog
from pdrun.clock import FakeClock
from pdrun.errors import ConfigError, RendezvousError
from pdrun.eventlog import EventLog, LogEvent
from pdrun.rendezvous.journal import file as journals
from pdrun.rendezvous.journal.file import Journal, create_journal, reopen_journal
from pdrun.rendezvous.journal.format import MAGIC, JournalHeader, JournalHistory, config_digest
from pdrun.rendezvous.journal.recovery import adopt_run_name, begin_job, begin_or_resume, resume_job
from pdrun.rendezvous.journal.replay import (
    JournalWriter,
    RestoredJob,
    find_unwritten,
    replay_journal,
)
from pdrun.rendezvous.membership.machine import IllegalEvent, JobState, Membership
from pdrun.rendezvous.protocol import messages as m
from pdrun.rendezvous.protocol.codec import CodecError, event_from_plain, event_to_plain
from pdrun.rendezvous.protocol.events import (
    AgentLost,
    AgentsAlive,
    JoinDeferred,
    LocalStop,
    LostNode,
    MembershipEvent,
    MessageReceived,
    NodesLost,
    PeerDisconnected,
    SchedulerConfig,
    SchedulerResumed,
    Tick,
)
from pdrun.rendezvous.scheduler.service import Service
from pdrun.rendezvous.transport.base import MemoryHub
from pdrun.ui.replay import replay_events
from tests.rendezvous.helpers import cause, config, hello, until

EVENTS: list[MembershipEvent] = [
    MessageReceived("p", hello("a")),
    MessageReceived("p", m.Join("n", None, 2, {"command": "x"}, "h:1", "{}")),
    MessageReceived("p", m.WorkerExit(0, 1, cause(traceback="t", tail=("a", "b")))),
    MessageReceived("p", m.Stacks(0, (m.StackGroup((0, 1), "here"),))),
    MessageReceived("p", m.Progress(0, (m.Step(0, 5, 0.25),), 4)),
    AgentsAlive(("p", "q")),
    PeerDisconnected("p"),
    JoinDeferred("p", "b"),
    Tick(),
    LocalStop(15, "me", True),
    AgentLost("gone"),
    SchedulerResumed("s" * 32),
    NodesLost((LostNode("a", "it sent nothing for 10.1 s", 12.5),)),
]


def header(settings: SchedulerConfig, now: float = 1000.0) -> JournalHeader:
    return JournalHeader(
        settings.job, settings.run, config_digest(settings), "s" * 32, now, 1_700_000_000.0
    )


def written(path: Path, groups: list[list[MembershipEvent]]) -> bytes:
    """Write a journal with so many commits; return its bytes."""
    journal = create_journal(path, header(config()))
    for number, group in enumerate(groups):
        for event in group:
            journal.add_entry(1000.0 + number, event)
        journal.commit()
    journal.close()
    return path.read_bytes()


def test_every_event_comes_back(tmp_path: Path) -> None:
    written(tmp_path / "new" / "j", [EVENTS])
    journal, past = reopen_journal(tmp_path / "new" / "j")
    journal.close()
    assert [entry.event for entry in past.entries] == EVENTS
    assert past.header == header(config()) and past.torn_bytes == 0
    assert stat.S_IMODE((tmp_path / "new" / "j").stat().st_mode) == 0o600
    assert {type(event) for event in EVENTS} == set(MembershipEvent.__args__), (
        "an event that the journal was not asked about"
    )


@pytest.mark.parametrize(
    "plain",
    [
        {},
        [],
        None,
        {"kind": "Nothing", "body": {}},
        {"kind": [], "body": {}},
        {"kind": "Tick", "body": {"x": 1}},
        {"kind": "Received", "peer": "p", "type": "Tick", "body": {}},
        {"kind": "Received", "body": {}},
        {"kind": "Received", "peer": 1, "type": "Leave", "body": {"reason": ""}},
    ],
)
def test_what_is_no_event_is_refused(plain: Any) -> None:
    with pytest.raises(CodecError):
        event_from_plain(plain, "event")
    assert event_from_plain(event_to_plain(Tick()), "event") == Tick()


def test_event_names_of_existing_journals_are_read() -> None:
    """The names in a journal are older than the classes, and stay."""
    old = [
        {"kind": "Received", "peer": "a", "type": "Start", "body": {"generation": 3}},
        {"kind": "Heard", "body": {"peers": ["a", "b"]}},
        {"kind": "Disconnected", "body": {"peer": "a", "between": True}},
        {"kind": "Tick", "body": {}},
        {"kind": "StopOrdered", "body": {"signal": 15, "by": "me", "force": False}},
        {"kind": "Orphaned", "body": {"reason": "gone"}},
        {"kind": "GivenUp", "body": {"nodes": [{"agent": "a", "why": "silent", "cut_at": 2.5}]}},
        {"kind": "Resumed", "body": {"scheduler": "s"}},
    ]
    events = [
        MessageReceived("a", m.Start(3)),
        AgentsAlive(("a", "b")),
        PeerDisconnected("a", between=True),
        Tick(),
        LocalStop(15, "me"),
        AgentLost("gone"),
        NodesLost((LostNode("a", "silent", 2.5),)),
        SchedulerResumed("s"),
    ]
    assert [event_from_plain(value, "event") for value in old] == events
    assert [json.loads(json.dumps(event_to_plain(event))) for event in events] == old


def test_an_end_that_is_torn_at_any_byte_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = written(path, [EVENTS[:2], EVENTS[2:4]])
    path.unlink()
    first = len(written(path, [EVENTS[:2], EVENTS[2:3]]))
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        journal, past = reopen_journal(path)
        assert [entry.event for entry in past.entries] == EVENTS[
            :3
        ] and past.torn_bytes == cut - first
        journal.add_entry(1010.0, Tick())  # and it goes on from there
        journal.commit()
        journal.close()
        journal, past = reopen_journal(path)
        journal.close()
        assert [entry.event for entry in past.entries] == [
            *EVENTS[:3],
            Tick(),
        ] and past.torn_bytes == 0
        assert past.entries[-1].group > past.entries[-2].group


def test_bytes_that_were_never_written_are_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = written(path, [EVENTS])
    path.write_bytes(whole + bytes(5000))
    journal, past = reopen_journal(path)
    journal.close()
    assert (
        len(past.entries) == len(EVENTS) and past.torn_bytes == 5000 and path.read_bytes() == whole
    )


def test_every_flipped_byte_is_damage_that_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = written(path, [EVENTS[:1], EVENTS[6:8]])
    ends = []
    for count in range(3):
        path.unlink()
        groups = [EVENTS[:1], EVENTS[6:8]]
        ends.append(len(written(path, groups[:count])))
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1 << (at % 8)
        path.write_bytes(broken)
        with pytest.raises(RendezvousError) as caught:
            reopen_journal(path)
        assert str(path) in str(caught.value) and caught.value.exit_code == 69
        if b"0" <= MAGIC[at : at + 1] <= b"9":  # of the first line: the byte may name a version
            continue
        place = int(str(caught.value).split("at byte ")[1].split(":")[0])
        assert place <= at and (place >= ends[0] or at < ends[0]), (
            "the complaint is about another entry"
        )


def test_entries_cannot_be_taken_out_or_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "j"
    sizes = []
    for count in range(4):
        whole = written(path, [[event] for event in EVENTS[:count]])
        sizes.append(len(whole))
        path.unlink()
    path.write_bytes(whole[: sizes[1]] + whole[sizes[2] :])
    with pytest.raises(RendezvousError, match=f"damaged at byte {sizes[1]}"):
        reopen_journal(path)


def test_a_journal_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdrun.rendezvous.journal.file.LOCK_SECONDS", 0.1)
    journal = create_journal(tmp_path / "j", header(config()))
    with pytest.raises(ConfigError, match="another scheduler writes this journal"):
        reopen_journal(tmp_path / "j")
    journal.close()
    reopen_journal(tmp_path / "j")[0].close()


def test_who_waits_for_the_lock_does_not_get_a_file_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The job's end lets the lock go and the file with it; the next scheduler begins a journal that is
    there.
    """
    path, clock, locks = tmp_path / "j", FakeClock(), journals._lock_file
    first = begin_job(config(), clock, path)

    def lock(where: Path, fd: int) -> None:
        first.discard_journal()
        locks(where, fd)

    monkeypatch.setattr(journals, "_lock_file", lock)
    with pytest.raises(FileNotFoundError):
        reopen_journal(path)
    monkeypatch.setattr(journals, "_lock_file", locks)
    first = begin_job(config(), clock, path)
    monkeypatch.setattr(journals, "_lock_file", lock)
    second = begin_or_resume(config(), clock, path)
    assert not second.is_resumed and not second.warning and path.exists()
    second.close()
    assert reopen_journal(path)[1].header.scheduler == second.scheduler


def test_only_the_own_file_is_removed(tmp_path: Path) -> None:
    """The name may be the next job's by the time that a disk answers."""
    first = create_journal(tmp_path / "j", header(config()))
    (tmp_path / "j").unlink()
    second = create_journal(tmp_path / "j", header(config()))
    first.discard()
    assert (tmp_path / "j").exists()
    second.discard()
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize("length", [0, 5, 16, 20, 40, 120])
def test_a_journal_in_which_nothing_stands_yet_is_begun(tmp_path: Path, length: int) -> None:
    path, clock = tmp_path / "j", FakeClock()
    path.write_bytes(written(path, [])[:length])
    path.chmod(0o644)
    assert adopt_run_name(config(run="made-up"), path).run == "made-up"
    begun = begin_or_resume(config(), clock, path)
    assert not begun.is_resumed and not begun.warning and path.stat().st_mode & 0o777 == 0o600
    begun.close()
    assert begin_or_resume(config(), clock, path).is_resumed


def test_a_file_of_something_else_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("my thesis")
    for call in (
        lambda: adopt_run_name(config(), tmp_path / "j"),
        lambda: begin_or_resume(config(), FakeClock(), tmp_path / "j"),
    ):
        with pytest.raises(RendezvousError, match="no journal of pdrun"):
            call()
    with pytest.raises(FileExistsError):
        create_journal(tmp_path / "j", header(config()))
    assert (tmp_path / "j").read_text() == "my thesis"


def test_a_journal_of_another_job_or_of_other_settings_is_refused(tmp_path: Path) -> None:
    path, clock = tmp_path / "j", FakeClock()
    begin_job(config(), clock, path).close()
    for other in ({"job": "another"}, {"run": "run-2"}, {"grace": 3.0}, {"nodes": 3}):
        with pytest.raises(ConfigError, match="another journal"):
            resume_job(config(**other), clock, path)
    assert adopt_run_name(config(run="made-up"), path).run == "run-1"
    assert adopt_run_name(config(run="made-up"), tmp_path / "none").run == "made-up"
    assert begin_or_resume(config(), clock, path).is_resumed


@pytest.mark.parametrize(
    "text", [b"", MAGIC[:-1], MAGIC, b"pdrun journal 1", b"something else\n" * 9]
)
def test_what_is_no_journal_is_called_that(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "j").write_bytes(text)
    with pytest.raises(RendezvousError, match="damaged at byte"):
        reopen_journal(tmp_path / "j")


@pytest.mark.parametrize(
    "first_line, theirs",
    [
        (b"pdrun journal 1, protocol %d\n" % (m.PROTOCOL + 1), f"protocol {m.PROTOCOL + 1}"),
        (b"pdrun journal 2, protocol 12\n", "protocol 12"),
        (b"pdrun journal 1\n", "'pdrun journal 1', without a protocol"),
    ],
)
def test_a_journal_of_another_version_is_not_called_damaged(
    tmp_path: Path, first_line: bytes, theirs: str
) -> None:
    path, clock = tmp_path / "j", FakeClock()
    begin_job(config(), clock, path).close()
    text = first_line + path.read_bytes()[len(MAGIC) :]
    path.write_bytes(text)
    for call in (
        lambda: resume_job(config(), clock, path),
        lambda: begin_or_resume(config(), clock, path),
        lambda: adopt_run_name(config(run="made-up"), path),
    ):
        with pytest.raises(RendezvousError) as caught:
            call()
        shown = str(caught.value)
        assert f"it has {theirs}, this version has protocol {m.PROTOCOL}" in shown, shown
        assert "another version of pdrun wrote" in shown and "damaged" not in shown, shown
        assert caught.value.exit_code == 69
    assert path.read_bytes() == text


@pytest.mark.parametrize(
    "payload",
    [
        {"group": 1, "now": 2.0, "event": {"kind": "OfLater", "body": {}}},
        {"group": 1, "now": 2.0, "event": {"kind": "Tick", "body": {}}, "more": 1},
    ],
)
def test_a_complete_entry_that_is_not_known_is_of_another_version(
    tmp_path: Path, payload: dict[str, Any]
) -> None:
    path = tmp_path / "j"
    journal = create_journal(path, header(config()))
    place = path.stat().st_size
    journal._append_frame(payload)
    journal.commit()
    journal.close()
    with pytest.raises(RendezvousError, match=f"another version .* byte {place}: ") as caught:
        reopen_journal(path)
    assert "damaged" not in str(caught.value)


def test_folders_that_are_made_for_it_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        create_journal(tmp_path / "logs" / "run" / "j", header(config())).close()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("logs", "logs/run")] == [
        0o700
    ] * 2


def test_a_folder_in_the_journals_place_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="cannot be read: Is a directory"):
        adopt_run_name(config(run="made-up"), tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, [])
    os.truncate(path, 1 << 40)
    with pytest.raises(
        RendezvousError, match=r"damaged at byte \d+: it has 1,099,511,627,776 bytes"
    ):
        reopen_journal(path)


def test_entries_that_do_not_follow_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, [[MessageReceived("p", m.Ready(0))]])
    with pytest.raises(RendezvousError, match="the job was not there"):
        resume_job(config(), FakeClock(), path)


# A journal that cannot be written
# --------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_costs_the_way_back_and_not_the_job(tmp_path: Path) -> None:
    events: list[LogEvent] = []
    recovery = begin_job(config(nodes=1), FakeClock(), tmp_path / "j")
    service = Service(
        config(nodes=1), MemoryHub(), clock=FakeClock(), record=events.extend, recovery=recovery
    )
    hub = service.transport
    assert isinstance(hub, MemoryHub) and recovery._writer is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recovery._writer.journal._fd)
    os.close(full)
    end = hub.connect()
    for number, message in enumerate((hello("a"), m.Join("n", None, 1, store="h:1"))):
        end.send(m.Envelope("a", 0, number, message))
        service.poll_once(0.0)
    assert [type(envelope.body) for envelope in end.take_envelopes()] == [m.Welcome, m.Assign], (
        "the job goes on"
    )
    told = [str(event.data["text"]) for event in events if event.kind == "warning"]
    assert (
        len(told) == 1
        and "No space left on device" in told[0]
        and "ends if the scheduler dies" in told[0]
    )
    assert not (tmp_path / "j").exists(), "nobody may go on from half a journal"


def test_a_disk_that_hangs_costs_the_way_back_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The journal is given up first, and told to be; then what was not written is acted upon; the file
    goes later.
    """
    free, lost, synced = threading.Event(), list[bool](), os.fdatasync

    def sync(fd: int) -> None:
        free.wait(60)
        synced(fd)

    recovery = begin_job(config(nodes=1), FakeClock(), tmp_path / "j")
    monkeypatch.setattr(journals, "DISK_SECONDS", 0.1)
    monkeypatch.setattr(os, "fdatasync", sync)
    events: list[LogEvent] = []
    service = Service(
        config(nodes=1), MemoryHub(), clock=FakeClock(), record=events.extend, recovery=recovery
    )
    hub = service.transport
    assert isinstance(hub, MemoryHub)
    end = hub.connect()
    recovery.on_lost = lambda: lost.append(not end.take_envelopes())
    began = time.monotonic()
    for number, message in enumerate((hello("a"), m.Join("n", None, 1, store="h:1"))):
        end.send(m.Envelope("a", 0, number, message))
        service.poll_once(0.0)
    assert time.monotonic() - began < 5.0 and lost == [True]
    assert [type(envelope.body) for envelope in end.take_envelopes()] == [m.Welcome, m.Assign], (
        "the job goes on"
    )
    told = [str(event.data["text"]) for event in events if event.kind == "warning"]
    assert len(told) == 1 and "the disk did not answer for 0.1 s" in told[0], told
    assert (tmp_path / "j").exists()
    free.set()
    until(lambda: not (tmp_path / "j").exists(), "nobody may go on from it")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recovery = begin_job(config(), FakeClock(), tmp_path / "file" / "j")
    assert "cannot be written" in recovery.warning and not recovery.is_resumed


def test_without_an_event_log_the_terminals_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recovery = begin_job(config(nodes=2), FakeClock(), tmp_path / "j")
    service = Service(config(nodes=2), MemoryHub(), clock=FakeClock(), recovery=recovery)
    hub = service.transport
    assert isinstance(hub, MemoryHub) and recovery._writer is not None
    end = hub.connect()
    end.send(m.Envelope("a", 0, 0, hello("a")))
    end.send(m.Envelope("a", 0, 1, m.Join("n", None, 1, store="h:1")))
    service.poll_once(0.0)
    os.close(recovery._writer.journal._fd)
    end.send(m.Envelope("a", 0, 2, m.StopRequest(15, "me")))
    service.poll_once(0.0)
    service.poll_once(0.0)
    notices = [
        envelope.body.text
        for envelope in end.take_envelopes()
        if isinstance(envelope.body, m.Notice)
    ]
    assert len(notices) == 1 and "cannot be written" in notices[0]


# The same state
# --------------

OF_THE_MOMENT = {
    "detector",
    "alive_at",
    "challenge",
    "answered_at",
    "lost_at",
    "cut_kind",
    "is_suspect",  # the failure detector's: reset by SchedulerResumed
    "outbox",
    "journal_events",
    "_is_replaying",  # of one step
    "next_waiting_at",  # when Waiting is sent again, even to no node
    "_tracks",
    "_pace_anchor",
    "_step_seconds",
    "_look_at",
    "_record_at",
    "_has_news",  # how far workers are: told again with the next Progress
}


def picture(value: Any) -> Any:
    """What lasts of a machine, as plain values that can be compared."""
    if isinstance(value, Enum) or value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return [[picture(key), picture(one)] for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [picture(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(picture, value))
    names = [item.name for item in fields(value)] if is_dataclass(value) else sorted(vars(value))
    return {name: picture(getattr(value, name)) for name in names if name not in OF_THE_MOMENT}


@dataclass
class Node:
    """An agent that mostly says what is due."""

    name: str
    incarnation: int = -1
    peer: str = ""
    life: int = 0
    ranks: list[int] = field(default_factory=list)
    generation: int = -1

    @property
    def agent(self) -> str:
        return f"{self.name}-{self.life}"


class Walk:
    """A random life of a job, written into a journal, and killed now and then."""

    def __init__(self, settings: SchedulerConfig, path: Path, seed: int) -> None:
        self.settings, self.path, self.random = settings, path, random.Random(seed)
        self.now, self.kills = 1000.0, 0
        self.machine = Membership(settings, "s" * 32, self.now)
        self.keeper = JournalWriter(create_journal(path, header(settings)))
        self.nodes = [Node(f"n{i}") for i in range(settings.nodes + settings.spares + 1)]

    def step(self, event: MembershipEvent) -> None:
        self.keeper.before_step(self.machine, event)
        try:
            actions = self.machine.step(event, self.now)
        except IllegalEvent:
            return
        self.keeper.after_step(self.machine, self.now)
        told = {node.peer: node for node in self.nodes if node.peer}
        for action in actions:
            node, message = told.get(getattr(action, "peer", "")), getattr(action, "message", None)
            if node and isinstance(message, m.Assign) and message.generation > node.generation:
                node.generation = message.generation
                node.ranks = [message.first_rank, message.first_rank + 1]

    def say(self, node: Node, message: m.Message) -> None:
        if node.peer:
            self.step(MessageReceived(node.peer, message))

    def turn(self) -> None:
        node, chance = self.random.choice(self.nodes), self.random.random()
        if chance < 0.3:
            for other in self.nodes:
                if self.random.random() < 0.9:
                    self.say(other, m.Heartbeat(1, 1))
            self.now += self.random.choice([0.01, 0.25, 0.25, 1.0, 4.0, 30.0])
            self.step(Tick())
        elif not node.peer:
            node.incarnation += 1
            node.peer = f"{node.agent}.{node.incarnation}.{self.kills}"
            self.say(node, hello(node.agent, incarnation=node.incarnation))
            self.say(node, m.Join(node.name, None, 2, store=f"{node.name}:1"))
        elif chance < 0.36:
            self.step(PeerDisconnected(node.peer))
            node.peer = ""
        elif chance < 0.38:
            self.say(node, self.random.choice([m.Leave("bye"), m.Depart("away")]))
            node.life, node.incarnation, node.peer = node.life + 1, -1, ""
        elif chance < 0.385:
            self.say(node, m.StopRequest(2, node.name))
        elif chance < 0.39:
            self.step(MessageReceived("viewer", hello("v", role="view")))
            self.step(MessageReceived("viewer", m.StatusQuery()))
            self.step(PeerDisconnected("viewer"))
        else:
            self.work(node)

    def work(self, node: Node) -> None:
        generation = node.generation
        if self.machine.state is JobState.ASSIGNING:
            self.say(node, m.Ready(generation))
        elif self.random.random() < 0.5:
            rank = self.random.choice(node.ranks or [0])
            saved = self.random.choice([-1, 3, 5])
            self.say(
                node,
                self.random.choice(
                    [
                        m.Progress(generation, (m.Step(rank, 5, 0.1),), saved),
                        m.Stacks(generation, ()),
                        m.Hung(generation, rank, "no progress")
                        if self.random.random() < 0.1
                        else m.Heartbeat(2, 2),
                    ]
                ),
            )
        elif node.ranks:
            code = self.random.choice([0, 0, 1])
            self.say(
                node,
                m.WorkerExit(generation, node.ranks.pop(), cause("exit" if code else "ok", code)),
            )
        else:
            self.say(node, m.Finished(generation, f"{node.name}:2"))

    def read(self) -> tuple[Journal, JournalHistory, RestoredJob]:
        self.keeper.journal.commit()
        self.keeper.journal.close()
        journal, past = reopen_journal(self.path)
        return journal, past, replay_journal(self.settings, past, self.path)

    def kill(self) -> None:
        """The scheduler dies, and its successor goes on."""
        journal, _, restored = self.read()
        assert picture(restored.machine) == picture(self.machine)
        self.machine, self.keeper = restored.machine, JournalWriter(journal)
        self.kills += 1
        self.now += 1.0
        for node in self.nodes:
            node.peer = ""
        self.step(SchedulerResumed(f"{self.kills:032x}"))


@given(
    st.integers(0, 1 << 32),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 30.0]),
    st.integers(0, 4),
)
def test_replay_leads_to_the_same_state(
    seed: int, nodes: int, spares: int, restarts: int, grow: float, fewer: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        walk = Walk(
            config(
                nodes=nodes,
                min_nodes=max(1, nodes - fewer) if fewer else 0,
                spares=spares,
                max_restarts=restarts,
                grow=grow or None,
                gather=1.0,
                backoff=0.5,
            ),
            Path(folder, "j"),
            seed,
        )
        for _ in range(160):
            walk.turn()
            if walk.random.random() < 0.02:
                walk.kill()
        walk.kill()
        walk.keeper.journal.close()


def test_the_walk_reaches_what_it_is_to_prove(tmp_path: Path) -> None:
    """A walk that never leaves the first state would prove nothing."""
    seen: set[JobState] = set()
    for seed in range(40):
        walk = Walk(
            config(nodes=2, min_nodes=1, spares=1, max_restarts=2, gather=1.0),
            tmp_path / f"{seed}",
            seed,
        )
        for _ in range(160):
            walk.turn()
            seen.add(walk.machine.state)
        walk.kill()
        walk.keeper.journal.close()
    assert seen == set(JobState)


def test_heartbeats_ticks_and_viewers_have_no_entries(tmp_path: Path) -> None:
    walk = Walk(config(nodes=1, waiting_every=1000.0), tmp_path / "j", 0)
    node = walk.nodes[0]
    node.peer = "p"
    for message in (hello(node.agent), m.Join(node.name, None, 2, store="h:1"), m.Ready(0)):
        walk.say(node, message)
    before = len(walk.keeper.journal._pending)
    for number in range(1000):
        walk.now += 0.25
        walk.say(node, m.Heartbeat(number, number))
        walk.step(Tick())
        walk.step(MessageReceived("viewer", hello("v", role="view")))
        walk.step(MessageReceived("viewer", m.StatusQuery()))
        walk.step(PeerDisconnected("viewer"))
    assert len(walk.keeper.journal._pending) == before
    walk.keeper.journal.close()


# The event log
# -------------


def test_what_was_decided_and_not_written_is_written_by_the_successor(tmp_path: Path) -> None:
    """Killed between the journal and the event log, and in the middle of a line of it."""
    path, log, clock = tmp_path / "j", tmp_path / "events.jsonl", FakeClock()
    recovery = begin_job(config(nodes=1), clock, path)
    service = Service(
        config(nodes=1), MemoryHub(), clock=clock, record=EventLog(log).extend, recovery=recovery
    )
    hub = service.transport
    assert isinstance(hub, MemoryHub)
    end = hub.connect()
    for number, message in enumerate((hello("a"), m.Join("n", None, 1, store="h:1"), m.Ready(0))):
        end.send(m.Envelope("a", 0, number, message))
        service.poll_once(0.0)
    whole, past = log.read_text(), path.read_bytes()
    recovery.close()
    assert whole.count("\n") == 4 and whole.endswith("}\n")
    last = whole.rstrip("\n").rindex("\n") + 1
    for cut in (last, last + 10, len(whole) - 1, len(whole)):
        log.write_text(whole[:cut])
        path.write_bytes(past)
        found = resume_job(config(nodes=1), clock, path, log)
        again = Service(
            config(nodes=1), MemoryHub(), clock=clock, record=EventLog(log).extend, recovery=found
        )
        status = replay_events(eventlog.read_events(log))
        kinds = [event.kind for event in eventlog.read_events(log)]
        assert status.state == "running" and kinds[:3] == ["created", "joined", "assigned"]
        assert kinds.count("started") == 1 and kinds[-1] == "resumed"
        assert len(again._lines) == 5
        found.close()


def test_many_lines_of_one_commit_are_found_again(tmp_path: Path) -> None:
    """What a crowd's arrival led to is more than the end of a log as a rule is."""
    path, log, clock, count = tmp_path / "j", tmp_path / "events.jsonl", FakeClock(), 20
    recovery = begin_job(config(nodes=count), clock, path)
    hub = MemoryHub()
    service = Service(
        config(nodes=count), hub, clock=clock, record=EventLog(log).extend, recovery=recovery
    )
    for name in (f"a{number}" for number in range(count)):
        end, host = hub.connect(), f"{name}-{'x' * 60_000}"
        end.send(m.Envelope(name, 0, 0, m.Hello(m.PROTOCOL, "agent", "job", name, 0, host, 1)))
        end.send(m.Envelope(name, 0, 1, m.Join(name, None, 1, store="h:1")))
    service.poll_once(0.0)
    recovery.close()
    assert log.stat().st_size > 1 << 20
    before = log.read_text()
    found = resume_job(config(nodes=count), clock, path, log)
    assert not found.unwritten and log.read_text() == before
    found.close()


@pytest.mark.parametrize("scheduler, missing", [("predecessor", 1), ("predecessor", 0), ("", 9)])
def test_a_successor_refuses_whoever_knows_more_than_the_journal(
    tmp_path: Path, scheduler: str, missing: int
) -> None:
    """Each envelope names the commit that came before it, and the next Hello repeats it."""
    path, clock = tmp_path / "j", FakeClock()
    recovery = begin_job(config(), clock, path)
    hub = MemoryHub()
    service = Service(config(), hub, clock=clock, recovery=recovery)
    end = hub.connect()
    end.send(m.Envelope("a" * 32, 0, 0, hello("a" * 32)))
    service.poll_once(0.0)
    (welcome,) = (e for e in end.take_envelopes() if isinstance(e.body, m.Welcome))
    assert welcome.incarnation > 0
    recovery.close()
    found = resume_job(config(), clock, path)
    hub = MemoryHub()
    service = Service(config(), hub, clock=clock, recovery=found)
    end = hub.connect()
    again = hello(
        "a" * 32,
        incarnation=1,
        scheduler=scheduler and welcome.sender,
        commit=welcome.incarnation + missing,
    )
    end.send(m.Envelope("a" * 32, 1, 0, again))
    service.poll_once(0.0)
    answers = [e.body for e in end.take_envelopes()]
    if scheduler and missing:
        (refusal,) = answers
        assert isinstance(refusal, m.Refuse)
        assert "the scheduler's journal has lost its end" in refusal.reason
    else:
        assert m.Welcome in {type(each) for each in answers}
    found.close()


def test_nothing_is_written_twice_into_the_event_log(tmp_path: Path) -> None:
    restored = RestoredJob(
        Membership(config(), "s" * 32, 0.0),
        (LogEvent("a", 1.0), LogEvent("b", 2.0, {"x": (1,)})),
        1,
    )
    assert find_unwritten(restored, []) == [LogEvent("b", 2.0, {"x": (1,)})]
    assert find_unwritten(restored, [LogEvent("b", 9.0, {"x": [1]})]) == []
