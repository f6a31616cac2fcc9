"""
Jobs that change their size: real agents on loopback that come, go and die; the work goes on where
it was saved.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Job, Shell, alive, free_port, gone_within, until

pytestmark = pytest.mark.slow

WORK = """
import os, sys, time
import pdrun
import pdrun.elastic as elastic

rank, world, node = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["PDRUN_NODE"]
with open(f"/proc/{os.getppid()}/stat") as file:
    agent = int(file.read().rpartition(")")[2].split()[1])
open(f"agent-{node}", "w").write(f"{agent}\\n")
open("pids", "a").write(f"{os.getpid()}\\n")
start = elastic.agreed_step() + 1
print(f"generation {elastic.generation()} rank {rank} of {world} on {node} from {start} "
      f"restarts {elastic.restart_count()} threads {os.environ['OMP_NUM_THREADS']}", flush=True)
step = start
while not os.path.exists("enough"):
    pdrun.progress(step)
    elastic.saved(step)
    open(f"saved-{elastic.generation()}-{rank}", "w").write(f"{step}\\n")
    if elastic.stopping():
        print(f"rank {rank} stops at {step}", flush=True)
        break
    step += 1
    time.sleep(0.05)
"""
"""It does not write ``from pdrun import``, for which each node would import torch and fork."""
FORKED_WORK = WORK.replace("import pdrun.elastic as elastic", "from pdrun import elastic")


def begun(job: Job, generation: int, world: int, timeout: float = 60.0) -> str:
    """Wait until every worker of a generation has begun; return all that was printed."""
    return job.expect(rf"generation {generation} rank \d+ of {world} on", timeout, count=world)


def agent_of(shell: Shell, node: str) -> int:
    """Pid of a node's agent, as one of its workers has seen it."""
    return int((shell.folder / f"agent-{node}").read_text())


def enough(shell: Shell) -> None:
    """Have every worker end well."""
    (shell.folder / "enough").touch()


def events(shell: Shell) -> list[dict]:
    (log,) = (shell.folder / "pdrun-logs").glob("*/events.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_killed_node_is_left_behind_and_no_restart_is_counted(shell: Shell) -> None:
    job = shell.start(
        "--local", "--nodes", "2:3", "--devices", "2", "--gather", "60", shell.script(WORK)
    )
    begun(job, 0, 6)
    until(lambda: saved(shell, 0, 6) >= 3, "some steps")
    os.kill(agent_of(shell, "node2"), signal.SIGKILL)
    text = begun(job, 1, 4)
    enough(shell)
    assert job.wait() == 0, job.err
    assert "restarts 1" not in text and "node2" in job.err and "restarting with 2 nodes" in job.err
    assert {line["restarts"] for line in events(shell) if line["kind"] == "assigned"} == {0}
    threads = set(re.findall(r"threads (\d+)", text))
    assert len(threads) == 1  # nobody gets more of a machine because another is gone
    gone_within(shell.pids("pids"), 2.0)


def saved(shell: Shell, generation: int, world: int) -> int:
    """
    The last step that all workers of a generation have saved, as their files say; -1: not all have.
    """
    found = [shell.pids(f"saved-{generation}-{rank}") for rank in range(world)]
    return min((steps[-1] if steps else -1 for steps in found), default=-1)


def test_a_node_that_is_told_to_go_saves_and_the_others_go_on_from_there(shell: Shell) -> None:
    job = shell.start("--local", "--nodes", "1:2", "--gather", "60", shell.script(FORKED_WORK))
    begun(job, 0, 2)
    until(lambda: saved(shell, 0, 2) >= 5, "some steps")
    agent = agent_of(shell, "node1")
    os.kill(agent, signal.SIGTERM)
    text = begun(job, 1, 1)
    enough(shell)
    assert job.wait() == 0, job.err
    assert "node1 leaves the job, which continues without it" in job.err
    first = int(re.findall(r"generation 1 rank 0 of 1 on node0 from (\d+) restarts 0", text)[0])
    assert first == saved(shell, 0, 2) + 1  # both said what they had saved before they ended
    gone_within([agent], 5.0)


def test_a_spare_takes_the_place_of_a_node_that_dies(shell: Shell) -> None:
    job = shell.start("--local", "--nodes", "2", "--spares", "1", shell.script(WORK))
    begun(job, 0, 2)
    job.expect(r"node\d is on standby")
    gone = next(node for node in ("node1", "node2") if (shell.folder / f"agent-{node}").exists())
    os.kill(agent_of(shell, gone), signal.SIGKILL)
    text = begun(job, 1, 2)
    enough(shell)
    assert job.wait() == 0, job.err
    assert f"generation 1 rank 1 of 2 on {'node2' if gone == 'node1' else 'node1'}" in text
    assert "restarts 1" not in text


def test_one_node_begins_alone_a_late_one_stands_by_and_takes_part_next_time(shell: Shell) -> None:
    where = f"127.0.0.1:{free_port()}"
    first = shell.start(
        "--nodes",
        "1:2",
        "--gather",
        "0",
        "--scheduler",
        where,
        "--serve",
        "--node-name",
        "a",
        "--max-restarts",
        "1",
        shell.script(WORK),
    )
    begun(first, 0, 1)
    first.expect(re.escape(f"pdrun join {where}"))
    late = shell.start("join", where, "--node-name", "b")
    late.expect("b is on standby: ")
    os.kill(shell.pids("pids")[0], signal.SIGKILL)  # a failure: the next generation has both
    until(lambda: "of 2 on b" in late.out and "of 2 on a" in first.out, "both run")
    enough(shell)
    assert (first.wait(), late.wait()) == (0, 0), first.err + late.err
    assert "restart 1 of 1 with 2 nodes" in first.err
    assert "restarts 1" in first.out and "restarts 1" in late.out


@pytest.mark.thorough  # tests/chaos/test_elastic.py has the default run's cases
def test_with_grow_a_late_node_is_taken_in_soon(shell: Shell) -> None:
    where = f"127.0.0.1:{free_port()}"
    first = shell.start(
        "--nnodes",
        "1:2",
        "--gather",
        "0",
        "--grow",
        "0.5",
        "--scheduler",
        where,
        "--serve",
        "--node-name",
        "a",
        shell.script(WORK),
    )
    begun(first, 0, 1)
    until(lambda: saved(shell, 0, 1) >= 3, "some steps")
    late = shell.start("join", where, "--node-name", "b")
    until(lambda: "of 2 on b" in late.out and "of 2 on a" in first.out, "both run", 60)
    enough(shell)
    assert (first.wait(), late.wait()) == (0, 0), first.err + late.err
    assert "restarts 1" not in first.out + late.out
    start = int(re.findall(r"generation 1 rank \d of 2 on a from (\d+)", first.out)[0])
    assert start == saved(shell, 0, 1) + 1


def test_below_the_least_the_job_ends(shell: Shell) -> None:
    job = shell.start(
        "--local", "--nodes", "2:3", "--grace", "2", "--gather", "60", shell.script(WORK)
    )
    begun(job, 0, 3)
    os.kill(agent_of(shell, "node2"), signal.SIGKILL)
    begun(job, 1, 2)
    os.kill(agent_of(shell, "node1"), signal.SIGKILL)
    assert job.wait(60) == 69
    assert "node1" in job.err and "lost" in job.err
    gone_within(shell.pids("pids"), 3.0)


def test_ctrl_c_and_sigterm_to_the_whole_job_stop_it(shell: Shell) -> None:
    job = shell.start("--local", "--nodes", "1:2", "--gather", "60", shell.script(WORK))
    begun(job, 0, 2)
    job.signal(signal.SIGTERM)
    assert job.wait(60) == 143
    assert "leaves the job" not in job.err and "generation 1" not in job.out
    gone_within(shell.pids("pids"), 2.0)


CODES = [
    (("--restart-on", "3"), "3", 0, 2),
    (("--restart-on", "4"), "3", 3, 1),
    (("--no-restart-on", "3"), "3", 3, 1),
    (("--no-restart-on", "4"), "3", 0, 2),
    (("--restart-on", "SIGKILL"), "kill", 0, 2),
]


@pytest.mark.parametrize(("options", "how", "code", "attempts"), CODES)
def test_which_codes_are_tried_again(
    shell: Shell, options: tuple, how: str, code: int, attempts: int
) -> None:
    script = shell.script(
        "import os, sys\nprint('attempt', flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), 9) if sys.argv[1] == 'kill' else sys.exit(int(sys.argv[1]))\n"
    )
    found, out, err = shell.run("--max-restarts", "2", *options, script, how)
    assert (found, out.count("attempt")) == (code, attempts), err
    if attempts == 1:
        assert "not restarted" in err and options[0] in err


def test_an_agent_leaves_no_folder_behind(shell: Shell) -> None:
    script = shell.script("import os\nopen('where', 'w').write(os.environ['PDRUN_AGENT'])\n")
    assert shell.run(script)[0] == 0
    folder = Path((shell.folder / "where").read_text()).parent
    assert folder.name.startswith("pdrun-agent-") and not folder.exists()


def test_workers_are_ended_when_the_agent_of_an_elastic_job_is_killed(shell: Shell) -> None:
    job = shell.start("--local", "--nodes", "1:2", "--gather", "60", shell.script(WORK))
    begun(job, 0, 2)
    before = set(shell.pids("pids"))
    os.kill(agent_of(shell, "node1"), signal.SIGKILL)
    begun(job, 1, 1)
    assert not any(alive(pid) for pid in before)
    enough(shell)
    assert job.wait() == 0, job.err
