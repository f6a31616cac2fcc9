"""
The edges of a run: signals and deaths before the job and after the verdict, closed descriptors, too
few of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.conftest import Job, Shell, gone_within, until
from tests.lib.tiers import by_tier, thorough

LOCAL = ("--nodes", "2", "--devices", "1", "--local")
HI = "print('hi')\n"
WAIT = "import time\nprint('up', flush=True)\ntime.sleep(60)\n"


def agents(front: int) -> list[int]:
    """Pids of the agents that a front has started so far, oldest first."""
    found = []
    for pid in _children(front):
        try:
            if b"agent_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            pass
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def in_shell(shell: Shell, command: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which ``pdrun`` is the command."""
    text = f'pdrun() {{ "{sys.executable}" -m pdrun "$@"; }}\n{command}'
    return subprocess.run(
        ["bash", "-c", text],
        cwd=shell.folder,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


# Before the job
# ------------------------------------------------------------------------------------------------


DELAYS = (0.0, 0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize(
    ("delay", "which"),
    [
        *((delay, place % 2) for place, delay in enumerate(DELAYS)),
        *(thorough(delay, 1 - place % 2) for place, delay in enumerate(DELAYS)),
    ],
)
def test_an_agent_killed_during_the_start_ends_the_job_soon(
    shell: Shell, which: int, delay: float
) -> None:
    job = shell.start(*LOCAL, shell.script(WAIT))
    until(lambda: len(agents(job.process.pid)) == 2, "two agents")
    time.sleep(delay)  # the moment is what is tested
    pids = agents(job.process.pid)
    os.kill(pids[which], signal.SIGKILL)
    start = time.monotonic()
    assert job.wait(20) in (137, 69)
    assert time.monotonic() - start < 5
    assert f"the agent of node{which} was killed by SIGKILL" in job.err
    assert "Traceback" not in job.err
    gone_within(pids, 5.0)


def _begun(job: Job) -> bool:
    """Whether the process has come so far that it answers signals itself: it has taken SIGTERM."""
    try:
        status = Path(f"/proc/{job.process.pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("number", "nodes"),
    [
        *((signal.SIGINT, LOCAL), (signal.SIGTERM, ()), (signal.SIGQUIT, LOCAL)),
        *(thorough(signal.SIGINT, ()), thorough(signal.SIGTERM, LOCAL)),
        thorough(signal.SIGQUIT, ()),
    ],
)
def test_a_stop_at_any_moment_of_the_start_has_its_code_and_no_traceback(
    shell: Shell, nodes: tuple[str, ...], number: int
) -> None:
    name = shell.script(
        "import signal, time\nfor n in (2, 3, 15): signal.signal(n,"
        " signal.SIG_DFL)\ntime.sleep(60)\n"
    )
    for delay in by_tier((0.0, 0.05, 0.2, 0.5), (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)):
        job = shell.start(*nodes, name)
        until(lambda job=job: _begun(job), "handlers")
        time.sleep(delay)  # the moment is what is tested
        pids = agents(job.process.pid)
        job.signal(number)
        assert job.wait(20) == 128 + number, (delay, job.err)
        assert "pdrun/" not in job.err and "launcher/" not in job.err, (delay, job.err)
        gone_within(pids, 5.0)


# Stopping and leaving
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGQUIT, "SIGQUIT"), (signal.SIGINT, "SIGINT")]
)
def test_the_front_stops_with_grace(shell: Shell, number: int, name: str) -> None:
    saving = f"""
import signal, sys, time
def stop(number, frame):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(0)
signal.signal({int(number)}, stop)
print("up", flush=True)
while True: time.sleep(0.05)
"""
    job = shell.start(*LOCAL, shell.script(saving))
    job.expect("up$", count=2)
    job.signal(number)
    assert job.wait(20) == 128 + number
    assert job.out.count("saved") == 2
    assert "stopped after" in job.err and name in job.err


@pytest.mark.parametrize(
    ("number", "nodes"),
    [
        *((signal.SIGINT, LOCAL), (signal.SIGTERM, ())),
        *(thorough(signal.SIGINT, ()), thorough(signal.SIGTERM, LOCAL)),
    ],
)
def test_any_number_of_signals_until_the_very_exit_leaves_the_code(
    shell: Shell, nodes: tuple[str, ...], number: int
) -> None:
    job = shell.start(*nodes, shell.script(WAIT))
    job.expect("up$", count=2 if nodes else 1)
    deadline = time.monotonic() + 30
    while job.process.poll() is None and time.monotonic() < deadline:
        job.signal(number)
        time.sleep(0.005)
    assert job.wait(1) == 128 + number
    assert "has died" not in job.err


# Descriptors
# ------------------------------------------------------------------------------------------------


CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
NODES = "--nodes 2 --devices 1 --local"


@pytest.mark.parametrize(
    ("args", "closed"),
    [
        *product(("--devices 2", "--dry-run"), CLOSED),
        (NODES, CLOSED[-1]),
        *(thorough(NODES, closed) for closed in CLOSED[:-1]),
    ],
)
def test_standard_streams_may_be_closed(shell: Shell, args: str, closed: str) -> None:
    done = in_shell(shell, f"pdrun {args} {shell.script(HI)} {closed}")
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    if ">&-" not in closed.split() and "dry" not in args:
        assert done.stdout.count("hi") == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "args", ["--help", "--version", "--dry-run work.py", "--dry-run --json work.py"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout_is_one_line(shell: Shell, args: str, unbuffered: str) -> None:
    shell.script(HI)
    done = in_shell(shell, f"export PYTHONUNBUFFERED={unbuffered}\npdrun {args} > /dev/full")
    assert done.returncode == 74
    assert (
        done.stderr
        == "pdrun: error: the output could not be written: No space left on device (ENOSPC)\n"
    )


@pytest.mark.root
@pytest.mark.parametrize(
    ("limit", "args"), [(1, ""), (3, ""), (5, ""), (7, ""), (4, "--nodes 2 --local")]
)
def test_a_limit_of_processes_is_one_clear_error(shell: Shell, limit: int, args: str) -> None:
    """
    Wherever it bites: a thread, the keeper, a worker. Root has no such limit, so another user takes
    its place.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv (util-linux)")
    caps = "+dac_override,+dac_read_search"  # the interpreter may lie below /root
    user = (
        f"setpriv --reuid 54321 --regid 54321 --clear-groups --inh-caps {caps} --ambient-caps"
        f" {caps}"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 54321, 54321)
        Path(folder, "work.py").write_text(HI)
        home = (
            f"cd {folder}; export HOME={folder} TMPDIR={folder}; unset XDG_CONFIG_HOME"
            " XDG_STATE_HOME"
        )
        limited = f"exec {user} prlimit --nproc={limit}"
        done = in_shell(
            shell, f"{home}; {limited} {sys.executable} -m pdrun --start exec {args} work.py"
        )
    assert done.returncode in (78, 126), done.stderr
    assert "a bug of pdrun" not in done.stderr and "Traceback" not in done.stderr
    assert "ulimit -u" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("limit", "args"),
    [
        (16, "--devices 4"),
        (20, "--devices 4"),
        (64, "--devices 60"),
        (24, "--nodes 3 --devices 2 --local"),
        (32, "--nodes 3 --devices 2 --local"),
    ],
)
def test_too_few_descriptors_is_one_line(shell: Shell, limit: int, args: str) -> None:
    shell.script(HI)
    done = in_shell(shell, f"ulimit -n {limit}; pdrun {args} work.py")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert f"RLIMIT_NOFILE: the limit of open files is {limit}, but a node with" in done.stderr
    assert "ulimit -n" in done.stderr


@pytest.mark.parametrize(
    ("imports", "args"),
    [
        ("", "--devices 4"),
        ("", "--nodes 2 --devices 2 --local"),
        pytest.param("import torch\n", "--devices 4", marks=pytest.mark.torch),
        thorough("import torch\n", "--nodes 2 --devices 2 --local"),
    ],
)
def test_the_limit_that_is_said_to_do_does(shell: Shell, args: str, imports: str) -> None:
    if imports:
        pytest.importorskip("torch")
    shell.script(imports + HI)
    refused = in_shell(shell, f"ulimit -n 16; pdrun {args} work.py")
    needed = int(refused.stderr.partition("needs about ")[2].partition(";")[0])
    done = in_shell(shell, f"ulimit -n {needed}; pdrun {args} work.py")
    assert (done.returncode, done.stdout.count("hi")) == (0, 4), done.stderr


@pytest.mark.parametrize("args", ["--devices 2", "--nodes 2 --devices 1 --local"])
def test_workers_have_the_users_limit_whatever_pdrun_needs(shell: Shell, args: str) -> None:
    script = shell.script("import resource\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    done = in_shell(shell, f"ulimit -Sn 24; ulimit -Hn 4096; pdrun {args} {script}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("24 4096") == 2


def test_workers_beyond_the_cores_see_every_cpu(shell: Shell) -> None:
    """Their libraries count CPUs as without a launcher, a DataLoader among them."""
    cpus = len(os.sched_getaffinity(0))
    (shell.folder / "cpus.py").write_text(
        "import os; print('cpus', len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
    )
    environ = {name: value for name, value in shell.env.items() if name != "OMP_NUM_THREADS"}
    shell.env = environ
    code, out, err = shell.run("--devices", str(min(2 * cpus, cpus + 4)), "cpus.py")
    assert code == 0, err
    assert {line.partition("| ")[2] for line in out.splitlines()} == {f"cpus {cpus} 1"}
