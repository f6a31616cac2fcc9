"""A look into a job that runs: stacks and traces of its workers here, output from now on."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.e2e.conftest import Shell, free_port

LOOP = """
import os, time
{imports}
import pdrun
def wait_for_the_end():
    for step in range(3000):
        pdrun.progress(step)
        print("at", step, flush=True)
        time.sleep(0.1)
        if os.path.exists("stop"):
            return
wait_for_the_end()
"""


def launch(shell: Shell, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pdrun", *words],
        cwd=shell.folder,
        env=shell.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(shell: Shell, *options: str, imports: str = "") -> subprocess.Popen[str]:
    (shell.folder / "loop.py").write_text(LOOP.format(imports=imports))
    job = launch(shell, *options, "loop.py")
    assert job.stdout is not None
    ranks: set[str] = set()
    while len(ranks) < 2:
        line = job.stdout.readline()
        assert line, "the job has ended"
        if "| at " in line:
            ranks.add(line.partition("|")[0])
    return job


def ask(shell: Shell, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdrun", *words],
        cwd=shell.folder,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def end(shell: Shell, job: subprocess.Popen[str]) -> None:
    (shell.folder / "stop").touch()
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out


def test_stacks_and_output(shell: Shell) -> None:
    job = start(shell, "--nodes", "2", "--devices", "1", "--local", "--start", "exec")
    found = ask(shell, "attach", "--stacks")
    assert found.returncode == 0, found.stderr
    assert "(0):" in found.stdout and "(1):" in found.stdout
    assert found.stdout.count("wait_for_the_end") == 2
    assert "(0)" not in ask(shell, "attach", "loop:1", "--stacks").stdout
    wrong = ask(shell, "attach", ":7", "--stacks")
    assert wrong.returncode == 2 and "with these ranks" in wrong.stderr
    failed = ask(shell, "trace", "--steps", "2", "--timeout", "30s")
    assert failed.returncode == 124 and "does not use torch" in failed.stderr
    end(shell, job)
    assert ask(shell, "attach").returncode == 2


@pytest.mark.torch
@pytest.mark.thorough
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_trace(shell: Shell, how: str) -> None:
    job = start(shell, "--devices", "2", "--start", how, imports="import torch")
    begin = time.monotonic()
    done = ask(shell, "trace", "loop", "--steps", "3", "-o", "t.json")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 60
    events = json.loads((shell.folder / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert {"rank 0", "rank 1"} <= names
    end(shell, job)


BREAK = """
import os
import pdrun
number = 41 + int(os.environ["RANK"])
pdrun.breakpoint(rank=1)
print("went on", number, flush=True)
"""


def start_debugged(shell: Shell) -> subprocess.Popen[str]:
    (shell.folder / "stop.py").write_text(BREAK)
    options = ("--devices", "2", "--start", "exec", "--hang-timeout", "2s")
    job = launch(shell, *options, "stop.py")
    assert job.stdout is not None
    while "rank 1 waits at" not in (line := job.stdout.readline()):
        assert line, "the job has ended"
    assert ":1 --debug" in line
    return job


def test_a_breakpoint_at_one_rank(shell: Shell) -> None:
    job = start_debugged(shell)

    def type_lines(text: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pdrun", "attach", "stop:1", "--debug"],
            cwd=shell.folder,
            env=shell.env,
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "detached from rank 1" in done.stderr
        return done.stdout

    assert "42" in type_lines("p number\n")  # the end of the input detaches
    assert ask(shell, "attach", "stop:0", "--debug").returncode == 2
    time.sleep(3.0)  # longer than the hang timeout: who waits for a person does not hang
    assert job.poll() is None
    type_lines("number = 99\nc\n")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out
    assert "went on 41" in out and "went on 99" in out


def test_quitting_ends_the_job(shell: Shell) -> None:
    job = start_debugged(shell)
    subprocess.run(
        [sys.executable, "-m", "pdrun", "attach", "--debug"],
        cwd=shell.folder,
        env=shell.env,
        input="q\n",
        text=True,
        timeout=60,
    )
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 130, out
    assert "went on" not in out


@pytest.mark.torch
@pytest.mark.thorough  # tests/launcher/jobs/views/test_trace.py has the parts
def test_a_trace_of_two_hosts(shell: Shell) -> None:
    """The second agent has another TMPDIR: as on another host, its workers are found there only."""
    scheduler = f"127.0.0.1:{free_port()}"
    there = shell.folder / "there"
    there.mkdir()
    (shell.folder / "traced.py").write_text(LOOP.format(imports="import torch"))
    jobs = []
    for rank, env in ((0, {}), (1, {"TMPDIR": str(there), "XDG_RUNTIME_DIR": str(there)})):
        command = [sys.executable, "-m", "pdrun", "--nodes", "2", "--devices", "1"]
        command += ["--scheduler", scheduler, "--node-rank", str(rank), "--node-name", f"n{rank}"]
        jobs.append(
            subprocess.Popen(
                [*command, "traced.py"],
                cwd=shell.folder,
                env={**shell.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    connect = f"env TMPDIR={there} XDG_RUNTIME_DIR={there} NODE={{node}}"
    try:
        assert jobs[0].stdout is not None
        while "at 1" not in (line := jobs[0].stdout.readline()):
            assert line, "the job has ended"
        done = ask(shell, "trace", "traced", "--steps", "2", "-o", "t.json", "--connect", connect)
    finally:
        (shell.folder / "stop").touch()
        texts = [job.communicate(timeout=60)[0] for job in jobs]
    assert done.returncode == 0, done.stderr
    assert "trace of 2 of 2 ranks" in done.stderr
    events = json.loads((shell.folder / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert {"rank 0", "rank 1"} <= names
    assert [job.returncode for job in jobs] == [0, 0], texts
