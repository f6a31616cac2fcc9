"""What workers say to their agent: read strictly, whoever it comes from."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.agent import channel as module
from pdrun.launcher.agent.channel import (
    MAX_DATAGRAM_BYTES,
    MAX_REPORTS_PER_READ,
    WorkerChannel,
    WorkerReport,
    parse_report,
)
from pdrun.launcher.common import agent_folder
from pdrun.rendezvous.protocol.messages import PlanFact
from pdrun.rendezvous.transport.zmq_util import wait_readable

SENDER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    sender.sendto(b'{"rank":1,"generation":0}', sys.argv[1])
print(os.getpid())
"""


@pytest.fixture
def channel():
    made = WorkerChannel()
    yield made
    made.close()


def say(channel: WorkerChannel, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(5)
        sender.sendto(data, channel.path)


def test_what_a_worker_says():
    assert parse_report(
        b'{"rank":3,"generation":1,"step":120,"busy":0.25,"saved":100}', 7
    ) == WorkerReport(3, 1, 120, 0.25, 100, 7)
    assert parse_report(b'{"rank":0,"generation":0}') == WorkerReport(0, 0)
    numbers = parse_report(b'{"rank":0,"generation":0,"total":9,"numbers":{"loss":2.5,"g":null}}')
    assert numbers == WorkerReport(0, 0, total=9, numbers={"loss": 2.5, "g": None})
    told = b'{"rank":0,"generation":0,"numbers":{"loss":2.5,"g":null},"bad":{"g":7,"loss":8,"h":9}}'
    found = parse_report(told)
    assert found is not None and found.bad_steps == {"g": 7}
    assert parse_report(b'{"rank":0,"generation":0,"busy":2}') == WorkerReport(0, 0, None, 2.0)
    plan = parse_report(b'{"rank":0,"generation":0,"plan":[["mesh","dp=2","default"]]}')
    assert plan == WorkerReport(0, 0, plan=(PlanFact("mesh", "dp=2", "default"),))


STRANGE = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff",
    b'{"rank":1}',
    b'{"rank":1,"generation":0,"more":1}',
    b'{"rank":true,"generation":0}',
    b'{"rank":1.0,"generation":0}',
    b'{"rank":"1","generation":0}',
    b'{"rank":-1,"generation":0}',
    b'{"rank":1,"generation":0,"step":1e3}',
    b'{"rank":1,"generation":0,"step":null}',
    b'{"rank":1,"generation":0,"busy":NaN}',
    b'{"rank":1,"generation":0,"busy":Infinity}',
    b'{"rank":1,"generation":0,"busy":-1}',
    b'{"rank":1,"generation":0,"busy":true}',
    b'{"rank":1,"generation":0,"numbers":[]}',
    b'{"rank":1,"generation":0,"bad":[]}',
    b'{"rank":1,"generation":0,"numbers":{"a":null},"bad":{"a":-1}}',
    b'{"rank":1,"generation":0,"numbers":{"a":null},"bad":{"a":"1"}}',
    b'{"rank":1,"generation":0,"numbers":{"a b":1}}',
    b'{"rank":1,"generation":0,"numbers":{"a":"1"}}',
    b'{"rank":1,"generation":0,"numbers":{"a":true}}',
    b'{"rank":1,"generation":0,"numbers":{"a":NaN}}',
    b'{"rank":1,"generation":0,"numbers":{"a":1e301}}',
    b'{"rank":1,"generation":0,"total":-1}',
    b"[" * 500,
    b'{"rank":1,"generation":0,"step":9007199254740992}',
    b'{"rank":1,"generation":0}' + b" " * MAX_DATAGRAM_BYTES,
    b'{"rank":0,"generation":0,"plan":[["a","b"]]}',
    b'{"rank":0,"generation":0,"plan":[["a","b",1]]}',
    b'{"rank":0,"generation":0,"plan":{"a":"b"}}',
    b'{"rank":0,"generation":0,"plan":[' + b",".join([b'["","",""]'] * 257) + b"]}",
    b'{"rank":1,"generation":0,"step":' + b"9" * 400 + b"}",
]


@pytest.mark.parametrize("data", STRANGE, ids=[repr(data[:45]) for data in STRANGE])
def test_what_no_worker_says_is_nothing(data):
    assert parse_report(data) is None


@given(
    st.binary(max_size=600)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["rank", "generation", "step"]), inner)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_bytes_break_the_parser(data):
    told = parse_report(data)
    assert told is None or (
        told.rank >= 0 and told.generation >= 0 and (told.step is None or told.step >= 0)
    )


def test_the_folder_is_this_users_alone_and_goes_with_the_channel(channel):
    assert stat.S_IMODE(channel.folder.stat().st_mode) == 0o700
    assert channel.path == f"{channel.folder}/agent"
    channel.close()
    assert not channel.folder.exists()


def test_strangers_are_counted_and_the_kernel_says_who_spoke(channel):
    for data in (b"garbage", b"x" * 60_000, b'{"rank":0,"generation":0,"step":4}'):
        say(channel, data)
    child = subprocess.run(
        [sys.executable, "-S", "-c", SENDER, channel.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert wait_readable(channel.fileno(), wait=5)
    assert channel.read_reports() == [
        WorkerReport(0, 0, 4, pid=os.getpid()),
        WorkerReport(1, 0, pid=int(child.stdout)),
    ]
    assert channel.rejected_count == 2
    assert channel.read_reports() == []


def test_a_flood_neither_blocks_the_worker_nor_keeps_the_agent(channel):
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with pytest.raises(BlockingIOError):
            while sent < 1_000_000:
                sender.sendto(b'{"rank":0,"generation":0,"step":1}', channel.path)
                sent += 1
    read = channel.read_reports()
    assert len(read) == min(sent, MAX_REPORTS_PER_READ)


def test_a_folder_with_too_long_a_path_is_not_taken(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(deep))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    made = WorkerChannel()
    assert made.path.startswith("/tmp/")
    assert list(deep.iterdir()) == []
    made.close()


def test_a_place_that_takes_no_folder_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    made = WorkerChannel()
    assert made.path.startswith("/tmp/")
    made.close()
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(FileNotFoundError, match="gone"):
        WorkerChannel()


def test_a_socket_that_cannot_be_bound_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MAX_PATH_BYTES", 200)
        patch.setattr(agent_folder, "FOLDER_PREFIX", "x" * 100)
        with pytest.raises(OSError, match="too long"):
            WorkerChannel()
    assert list(tmp_path.iterdir()) == [] and not WorkerChannel.folders
    assert len(os.listdir("/proc/self/fd")) <= before  # those of earlier tests may be collected


@pytest.fixture
def short():
    """A folder with a path so short that an agent's folder may lie in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def test_what_killed_agents_left_is_removed_and_nothing_else(short, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(short))
    kernel = module.folder_prefix()
    names = (f"{kernel}left", f"{kernel}young", "pdrun-agent-0badf00d-left")
    left, young, theirs = (short / name for name in names)
    for folder in (left, young, theirs):
        folder.mkdir()
    for folder in (left, theirs):  # another host's socket is refused here, held or not
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
            dead.bind(str(folder / "agent"))
    living, other = WorkerChannel(), WorkerChannel()
    assert not left.exists() and young.exists() and theirs.exists()
    assert living.folder.exists() and other.folder.exists()
    living.close()
    other.close()
