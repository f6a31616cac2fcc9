"""The keeper with real processes: what it starts, what it reports, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from pdrun.errors import PdrunError
from pdrun.launcher.stdlib_only.process_tree import KILL_SECONDS, find_process, kill_process
from pdrun.launcher.supervisor import boot, client
from pdrun.launcher.supervisor.events import (
    Exited,
    ForkServerStatus,
    Spawned,
    SpawnFailed,
    Swept,
    WorkerCommand,
)
from pdrun.rendezvous.transport.zmq_util import wait_readable
from tests.lib.supervisor_driver import (
    REPOSITORY,
    is_alive,
    python,
    read_pid,
    supervisor_driver,
    wait_until,
)
from tests.lib.timing import in_starts

DETACHED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], 'w') as file:
            file.write(f'{os.getpid()}\\n')
        time.sleep(600)
    os._exit(0)
"""


@pytest.fixture
def driver():
    with supervisor_driver() as made:
        yield made


def test_reports_exit_codes_and_signals(driver):
    driver.start(0, ("/bin/sh", "-c", "exit 42"))
    driver.start(1, ("/bin/sh", "-c", "kill -SEGV $$"))
    assert os.waitstatus_to_exitcode(driver.wait(Exited, 0).status) == 42
    assert os.WTERMSIG(driver.wait(Exited, 1).status) == signal.SIGSEGV


def test_spawned_comes_before_exited_with_the_same_pid(driver):
    before = time.monotonic()
    driver.start(0, ("/bin/true",))
    spawned, exited = driver.wait(Spawned), driver.wait(Exited)
    assert spawned.pid == exited.pid
    assert before < exited.at < time.monotonic()


@pytest.mark.parametrize(
    ("name", "content", "mode", "code"),
    [
        ("missing", None, 0, errno.ENOENT),
        ("text", b"no program\n", 0o755, errno.ENOEXEC),
        ("folder/", None, 0, errno.ENOENT),
        ("nox", b"#!/bin/sh\n", 0o644, errno.EACCES),
    ],
)
def test_exec_errors_are_exact(driver, tmp_path, name, content, mode, code):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    driver.start(0, (str(path),))
    failed = driver.wait(SpawnFailed)
    assert failed.errno == code
    assert str(path) in failed.message


def test_program_is_found_by_the_workers_own_path(driver, tmp_path):
    tool = tmp_path / "pdrun-test-tool"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    driver.start(0, (tool.name,), env={"PATH": f"/nowhere:{tmp_path}"})
    assert os.waitstatus_to_exitcode(driver.wait(Exited).status) == 9
    driver.start(0, (tool.name,), env={"PATH": "/nowhere"})
    assert driver.wait(SpawnFailed).errno == errno.ENOENT


def test_missing_folder_is_named(driver):
    driver.start(0, ("/bin/true",), cwd="/nowhere/at/all")
    failed = driver.wait(SpawnFailed)
    assert (failed.errno, "/nowhere/at/all" in failed.message) == (errno.ENOENT, True)


def test_impossible_cpus_and_nul_bytes_fail_the_spawn_only(driver):
    driver.start(0, ("/bin/true",), cpus=(4000,))
    assert driver.wait(SpawnFailed).errno == errno.EINVAL
    driver.start(0, ("/bin/echo", "a\0b"))
    assert driver.wait(SpawnFailed).errno == errno.EINVAL
    driver.start(0, ("/bin/true",))
    assert driver.wait(Exited).status == 0


def test_taken_slot_is_refused(driver):
    driver.start(0, ("/bin/sleep", "600"))
    driver.wait(Spawned)
    driver.start(0, ("/bin/true",))
    assert driver.wait(SpawnFailed).errno == errno.EBUSY


REPORT = """
import json, os, signal, sys
fds = sorted(int(n) for n in os.listdir('/proc/self/fd'))
ignored = int(next(l for l in open('/proc/self/status') if l.startswith('SigIgn')).split()[1], 16)
blocked = int(next(l for l in open('/proc/self/status') if l.startswith('SigBlk')).split()[1], 16)
json.dump(dict(env=dict(os.environ), cwd=os.getcwd(), fds=fds, ignored=ignored, blocked=blocked, sid=os.getsid(0),
  pid=os.getpid(), argv=sys.argv[1:], cpus=sorted(os.sched_getaffinity(0)), three=os.read(3, 99).decode()), sys.stdout)
"""


def test_child_gets_exactly_what_was_asked_for(driver, tmp_path):
    out, (read, write) = tmp_path / "out", os.pipe()
    os.write(write, b"through fd 3")
    cpu = min(os.sched_getaffinity(0))
    env = {
        "ODD": "\udcff\u00e9=\n",
        "PATH": "/bin",
        "PYTHONIOENCODING": "utf-8:surrogateescape",
        "BIG": "x" * 100_000,
    }
    with out.open("wb") as file:
        driver.start(
            0,
            (sys.executable, "-S", "-c", REPORT, "\udcfe \u20ac", ""),
            env=env,
            cwd=str(tmp_path),
            out=file.fileno(),
            cpus=(cpu,),
            pass_fds=(read,),
        )
    assert driver.wait(Exited).status == 0
    os.close(read), os.close(write)
    got = json.loads(out.read_text())
    marker = got["env"].pop("PDRUN_WORKER_OF")
    got["env"].pop("LC_CTYPE", None)  # Python's own coercion of the C locale
    assert (got["env"], marker.endswith(".0")) == (env, True)
    assert (got["cwd"], got["cpus"], got["argv"]) == (str(tmp_path), [cpu], ["\udcfe \u20ac", ""])
    assert (got["sid"], got["three"]) == (got["pid"], "through fd 3")
    assert [number for number in got["fds"] if number <= 3] == [0, 1, 2, 3]
    assert len(got["fds"]) == 5  # the folder itself is open while it is listed
    inherited = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    touched = {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGCHLD}
    assert {number for number in touched if got["ignored"] >> number - 1 & 1} == inherited
    assert got["blocked"] == 0


def test_environment_larger_than_any_packet(driver, tmp_path):
    env = {f"V{number}": "y" * 50_000 for number in range(20)}
    driver.start(
        0, python("import os; os._exit(len([1 for n in os.environ if n[0] == 'V']))"), env=env
    )
    assert os.waitstatus_to_exitcode(driver.wait(Exited).status) == 20


def test_many_workers_at_once_do_not_jam_the_socket(driver):
    for slot in range(60):
        driver.start(slot, ("/bin/true",))
    for slot in range(60):
        assert driver.wait(Exited, slot, 30).status == 0


def test_signals_reach_the_process_or_its_group(driver, tmp_path):
    script = (
        "trap 'exit 7' USR1; (trap 'echo x > %s' USR1; echo 1 > %s; sleep 600 & wait) & wait; wait"
    )
    mark, ready = tmp_path / "mark", tmp_path / "ready"
    driver.start(0, ("/bin/sh", "-c", script % (mark, ready)))
    read_pid(ready)
    driver.supervisor.send_signal(0, signal.SIGUSR1, group=True)
    assert os.waitstatus_to_exitcode(driver.wait(Exited).status) == 7
    wait_until(mark.exists, what="the group's other member to be signalled")
    driver.supervisor.send_signal(0, signal.SIGUSR1, group=False)  # of an ended slot: no error
    driver.start(0, ("/bin/true",))
    driver.wait(Spawned)


def test_signal_right_after_spawn_is_not_lost(driver):
    for _ in range(20):
        driver.start(0, ("/bin/sleep", "600"))
        driver.supervisor.send_signal(0, signal.SIGTERM, group=False)
        assert os.WTERMSIG(driver.wait(Exited).status) == signal.SIGTERM


def test_leftover_is_swept_and_named(driver, tmp_path):
    pid_file = tmp_path / "pid"
    driver.start(0, python(DETACHED, pid_file))
    driver.start(1, ("/bin/sleep", "600"))
    other = driver.wait(Spawned, 1).pid
    driver.wait(Exited)
    left = read_pid(pid_file)
    driver.supervisor.sweep_descendants(0)
    swept = driver.wait(Swept)
    assert not is_alive(left)
    assert [text.split()[0] for text in swept.processes] == [str(left)]
    assert swept.stuck == ()
    assert is_alive(other)


def test_nothing_left_is_answered_at_once(driver):
    slots = count()

    def sweep() -> float:
        slot = next(slots)
        driver.start(slot, ("/bin/true",))
        driver.wait(Exited, slot)
        begin = time.monotonic()
        driver.supervisor.sweep_descendants(slot)
        assert driver.wait(Swept, slot) == Swept(slot, ())
        return time.monotonic() - begin

    assert in_starts(sweep, 2) < 2


def test_helper_that_ends_by_itself_is_left_to_do_so(driver, tmp_path):
    driver.start(0, ("/bin/sh", "-c", f"(sleep 0.03; echo done > {tmp_path}/mark) & exit 0"))
    driver.wait(Exited)
    driver.supervisor.sweep_descendants(0)
    assert driver.wait(Swept).processes == ()
    assert (tmp_path / "mark").exists()


def test_leftover_that_hides_goes_with_the_last_worker(driver, tmp_path):
    inner = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    hidden = (
        f"import os; os.execve('/usr/bin/setsid', ['setsid', '--fork', '/bin/sh', '-c', {inner!r}],"
        " {})"
    )
    driver.start(0, python(hidden))
    driver.wait(Exited)
    left = read_pid(tmp_path / "pid")
    driver.supervisor.sweep_descendants(0)
    assert [text.split()[0] for text in driver.wait(Swept).processes] == [str(left)]


def test_close_ends_everything_at_once(tmp_path):
    with supervisor_driver() as driver:
        deaf = "import signal; signal.signal(15, signal.SIG_IGN)\n"
        driver.start(0, python(deaf + DETACHED + "time.sleep(600)", tmp_path / "pid"))
        worker, left = driver.wait(Spawned).pid, read_pid(tmp_path / "pid")
        begin = time.monotonic()
        driver.supervisor.close()
        assert time.monotonic() - begin < KILL_SECONDS - 1
    assert not is_alive(worker)
    assert not is_alive(left)
    assert not is_alive(driver.supervisor.pid)


AGENT = """
import sys, time
from pathlib import Path
from tests.lib.supervisor_driver import SupervisorDriver, python
from pdrun.launcher.supervisor.events import Spawned
driver = SupervisorDriver()
driver.start(0, ("/bin/sh", "-c", sys.argv[1]))
print(driver.supervisor.pid, driver.wait(Spawned).pid, flush=True)
time.sleep(600)
"""


def test_killed_agent_leaves_nothing(tmp_path):
    pid_file = tmp_path / "pid"
    worker = f"trap '' TERM INT HUP; setsid sh -c 'echo $$ > {pid_file}; sleep 600' & sleep 600"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, worker], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        keeper, leader = map(int, agent.stdout.readline().split())
        left = read_pid(pid_file)
        agent.kill()
        wait_until(
            lambda: not (is_alive(left) or is_alive(leader) or is_alive(keeper)),
            4,
            "everything to end",
        )
    finally:
        agent.kill()
        agent.communicate()


PLAIN_AND_DETACHED = """
import os, sys, time
def left(name):
    with open(f"{sys.argv[1]}/{name}", "w") as file: file.write(f"{os.getpid()}\\n")
    os.closerange(0, 3)
    time.sleep(600)
if os.fork() == 0: left("plain")
if os.fork() == 0: os.setsid(); left("session")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: left("double")
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def agent(tmp_path):
    """
    A process with a keeper and a worker that has made children of all kinds: (process, keeper, all
    others).
    """
    worker = f"exec {sys.executable} -S -c '{PLAIN_AND_DETACHED}' {tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, worker], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    keeper = 0
    try:
        keeper, leader = map(int, process.stdout.readline().split())
        others = [leader, *(read_pid(tmp_path / name) for name in ("plain", "session", "double"))]
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        yield process, keeper, [*others, *map(int, children)]
    finally:
        process.kill()
        process.communicate()
        if keeper and is_alive(keeper):
            os.kill(keeper, signal.SIGKILL)


@pytest.mark.parametrize("keeper_first", [False, True])
def test_agent_and_keeper_killed_in_one_instant_leave_nothing(agent, keeper_first):
    process, keeper, others = agent
    for pid in (keeper, process.pid) if keeper_first else (process.pid, keeper):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, others)), 5, f"the end of {others}")


def test_a_keeper_that_was_stopped_wakes_when_its_agent_dies(agent):
    process, keeper, others = agent
    os.kill(keeper, signal.SIGSTOP)
    wait_until(
        lambda: Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[0] == "T",
        what="the stop",
    )
    process.kill()
    wait_until(lambda: not any(map(is_alive, [keeper, *others])), 5, "everything to end")


def test_a_keeper_that_does_not_answer_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "PING_SECONDS", 0.1)
    with supervisor_driver() as driver:
        driver.start(0, python(DETACHED + "time.sleep(600)", tmp_path / "pid"))
        worker, left = driver.wait(Spawned).pid, read_pid(tmp_path / "pid")
        for _ in range(3 * client.MAX_UNANSWERED_PINGS):  # it answers: nothing happens
            due = driver.supervisor.send_ping()
            wait_until(lambda due=due: time.monotonic() >= due)
            assert list(driver.supervisor.read_events()) == []
        os.kill(driver.supervisor.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(
            PdrunError, match=r"supervisor process \d+ did not answer for .* was killed"
        ):
            wait_until(
                lambda: driver.supervisor.read_events() or driver.supervisor.send_ping() is None
            )
        assert time.monotonic() - begin >= 0.1 * client.MAX_UNANSWERED_PINGS
        assert not is_alive(driver.supervisor.pid)
        assert not is_alive(worker)
        assert not is_alive(left)


def test_a_stall_of_the_agent_is_no_silence_of_the_keeper(driver, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(client.time, "monotonic", lambda: now)
    for _ in range(2 * client.MAX_UNANSWERED_PINGS):
        now += 60.0
        driver.supervisor.send_ping()
        driver.supervisor.send_ping()  # not due again
        assert wait_readable(driver.supervisor.fileno(), wait=5)
        assert list(driver.supervisor.read_events()) == []


def test_closing_does_not_wait_for_a_stopped_keeper(driver):
    driver.start(0, ("/bin/sleep", "600"))
    driver.wait(Spawned)
    os.kill(driver.supervisor.pid, signal.SIGSTOP)
    begin = time.monotonic()
    driver.supervisor.close()
    assert time.monotonic() - begin < KILL_SECONDS - 1


def test_the_one_that_stands_by_is_no_leftover(driver):
    standby = Path(f"/proc/{driver.supervisor.pid}/task/{driver.supervisor.pid}/children")
    driver.start(0, ("/bin/true",))
    driver.wait(Exited)
    before = standby.read_text().split()
    driver.supervisor.sweep_descendants(None)
    assert driver.wait(Swept, None).processes == ()
    assert len(before) == 1 and standby.read_text().split() == before
    driver.supervisor.close()
    assert not is_alive(int(before[0]))


def test_killed_keeper_is_a_clear_error_and_leaves_nothing(tmp_path):
    with supervisor_driver() as driver:
        driver.start(0, python(DETACHED + "time.sleep(600)", tmp_path / "pid"))
        worker, left = driver.wait(Spawned).pid, read_pid(tmp_path / "pid")
        bystander = subprocess.Popen(["/bin/sleep", "600"])
        try:
            driver.supervisor.spared_pids.add(bystander.pid)
            os.kill(driver.supervisor.pid, signal.SIGKILL)
            with pytest.raises(PdrunError, match=r"process .* was killed by SIGKILL") as error:
                driver.wait(Exited)
            assert error.value.exit_code == 137, "70 would be a fault of pdrun"
            assert not is_alive(worker)
            assert not is_alive(left)
            assert is_alive(bystander.pid)
            with pytest.raises(PdrunError):
                driver.supervisor.read_events()
        finally:
            bystander.kill()
            bystander.wait()


def test_keeper_outlives_the_signals_of_a_terminal_and_of_a_batch_system(driver):
    driver.start(0, ("/bin/sleep", "600"))
    worker = driver.wait(Spawned).pid
    terminal = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for number in (*terminal, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(driver.supervisor.pid, number)
    driver.start(1, ("/bin/true",))
    driver.wait(Exited, 1)
    assert is_alive(worker)
    assert os.getsid(driver.supervisor.pid) == driver.supervisor.pid


COUNTING = """
import os, signal, time
def on(number, frame): os.write(1, f"{number}\\n".encode())
for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, on)
os.write(1, b"up\\n")
while True: time.sleep(0.01)
"""


@contextlib.contextmanager
def counting_worker(folder):
    """Yield a driver, the worker's pid, and what the worker has seen so far."""
    with (folder / "out").open("wb") as out, supervisor_driver() as driver:
        driver.start(0, (sys.executable, "-c", COUNTING), out=out.fileno())
        worker = driver.wait(Spawned).pid

        def seen() -> str:
            return (folder / "out").read_text().replace("\n", " ").strip()

        wait_until(lambda: seen() == "up")
        yield driver.supervisor, worker, seen


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_that_a_batch_system_sends_to_all_is_passed_on_to_none(tmp_path, number):
    with counting_worker(tmp_path) as (supervisor, worker, seen):
        for pid in (supervisor.pid, worker):
            os.kill(pid, number)
        wait_until(lambda: seen() == f"up {int(number)}")
        supervisor.send_signal(0, number, group=False)  # the agent's, for the same cause
        supervisor.send_signal(0, signal.SIGCONT, group=False)
        supervisor.send_signal(0, number, group=False)  # of another cause
        wait_until(lambda: seen() == f"up {int(number)} {int(number)}")


def test_slurms_signal_may_reach_the_agent_first(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with counting_worker(tmp_path) as (supervisor, worker, seen):
        supervisor.send_signal(0, signal.SIGUSR1, group=False)
        for pid in (supervisor.pid, worker):
            os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: seen() == "up 10")
        supervisor.send_signal(0, signal.SIGTERM, group=False)  # sent to the agent alone
        wait_until(lambda: seen() == "up 10 15")


def test_fork_refusal_is_a_failed_spawn():
    if os.geteuid() == 0:
        pytest.skip("root has no limit of processes")
    with supervisor_driver() as driver:
        soft, hard = resource.prlimit(driver.supervisor.pid, resource.RLIMIT_NPROC)
        resource.prlimit(driver.supervisor.pid, resource.RLIMIT_NPROC, (1, hard))
        driver.start(0, ("/bin/true",))
        assert driver.wait(SpawnFailed).errno == errno.EAGAIN
        resource.prlimit(driver.supervisor.pid, resource.RLIMIT_NPROC, (soft, hard))
        driver.start(0, ("/bin/true",))
        driver.wait(Exited)


def test_descriptor_refusal_is_a_failed_spawn(driver):
    driver.start(0, ("/bin/true",))
    driver.wait(Exited)
    used = len(list(Path(f"/proc/{driver.supervisor.pid}/fd").iterdir()))
    _, hard = resource.prlimit(driver.supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(driver.supervisor.pid, resource.RLIMIT_NOFILE, (used + 2, hard))
    driver.start(0, ("/bin/true",))
    assert driver.wait(SpawnFailed).errno == errno.EMFILE


FAILING = """
import errno, os, sys
sys.path.append(sys.argv.pop(1).rpartition('/')[0])
import supervisor
run, real, calls = supervisor.Supervisor.run, os.{name}, []
def failing(*args):
    calls.append(args)
    if len(calls) == {number}: raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return real(*args)
def from_here_on(self):
    os.{name} = failing
    run(self)
supervisor.Supervisor.run = from_here_on
supervisor.main(sys.argv)
"""


@contextlib.contextmanager
def failing_driver(monkeypatch, name, number):
    """
    A keeper whose call of that number of ``os.name`` fails, as where no descriptor or process is
    left.
    """
    monkeypatch.setattr(boot, "BOOT_CODE", FAILING.format(name=name, number=number))
    with supervisor_driver() as made:
        made.supervisor.send_ping()  # it runs when it has answered
        assert wait_readable(made.supervisor.fileno(), wait=10)
        assert list(made.supervisor.read_events()) == []
        yield made


def descriptors(driver):
    return sorted(os.listdir(f"/proc/{driver.supervisor.pid}/fd"))


def outcome(driver, slot):
    """Wait for the end of a slot's process, or for the refusal."""

    def ended():
        if wait_readable(driver.supervisor.fileno(), wait=0.1):
            driver.events += driver.supervisor.read_events()
        return any(
            isinstance(event, Exited | SpawnFailed) and event.slot == slot
            for event in driver.events
        )

    wait_until(ended)
    kinds = [type(event) for event in driver.events if event.slot == slot]
    driver.events = [event for event in driver.events if event.slot != slot]
    return kinds


@pytest.mark.parametrize("name", ["pipe2", "fork", "pidfd_open"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_lack_at_any_call_costs_one_worker_and_nothing_else(monkeypatch, tmp_path, name, number):
    with failing_driver(monkeypatch, name, number) as driver:
        before, seen = descriptors(driver), []
        for slot in range(3):
            driver.start(slot, ("/bin/sh", "-c", "setsid sleep 600 & exit 0"))
            seen.append(outcome(driver, slot))
            driver.supervisor.sweep_descendants(slot)
            driver.wait(Swept, slot)
        refused = [] if name == "pidfd_open" else [number - 1]
        assert [slot for slot in range(3) if SpawnFailed in seen[slot]] == refused
        for slot in range(3):
            driver.start(slot, ("/bin/true",))
            assert outcome(driver, slot) == [Spawned, Exited]
        assert descriptors(driver) == before


STARTER = """
import os, socket, sys, time
me = socket.socket(fileno=3)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
me.send(b'{"why": ""}')
me.recv(1)
"""


def fork_order(driver, slot):
    with open(os.devnull, "r+b") as null:
        command = WorkerCommand(slot, ("/bin/true",), {"PATH": os.environ["PATH"]}, "/", (), "auto")
        driver.supervisor.spawn(command, null.fileno(), null.fileno(), null.fileno())


@pytest.mark.parametrize("early", [True, False])
def test_a_fork_that_cannot_be_ordered_leaves_its_slot_free(monkeypatch, tmp_path, early):
    """The second pipe: the first one is the starter's."""
    with failing_driver(monkeypatch, "pipe2", 2) as driver:
        driver.supervisor.start_fork_server(
            WorkerCommand(-1, python(STARTER, tmp_path / "go"), {}, "/")
        )
        if early:
            fork_order(driver, 0)
        (tmp_path / "go").touch()
        assert driver.wait(ForkServerStatus, None, 20).why == ""
        if not early:
            fork_order(driver, 0)
        assert driver.wait(SpawnFailed).errno == errno.EMFILE
        fork_order(driver, 0)  # the starter ends at that: it is executed
        assert outcome(driver, 0) == [Spawned, Exited]


@pytest.mark.parametrize("name", ["pipe2", "fork", "memfd_create"])
def test_a_starter_that_cannot_be_started_is_told_and_done_without(monkeypatch, tmp_path, name):
    with failing_driver(monkeypatch, name, 1) as driver:
        before = descriptors(driver)
        driver.supervisor.start_fork_server(
            WorkerCommand(-1, python(STARTER, tmp_path / "go"), {}, "/")
        )
        why = driver.wait(ForkServerStatus, None).why
        assert why == "the fork server could not be started: Too many open files"
        assert descriptors(driver) == before
        fork_order(driver, 0)
        assert outcome(driver, 0) == [Spawned, Exited]


def test_a_starters_command_that_did_not_come_is_told(driver):
    driver.supervisor._send_message({"op": "prepare"})
    assert "Too many open files" in driver.wait(ForkServerStatus, None).why
    driver.start(0, ("/bin/true",))
    assert driver.wait(Exited).status == 0


def test_killing_without_a_descriptor_passes_over_what_has_ended(monkeypatch):
    def refuse(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    gone, there = (subprocess.Popen(["/bin/sleep", "600"]) for _ in range(2))
    targets = [find_process(gone.pid), find_process(there.pid)]
    gone.kill()
    gone.wait()
    monkeypatch.setattr(os, "pidfd_open", refuse)
    for target in targets:
        kill_process(target)
    assert there.wait(10) == -signal.SIGKILL


def test_start_is_quick_and_small():
    resident = []

    def start() -> float:
        begin = time.monotonic()
        with supervisor_driver() as driver:
            driver.start(0, ("/bin/true",))
            driver.wait(Exited)
            took = time.monotonic() - begin
            status = Path(f"/proc/{driver.supervisor.pid}/status").read_text()
        resident.append(int(status.partition("VmRSS:")[2].split()[0]))
        return took

    assert in_starts(start, 12) < 12
    assert max(resident) < 25_000  # KiB
