"""The truth about failure: codes, causes, peers, and nothing left behind."""

from __future__ import annotations

import signal
import time

import pytest

from tests.e2e.conftest import Shell, free_port, gone_within, until
from tests.lib.tiers import thorough

FAILING = """
import os, signal, sys, time
open("pids", "a").write(f"{os.getpid()}\\n")
rank = int(os.environ["RANK"])
def inner():
    raise ValueError("boom from rank 1")
if rank == 1:
    time.sleep(0.3)
    how = sys.argv[1]
    open("when", "w").write(repr(time.monotonic()))
    if how == "exit": sys.exit(42)
    if how == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise": inner()
def told(*_):
    open(f"told{rank}", "w").write(repr(time.monotonic()))
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
time.sleep(60)
"""

CASES = [
    ("exit", 42, "exit code 42"),
    ("segv", 139, "SIGSEGV"),
    ("kill", 137, "SIGKILL"),
    ("raise", 1, "boom from rank 1"),
]


@pytest.mark.parametrize(
    ("how", "code", "words"), [*(thorough(*case) for case in CASES[:2]), *CASES[2:]]
)
def test_the_workers_own_code_on_two_simulated_nodes(
    shell: Shell, how: str, code: int, words: str
) -> None:
    script = shell.script(FAILING)
    found, _, err = shell.run("--nodes", "2", "--devices", "2", "--local", script, how, timeout=40)
    assert found == code, err
    assert words in err and "rank 1" in err and "node0" in err
    told = [float((shell.folder / f"told{rank}").read_text()) for rank in (0, 2, 3)]
    failed = float((shell.folder / "when").read_text())
    assert max(told) - failed < 5, "a second on a quiet machine; silence takes ten"
    gone_within(shell.pids("pids"), 4.0)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [CASES[0], *(thorough(*case) for case in CASES[1:])],
)
def test_the_same_code_on_every_node_started_by_hand(
    shell: Shell, how: str, code: int, words: str
) -> None:
    script = shell.script(FAILING)
    where = f"127.0.0.1:{free_port()}"
    both = [
        shell.start(
            "--nodes",
            "2",
            "--devices",
            "2",
            "--scheduler",
            where,
            "--node-rank",
            str(rank),
            "--node-name",
            f"host{rank}",
            script,
            how,
        )
        for rank in (0, 1)
    ]
    assert [job.wait(40) for job in both] == [code, code], both[0].err + both[1].err
    for job in both:
        assert words in job.err and "rank 1" in job.err and "host0" in job.err


def test_the_users_traceback_without_decorator_or_launcher_frames(shell: Shell) -> None:
    script = shell.script(FAILING)
    code, _, err = shell.run("--devices", "2", script, "raise")
    assert code == 1
    summary = err[err.index("pdrun: job failed after ") :]
    assert "in inner" in summary and 'raise ValueError("boom from rank 1")' in summary
    for ours in ("launcher/", "runpy", "pdrun/agent", "keeper"):
        assert ours not in summary


def test_kubernetes_reads_the_first_cause(shell: Shell) -> None:
    log = shell.folder / "termination-log"
    env = {"PDRUN_TERMINATION_LOG": str(log)}
    script = shell.script(FAILING)
    local = ("--nodes", "2", "--devices", "1", "--local")
    assert shell.run(*local, script, "exit", env=env)[0] == 42
    text = log.read_text()
    assert "rank 1" in text and "exit code 42" in text
    assert shell.run("--no-python", "true", env=env)[0] == 0
    assert log.read_text() == text  # a job that is done has no cause
    assert shell.run("--nodes", "0", script, env=env)[0] == 2
    assert log.read_text().startswith("pdrun: error: --nodes: ")


def test_a_node_whose_agent_is_killed_leaves_nothing_and_the_others_are_told(shell: Shell) -> None:
    script = shell.script(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "open('pids' + os.environ['GROUP_RANK'], 'a').write(f'{os.getpid()}\\n{child.pid}\\n')\n"
        "time.sleep(300)\n"
    )
    where = f"127.0.0.1:{free_port()}"
    first, second = (
        shell.start(
            "--nodes",
            "2",
            "--devices",
            "2",
            "--grace",
            "2",
            "--scheduler",
            where,
            "--node-rank",
            str(rank),
            "--node-name",
            f"host{rank}",
            script,
        )
        for rank in (0, 1)
    )
    until(
        lambda: len(shell.pids("pids0")) == 4 and len(shell.pids("pids1")) == 4,
        "all workers started",
    )
    killed = second.signal(signal.SIGKILL)
    gone_within(shell.pids("pids1"), 4.0)
    assert first.wait(20) == 69
    assert time.monotonic() - killed < 8
    assert "host1" in first.err and "lost" in first.err
    gone_within(shell.pids("pids0"), 4.0)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_launcher_leaves_nothing(shell: Shell, nodes: int) -> None:
    script = shell.script(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "open('pids', 'a').write(f'{os.getpid()}\\n{child.pid}\\n')\n"
        "time.sleep(300)\n"
    )
    job = shell.start("--nodes", str(nodes), "--devices", "2", "--local", script)
    until(lambda: len(shell.pids("pids")) == 4 * nodes, "all workers started")
    job.signal(signal.SIGKILL)
    gone_within(shell.pids("pids"), 4.0)


def test_restarts_are_counted_for_the_whole_job(shell: Shell) -> None:
    script = shell.script(
        "import os, sys, time\n"
        "count, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "print('attempt', count, 'of', rank, flush=True)\n"
        "open(f'seen-{count}-{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'seen-{count}-{other}') for other in range(4)): time.sleep(0.01)\n"
        "sys.exit(3 if rank == '3' and count != '2' else 0)\n"
    )
    code, out, err = shell.run(
        "--nodes", "2", "--devices", "2", "--local", "--max-restarts", "2", script
    )
    assert code == 0, err
    for count in range(3):
        assert [out.count(f"attempt {count} of {rank}") for rank in range(4)] == [1, 1, 1, 1]


def test_hopeless_failures_are_not_tried_again(shell: Shell) -> None:
    code, out, err = shell.run("--devices", "2", "--max-restarts", "3", "missing.py")
    assert (code, out) == (2, "") and "missing.py" in err
    script = shell.script("def broken(:\n")
    code, _, err = shell.run("--devices", "2", "--max-restarts", "3", script)
    assert code == 1 and "SyntaxError" in err
    (log,) = (shell.folder / "pdrun-logs").glob("*/events.jsonl")
    assert log.read_text().count('"kind": "assigned"') == 1
