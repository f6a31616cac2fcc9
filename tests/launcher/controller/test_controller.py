"""
The controller with fake agents that are real processes: output, signals, exits.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdrun.launcher.config.spec import JobSpec, Program, Resources
from pdrun.launcher.controller import controller, exit_policy
from pdrun.launcher.controller.agent_handle import AgentExit, LocalAgentHandle, agent_command
from pdrun.launcher.controller.exit_policy import ShutdownTimer, job_exit_code
from pdrun.launcher.controller.local import AgentStart, bind_scheduler, make_agent_starts
from pdrun.launcher.controller.ssh_agent import RemoteAgentHandle
from pdrun.launcher.output.console import Console
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.security import Secret

RUN = """
import json, os, sys
from pdrun.launcher.controller import controller, exit_policy
from pdrun.launcher.controller.local import AgentStart
from pdrun.launcher.output.console import Console
from pdrun.launcher.controller.agent_handle import LocalAgentHandle
exit_policy.AFTER_EXIT_SECONDS, exit_policy.AFTER_KILL_SECONDS, exit_policy.AFTER_CLOSE_SECONDS, exit_policy.AFTER_EARLY_EXIT_SECONDS = 0.5, 0.5, 0.5, 0.5
codes = json.loads(sys.argv[1])
lines = [json.dumps({"code": code, "said": sys.argv[2]}) + "\\n" for code in codes]
starts = [AgentStart(f"node{i}", line) for i, line in enumerate(lines)]
agent = "import contextlib, json, os, signal, sys, time\\norder = json.loads(sys.stdin.readline())\\n"
# an agent that starts late may find the controller's end closed already
agent += "with contextlib.suppress(BrokenPipeError): os.write(0, order['said'].encode())\\nexec(order['code'])"
command = [sys.executable, "-u", "-c", agent]
agents = [LocalAgentHandle(start, command) for start in starts]
job = controller.Controller(agents, Console(), grace=0.2, can_restart=sys.argv[3] == "outlives")
job.start()
sys.exit(job.run())
"""
# A signal that arrives just before read() blocks runs its Python handler only when read() returns:
# the fake agent waits in short turns instead.
UNTIL_EOF = """
import select
open('pid', 'a').write(str(os.getpid()) + '\\n'); print('up')
while not select.select([0], [], [], 0.02)[0] or os.read(0, 4096): pass
sys.exit(70)
"""


class ControlledJob:
    """
    A controller with fake agents, in another process.

    The agents report up and running immediately.
    """

    def __init__(self, folder: Path, *codes: str, said: str = "ur", outlives: bool = False) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, json.dumps(codes), said, "outlives" if outlives else ""],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        os.set_blocking(self.process.stdout.fileno(), True)

    def finish(self, timeout: float = 30.0) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        return self.process.returncode, out.decode(), err.decode()

    def lines(self, count: int) -> list[bytes]:
        return [self.process.stdout.readline() for _ in range(count)]

    def pids(self) -> list[int]:
        return [int(line) for line in (self.folder / "pid").read_text().split()]


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() and _state(pid) not in "ZX" for pid in pids):
            return True
        time.sleep(0.005)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_output_is_merged_by_whole_lines_and_streams_stay_apart(tmp_path: Path) -> None:
    code = (
        "for i in range(3000):\n os.write(1, b'node%d out ' % NODE); os.write(1, b'%d\\n' % i)\n"
        "os.write(2, b'node%d err\\n' % NODE)"
    )
    job = ControlledJob(tmp_path, *(code.replace("NODE", str(node)) for node in range(3)))
    status, out, err = job.finish()
    assert status == 0
    for node in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"node{node} ")]
        assert mine == [f"node{node} out {number}" for number in range(3000)]
    assert sorted(err.splitlines()) == [f"node{node} err" for node in range(3)]


def test_the_exit_code_is_that_of_the_verdict(tmp_path: Path) -> None:
    assert ControlledJob(tmp_path, "sys.exit(42)", "sys.exit(42)").finish() == (42, "", "")


def test_codes_that_differ_are_reported(tmp_path: Path) -> None:
    status, _, err = ControlledJob(
        tmp_path, "sys.exit(0)", "time.sleep(0.2); sys.exit(69)"
    ).finish()
    assert status == 69
    told = re.search(
        r"the nodes ended with different codes \((.*), (.*)\); using the first that is not 0: 69",
        err,
    )
    assert told is not None and sorted(told.groups()) == [
        "node0: 0",
        "node1: 69",
    ], err  # in the order of their ends


def test_nodes_with_the_same_code_are_one_entry() -> None:
    from pdrun.launcher.controller.exit_policy import job_exit_code

    exits = [*((f"node{number}", 77) for number in range(30)), ("head", 69)]
    code, message = job_exit_code(exits)
    assert code == 77
    assert "(node[0-29]: 77, head: 69)" in message


def test_signals_reach_every_agent_once_each(tmp_path: Path) -> None:
    code = (
        "import signal\nseen = []\n"
        "for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):\n"
        "    signal.signal(n, lambda n, f: (seen.append(n), print(n)))\n"
        "print('up')\nwhile signal.SIGTERM not in seen: time.sleep(0.01)\nsys.exit(7)"
    )
    job = ControlledJob(tmp_path, code, code)
    assert job.lines(2) == [b"up\n"] * 2
    for number in (signal.SIGUSR1, signal.SIGINT):
        job.process.send_signal(number)
        assert job.lines(2) == [b"%d\n" % number] * 2
    job.process.send_signal(signal.SIGTERM)
    assert job.finish()[:2] == (7, "15\n15\n")


def test_killing_the_controller_ends_the_agents(tmp_path: Path) -> None:
    job = ControlledJob(tmp_path, UNTIL_EOF, UNTIL_EOF)
    assert job.lines(2) == [b"up\n"] * 2
    pids = job.pids()
    job.process.kill()
    job.process.wait(10)
    assert gone(pids, 2.0)
    job.finish()


def test_an_agent_that_is_killed_is_named_and_the_others_decide(tmp_path: Path) -> None:
    status, _, err = ControlledJob(
        tmp_path, "os.kill(os.getpid(), 9)", "time.sleep(0.3); sys.exit(137)"
    ).finish()
    assert status == 137
    assert err == "pdrun: the agent of node0 was killed by SIGKILL\n"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(143)"])
def test_a_job_that_may_go_on_without_a_node_is_left_to_its_scheduler(
    tmp_path: Path, end: str
) -> None:
    first = "time.sleep(3); sys.exit(0)"  # longer than the others of a fixed job would be given
    status, _, err = ControlledJob(
        tmp_path, first, f"time.sleep(0.1); {end}", outlives=True
    ).finish()
    assert status == 0
    assert "did not end" not in err and "different codes" not in err


def test_the_end_of_the_head_node_ends_the_job(tmp_path: Path) -> None:
    begin = time.monotonic()
    status, _, err = ControlledJob(
        tmp_path, "time.sleep(0.1); sys.exit(69)", UNTIL_EOF, outlives=True
    ).finish()
    assert status == 69 and "node1 did not end with the others" in err
    assert time.monotonic() - begin < 20


def test_agents_learn_that_a_stop_is_for_the_whole_job(tmp_path: Path) -> None:
    code = (
        "signal.signal(15, lambda n, f: (print(os.read(0, 9), 'signalled', flush=True),"
        " sys.exit(143)))\nprint('up')\ntime.sleep(60)"
    )
    job = ControlledJob(tmp_path, code)
    assert job.lines(1) == [b"up\n"]
    job.process.send_signal(signal.SIGTERM)
    status, out, _ = job.finish()
    assert status == 143 and "b'a'" in out and "signalled" in out


@pytest.mark.parametrize("said", ["", "u"])
def test_an_agent_killed_before_the_job_began_ends_the_others_at_once(
    tmp_path: Path, said: str
) -> None:
    start = time.monotonic()
    status, _, err = ControlledJob(
        tmp_path, "time.sleep(0.2); os.kill(os.getpid(), 9)", UNTIL_EOF, said=said
    ).finish()
    assert status == 137
    assert (
        err
        == "pdrun: the agent of node0 was killed by SIGKILL before the job started; stopping the"
        " others\n"
    )
    assert time.monotonic() - start < 3


def test_an_agent_that_fails_before_the_job_began_ends_others_that_hang(tmp_path: Path) -> None:
    hung = "signal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(0.05)"
    status, _, err = ControlledJob(tmp_path, "sys.exit(77)", UNTIL_EOF, hung, said="u").finish()
    assert status == 77
    assert "pdrun: killing the agent of node2" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_the_controller_handles_signals_for_agents_that_are_not_up(
    tmp_path: Path, number: int
) -> None:
    job = ControlledJob(tmp_path, UNTIL_EOF, UNTIL_EOF, said="")
    assert job.lines(2) == [b"up\n"] * 2
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(number)
    status, _, err = job.finish()
    assert (status, err) == (
        128 + number,
        f"pdrun: stopped by {signal.Signals(number).name} before the job started\n",
    )
    assert gone(job.pids(), 1.0)


def test_when_all_are_killed_the_first_signal_is_the_code(tmp_path: Path) -> None:
    assert (
        ControlledJob(tmp_path, "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 9)").finish()[0]
        == 137
    )


def test_an_agent_that_stays_is_asked_then_cut_then_killed(tmp_path: Path) -> None:
    stubborn = "signal.signal(15, lambda n, f: print('asked'))\nwhile True: time.sleep(0.05)"
    job = ControlledJob(tmp_path, "time.sleep(0.3); sys.exit(78)", UNTIL_EOF, stubborn)
    start = time.monotonic()
    status, out, err = job.finish()
    assert status == 78
    assert "asked" in out
    assert "pdrun: node1, node2 did not end with the others: stopping" in err
    assert "pdrun: killing the agent of node2" in err
    assert "different codes" not in err
    assert time.monotonic() - start < 10


def test_the_third_stop_signal_cuts_the_lifelines(tmp_path: Path) -> None:
    code = "for n in (2, 15): signal.signal(n, lambda n, f: print('ignored'))\n" + UNTIL_EOF
    job = ControlledJob(tmp_path, code)
    assert job.lines(1) == [b"up\n"]
    for _ in range(2):
        job.process.send_signal(signal.SIGINT)
        assert job.lines(1) == [b"ignored\n"]
    job.process.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


def test_a_closed_stdout_does_not_end_the_job(tmp_path: Path) -> None:
    code = "for i in range(5000): print('x' * 99)\nopen('done', 'w').close()"
    job = ControlledJob(tmp_path, code)
    assert job.lines(1) == [b"x" * 99 + b"\n"]
    job.process.stdout.close()
    assert job.process.wait(30) == 0
    assert job.process.stderr.read() == b""
    job.process.stderr.close()
    assert (tmp_path / "done").exists()


FLOOD = """
def flood(size):
    while size > 0: size -= os.write(1, b'x' * 999 + b'\\n')
flood(8 << 20)  # what the controller takes in any case: its reader's pipe may take a line only
open('full', 'w').close()
"""


def full(job: ControlledJob) -> None:
    """Wait until the output is not read any more."""
    deadline = time.monotonic() + 30
    while not (job.folder / "full").exists():
        assert time.monotonic() < deadline, "the output does not come"
        time.sleep(0.005)


def unread(job: ControlledJob) -> tuple[int, str]:
    """Return exit code and stderr of a controller whose stdout is not read."""
    try:
        code = job.process.wait(20)
    finally:
        job.process.kill()
    return code, job.process.communicate()[1].decode()


def test_without_a_reader_the_controller_exits_when_all_have_ended(tmp_path: Path) -> None:
    code, err = unread(ControlledJob(tmp_path, FLOOD + "flood(32768); sys.exit(3)"))
    assert code == 3 and "pdrun: stdout: the reader read nothing for 2 s" in err


@pytest.mark.parametrize("obeys", [True, False])
def test_a_stop_needs_no_reader(tmp_path: Path, obeys: bool) -> None:
    flooding = (
        f"signal.signal(2, lambda n, f: {'os._exit(130)' if obeys else 0})\nsignal.signal(15,"
        " lambda n, f: 0)\n"
    )
    job = ControlledJob(
        tmp_path,
        flooding + FLOOD + "flood(1 << 20)",
        "signal.signal(2, lambda n, f: sys.exit(130))\n" + "print('up')\ntime.sleep(60)",
    )
    full(job)
    job.process.send_signal(signal.SIGINT)
    code, err = unread(job)
    assert code == 130 and ("killing the agent of node0" in err) == (not obeys)


def test_at_the_second_stop_agents_are_read_without_their_reader(tmp_path: Path) -> None:
    job = ControlledJob(
        tmp_path,
        "stops = []\nsignal.signal(2, lambda n, f: (stops.append(n), os.write(2, b'stop\\n')))\n"
        + FLOOD
        + "while len(stops) < 2: flood(1000)\nflood(1 << 20); sys.exit(130)",
    )
    full(job)
    job.process.send_signal(signal.SIGINT)
    assert job.process.stderr.readline() == b"stop\n"
    job.process.send_signal(signal.SIGINT)
    code, err = unread(job)
    assert code == 130 and re.search(
        "pdrun: [0-9]+ bytes of output not shown: their reader was behind", err
    )


def test_a_connection_that_was_cut_in_the_same_moment_is_not_read(tmp_path: Path) -> None:
    """
    A stop kills an agent whose order is still on its way: its descriptor is ready, closed, and
    another's by now.
    """
    agent = RemoteAgentHandle("node0", [sys.executable, "-c", "import time; time.sleep(60)"])
    agent.connect(str(tmp_path), first=b"x" * (1 << 20))
    try:
        (ready,) = [
            fd
            for fd, mask in agent.poll_descriptors(lambda stream: False)
            if mask == select.POLLOUT
        ]
        agent.kill()
        with (tmp_path / "other").open("wb+", buffering=0) as other:
            other.write(b"not for it")
            other.seek(0)
            os.dup2(other.fileno(), ready)
            assert list(agent.read_output(ready)) == []
            os.close(ready)
            assert other.read() == b"not for it"
    finally:
        agent.abort()


def test_a_command_that_cannot_be_started_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGTERM)
    fds = set(os.listdir("/proc/self/fd"))
    job = controller.Controller(
        [LocalAgentHandle(AgentStart("node0", "{}\n"), ["/no/such/program"])], Console(), grace=1.0
    )
    with pytest.raises(FileNotFoundError):
        job.start()
    assert signal.getsignal(signal.SIGTERM) is before
    assert set(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize(
    ("ends", "stopped", "code", "has_note"),
    [
        ([("a", 0), ("b", 0)], [], 0, False),
        ([("a", 3), ("b", 3)], [], 3, False),
        ([("a", 0), ("b", 5), ("c", 6)], [], 5, True),
        ([("a", -9), ("b", 1)], [], 1, False),
        ([("a", -11), ("b", -9)], [], 139, False),
        ([("a", 78), ("b", 143)], ["b"], 78, False),
        ([("a", -9), ("b", 143)], ["b"], 137, False),
        ([("a", 143), ("b", -9)], ["a"], 137, False),
        ([("a", 143), ("b", -9)], ["a", "b"], 70, False),
        ([("a", None), ("b", 5)], [], 5, False),
        ([("a", None), ("b", -9)], [], 137, False),
        ([("a", None), ("b", None)], [], 69, False),
    ],
)
def test_job_exit_code(
    ends: list[tuple[str, int]], stopped: list[str], code: int, has_note: bool
) -> None:
    found, note = job_exit_code(ends, stopped_nodes=stopped)
    assert (found, bool(note)) == (code, has_note)


def test_the_exit_code_of_a_job_that_can_restart_is_that_of_its_head_node() -> None:
    ends = [("node2", -9), ("node1", 143), ("node0", 0)]
    assert job_exit_code(ends, head_node="node0") == (0, "")
    assert job_exit_code([("node1", 143), ("node0", -9)], head_node="node0") == (143, "")
    assert job_exit_code(
        [("node1", 69), ("node0", 143)], stopped_nodes=["node0"], head_node="node0"
    ) == (
        69,
        "",
    )


@pytest.mark.parametrize(
    ("ends", "stopped", "stops", "code"),
    [
        ([("a", 69), ("b", 130)], [], [2, 2], 130),
        ([("a", 143), ("b", 143)], [], [2, 15], 143),
        ([("a", -9), ("b", -9)], ["a", "b"], [2], 130),
        ([("a", 70), ("b", 70)], ["a", "b"], [15, 2, 2], 143),
        ([("a", 3), ("b", 3)], [], [2], 3),
    ],
)
def test_the_users_stop_wins_over_what_follows_from_it(
    ends: list[tuple[str, int]], stopped: list[str], stops: list[int], code: int
) -> None:
    assert job_exit_code(ends, stopped_nodes=stopped, stop_signals=stops) == (code, "")


def test_the_timer_waits_longer_when_an_agent_was_killed() -> None:
    for killed, term in (
        (False, exit_policy.AFTER_EXIT_SECONDS),
        (True, exit_policy.AFTER_KILL_SECONDS + 30),
    ):
        timer = ShutdownTimer(30.0)
        timer.on_agent_exit(100.0, is_killed=killed)
        timer.on_agent_exit(110.0, is_killed=False)
        assert timer.next_step(100.0 + term - 0.1) == ""
        assert [timer.next_step(100.0 + term), timer.next_step(100.0 + term)] == ["term", ""]
        assert [timer.next_step(1000.0), timer.next_step(1000.0), timer.next_step(1000.0)] == [
            "close",
            "kill",
            "",
        ]


def test_before_there_are_workers_patience_is_short() -> None:
    for killed, cut in ((True, 100.0), (False, 100.0 + exit_policy.AFTER_EARLY_EXIT_SECONDS)):
        timer = ShutdownTimer(30.0)
        timer.on_agent_exit(100.0, is_killed=killed, has_workers=False)
        assert timer.next_step(cut - 0.1) == ""
        assert [
            timer.next_step(cut),
            timer.next_step(cut),
            timer.next_step(cut + exit_policy.AFTER_EARLY_EXIT_SECONDS),
        ] == [
            "close",
            "",
            "kill",
        ]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (b"", "standard input ended without a payload"),
        (b"x" * (17 << 20), "the payload is longer than 16 MiB"),
    ],
)
def test_an_invalid_payload_is_reported(order: bytes, words: str) -> None:
    done = subprocess.run(
        agent_command(), input=order, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 78 and words in done.stderr.decode()


def test_the_payload_of_each_agent() -> None:
    spec = JobSpec(Program("script", "train.py", ("-x",)), Resources(nodes=3, devices=2))
    plan = LaunchPlan(
        mode="local",
        job="j",
        node="host",
        nodes=3,
        spec=spec,
        sources={"resources.nodes": "--nodes"},
        workers=(),
        backend="cpu",
        backend_reason="",
        visibility={},
        collective="gloo",
        base_env={},
        removed=(),
        scheduler=None,
        listen="127.0.0.1",
        cwd="/",
    )
    secret = Secret.random()
    with bind_scheduler() as listener:
        host, port = listener.getsockname()
        starts = make_agent_starts(
            plan,
            listener,
            secret,
            controller_pid=7,
            process_data={"tty": [True, False], "colour": False},
        )
        fd = listener.fileno()
    assert host == "127.0.0.1"
    assert [start.pass_fds for start in starts] == [(fd,), (), ()]
    assert secret.reveal().hex() not in repr(starts)
    for index, start in enumerate(starts):
        assert re.fullmatch(r".*\n", start.payload)
        order = json.loads(start.payload)
        got = JobSpec.from_json(order["spec"])
        assert (got.place.simulated, got.place.node_rank, got.place.local) == (
            (index, 3),
            index,
            True,
        )
        assert got.place.scheduler is not None and got.place.scheduler.port == port
        assert (order["scheduler_fd"], order["quiet"], order["front"]) == (
            None if index else fd,
            bool(index),
            7,
        )
        assert (order["tty"], order["colour"]) == ([True, False], False)
        assert Secret.from_hex(order["secret"]) == secret


class EndedAgent:
    """An agent that ended long ago, as it is seen after a pause; a stray child keeps its pipe."""

    node = "node0"
    is_up = is_running = True

    def __init__(self, output: bytes) -> None:
        self.exit: AgentExit | None = None
        self.read_fd, self.write_fd = os.pipe()
        os.write(self.write_fd, output)

    def start(self) -> None:
        pass

    def send_payload(self) -> None:
        pass

    def poll_descriptors(self, is_behind: object) -> list[tuple[int, int]]:
        return [(self.read_fd, select.POLLIN)]

    def read_output(self, fd: int) -> list[tuple[int, bytes]]:
        return [(1, os.read(fd, 1000))]

    def is_drained(self) -> bool:
        return False

    def check_exit(self) -> None:
        late = 2 * exit_policy.AFTER_CLOSE_SECONDS
        self.exit = AgentExit(0, time.monotonic() - late)

    def close_lifeline(self) -> None:
        pass


def test_a_pause_of_the_controller_loses_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    """
    It had given up a pipe in which everything was: the time for that had passed while it stood
    still.
    """
    agent = EndedAgent(b"x" * 9999 + b"\n")
    job = controller.Controller([agent], Console(), grace=0.2)
    job.start()
    try:
        assert job.run() == 0
        assert capfd.readouterr().out == "x" * 9999 + "\n"
    finally:
        os.close(agent.write_fd)
        os.close(agent.read_fd)
