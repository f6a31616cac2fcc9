"""Lines of several agents are merged whole: half a line waits for its other half."""

from __future__ import annotations

import os

import pytest

from pdrun.launcher.controller import agent_handle
from pdrun.launcher.controller.agent_handle import STDERR, STDOUT, AgentStart, LocalAgentHandle


@pytest.fixture
def pipe(monkeypatch):
    """A handle that reads from a pipe; the ends of the pipe."""
    monkeypatch.setattr(agent_handle, "MAX_PARTIAL_LINE_BYTES", 100)
    handle = LocalAgentHandle(AgentStart("host0", ""), ())
    read, write = os.pipe()
    handle._streams = {read: STDOUT}
    yield handle, read, write
    os.close(write)


def read_bytes(handle, fd) -> bytes:
    return b"".join(data for _, data in handle.read_output(fd))


def test_half_a_line_waits_for_its_other_half(pipe):
    handle, read, write = pipe
    os.write(write, b"first\nsec")
    assert list(handle.read_output(read)) == [(STDOUT, b"first\n")]
    os.write(write, b"ond\nthi")
    assert list(handle.read_output(read)) == [(STDOUT, b"second\n")]
    handle._streams[read] = STDERR
    os.write(write, b"rd\n")
    assert list(handle.read_output(read)) == [(STDERR, b"third\n")]
    os.close(read)


def test_a_line_without_end_does_not_stay_in_memory(pipe):
    handle, read, write = pipe
    os.write(write, b"x" * 60)
    assert read_bytes(handle, read) == b""
    os.write(write, b"x" * 60)
    assert read_bytes(handle, read) == b"x" * 120
    assert handle._partial_lines[read] == b""
    os.close(read)


def test_the_last_line_needs_no_end():
    handle = LocalAgentHandle(AgentStart("host0", ""), ())
    read, write = os.pipe()
    handle._streams = {read: STDOUT}
    os.write(write, b"prompt> ")
    assert read_bytes(handle, read) == b""
    os.close(write)
    assert read_bytes(handle, read) == b"prompt> "
    assert handle._streams == {}
