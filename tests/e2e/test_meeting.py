"""
Nodes that come together, or do not: who is missing, wrong jobs, wrong tokens, strangers at the
port.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time

from tests.e2e.conftest import Job, Shell, free_port

HELLO = (
    "import os\n"
    "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK PDRUN_NODE'.split()\n"
    "print('hello', *map(os.environ.get, names))\n"
)


def node(
    shell: Shell,
    where: str,
    name: str,
    script: str,
    *more: str,
    nodes: int = 2,
    devices: int = 1,
    **kwargs: object,
) -> Job:
    """Start one node of a job by hand."""
    options = (
        "--nodes",
        str(nodes),
        "--devices",
        str(devices),
        "--scheduler",
        where,
        "--node-name",
        name,
    )
    return shell.start(*options, *more, script, **kwargs)  # type: ignore[arg-type]


def hellos(*jobs: Job) -> list[tuple[int, ...]]:
    """(rank, world size, local rank, local world size, node rank) of every line, in rank order."""
    text = "".join(job.out for job in jobs)
    return sorted(
        tuple(map(int, match)) for match in re.findall(r"hello (\d+) (\d+) (\d+) (\d+) (\d+)", text)
    )


def test_uneven_nodes_form_one_world(shell: Shell) -> None:
    script, where = shell.script(HELLO), f"127.0.0.1:{free_port()}"
    jobs = [node(shell, where, "a", script, devices=1), node(shell, where, "b", script, devices=2)]
    assert [job.wait(30) for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert hellos(*jobs) == [(0, 3, 0, 1, 0), (1, 3, 0, 2, 1), (2, 3, 1, 2, 1)]


def test_node2_stands_before_node10_whatever_the_order_of_arrival(shell: Shell) -> None:
    script = shell.script(HELLO)
    for order in (("node10", "node2"), ("node2", "node10")):
        where = f"127.0.0.1:{free_port()}"
        jobs = [node(shell, where, name, script) for name in order]
        assert [job.wait(30) for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
        out = "".join(job.out for job in jobs)
        assert re.search(r"hello 0 2 0 1 0 node2$", out, re.MULTILINE) and re.search(
            r"hello 1 2 0 1 1 node10$", out, re.MULTILINE
        )


def test_two_of_three_nodes_say_who_is_missing_and_ctrl_c_ends_them(shell: Shell) -> None:
    script, where = shell.script(HELLO), f"127.0.0.1:{free_port()}"
    jobs = [
        node(shell, where, f"n{rank}", script, "--node-rank", str(rank), nodes=3) for rank in (0, 2)
    ]
    jobs[0].expect(
        r"2 of 3 nodes.*missing.*node rank 1|2 of 3 nodes.*node rank 1.*missing", timeout=60
    )
    assert f"pdrun join {where}" in jobs[0].err
    sent = jobs[0].signal(signal.SIGINT)
    assert jobs[0].wait(20) == 130
    assert time.monotonic() - sent < 4, "a second on a quiet machine"
    assert jobs[1].wait(15) == 130
    assert "hello" not in jobs[0].out + jobs[1].out


def test_a_node_that_never_comes_is_code_69(shell: Shell) -> None:
    script, where = shell.script(HELLO), f"127.0.0.1:{free_port()}"
    job = node(shell, where, "n0", script, "--start-timeout", "2")
    start = time.monotonic()
    assert job.wait(15) == 69
    assert 1.5 < time.monotonic() - start < 8
    assert "1 of 2" in job.err and "hello" not in job.out


def test_the_second_of_two_unrelated_jobs_is_refused_naming_both(shell: Shell) -> None:
    where = f"127.0.0.1:{free_port()}"
    mine = node(shell, where, "a", shell.script(HELLO, "mine.py"), "--job", "mine")
    mine.expect("1 of 2 nodes", timeout=60)
    other = node(shell, where, "b", shell.script(HELLO, "other.py"), "--job", "other")
    assert other.wait(15) == 69
    assert "mine" in other.err and "other" in other.err
    third = node(shell, where, "c", "mine.py", "--job", "mine")
    assert [mine.wait(20), third.wait(20)] == [0, 0]


def test_unnamed_jobs_are_told_apart_by_their_command(shell: Shell) -> None:
    where = f"127.0.0.1:{free_port()}"
    mine = node(shell, where, "a", shell.script(HELLO, "mine.py"))
    mine.expect("1 of 2 nodes", timeout=60)
    other = node(shell, where, "b", shell.script(HELLO, "other.py"))
    assert other.wait(15) == 69
    assert "mine" in other.err and "other" in other.err
    mine.signal(signal.SIGINT)
    assert mine.wait(10) == 130


def test_one_job_with_two_commands_is_told_both(shell: Shell) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(HELLO)

    def start(name: str, argument: str, *job: str) -> Job:
        named = ("--nodes", "2", "--devices", "1", "--scheduler", where, "--node-name", name)
        return shell.start(*named, *job, script, argument)

    first = start("a", "2", "--job", "q")
    first.expect("1 of 2 nodes", timeout=60)
    second = start("b", "3", "--job", "q")
    assert second.wait(15) == 78
    assert (
        f"`pdrun --nodes 2 {script} 2` on a, `pdrun --nodes 2 {script} 3` on b: use the same"
        " command" in second.err
    )
    third = start("c", "3")
    assert third.wait(15) == 69
    assert (
        f"with `pdrun --nodes 2 {script} 2`" in third.err
        and "or another port for one of the jobs" in third.err
    )
    first.signal(signal.SIGINT)
    assert first.wait(10) == 130


def test_node_ranks_on_one_host_need_no_names(shell: Shell) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(HELLO)
    common = ("--nodes", "2", "--devices", "1", "--scheduler", where)
    jobs = [shell.start(*common, "--node-rank", str(rank), script) for rank in (0, 1)]
    assert [job.wait(30) for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert hellos(*jobs) == [(0, 2, 0, 1, 0), (1, 2, 0, 1, 1)]


def test_a_name_that_is_not_known_is_said(shell: Shell) -> None:
    script = shell.script(HELLO)
    nowhere = ("--nodes", "2", "--scheduler", "no-such-host.invalid:1")
    words = "the name 'no-such-host.invalid' is not known here"
    code, _, err = shell.run(*nowhere, "--dry-run", script)
    assert code == 78 and f"--scheduler: {words}" in err
    for args in (
        (*nowhere, "--interface", "lo", "--start-timeout", "3", script),
        ("join", "no-such-host.invalid:1", "--start-timeout", "3"),
    ):
        code, _, err = shell.run(*args)
        assert code == 69 and f"waiting for the scheduler at no-such-host.invalid:1: {words}" in err
        assert f"error: no-such-host.invalid:1: {words}" in err


def test_a_wrong_token_is_77_within_five_seconds_and_said_on_both_sides(shell: Shell) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(HELLO)
    first = node(shell, where, "a", script, "--node-rank", "0")
    first.expect("1 of 2 nodes", timeout=60)
    start = time.monotonic()
    config = {"XDG_CONFIG_HOME": str(shell.folder / "another-user")}
    second = node(shell, where, "b", script, "--node-rank", "1", env=config)
    assert second.wait(15) == 77
    assert time.monotonic() - start < 12
    assert "token" in second.err
    first.expect("token")
    third = node(shell, where, "c", script, "--node-rank", "1")
    assert [first.wait(20), third.wait(20)] == [0, 0], first.err


def test_strangers_at_the_port_are_dropped_and_the_service_goes_on(shell: Shell) -> None:
    port = free_port()
    where, script = f"127.0.0.1:{port}", shell.script(HELLO)
    first = node(shell, where, "a", script)
    first.expect("1 of 2 nodes", timeout=60)
    null_greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
    for noise in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 64,
        null_greeting,
        b"\x80\x04\x95",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(noise)
    second = node(shell, where, "b", script)
    assert [first.wait(30), second.wait(30)] == [0, 0], first.err
    assert hellos(first, second) == [(0, 2, 0, 1, 0), (1, 2, 0, 1, 1)]


def test_a_port_that_something_else_holds_is_said_at_once(shell: Shell) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        where = f"127.0.0.1:{other.getsockname()[1]}"
        start = time.monotonic()
        first = node(shell, where, "a", shell.script(HELLO))
        first.expect(
            rf"port \d+ is in use by pid {os.getpid()} \(.*\): joining the scheduler there",
            timeout=5,
        )
        assert first.wait(15) == 78
        assert time.monotonic() - start < 12
    assert f"error: {where}: port" in first.err and "which is not a scheduler" in first.err


def test_join_needs_only_the_address(shell: Shell) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(HELLO)
    first = node(shell, where, "a", script, devices=2)
    line = first.expect(r"pdrun join \S+", timeout=60)
    address = re.search(r"pdrun join (\S+)", line)
    assert address and address[1] == where
    second = shell.start("join", where, "--node-name", "b")
    assert [first.wait(30), second.wait(30)] == [0, 0], second.err
    assert [found[:2] for found in hellos(first, second)] == [(rank, 4) for rank in range(4)]


def test_a_standing_scheduler_serves_nodes_that_only_connect(shell: Shell) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(HELLO)
    scheduler = shell.start("scheduler", "--nodes", "2", "--listen", where)
    scheduler.expect(where.replace(".", r"\."))
    jobs = [node(shell, where, name, script, "--no-serve") for name in ("a", "b")]
    assert [job.wait(30) for job in jobs] == [0, 0], jobs[0].err + scheduler.err
    assert scheduler.wait(15) == 0


def test_a_standing_scheduler_says_how_nodes_come_and_a_joiner_waits_for_the_script(
    shell: Shell,
) -> None:
    where, script = f"127.0.0.1:{free_port()}", shell.script(HELLO)
    scheduler = shell.start("scheduler", "--nodes", "2", "--listen", where)
    scheduler.expect(f"pdrun --nodes 2 --scheduler {where} --no-serve SCRIPT")
    joiner = shell.start("join", where, "--node-name", "b")
    joiner.expect("does not know the job's command yet", timeout=60)
    first = node(shell, where, "a", script, "--no-serve")
    assert [first.wait(30), joiner.wait(30), scheduler.wait(15)] == [0, 0, 0], joiner.err
    assert [found[:2] for found in hellos(first, joiner)] == [(0, 2), (1, 2)]


def test_nothing_heavy_is_imported_for_several_nodes(shell: Shell) -> None:
    """
    Every process of pdrun tells what it imports: zmq where nodes meet, and nothing beyond that.
    """
    code, _, err = shell.run(
        "--nodes",
        "2",
        "--devices",
        "1",
        "--local",
        "--no-python",
        "/bin/true",
        env={"PYTHONPROFILEIMPORTTIME": "1"},
    )
    assert code == 0, err
    imported = {
        line.rpartition("|")[2].strip() for line in err.splitlines() if "import time:" in line
    }
    assert {"pdrun.launcher.agent.agent", "pdrun.launcher.controller.controller", "zmq"} <= imported
    heavy = {"rich", "yaml", "psutil", "torch", "numpy", "cloudpickle", "asyncio", "ssl"}
    assert not sorted(heavy & imported)


def test_the_front_and_the_first_words_need_no_zmq(shell: Shell) -> None:
    script = shell.script("import torch\n")
    code, _, err = shell.run(
        "--nodes", "2", "--local", "--dry-run", script, env={"PYTHONPROFILEIMPORTTIME": "1"}
    )
    imported = {
        line.rpartition("|")[2].strip() for line in err.splitlines() if "import time:" in line
    }
    assert code == 0 and "pdrun.launcher.plan.plan" in imported
    assert not {"zmq", "rich", "yaml", "psutil", "asyncio", "torch", "numpy", "socket"} & imported
