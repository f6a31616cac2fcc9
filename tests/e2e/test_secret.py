"""
PDRUN_TOKEN: one secret for all that a command does, and for none of the processes that it starts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from pdrun.rendezvous.protocol.security import Secret, format_token
from tests.e2e.conftest import Shell, free_port

TOKEN = format_token(Secret(b"s" * 32))
WAITS = (
    "import os, time\n"
    "open(f'{os.environ[\"RANK\"]}.up', 'w').close()\n"
    "while not os.path.exists('go'): time.sleep(0.02)\n"
)
SSH = '#!/bin/sh\nenv > ssh.env\nfor last; do :; done\nexec sh -c "$last"\n'


@pytest.fixture
def waits(shell: Shell) -> str:
    """A script that runs until there is a file ``go``."""
    return shell.script(WAITS)


def up(shell: Shell, ranks: int) -> None:
    deadline = time.monotonic() + 40
    while not all((shell.folder / f"{rank}.up").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline, "the workers did not start" + "".join(
            job.err for job in shell.jobs
        )
        time.sleep(0.02)


def with_the_token(pid: int) -> tuple[list[str], int]:
    """
    Command lines of the descendants of a process in whose environment the token is; how many were
    looked at.
    """
    found, seen = [], 0
    for process in psutil.Process(pid).children(recursive=True):
        try:
            environ, words = Path(f"/proc/{process.pid}/environ").read_bytes(), process.cmdline()
        except (OSError, psutil.NoSuchProcess):
            continue
        seen += 1
        if TOKEN.encode() in environ:
            found.append(" ".join(words)[:200])
    return found, seen


def test_two_nodes_on_one_host_with_the_same_command_have_one_secret(
    shell: Shell, waits: str
) -> None:
    where = f"127.0.0.1:{free_port()}"
    words = ("--nodes", "2", "--devices", "1", "--scheduler", where, waits)
    first = shell.start("--node-name", "a", *words, env={"PDRUN_TOKEN": TOKEN})
    first.expect("1 of 2 nodes have joined")
    second = shell.start("--node-name", "b", *words, env={"PDRUN_TOKEN": TOKEN})
    up(shell, 2)
    for job in (first, second):
        found, seen = with_the_token(job.process.pid)
        assert seen >= 2 and not found
    (shell.folder / "go").touch()
    assert [first.wait(30), second.wait(30)] == [0, 0], first.err + second.err
    assert "joining the scheduler there" in second.err


@pytest.mark.parametrize(
    "words",
    [
        ("--devices", "2"),
        ("--nodes", "2", "--devices", "1", "--local"),
        ("--nodes", "1:2", "--devices", "1", "--local"),
    ],
)
def test_no_process_of_a_job_has_the_token(
    shell: Shell, waits: str, words: tuple[str, ...]
) -> None:
    job = shell.start(*words, waits, env={"PDRUN_TOKEN": TOKEN})
    up(shell, 2)
    found, seen = with_the_token(job.process.pid)
    assert seen >= 3 and not found
    (shell.folder / "go").touch()
    assert job.wait(30) == 0, job.err


def test_ssh_does_not_have_the_token(shell: Shell, waits: str) -> None:
    ssh = shell.folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    job = shell.start(
        "--hosts",
        "192.0.2.1",
        "--ssh",
        str(ssh),
        "--python",
        sys.executable,
        "--devices",
        "1",
        waits,
        env={"PDRUN_TOKEN": TOKEN},
    )
    up(shell, 1)
    found, seen = with_the_token(job.process.pid)
    assert seen >= 3 and not found
    told = (shell.folder / "ssh.env").read_text()
    assert "PATH=" in told and "PDRUN_TOKEN" not in told
    (shell.folder / "go").touch()
    assert job.wait(30) == 0, job.err


def test_a_job_of_a_function_does_not_have_the_token(shell: Shell) -> None:
    shell.script(
        "import os, pdrun, psutil\n"
        "def work():\n"
        "    found = [psutil.Process(), *psutil.Process().parents()]\n"
        "    mine = found[:[one.pid for one in found].index(int(os.environ['CALLER']))]\n"
        "    return [one.cmdline() for one in mine if 'PDRUN_TOKEN' in one.environ()], len(mine)\n"
        "if __name__ == '__main__':\n"
        "    os.environ['CALLER'] = str(os.getpid())\n"
        "    print(pdrun.launch(work, quiet=True)[0], 'PDRUN_TOKEN' in os.environ)\n"
    )
    call = shell.start_process([sys.executable, "work.py"], env={"PDRUN_TOKEN": TOKEN})
    assert call.wait(60) == 0, call.err
    assert call.out.startswith("([], ") and call.out.endswith(" True\n"), call.out


def test_only_those_tools_have_the_token_that_hand_it_on(shell: Shell) -> None:
    tools = shell.folder / "tools"
    tools.mkdir()
    for name, answer in (("mpirun", "echo 'mpirun (Open MPI) 4.1.4'"), ("sbatch", "echo 12")):
        (tools / name).write_text(f"#!/bin/sh\nenv > {shell.folder}/{name}.env\n{answer}\n")
        (tools / name).chmod(0o755)
    env = {"PDRUN_TOKEN": TOKEN, "PATH": f"{tools}:{os.environ['PATH']}"}
    script = shell.script("")
    code, out, err = shell.run("env", env=env)
    assert code == 0 and "PDRUN_TOKEN=(hidden)" in out, out + err
    code, _, err = shell.run("slurm", "submit", "--nodes", "2", script, env=env)
    assert code == 0, err
    assert f"PDRUN_TOKEN={TOKEN}" in (shell.folder / "sbatch.env").read_text()
    code, out, err = shell.run("mpirun", "render", "--hosts", "h1,h2", script, env=env)
    assert code == 0 and "-x PDRUN_TOKEN" in out, out + err
    assert "PDRUN_TOKEN" not in (shell.folder / "mpirun.env").read_text(), (
        "it was only asked for its version"
    )
