"""
From what workers say and show to what the scheduler is told: a real channel, processes that do
nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pdrun.clock import FakeClock
from pdrun.launcher.agent import channel
from pdrun.launcher.agent.generation import GenerationRunner
from pdrun.launcher.agent.monitor import WorkerMonitor
from pdrun.launcher.common import procfs
from pdrun.launcher.diagnosis import hangs
from pdrun.launcher.diagnosis.stack_collector import StackRequest
from pdrun.rendezvous.policies.progress import MAX_PLANS
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    Hung,
    PlanFact,
    Progress,
    ShowStacks,
    Stacks,
    Step,
    WorkerExit,
)
from tests.lib.agent_fakes import FakeOutput, FakeSupervisor
from tests.lib.supervisor_driver import wait_until

IDLE = "import sys, time; print('up', flush=True); time.sleep(600)"
BUSY = "print('up', flush=True)\nwhile True: pass"


class FakeGroup:
    """Three workers of ranks 4 to 6, which stand for any program."""

    has_started, is_done, is_stopping, generation = True, False, False, 2
    ranks = range(4, 7)

    def __init__(self, *codes: str) -> None:
        commands = [[sys.executable, "-S", "-c", code] for code in codes]
        self.processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"

    def alive_workers(self) -> list[tuple[int, int, int]]:
        return [(4 + slot, slot, process.pid) for slot, process in enumerate(self.processes)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


class MonitorHarness:
    """Reports under a clock that stands still, with a wire to its socket."""

    def __init__(self, *codes: str, timeout: float | None = 10.0, is_wrapped: bool = False) -> None:
        self.clock, self.sent, self.printed = FakeClock(), [], []
        self.group, self.output, self.supervisor = FakeGroup(*codes), FakeOutput(), FakeSupervisor()
        self.monitor = WorkerMonitor(self.clock, self.sent.append, self.printed.append)
        self.path = self.monitor.open_channel(is_wrapped=is_wrapped, hang_timeout=timeout)
        self.monitor.begin_generation(self.group, self.output, self.supervisor)

    def send_step(self, rank: int, step: int = 1, generation: int = 2, more: str = "") -> None:
        """
        A datagram that this very process sends; where a worker must have sent it, `of` gives it
        that pid.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(
                f'{{"rank":{rank},"generation":{generation},"step":{step}{more}}}'.encode(),
                self.path,
            )

    def pass_time(self, seconds: float, each=lambda: None) -> None:
        for _ in range(int(seconds)):
            each()
            self.clock.advance(1.0)
            self.monitor.run_once()

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def close(self) -> None:
        self.monitor.close()
        self.group.close()
        self.supervisor.close()


@pytest.fixture
def harness():
    made: list[MonitorHarness] = []

    def make(*codes, **options):
        made.append(MonitorHarness(*codes, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_progress_is_told_once_a_second_with_what_changed(harness):
    it = harness(IDLE, IDLE, IDLE, is_wrapped=True)
    it.send_step(4, 1)
    it.send_step(4, 2, more=',"busy":0.5')
    it.send_step(6, 2, more=',"saved":1')
    it.monitor.run_once()
    it.send_step(5, 3)
    it.monitor.run_once()
    assert it.of(Progress) == [Progress(2, (Step(4, 2, 0.5), Step(6, 2)), -1)]
    it.clock.advance(1.0)
    it.monitor.run_once()
    it.monitor.run_once()
    assert it.of(Progress)[1:] == [Progress(2, (Step(5, 3),), -1)]


def test_the_plan_of_rank_0_is_passed_on(harness):
    it = harness(*[IDLE] * 3, is_wrapped=True)
    it.send_step(4, more=',"plan":[["mesh","dp=2","default"]]')
    it.monitor.run_once()
    assert it.of(Progress) == [], "only rank 0 knows the plan"
    it.group.ranks = range(3)
    for _ in range(20):
        it.send_step(0, more=',"plan":[["mesh","dp=2","default"]]')
        it.monitor.run_once()
    plan = (PlanFact("mesh", "dp=2", "default"),)
    assert it.of(Progress) == [Progress(2, plan=plan)] * MAX_PLANS


def test_sampled_steps_are_shown_but_promise_nothing(harness):
    it = harness(IDLE, IDLE, IDLE, is_wrapped=True)
    for rank in (4, 5, 6):
        it.send_step(rank, 9, more=',"sampled":true,"numbers":{"loss":2.5}')
    it.pass_time(30.0)
    sent = it.of(Progress)[0]
    assert sent.steps == tuple(Step(rank, 9, 0.0, True) for rank in (4, 5, 6))
    assert sent.numbers[0].sum == 7.5
    # no step for 30 s proves nothing, an evaluation reports none either; as without any step:
    assert {hung.waits for hung in it.of(Hung)} == {True}
    assert {hung.why.partition(" for ")[0] for hung in it.of(Hung)} == {"no output and no CPU time"}
    it.send_step(4, 10, more=',"sampled":1')
    it.monitor.run_once()
    assert it.monitor._channel.rejected_count == 1


def test_a_worker_in_a_debugger_does_not_hang(harness):
    it = harness(IDLE, IDLE, IDLE, is_wrapped=True)
    for rank in (4, 5, 6):
        it.send_step(rank, 1, more=',"paused":true')
    it.pass_time(30.0)
    assert it.of(Hung) == []
    for rank in (4, 5, 6):
        it.send_step(rank, 1)
    it.pass_time(15.0)
    assert {hung.rank for hung in it.of(Hung)} == {4, 5, 6}


def test_a_node_has_saved_what_all_its_workers_have(harness):
    it = harness(IDLE, IDLE, IDLE, is_wrapped=True)
    for rank, saved in ((4, 30), (5, 20), (6, 40)):
        it.send_step(rank, 50, more=f',"saved":{saved}')
    it.monitor.read_reports()
    it.monitor.send_progress()
    assert it.of(Progress)[-1].saved == 20
    it.monitor.send_progress()
    assert len(it.of(Progress)) == 1


def test_the_last_report_of_a_worker_comes_before_its_exit(harness, monkeypatch):
    monkeypatch.setattr(channel, "MAX_REPORTS_PER_READ", 2)
    it = harness(IDLE, IDLE, IDLE, is_wrapped=True)
    it.send_step(4, 57)
    it.monitor.run_once()
    for step in range(58, 63):  # after that, and more than one read takes
        it.send_step(4, step)
    told = []

    def send(message):
        told.extend([*it.sent, message])
        it.sent.clear()

    generation = GenerationRunner.__new__(GenerationRunner)
    generation._assign, generation._monitor = Assign(2, 0, 1, 4, 7, 0, "h:1"), it.monitor
    generation._send = send
    generation._report_exit(4, Cause("ok", 0))
    assert [type(message) for message in told] == [Progress, Progress, WorkerExit]
    assert told[1].steps == (Step(4, 62),)


def test_only_a_worker_of_this_generation_counts(harness):
    it = harness(IDLE, IDLE, IDLE)
    it.send_step(4)  # by this process, which is none
    it.send_step(9)
    it.send_step(5, generation=1)
    it.monitor.read_reports()
    it.monitor.send_progress()
    assert it.of(Progress) == []


def test_below_a_shell_the_first_that_speaks_is_the_worker(harness):
    it = harness(IDLE, IDLE, IDLE, is_wrapped=True)
    it.send_step(4, 1)
    helper = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        "s.sendto({!r}, sys.argv[1])"
    )
    words = helper.format(b'{"rank":4,"generation":2,"step":99}')
    subprocess.run([sys.executable, "-S", "-c", words, it.path], check=True)
    it.monitor.read_reports()
    it.monitor.send_progress()
    assert it.of(Progress) == [Progress(2, (Step(4, 1),), -1)]


def test_no_progress_is_a_hang_that_is_told_once(harness):
    it = harness(IDLE, BUSY, IDLE, is_wrapped=True)
    steps = iter(range(1000))
    it.pass_time(
        30, lambda: (it.send_step(5, next(steps)), it.send_step(6, 7), it.monitor.read_reports())
    )
    assert [(hung.rank, hung.why[:22], hung.waits) for hung in it.of(Hung)] == [
        (6, "no progress for 10 s (", False)
    ]


def test_who_is_quiet_waits_for_who_is_at_work(harness):
    it = harness(IDLE, BUSY, IDLE)
    burnt = FakeCpu(it.group.processes[1].pid)
    for _ in range(4):
        burnt.wait(0.3)
        it.pass_time(8)
    assert it.of(Hung) == []
    it.group.processes[1].kill()
    it.group.processes[1].wait()
    it.group.alive_workers = lambda: [
        (4, 0, it.group.processes[0].pid),
        (6, 2, it.group.processes[2].pid),
    ]
    it.pass_time(12)
    assert {hung.rank for hung in it.of(Hung)} == {4, 6} and all(hung.waits for hung in it.of(Hung))
    it.monitor.show_stacks(2)
    it.pass_time(4)
    assert it.of(Stacks)[-1].active == ()  # to be told is no sign of life
    before = len(it.of(Hung))
    it.pass_time(12)  # the scheduler may have found one at work elsewhere: so it is told again
    assert len(it.of(Hung)) > before


def test_who_reaches_the_timeout_while_stacks_are_collected_does_not_work(harness):
    it = harness(IDLE, IDLE, IDLE)
    os.kill(it.group.processes[2].pid, signal.SIGKILL)  # it has no stacks, and takes all the time
    wait_until(lambda: procfs.read_state(it.group.processes[2].pid).letter == "Z")
    it.pass_time(2)
    it.pass_time(8)
    it.monitor.show_stacks(2)
    ((request, _),) = it.monitor._stack_requests
    assert request.active and it.of(Hung) == []
    request.poll_workers = lambda now: now >= request._give_up_at
    it.pass_time(4)
    assert {hung.rank for hung in it.of(Hung)} >= {4, 5}
    assert it.of(Stacks)[-1].active == ()
    assert it.sent.index(it.of(Hung)[-1]) < it.sent.index(it.of(Stacks)[-1])


class FakeCpu:
    """Waits until a process has really used CPU time: a loaded machine may take its time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def used(self) -> float:
        with open(f"/proc/{self.pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf(
                "SC_CLK_TCK"
            )

    def wait(self, seconds: float) -> None:
        begin = self.used()
        wait_until(lambda: self.used() >= begin + seconds, 60)


def stop_process(it, place):
    """Stop one of three processes that sleep; the kernel does it a moment after the signal."""
    os.kill(it.group.processes[place].pid, signal.SIGSTOP)
    letters = ["T" if each == place else "S" for each in range(3)]
    wait_until(
        lambda: [procfs.read_state(process.pid).letter for process in it.group.processes] == letters
    )


def test_one_that_was_stopped_is_named_first(harness):
    it = harness(IDLE, IDLE, IDLE)
    stop_process(it, 1)
    it.pass_time(13)
    assert it.of(Hung)[0].rank == 5
    assert "stopped by a signal" in it.of(Hung)[0].why and not it.of(Hung)[0].waits


def test_stacks_are_answered_within_three_seconds_also_without_python(harness):
    it = harness(IDLE, IDLE, IDLE)
    stop_process(it, 2)
    it.monitor.show_stacks(ShowStacks(2).generation)
    it.clock.advance(3.1)
    it.monitor.run_once()
    (answer,) = it.of(Stacks)
    assert [group.ranks for group in answer.groups] == [(4, 5), (6,)]
    assert "state T (stopped by a signal)" in answer.groups[1].stack
    assert it.supervisor.signals == []  # nobody had offered its stacks: no signal that would end it
    it.monitor.show_stacks(1)
    it.pass_time(4)
    assert len(it.of(Stacks)) == 1


OFFERS = """
import faulthandler, os, sys, time
folder = sys.stdin.readline().strip()
file = open(f"{folder}/{os.getpid()}.stacks", "ab", buffering=0)
faulthandler.register(51, file=file, all_threads=True)
def stand_here():
    print("ready", flush=True)
    time.sleep(600)
stand_here()
"""


def test_a_worker_that_has_offered_its_stacks_writes_them(harness):
    it = harness(IDLE)
    offering = subprocess.Popen(
        [sys.executable, "-S", "-c", OFFERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        offering.stdin.write(f"{os.path.dirname(it.path)}\n".encode())
        offering.stdin.flush()
        assert offering.stdout.readline() == b"ready\n"
        it.group.alive_workers = lambda: [(4, 0, offering.pid)]
        it.supervisor.send_signal = lambda slot, number, group: os.kill(offering.pid, number)
        it.monitor.show_stacks(2)
        wait_until(
            lambda: (
                "<module>" in Path(os.path.dirname(it.path), f"{offering.pid}.stacks").read_text()
            ),
            20,
        )
        wait_until(lambda: (it.clock.advance(0.06), it.monitor.run_once(), it.of(Stacks))[2], 20)
        assert "in stand_here" in it.of(Stacks)[0].groups[0].stack
        assert offering.poll() is None
    finally:
        offering.kill()
        offering.wait()
        offering.stdin.close()
        offering.stdout.close()


def test_py_spy_is_asked_where_it_is_installed(harness, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text(
        '#!/bin/sh\necho "$@" >> "$0.asked"\n'
        "printf 'Thread 1 (idle): \"MainThread\"\\n    f (x.py:3)\\n'\n"
    )
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    it = harness(IDLE, IDLE)
    it.monitor.show_stacks(2)
    for asked in it.monitor._stack_requests[0][0]._dumps:
        assert asked.spy is not None
        asked.spy.wait(20)
    it.clock.advance(0.1)
    it.monitor.run_once()
    assert [(group.ranks, group.stack) for group in it.of(Stacks)[0].groups] == [
        ((4, 5), "f (x.py:3)")
    ]
    assert (
        f"dump --native --pid {it.group.processes[0].pid}\n"
        in (tmp_path / "py-spy.asked").read_text()
    )


def test_a_py_spy_that_hangs_is_not_waited_for(harness, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 600\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    it = harness(IDLE)
    begin = time.monotonic()
    it.monitor.show_stacks(2)
    it.clock.advance(3.1)
    it.monitor.run_once()
    assert "no Python stack" in it.of(Stacks)[0].groups[0].stack
    assert time.monotonic() - begin < 5


def test_a_py_spy_that_nothing_can_kill_is_reaped_later(harness, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 20\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    it = harness(IDLE)
    it.monitor.show_stacks(2)
    stuck = it.monitor._stack_requests[0][0]._dumps[0].spy
    begin, real = time.monotonic(), stuck.kill
    stuck.kill = lambda: None  # as for one in uninterruptible sleep
    it.clock.advance(3.1)
    it.monitor.run_once()
    assert "no Python stack" in it.of(Stacks)[0].groups[0].stack
    it.monitor.close()
    assert time.monotonic() - begin < 10 and stuck.returncode is None
    real()
    os.waitid(os.P_PID, stuck.pid, os.WEXITED | os.WNOWAIT)
    StackRequest([], tmp_path, lambda slot, number: None, 0.0)
    assert stuck.returncode == -signal.SIGKILL


def test_py_spy_needs_no_disk(harness, tmp_path, monkeypatch):
    """
    Where $TMPDIR takes nothing, and where no descriptor is left, the question is asked without
    ending the agent.
    """
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nprintf 'Thread 1 (idle): \"MainThread\"\\n    f (x.py:3)\\n'\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    it = harness(IDLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    it.monitor.show_stacks(2)
    it.monitor._stack_requests[0][0]._dumps[0].spy.wait(20)
    it.clock.advance(0.1)
    it.monitor.run_once()
    assert it.of(Stacks)[0].groups[0].stack == "f (x.py:3)"

    def refuse(name, flags):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    it.monitor.show_stacks(2)
    it.clock.advance(3.1)
    it.monitor.run_once()
    assert "no Python stack" in it.of(Stacks)[1].groups[0].stack


def test_a_traceback_without_a_timeout_counts_only_where_the_program_has_ended(
    harness, monkeypatch
):
    monkeypatch.setattr(hangs, "TRACEBACK_SECONDS", 10.0)
    it = harness(IDLE, timeout=None)
    it.output.traces[4] = (0.0, "Traceback (most recent call last):\nValueError: x")
    it.pass_time(60)
    assert it.of(Hung) == []  # /proc alone shows no stack
    assert it.monitor._stack_requests == []


ENDED = """
import faulthandler, os, sys, threading, time
folder = sys.stdin.readline().strip()
file = open(f"{folder}/{os.getpid()}.stacks", "ab", buffering=0)
faulthandler.register(51, file=file, all_threads=True)
def linger():
    threading.main_thread().join()
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=linger).start()
raise ValueError("uncaught")
"""


@pytest.mark.parametrize(
    ("code", "hangs_"), [(ENDED, True), (OFFERS, False)], ids=["ended", "at work"]
)
def test_a_worker_that_is_stuck_behind_its_traceback_hangs_without_any_timeout(
    harness, monkeypatch, code, hangs_
):
    monkeypatch.setattr(hangs, "TRACEBACK_SECONDS", 10.0)
    it = harness(IDLE, timeout=None)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as worker:
        try:
            worker.stdin.write(f"{os.path.dirname(it.path)}\n".encode())
            worker.stdin.flush()
            assert worker.stdout.readline() == b"ready\n"
            it.group.alive_workers = lambda: [(4, 0, worker.pid)]
            it.supervisor.send_signal = lambda slot, number, group: os.kill(worker.pid, number)
            it.output.traces[4] = (0.0, "Traceback (most recent call last):\nValueError: uncaught")
            wait_until(lambda: (it.pass_time(1), it.monitor._stack_requests)[1], 20)
            file = Path(os.path.dirname(it.path), f"{worker.pid}.stacks")
            wait_until(lambda: "most recent call first" in file.read_text(), 20)
            time.sleep(0.3)  # the whole of it: two threads
            it.pass_time(4)
            assert [hung.why[:26] for hung in it.of(Hung)] == (
                ["it printed a traceback and"] if hangs_ else []
            )
        finally:
            worker.kill()


def test_without_a_timeout_nothing_of_a_quiet_worker_is_read(harness):
    it = harness(IDLE, timeout=None)
    it.pass_time(100)
    assert it.monitor._detectors == {}
    assert it.sent and all(message.usage for message in it.sent)


def test_samples_wait_for_workers_and_end_with_them(harness):
    it = harness(timeout=None)  # has started, no worker has a pid yet
    it.pass_time(20)
    assert it.sent == []
    it = harness(IDLE, timeout=None)
    it.pass_time(10)
    assert [message.usage[0].name for message in it.sent] == ["cpu_percent"]
    it.group.processes[0].kill()
    it.group.processes[0].wait()
    it.group.alive_workers = list
    it.pass_time(40)
    assert len(it.sent) == 1
    assert it.monitor.next_deadline() > it.clock.monotonic(), "not again and again"
