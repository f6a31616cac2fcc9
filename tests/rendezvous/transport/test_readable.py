"""Which descriptors can be read."""

from __future__ import annotations

import fcntl
import math
import os
import resource
from collections.abc import Iterator

import pytest

from pdrun.rendezvous.transport.zmq_util import wait_readable


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


def test_data_an_end_and_nothing(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert (
        wait_readable(read, wait=0)
        == wait_readable(read, wait=-1.0)
        == wait_readable(wait=0)
        == set()
    )
    os.write(write, b"x")
    assert wait_readable(read) == wait_readable(read, wait=math.inf) == {read}
    os.read(read, 1)
    assert wait_readable(read, wait=0) == set()
    os.close(write)
    assert wait_readable(read) == {read}


def test_one_that_is_closed(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with pytest.raises(ValueError, match=f"not open: descriptor {pipe[0]}"):
        wait_readable(pipe[0], wait=0)


def test_beyond_what_select_knows(pipe: tuple[int, int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2048:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    high = fcntl.fcntl(pipe[0], fcntl.F_DUPFD_CLOEXEC, 1500)
    try:
        os.write(pipe[1], b"x")
        assert wait_readable(high, wait=5) == {high} and high >= 1500
    finally:
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
