"""The agent with real workers: codes, causes, signals, and nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from pdrun.launcher.stdlib_only import process_tree
from tests.lib.supervisor_driver import is_alive, wait_until
from tests.lib.tiers import by_tier, cover_pairs
from tests.lib.timing import compared, in_starts

STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda n, f: say("ignored", n))
note(); say("up")
while True: time.sleep(0.05)
"""
POLITE = """
def stop(n, f):
    say("saved", n); sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, stop)
signal.signal(signal.SIGUSR1, lambda n, f: say("notice", n))
note(); say("up")
while True: time.sleep(0.05)
"""
DETACHING = """
child = os.fork()
if child == 0:
    os.setsid()
    os.closerange(0, 3)
    time.sleep(600)
    os._exit(0)
note(child); note()
"""


def gone(pids: list[int], seconds: float = 3.0) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), seconds, f"the end of {pids}")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("exit 42", 42, "exit code 42"),
        ("kill -SEGV $$", 139, "SIGSEGV (segmentation fault)"),
        ("kill -KILL $$", 137, "SIGKILL, not by pdrun"),
        ("exit 255", 255, "exit code 255"),
        ("exit 0", 0, "job done"),
    ],
)
def test_the_workers_own_code(jobs, command, code, words):
    found, job = jobs.run("/bin/sh", "-c", command, workers=1)
    assert found == code, job.err
    assert words in job.err


def test_others_are_stopped_and_the_summary_tells(jobs):
    code = (
        "note()\nif rank == 1:\n def inner(): raise ValueError('boom')\n"
        " time.sleep(0.2); inner()\ntime.sleep(60)"
    )
    found, job = jobs.run(*jobs.python(code), workers=3)
    assert found == 1
    summary = job.err[job.err.index("pdrun: job failed") :]
    assert (
        "rank 1 on node0" in summary
        and "in inner" in summary
        and "2 other workers were stopped" in summary
    )
    assert "keeper" not in summary and "agent" not in summary
    gone(jobs.pids())


HANDLED = """
import logging, traceback
if rank == 0:
    try: 1 / 0
    except ZeroDivisionError: {how}
    note(); time.sleep(60)
while not os.path.exists("pids"): time.sleep(0.01)
time.sleep({pause})
{end}
"""


CODES = {"os._exit(3)": 3, "os.kill(os.getpid(), 9)": 137, "raise KeyError('own')": 1}
HANDLERS = ["logging.exception('handled')", "traceback.print_exc()"]


@pytest.mark.parametrize(
    "handled", cover_pairs(itertools.product([0, 1.5], CODES, HANDLERS), list), ids=str
)
def test_an_exception_that_was_handled_is_nobody_s_cause(jobs, handled):
    pause, end, how = handled
    code = CODES[end]
    found, job = jobs.run(
        *jobs.python(HANDLED.format(how=how, end=end, pause=pause)), workers=2, grace=1.0
    )
    assert found == code, job.err
    assert "rank 1 on node0 failed" in job.err


def test_one_that_hangs_on_its_way_out_explains_its_victims(jobs):
    code = """
import atexit
if rank == 0:
    atexit.register(time.sleep, 60)
    atexit.register(note)
    raise ValueError("true cause")
while not os.path.exists("pids"): time.sleep(0.01)
raise RuntimeError("Connection closed by peer")
"""
    found, job = jobs.run(*jobs.python(code), workers=2, grace=1.0)
    assert found == 1, job.err
    assert "rank 0 on node0 failed: ValueError: true cause" in job.err


@pytest.mark.parametrize(
    ("content", "mode", "code"),
    [(None, 0, 127), (b"no program\n", 0o755, 126), (b"#!/bin/sh\n", 0o644, 126)],
)
def test_commands_that_cannot_start(jobs, content, mode, code):
    tool = jobs.folder / "tool"
    if content is not None:
        tool.write_bytes(content)
        tool.chmod(mode)
    found, job = jobs.run(str(tool))
    assert found == code, job.err
    assert str(tool)[:30] in job.err  # a long path is cut


def test_a_script_is_loaded_by_an_interpreter_that_is_not_there(jobs):
    (jobs.folder / "x.py").write_text("")
    found, job = jobs.run("/nowhere/python", "x.py", kind="script")
    assert found == 127, job.err
    assert "/nowhere/python" in job.err


def test_the_log_folder_that_cannot_be_made_is_78(jobs):
    (jobs.folder / "file").write_text("")
    found, job = jobs.run("/bin/true", files=True, log_dir=str(jobs.folder / "file" / "logs"))
    assert found == 78
    assert "file" in job.err


def test_sigint_once_is_graceful(jobs):
    job = jobs.start(*jobs.python(POLITE), workers=2)
    job.expect("up", 2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.out.count("saved 2") == 2
    assert "stopped after" in job.err and "SIGINT on node0" in job.err


def test_twice_is_at_once(jobs):
    job = jobs.start(*jobs.python(STUBBORN), workers=2, grace=60.0)
    job.expect("up", 2)
    job.signal(signal.SIGINT)
    job.expect("ignored", 2)
    second = job.signal(signal.SIGINT)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert time.monotonic() - second < 10
    gone(jobs.pids())


def test_workers_that_ignore_sigterm_are_killed_at_grace(jobs):
    job = jobs.start(*jobs.python(STUBBORN), workers=2, grace=0.7)
    job.expect("up", 2)
    sent = job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert 0.6 < time.monotonic() - sent < 10
    gone(jobs.pids())


def test_grace_is_the_same_when_a_worker_fails(jobs):
    code = (
        "if rank == 1:\n while not os.path.exists('pids'): time.sleep(0.01)\n sys.exit(5)\n"
        + STUBBORN
    )
    begin = time.monotonic()
    found, job = jobs.run(*jobs.python(code), workers=2, grace=0.7)
    assert found == 5, job.err
    assert time.monotonic() - begin < 15
    assert job.out.count("ignored 15") == 1


def test_usr1_is_passed_on_and_the_job_goes_on(jobs):
    job = jobs.start(*jobs.python(POLITE), workers=2)
    job.expect("up", 2)
    job.signal(signal.SIGUSR1)
    job.expect("notice 10", 2)
    assert job.process.poll() is None
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


def test_nohup_survives_sighup_and_its_workers_inherit_that(jobs):
    job = jobs.start(
        *jobs.python("note(); os.kill(os.getpid(), signal.SIGHUP)\n" + POLITE), prefix=("nohup",)
    )
    job.expect("up", 2)
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGUSR1)
    job.expect("notice 10", 2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


def test_sighup_without_nohup_stops_the_job(jobs):
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here already")
    job = jobs.start(
        *jobs.python("signal.signal(signal.SIGHUP, lambda n, f: sys.exit(0))\n" + POLITE)
    )
    job.expect("up", 2)
    job.signal(signal.SIGHUP)
    assert job.wait() == 129


def test_ctrl_z_stops_the_workers_too_and_fg_continues_them(jobs):
    job = jobs.start(*jobs.python(POLITE), workers=1)
    job.expect("up")
    (worker,) = jobs.pids()
    job.signal(signal.SIGTSTP)
    wait_until(lambda: state(worker) == "T" and state(job.process.pid) == "T", 5, "both to stop")
    job.signal(signal.SIGCONT)
    wait_until(lambda: state(worker) == "S", 5, "the worker to go on")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_killed_agent_leaves_nothing(jobs):
    job = jobs.start(
        *jobs.python(DETACHING + "signal.signal(15, signal.SIG_IGN); say('up'); time.sleep(600)")
    )
    job.expect("up", 2)
    assert len(jobs.pids()) == 4
    job.signal(signal.SIGKILL)
    gone(jobs.pids(), 1.0)


def keeper_of(pid: int) -> int:
    myself = process_tree.find_process(pid)
    assert myself is not None
    return next(
        child.pid
        for child in process_tree.list_children(myself)
        if b"stdlib_only/supervisor.py" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    )


def test_a_killed_keeper_is_a_clear_failure_and_leaves_nothing(jobs):
    job = jobs.start(*jobs.python(DETACHING + "say('up'); time.sleep(600)"))
    job.expect("up", 2)
    killed = time.monotonic()
    os.kill(keeper_of(job.process.pid), signal.SIGKILL)
    assert job.wait() == 137
    assert time.monotonic() - killed < 10
    assert "supervisor process" in job.err and "killed by SIGKILL" in job.err
    gone(jobs.pids())


def test_the_job_goes_on_with_a_new_keeper_when_it_may_restart(jobs):
    code = (
        "say('up', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "while not os.path.exists('go'): time.sleep(0.02)"
    )
    job = jobs.start(*jobs.python(code), max_restarts=1)
    job.expect("up 0", 2)
    os.kill(keeper_of(job.process.pid), signal.SIGKILL)
    job.expect("up 1", 2)
    (jobs.folder / "go").touch()
    assert job.wait() == 0


def test_a_leftover_of_a_worker_that_ended_well_is_swept_and_named(jobs):
    found, job = jobs.run(*jobs.python(DETACHING), workers=1)
    assert found == 0
    child = jobs.pids()[0]
    assert f"rank 0 left processes behind, which were ended: {child} " in job.err
    gone([child])


def test_a_pipe_that_a_leftover_holds_open_holds_nobody_up(jobs):
    def run(code: str) -> float:
        begin = time.monotonic()
        found, job = jobs.run(*jobs.python(code + "say('last words')"), workers=2)
        took = time.monotonic() - begin
        assert found == 0
        assert job.out.count("last words") == 2
        return took

    held = DETACHING.replace("os.closerange(0, 3)", "pass")
    assert held != DETACHING
    assert compared(lambda: run(held), lambda: run(DETACHING), 1.5) < 1.5


def test_a_worker_that_ends_well_early_does_not_end_the_others(jobs):
    code = (
        "if rank == 0: note(); sys.exit(0)\n"
        "while not os.path.exists('go'): time.sleep(0.02)\nsay('done')"
    )
    job = jobs.start(*jobs.python(code), workers=2)
    wait_until(jobs.pids, 10, "rank 0 to run")
    wait_until(lambda: not Path(f"/proc/{jobs.pids()[0]}").exists(), 10, "rank 0 to be reaped")
    (jobs.folder / "go").touch()
    assert job.wait() == 0
    assert "done" in job.out


RACE = """
me = os.environ["PDRUN_WORKER_OF"].partition(".")[0]
open(f"ready{rank}-{me}", "w").close()
while not os.path.exists(f"ready{1 - rank}-{me}"): time.sleep(0.002)
if rank == 0:  # at fault: prints its traceback, then takes its time
    import atexit
    atexit.register(time.sleep, 0.15)
    raise ValueError("the true cause")
time.sleep(0.03)
raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3131")
"""


def test_the_right_cause_each_time(jobs):
    rounds = by_tier(15, 50)
    job = jobs.start(*jobs.python(RACE), rounds=rounds - 1)
    assert job.wait(100) == 1
    verdicts = [
        line.partition(": ")[2]
        for line in job.err.splitlines()
        if line.startswith("pdrun: job failed")
    ]
    assert len(verdicts) == rounds
    assert {line.partition(": ")[2] for line in verdicts} == {
        "rank 0 on node0 failed: ValueError: the true cause"
    }


def test_restarts_have_a_number_and_logs_of_their_own(jobs):
    code = (
        "n = int(os.environ['TORCHELASTIC_RESTART_COUNT']); "
        "say('attempt', n); sys.exit(7 if n < 2 else 0)"
    )
    found, job = jobs.run(*jobs.python(code), workers=1, max_restarts=2, files=True)
    assert found == 0, job.err
    (run,) = (jobs.folder / "logs").glob("demo-*")
    assert [(run / str(n) / "rank_0.out").read_text() for n in range(3)] == [
        f"attempt {n}\n" for n in range(3)
    ]
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert (kinds.count("assigned"), kinds.count("exited"), kinds[-2:]) == (
        3,
        3,
        ["verdict", "left"],
    )


def test_twenty_quick_launches_leave_no_process_zombie_or_descriptor(jobs):
    job = jobs.start(*jobs.python("note(); note(os.getppid())"), workers=2, rounds=19)
    assert job.wait(60) == 0, job.err
    rounds = [line.split() for line in job.out.splitlines() if line.startswith("round")]
    assert len(rounds) == 19
    assert {words[3] for words in rounds} == {"0"}
    assert {words[7] for words in rounds} == {"0"}, "children"
    assert len({words[5] for words in rounds[1:]}) == 1, "descriptors"
    assert len(jobs.pids()) == 80
    assert not [pid for pid in jobs.pids() if Path(f"/proc/{pid}").exists()]


def test_the_end_follows_the_last_worker_at_once(jobs):
    def tail() -> float:
        _, job = jobs.run(*jobs.python("say(repr(time.monotonic())); os._exit(0)"), workers=1)
        return time.monotonic() - float(job.out)

    assert in_starts(tail, 7) < 7


def test_nothing_heavy_is_imported_for_one_node(jobs):
    heavy = {"zmq", "rich", "yaml", "psutil", "asyncio", "torch", "numpy"}
    found, job = jobs.run("/bin/true", prefix=("env", "PYTHONPROFILEIMPORTTIME=1"))
    imported = {
        line.rpartition("|")[2].strip()
        for line in job.err.splitlines()
        if line.startswith("import time:")
    }
    assert found == 0 and "pdrun.launcher.agent.agent" in imported
    assert not heavy & imported


def test_a_keeper_that_is_stopped_ends_the_job_with_clear_words(jobs):
    job = jobs.start(*jobs.python("note(); time.sleep(600)"), workers=2)
    wait_until(lambda: len(jobs.pids()) == 2, what="two workers")
    os.kill(keeper_of(job.process.pid), signal.SIGSTOP)
    assert job.wait() == 137, job.err
    assert "did not answer for 6 s" in job.err
    gone(jobs.pids(), 0.5)
