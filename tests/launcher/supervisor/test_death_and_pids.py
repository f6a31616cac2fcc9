"""Workers die with their supervisor; a reused pid is spared; a full socket blocks no one."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
from collections import deque

import pytest

from pdrun.launcher.stdlib_only import process_tree, watchdog, worker_exec
from pdrun.launcher.stdlib_only.process_tree import (
    descendants,
    find_process,
    kill_process,
    list_children,
)
from pdrun.launcher.stdlib_only.supervisor import Supervisor
from pdrun.launcher.supervisor.events import Exited
from tests.lib.supervisor_driver import python, supervisor_driver, wait_until

READ_DEATH_SIGNAL = """
import ctypes
number = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
raise SystemExit(number.value)
"""


def test_the_kernel_kills_a_worker_with_its_keeper():
    with supervisor_driver() as driver:
        driver.start(0, python(READ_DEATH_SIGNAL))
        assert os.waitstatus_to_exitcode(driver.wait(Exited).status) == signal.SIGKILL


def test_a_worker_whose_keeper_died_before_it_asked_for_its_death_does_not_start(tmp_path):
    """The process that forked it is not the one that it names: as if that had died meanwhile."""
    read, write = os.pipe()
    command = {"argv": ["/bin/sh", "-c", f"touch {tmp_path}/ran"], "env": {}, "cwd": "/"}
    pid = os.fork()
    if pid == 0:
        worker_exec.exec_child(
            {**command, "cpus": [], "nofile": None}, [read, read, read], write, os.getpid(), False
        )
    os.close(read)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 127
    assert not (tmp_path / "ran").exists()


def test_descendants_are_found_in_all_generations():
    command = ["/bin/sh", "-c", "sh -c 'sleep 600 & wait' & wait"]
    with subprocess.Popen(command, start_new_session=True) as first:
        root = find_process(first.pid)
        try:
            found = wait_until(lambda: (all_of := list(descendants([root])))[2:] and all_of)
            assert found[0].pid == first.pid
            assert [member.ppid for member in found[1:]] == [member.pid for member in found[:-1]]
            for member in found:
                kill_process(member)
            assert first.wait(10) == -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)


@pytest.mark.parametrize("has_descriptor", [True, False])
def test_a_process_that_has_taken_over_a_pid_is_left_alone(monkeypatch, has_descriptor):
    def refuse(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        target = find_process(other.pid)
        target.start = b"1"  # of the process that had this pid before
        if not has_descriptor:
            monkeypatch.setattr(os, "pidfd_open", refuse)
        kill_process(target)
        assert other.communicate(b"alive") == (b"alive", None)
        assert other.returncode == 0


def test_a_process_that_has_taken_over_a_pid_has_no_children_to_kill():
    with subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"]) as other:
        parent = find_process(other.pid)
        (child,) = wait_until(lambda: list_children(parent))
        parent.start = b"1"
        assert list_children(parent) == []
        kill_process(child)
        assert other.wait(10) == 0


def test_a_full_socket_does_not_block_the_keeper():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = object.__new__(Supervisor)  # its signal handlers are not for this process
    keeper.agent = ours
    keeper.outbox = deque([b"x" * 1000] * 10_000)
    with ours, theirs:
        thread = threading.Thread(target=keeper.flush_outbox, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        waiting = len(keeper.outbox)
        assert 0 < waiting < 10_000
        assert theirs.recv(2000) == b"x" * 1000
        keeper.flush_outbox()
        assert len(keeper.outbox) < waiting


def test_the_one_that_stands_by_looks_again_after_each_find(monkeypatch):
    """A process that is just being forked shows a moment later."""
    rounds = iter(["", "a", "", "", "b", "", "", ""])
    killed = []
    monkeypatch.setattr(watchdog, "find_marked", lambda token: iter(next(rounds)))
    monkeypatch.setattr(process_tree, "kill_process", killed.append)
    monkeypatch.setattr(process_tree, "RETRY_SECONDS", 0.0)
    watchdog.kill_marked("token")
    assert killed == ["a", "b"]
    assert next(rounds, None) is None, "three rounds without a find are enough, and needed"
