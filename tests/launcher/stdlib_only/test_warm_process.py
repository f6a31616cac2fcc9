"""
The warm process by itself: who is answered, what is borrowed, what a job leaves, and when it ends.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, PdrunError
from pdrun.launcher.plan.start_method import why_unusable
from pdrun.launcher.stdlib_only import inherited_state
from pdrun.launcher.supervisor import warm_client, warm_start
from pdrun.launcher.supervisor.events import (
    Exited,
    ForkServerStatus,
    Spawned,
    WarmProcess,
    WorkersFenced,
)
from pdrun.rendezvous.transport.zmq_util import wait_readable
from tests.launcher.stdlib_only.conftest import Bench, plain_environment, said, warm_process
from tests.launcher.stdlib_only.test_fork_hazards import SLEEPER, pids
from tests.lib.supervisor_driver import is_alive, supervisor_driver, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "pdrun"


@pytest.fixture
def light(folder: Path) -> Iterator[WarmProcess]:
    """One that has imported next to nothing."""
    with warm_process(folder, plain_environment(), ("random",)) as found:
        yield found


@contextlib.contextmanager
def borrowed(found: WarmProcess) -> Iterator[Bench]:
    """A bench on a keeper that was forked from a warm process."""
    with supervisor_driver(warm_client.borrow_supervisor(found.socket)) as driver:
        assert driver.wait(ForkServerStatus, None, 20).why == ""
        yield Bench(driver)


def connection(found: WarmProcess) -> socket.socket:
    with warm_client.open_private_dir(Path(found.socket).parent) as number:
        return warm_client.connect_to(number, Path(found.socket).name)


def sleepers(bench: Bench, script: Path, count: int = 1) -> list[int]:
    """
    Workers with a forked and an executed descendant each, in sessions of their own; returns all
    pids.
    """
    script.write_text(SLEEPER)
    null = os.open(os.devnull, os.O_RDWR)
    for _ in range(count):
        bench.start((sys.executable, str(script)), null, null, cwd=str(script.parent))
    os.close(null)
    return pids(script.parent, 3 * count)


# Who is answered
# ------------------------------------------------------------------------------------------------


HOSTILE = (
    b"",
    b"\0",
    b"{",
    b"[]",
    b"1",
    b"null",
    b'{"ask": 7}',
    b'{"ask": "hell"}',
    b'{"ask": "keeper"}',
    b"[" * 60000,
    b'{"ask": "keeper", "inherited": []}',
    b'{"ask": "keeper", "inherited": {}}',
    b"x" * 120000,
    b'{"ask": ["stop"]}',
    b'{"ask": "keeper", "inherited": {"umask": "x", "limits": 5}}',
    b"\xff" * 100,
)


def test_hostile_bytes_end_a_connection_and_nothing_else(light: WarmProcess, folder: Path) -> None:
    silent = [connection(light) for _ in range(10)]
    for data in HOSTILE:
        with connection(light) as client:
            client.sendmsg(
                [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
            )
            client.settimeout(10)
            answer = client.recv(1 << 17)
            assert not answer or "refused" in json.loads(answer), data
    for client in silent:
        client.close()
    with connection(light) as client:
        client.send(b'{"ask": "hello"}')  # gone before the answer
    wait_until(lambda: said(folder).running_jobs == 0, 10, "the end of what began nevertheless")
    assert said(folder).pid == light.pid
    held = sorted(os.listdir(f"/proc/{light.pid}/fd"), key=int)
    assert len(held) <= 5, held  # three streams, the listener, and what `said` has just left


def test_more_connections_than_it_takes_are_closed_at_once(
    light: WarmProcess, folder: Path
) -> None:
    many = []
    with contextlib.suppress(OSError):
        for _ in range(200):
            many.append(connection(light))
    for client in many:
        client.close()
    wait_until(
        lambda: warm_client.WarmScan({"XDG_RUNTIME_DIR": str(folder.parent)}).collect_answers(),
        10,
        "an answer",
    )
    assert said(folder).pid == light.pid


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_another_user_is_not_answered_and_not_asked(light: WarmProcess, folder: Path) -> None:
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    Path(light.socket).chmod(0o666)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.seteuid(65534)
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            os.chdir(folder)
            client.connect(Path(light.socket).name)
            client.settimeout(10)
            with contextlib.suppress(BrokenPipeError):
                client.send(b'{"ask": "hello"}')
            os.write(write, b"[" + client.recv(1 << 17) + b"]")
        except ConnectionResetError:
            os.write(write, b"[]")
        finally:
            os._exit(0)
    os.wait()
    assert os.read(read, 99) == b"[]"
    os.close(read), os.close(write)
    with (
        pytest.raises(ConfigError, match="accessible to other users"),
        warm_client.open_private_dir(folder),
    ):
        pass
    folder.chmod(0o700)
    with warm_client.open_private_dir(
        folder
    ) as number:  # and the other way round: a socket that another user serves
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"/proc/self/fd/{number}/theirs.sock")
            os.seteuid(65534)
            listener.listen()
            os.seteuid(0)
            with pytest.raises(PermissionError, match="belongs to user 65534"):
                warm_client.connect_to(number, "theirs.sock")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "pdrun").symlink_to("real")
    with pytest.raises(OSError), warm_client.open_private_dir(tmp_path / "pdrun"):
        pass


# What is borrowed
# ------------------------------------------------------------------------------------------------


def test_jobs_at_once_do_not_see_each_other(light: WarmProcess, folder: Path, script: Path) -> None:
    """
    Environment, descriptors and memory: of a neighbour's, of the warm process's, of one before.
    """
    script.write_text(
        "import os\nprint(sorted(os.environ), sorted(int(n) for n in"
        " os.listdir('/proc/self/fd')))\n"
    )
    secret = os.urandom(12).hex()
    with contextlib.ExitStack() as stack:
        benches = [stack.enter_context(borrowed(light)) for _ in range(8)]
        assert said(folder).running_jobs == 8
        for number, bench in enumerate(benches):
            ended = bench.run(str(script), env={f"MINE{number}": secret})
            names = sorted({*bench.env, f"MINE{number}", "PDRUN_WORKER_OF"})
            assert ended.out == f"{names} [0, 1, 2, 3]\n", ended.err  # 3: listdir's own
        for path in Path("/proc").glob(f"{light.pid}/environ"):
            assert secret.encode() not in path.read_bytes()
        assert not _in_memory(light.pid, secret.encode())
    wait_until(lambda: said(folder).running_jobs == 0, 10, "the end of all jobs")
    assert said(folder).served_jobs == 8


def _in_memory(pid: int, word: bytes) -> bool:
    """Whether a process holds a word anywhere that it can write."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, mode, *_ = line.split()
            if mode.startswith("rw"):
                first, last = (int(part, 16) for part in area.split("-"))
                memory.seek(first)
                with contextlib.suppress(OSError):
                    if word in memory.read(last - first):
                        return True
    return False


def test_descriptors_of_whoever_started_it_are_closed(folder: Path) -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(number, True)
    os.dup2(number, 99)
    with warm_process(folder, plain_environment(), ("random",)) as found:
        assert "99" not in os.listdir(f"/proc/{found.pid}/fd")
    os.close(number), os.close(99)


def test_what_was_inherited_is_taken_on_or_refused(light: WarmProcess, script: Path) -> None:
    script.write_text("""
import json, os, resource
status = dict(l.split(':', 1) for l in open('/proc/self/status') if ':' in l)
print(json.dumps([status['Umask'], int(status['SigIgn'], 16) & ~(3 << 31), os.getpriority(0, 0), sorted(os.sched_getaffinity(0)),
  resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_STACK), open('/proc/self/oom_score_adj').read(), os.sched_getscheduler(0)]))
""")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.umask(0o31)
            os.nice(3)
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (4096, 8192))
            resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, 1 << 24))
            Path("/proc/self/oom_score_adj").write_text("77")
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            with borrowed(light) as bench:
                outs = [bench.run(str(script), start=start) for start in ("fork", "exec")]
            with supervisor_driver() as driver:
                outs.append(Bench(driver).run(str(script), start="exec"))
            os.write(write, json.dumps([ended.out or ended.err for ended in outs]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        forked, executed, cold = json.load(file)
    os.waitpid(child, 0)
    assert forked == executed == cold
    assert json.loads(forked)[0].strip() == "0031" and json.loads(forked)[2] == min(
        os.getpriority(0, 0) + 3, 19
    )

    def refused(**changes: object) -> str:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError) as caught:
            real = inherited_state.read_state()
            patch.setattr(inherited_state, "read_state", lambda: {**real, **changes})
            warm_client.borrow_supervisor(light.socket)
        return caught.value.strerror or ""

    assert "namespace net of the agent cannot" in refused(**{"namespace net": "net:[1]"})
    assert "cgroup of the agent cannot" in refused(cgroup="0::/elsewhere\n")
    assert "CapEff of the agent cannot" in refused(CapEff="0")
    assert "cpus of the agent cannot" in refused(cpus=[4000])
    assert "limits of the agent cannot" in refused(limits={"RLIMIT_NOFILE": [1 << 40, 1 << 40]})


# What ends when
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_too", [False, True])
@pytest.mark.parametrize("how", ["agent", "keeper"])
def test_nothing_outlives_a_killed_agent_or_keeper(
    light: WarmProcess, script: Path, how: str, warm_too: bool
) -> None:
    with borrowed(light) as bench:
        started = sleepers(bench, script, 2)
        if warm_too:
            os.kill(light.pid, signal.SIGKILL)
        if how == "agent":
            bench.driver.supervisor._socket.close()  # type: ignore[union-attr]
            bench.driver.supervisor._socket = None
        else:
            os.kill(bench.driver.supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)), 5.0, "everything gone")
        if how == "keeper":
            with pytest.raises(PdrunError, match="supervisor process"):
                wait_until(lambda: list(bench.driver.supervisor.read_events()) and False, 5)


@pytest.mark.parametrize("still", ["agent", "agent and keeper"])
def test_a_lent_keeper_ends_its_workers_at_the_fence(
    light: WarmProcess, script: Path, still: str
) -> None:
    with borrowed(light) as bench:
        started = sleepers(bench, script)
        supervisor = bench.driver.supervisor
        list(supervisor.read_events())
        fence = time.monotonic() + 0.6
        supervisor.send_ping(fence)
        if still != "agent":  # its watchdog is left
            assert wait_readable(supervisor.fileno(), wait=5)
            os.kill(supervisor.pid, signal.SIGSTOP)
        wait_until(lambda: not any(map(is_alive, started)), 10.0, "everything gone")
        assert time.monotonic() >= fence
        with pytest.raises(WorkersFenced):
            wait_until(lambda: list(supervisor.read_events()) and False, 5)


def test_what_hides_from_its_mark_is_ended_by_the_warm_process(
    light: WarmProcess, folder: Path, script: Path
) -> None:
    script.write_text("""
import os, subprocess, time
child = subprocess.Popen(['sleep', '300'], start_new_session=True, env={})
open('pids', 'a').write(f'{os.getpid()}\\n{child.pid}\\n')
time.sleep(300)
""")
    with borrowed(light) as bench:
        null = os.open(os.devnull, os.O_RDWR)
        bench.start((sys.executable, str(script)), null, null, cwd=str(script.parent))
        started = pids(script.parent, 2)
        os.kill(bench.driver.supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)), 5.0, "everything gone")
    assert said(folder).running_jobs == 0


def test_a_stopped_keeper_wakes_when_its_agent_is_gone(light: WarmProcess, script: Path) -> None:
    read, write = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            with borrowed(light) as bench:
                started = sleepers(bench, script)
                os.kill(bench.driver.supervisor.pid, signal.SIGSTOP)
                os.write(write, json.dumps(started).encode())
                time.sleep(300)
        finally:
            os._exit(0)
    started = json.loads(os.read(read, 999))
    assert all(map(is_alive, started))
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    wait_until(lambda: not any(map(is_alive, started)), 5.0, "everything gone")
    os.close(read), os.close(write)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_job_goes_on_when_the_warm_process_ends(
    light: WarmProcess, script: Path, how: str
) -> None:
    script.write_text(
        "import os, sys\nprint(os.getppid(), len(sys.stdin.readline()), flush=True)\nsys.exit(7)\n"
    )
    with borrowed(light) as bench:
        read, write = os.pipe()
        out, into = os.pipe()
        slot = bench.start((sys.executable, str(script)), into, into, stdin=read)
        bench.driver.wait(Spawned, slot, 20)
        if how == "stop":
            assert warm_start.stop_warm(light)
        else:
            os.kill(light.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(light.pid), 5)
        os.write(write, b"on\n")
        assert os.waitstatus_to_exitcode(bench.driver.wait(Exited, slot, 20).status) == 7
        assert os.read(out, 99) == f"{bench.driver.supervisor.pid} 3\n".encode()
        assert (
            bench.run(str(script), stdin=os.open(os.devnull, os.O_RDONLY)).code == 7
        )  # its starter is there still
        for number in (read, write, out, into):
            os.close(number)
    with pytest.raises(OSError):
        warm_client.borrow_supervisor(light.socket)


def test_it_ends_when_nobody_has_used_it_and_not_during_a_job(folder: Path, script: Path) -> None:
    script.write_text("input()\n")
    with warm_process(folder, plain_environment(), ("random",), idle=1.5) as found:
        handle = os.pidfd_open(found.pid)
        with borrowed(found) as bench:
            read, write = os.pipe()
            slot = bench.start((sys.executable, str(script)), write, write, stdin=read)
            wait_until(
                lambda: said(folder).unused_seconds > found.idle_seconds,
                20,
                "a job longer than that",
            )  # each question wakes it
            os.write(write, b"\n")
            assert bench.driver.wait(Exited, slot, 20).status == 0
            assert is_alive(found.pid)
            os.close(read)
            os.close(write)
        assert wait_readable(handle, wait=20)
        os.close(handle)
        assert not Path(found.socket).exists()


def test_a_socket_of_a_killed_process_is_replaced(folder: Path, light: WarmProcess) -> None:
    os.kill(light.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(light.pid), 5)
    look = warm_client.WarmScan({"XDG_RUNTIME_DIR": str(folder.parent)})
    assert look.collect_answers() == () and list(look.faults.values()) == [warm_client.DEAD_REASON]
    with warm_process(folder, plain_environment(), ("random",)) as again:
        assert again.pid != light.pid and again.socket == light.socket


def test_what_a_killed_process_has_left_can_be_removed(folder: Path, light: WarmProcess) -> None:
    os.kill(light.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(light.pid), 5)
    assert warm_start.remove_dead(
        warm_client.WarmScan({"XDG_RUNTIME_DIR": str(folder.parent)}), print
    ) == [Path(light.socket).name]
    assert not Path(light.socket).exists()


def test_a_stopped_process_is_called_that(folder: Path, light: WarmProcess) -> None:
    os.kill(light.pid, signal.SIGSTOP)
    try:
        look = warm_client.WarmScan({"XDG_RUNTIME_DIR": str(folder.parent)})
        assert look.collect_answers() == () and warm_start.remove_dead(look, print) == []
        (why,) = look.faults.values()
        assert (
            why.startswith(f"the warm process {light.pid} is stopped")
            and f"kill -CONT {light.pid}" in why
        )
    finally:
        os.kill(light.pid, signal.SIGCONT)


def test_one_that_does_not_answer_is_ended_before_its_name_is_taken(
    folder: Path, light: WarmProcess
) -> None:
    """
    Nothing found it any more: no status, no stop; it held its memory until it had been idle for
    half an hour.
    """
    told: list[str] = []

    def looked() -> warm_client.WarmScan:
        look = warm_client.WarmScan({"XDG_RUNTIME_DIR": str(folder.parent)})
        look.collect_answers()
        warm_start.replace_silent(look, Path(light.socket).name, told.append)
        return look

    assert not looked().faults and not told and is_alive(light.pid)
    os.kill(light.pid, signal.SIGSTOP)
    looked()
    wait_until(lambda: not is_alive(light.pid), 5)
    assert told == [f"replacing the warm process {light.pid}, which does not answer"]
    assert list(looked().faults.values()) == [warm_client.DEAD_REASON] and len(told) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise OSError('no library')", "OSError: no library"),
        ("import os\nos._exit(3)", "ended during the import"),
        (
            (
                "import threading\nthreading.Thread(target=threading.Event().wait,"
                " daemon=True).start()"
            ),
            "left 2 threads",
        ),
    ],
)
def test_what_cannot_be_kept_warm_is_told(
    folder: Path, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "plugin.py").write_text(text + "\n")
    env = {**plain_environment(), "PYTHONPATH": str(tmp_path)}
    with (
        pytest.raises(ConfigError, match=why),
        warm_process(folder, env, ("plugin",)),
    ):  # no fault of pdrun itself
        pass
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_files_and_variables_of_the_import_are_known(folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    module = site / "mine.py"
    module.write_text(
        "import os\nos.environ.get('LOOKED_UP'), 'ALSO' in os.environ, os.getenv('HOME')\n"
    )
    env = {
        **plain_environment(),
        "PYTHONPATH": str(site),
        "ALSO": "1",
        "UNRELATED": "2",
        "OMP_NUM_THREADS": "4",
    }
    with warm_process(folder, env, ("mine",)) as found:
        assert {
            name: found.variables.get(name, "-")
            for name in ("LOOKED_UP", "ALSO", "UNRELATED", "PYTHONPATH")
        } == {"LOOKED_UP": None, "ALSO": "1", "UNRELATED": "-", "PYTHONPATH": str(site)}
        assert found.variables["OMP_NUM_THREADS"] == "1" and not found.depends_on_all
        (site / "train.py").write_text("")  # a program beside it is no reason
        assert said(folder).unfit == ""
        (site / "socket.py").mkdir()  # what would be found first now
        assert said(folder).unfit == f"{site} has changed since"
        (site / "socket.py").rmdir()
        assert said(folder).unfit == ""
        module.write_text(module.read_text() + "\n")
        assert said(folder).unfit == f"{module} has changed since"


WALKS = {
    "tqdm's": ("", "import tqdm.utils", False),
    "items": ("for name, value in os.environ.items(): pass", "", True),
    "a dict": ("dict(os.environ)", "", True),
    "a copy": ("os.environ.copy()", "", True),
    "names": ("[name for name in os.environ if name.startswith('X_')]", "", True),
    "by name": ("os.environ.get('OLDPWD')", "", False),
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_through_the_environment(folder: Path, tmp_path: Path, walk: str) -> None:
    """
    Another terminal has other variables of its own, which nothing asks for by name, and tqdm looks
    for TQDM_ only.
    """
    site = tmp_path / "site"
    (site / "tqdm").mkdir(parents=True)
    (site / "tqdm" / "__init__.py").touch()
    (site / "tqdm" / "utils.py").write_text(
        "import os\n{k: v for k, v in os.environ.items() if k.startswith('TQDM_')}\n"
    )
    text, more, every = WALKS[walk]
    (site / "mine.py").write_text(f"import os\n{more}\n{text}\n")
    env = {**plain_environment(), "PYTHONPATH": str(site), "OLDPWD": "/a", "OTHER": "1"}
    with warm_process(folder, env, ("mine",)) as found:
        assert found.depends_on_all == every

        def why(**changes: str) -> str:
            return why_unusable(found, (sys.executable, "x.py"), ("mine",), "", {**env, **changes})

        assert ("OLDPWD" in why(OLDPWD="/b")) == (walk == "by name")
        assert why(SSH_TTY="/dev/pts/7", SHLVL="9") == ""
        assert ("NEW" in why(NEW="1")) == ("OTHER" in why(OTHER="2")) == every
        assert "TQDM_NCOLS" in why(TQDM_NCOLS="7")


def test_whoever_waits_for_another_start_is_told(tmp_path: Path) -> None:
    said, inside = list[str](), threading.Event()

    def second() -> None:
        with warm_start.locked_dir(tmp_path / "w", said.append):
            inside.set()

    thread = threading.Thread(target=second, daemon=True)
    with warm_start.locked_dir(tmp_path / "w", said.append):
        assert said == []
        thread.start()
        wait_until(lambda: said, what="a word")
        assert (
            "waiting for another pdrun warm" in said[0]
            and str(tmp_path / "w") in said[0]
            and not inside.is_set()
        )
    assert inside.wait(10)
    thread.join(10)


def test_a_folder_for_sockets_is_not_blamed_for_what_is_done_in_it(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), warm_start.locked_dir(tmp_path / "w", print):
        raise BlockingIOError(errno.EAGAIN, "no process is left")
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot contain sockets"),
        warm_start.locked_dir(tmp_path / "file" / "w", print),
    ):
        pass
