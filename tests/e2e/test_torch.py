"""The main job, and torch's own rendezvous, under pdrun, torchrun and nothing."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell, alive, free_port, until
from tests.lib.tiers import thorough

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SMALL = ("--steps", "12", "--batch", "4", "--width", "64", "--layers", "1", "--validation", "64")
"""Of the example: enough to learn something."""
EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py")

REDUCE = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("sum", int(x[0]), "of", dist.get_world_size(), flush=True)
open("pids", "a").write(f"{os.getpid()}\\n")
while os.path.exists("hold"): time.sleep(0.02)
dist.destroy_process_group()
"""


def listeners(pids: set[int]) -> set[str]:
    """Addresses (hexadecimal, as in /proc/net/tcp) on which any of the processes listens."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            part = line.split()
            if part[3] == "0A" and part[9] in inodes:
                found.add(part[1].partition(":")[0])
    return found


def family(root: int) -> set[int]:
    """A process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found, last = {root}, set()
    while found != last:
        last = set(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


@pytest.mark.parametrize("nodes", [thorough("1"), "2"])
def test_gloo_meets_at_the_held_port_and_everything_listens_on_loopback(
    shell: Shell, nodes: str
) -> None:
    (shell.folder / "hold").touch()
    job = shell.start("--nodes", nodes, "--devices", "2", "--local", shell.script(REDUCE))
    world = 2 * int(nodes)
    until(lambda: len(shell.pids("pids")) == world, "all workers reduced", 90)
    addresses = listeners(family(job.process.pid))
    (shell.folder / "hold").unlink()
    assert job.wait(60) == 0, job.err
    assert job.out.count(f"sum {sum(range(1, world + 1))} of {world}") == world
    assert addresses and addresses <= {"0100007F"}, addresses
    assert not [pid for pid in shell.pids("pids") if alive(pid)]


def test_a_restart_gets_a_store_of_its_own(shell: Shell) -> None:
    script = shell.script(
        REDUCE
        + "sys.exit(5 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] =="
        " '1' else 0)\n"
    )
    code, out, err = shell.run("--devices", "2", "--max-restarts", "1", script, timeout=120)
    assert code == 0, err
    assert out.count("sum 3 of 2") == 4


FIXED = """
import os, sys
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=size)
x = torch.ones(1)
dist.all_reduce(x)
dist.barrier()
print("sum", int(x), "at", os.environ["MASTER_PORT"], flush=True)
dist.destroy_process_group()
sys.exit(3 if os.environ["PDRUN_GENERATION"] == "0" and "fail" in sys.argv else 0)
"""


def test_a_script_that_meets_at_a_port_of_its_own_finds_the_store_there(shell: Shell) -> None:
    port = str(free_port())
    options = ("--devices", "2", "--backend", "cpu", "--max-restarts", "1", "--backoff", "0")
    code, out, err = shell.run(
        *options, "--master-port", port, shell.script(FIXED), port, "fail", timeout=120
    )
    assert code == 0, err
    assert out.count(f"sum 2 at {port}") == 4  # the store of the restart listens there, too


@pytest.mark.thorough
def test_nodes_that_meet_at_a_port_of_their_own_find_the_store_there(shell: Shell) -> None:
    port = str(free_port())
    options = ("--nodes", "2", "--devices", "1", "--backend", "cpu", "--rdzv-endpoint")
    place = (f"127.0.0.1:{port}", shell.script(FIXED), port)
    jobs = [shell.start("--node-rank", rank, *options, *place) for rank in "01"]
    assert [job.wait(120) for job in jobs] == [0, 0], jobs[0].err
    assert sum(job.out.count(f"sum 2 at {port}") for job in jobs) == 2


def test_a_port_in_use_is_refused_by_the_name_of_its_variable(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = shell.run("--no-python", "true", env={"MASTER_PORT": port})
    assert code == 78
    assert (
        f"MASTER_PORT: torch's store cannot listen on 127.0.0.1:{port}: port {port} is in use"
        in err
    )


def test_a_peer_that_dies_of_a_broken_connection_is_not_the_cause(shell: Shell) -> None:
    script = shell.script(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: raise ValueError('the true cause')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    code, _, err = shell.run("--devices", "3", script, timeout=120)
    assert code == 1
    first = err[err.index("pdrun: job") :] if "pdrun: job" in err else err
    assert "the true cause" in err and re.search(r"rank 1\b", first), err[-3000:]


def check_training(text: str) -> None:
    (loss,) = re.findall(r"validation loss (\d+\.\d+)", text)
    assert math.isfinite(float(loss)) and float(loss) < math.log(256) - 1, text[-2000:]


def test_the_example_learns_under_pdrun(shell: Shell) -> None:
    code, out, err = shell.run("--devices", "2", EXAMPLE, *SMALL, timeout=170)
    assert code == 0, err
    check_training(out)


@pytest.mark.thorough  # tests/parallel/startup has pdrun.init under torchrun
def test_the_example_runs_unchanged_under_torchrun(shell: Shell) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        EXAMPLE,
        *SMALL,
    ]
    done = subprocess.run(
        command,
        cwd=shell.folder,
        env={**shell.env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_training(done.stdout)


def test_a_late_variable_is_named_once_for_all_ranks(shell: Shell) -> None:
    """Libraries set KMP_* themselves, which changes nothing: no line about those."""
    (shell.folder / "late.py").write_text(
        "import os\nfor name in ['TORCH_LOGS', 'KMP_DUPLICATE_LIB_OK']:\n"
        "    os.environ[name] = 'recompiles'\nimport torch\n"
    )
    code, _, err = shell.run("--devices", "3", "late.py")
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "--start exec" in line]
    assert line.startswith("pdrun: TORCH_LOGS has no effect: set by 3 ranks")
