"""`pdrun.init()` in its four situations, each with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdrun.worker_env import WorkerEnv
from tests.lib.tiers import by_tier
from tests.lib.worker_processes import (
    clean,
    finish,
    finish_all,
    fork,
    free_port,
    reports,
    start,
    torch,
    write,
)

pytestmark = pytest.mark.torch

SUM = """
ctx = pdrun.init()
import torch, torch.distributed as dist
value = torch.tensor([float(ctx.rank + 1)])
dist.all_reduce(value)
report(ctx, sum=value.item(), group=dist.get_backend(), again=pdrun.init() is ctx)
"""


def worker_environ(rank: int, world: int, port: int) -> dict[str, str]:
    """What pdrun sets; without its store process, so rank 0 serves the store itself."""
    environ = WorkerEnv(
        rank=rank,
        world_size=world,
        local_rank=rank,
        local_world_size=world,
        node_rank=0,
        nodes=1,
        master_addr="127.0.0.1",
        master_port=port,
        run_id="r",
        restart_count=2,
        generation=2,
        collective="gloo",
    ).to_env()
    return {**environ, "TORCHELASTIC_USE_AGENT_STORE": "False", "GLOO_SOCKET_IFNAME": "lo"}


@torch
def test_under_pdrun(tmp_path: Path) -> None:
    port = free_port()
    workers = [fork(tmp_path, SUM, worker_environ(rank, 2, port)) for rank in range(2)]
    ended = finish_all(workers)
    assert [code for code, _, _ in ended] == [0, 0], ended
    message = reports("".join(out for _, out, _ in ended))
    assert [(one["rank"], one["main"], one["local_rank"]) for one in message] == [
        (0, True, 0),
        (1, False, 1),
    ]
    assert all(one["again"] and one["sum"] == 3 for one in message)
    same = {
        "world_size": 2,
        "local_world_size": 2,
        "node_rank": 0,
        "nodes": 1,
        "device": "cpu",
        "backend": "cpu",
        "collective": "gloo",
        "generation": 2,
        "restart_count": 2,
    }
    assert message[1] | same == message[1]


@torch
def test_nobody_leaves_before_all_have_come(tmp_path: Path) -> None:
    """A rank that ends at once after init broke off connections that another was still making."""
    gone = tmp_path / "gone"
    body = f"""
import os, pathlib, time, torch.distributed as dist
gone, make = pathlib.Path({str(gone)!r}), dist.init_process_group
def slow(*args, **kwargs):
    make(*args, **kwargs)
    end = time.monotonic() + 1.5
    while time.monotonic() < end and not gone.exists():
        time.sleep(0.01)
    seen.append(gone.exists())
seen = []
if os.environ["RANK"] == "SLOW":
    dist.init_process_group = slow
ctx = pdrun.init()
gone.touch()
report(ctx, seen=seen)
"""
    for slow in by_tier("1", "01"):  # rank 0 holds the store here
        port = free_port()
        gone.unlink(missing_ok=True)
        workers = [
            fork(tmp_path, body.replace("SLOW", slow), worker_environ(rank, 2, port))
            for rank in range(2)
        ]
        ended = finish_all(workers)
        assert [code for code, _, _ in ended] == [0, 0], ended
        message = reports(ended[int(slow)][1])
        assert message[0]["seen"] == [False], "the other one had left"
        port = free_port()


@torch
@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    script = write(tmp_path, SUM)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run = subprocess.run(
        [*torchrun, str(script)], env=clean(), capture_output=True, text=True, timeout=90
    )
    assert run.returncode == 0, run.stderr
    assert [(one["rank"], one["world_size"], one["sum"]) for one in reports(run.stdout)] == [
        (0, 2, 3),
        (1, 2, 3),
    ]


@torch
def test_a_job_started_by_a_process_alone_has_interfaces_of_its_own(tmp_path: Path) -> None:
    """Collectives over several hosts would use the loopback interface of the process alone."""
    body = """
ctx = pdrun.init()
import subprocess
job = [sys.executable, "-m", "pdrun", "--devices", "1", "--no-files", "--no-python", "env"]
def run(**more):
    done = subprocess.run(job, capture_output=True, text=True, env={**os.environ, **more})
    return [line for line in done.stdout.splitlines() if "GLOO_SOCKET_IFNAME" in line]
report(ctx, here=os.environ["GLOO_SOCKET_IFNAME"], job=run(), user=run(GLOO_SOCKET_IFNAME="ib0"))
ctx.close()
report(ctx, left=[name for name in os.environ if "INTERFACES" in name])
"""
    code, out, err = finish(fork(tmp_path, body))
    assert code == 0, err
    first, second = reports(out)
    assert (first["here"], first["job"]) == ("lo", [])
    assert first["user"] and first["user"][0].endswith("GLOO_SOCKET_IFNAME=ib0")
    assert second["left"] == []


@torch
def test_alone_listens_on_loopback_only_and_leaves_no_trace(tmp_path: Path) -> None:
    body = (
        SUM
        + """
import psutil
listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
ctx.close(); ctx.close()
report(ctx, listening=listening, left=dist.is_initialized(), name=os.environ.get("GLOO_SOCKET_IFNAME"))
"""
    )
    code, out, err = finish(fork(tmp_path, body))
    assert code == 0, err
    first, second = reports(out)
    assert (first["rank"], first["world_size"], first["sum"], first["group"]) == (0, 1, 1, "gloo")
    assert set(second["listening"]) <= {"127.0.0.1"}
    assert (second["left"], second["name"]) == (False, None)


@torch
def test_dynamic_cluster(tmp_path: Path) -> None:
    shared = {
        "PDRUN_SCHEDULER": f"127.0.0.1:{free_port()}",
        "PDRUN_WORKERS": "2",
        "PDRUN_TOKEN_FILE": _token(tmp_path),
    }
    body = SUM + "ctx.close(); ctx = pdrun.init(); dist.barrier(); report(ctx, second=True)"
    scheduler = fork(tmp_path, body, {**shared, "PDRUN_ROLE": "scheduler"})
    workers = [fork(tmp_path, body, {**shared, "PDRUN_ROLE": "worker"}) for _ in range(2)]
    ended = finish_all([*workers, scheduler])
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert "REPORT" not in ended[2][1]  # the scheduler never reaches the script's own lines
    message = reports("".join(out for _, out, _ in ended))
    assert [one["rank"] for one in message] == [0, 0, 1, 1]
    assert [one["sum"] for one in message if "sum" in one] == [3, 3]
    assert {(one["local_world_size"], one["nodes"], one["node_rank"]) for one in message} == {
        (2, 1, 0)
    }


@torch
def test_dynamic_cluster_by_mindspores_names_ends_with_the_failing_code(tmp_path: Path) -> None:
    shared = {
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(free_port()),
        "MS_WORKER_NUM": "2",
        "PDRUN_TOKEN_FILE": _token(tmp_path),
    }
    body = "ctx = pdrun.init()\nif ctx.is_main: sys.exit(7)\nimport time; time.sleep(60)"
    scheduler = fork(tmp_path, body, {**shared, "MS_ROLE": "MS_SCHED"})
    workers = [
        fork(tmp_path, body, {**shared, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)})
        for rank in range(2)
    ]
    codes = [code for code, _, _ in finish_all([*workers, scheduler])]
    assert codes == [7, -15, 7]


def _token(folder: Path) -> str:
    from pdrun.rendezvous.protocol.security import Secret, format_token

    path = folder / "token"
    path.write_text(format_token(Secret.random()) + "\n")
    path.chmod(0o600)
    return str(path)


@torch
def test_the_launchers_variables_beat_the_dynamic_clusters(tmp_path: Path) -> None:
    dynamic = {"PDRUN_ROLE": "worker", "PDRUN_SCHEDULER": "127.0.0.1:9", "PDRUN_WORKERS": "9"}
    environ = {"RANK": "0", "WORLD_SIZE": "1", **dynamic}
    code, out, err = finish(fork(tmp_path, "report(pdrun.init())", environ))
    assert code == 0, err
    assert reports(out)[0]["world_size"] == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "1"}, "RANK: 'x' is not a whole number"),
        ({"PDRUN_ROLE": "worker"}, "PDRUN_SCHEDULER"),
        (
            {
                "MS_ROLE": "MS_PSERVER",
                "MS_SCHED_HOST": "h",
                "MS_SCHED_PORT": "1",
                "MS_WORKER_NUM": "1",
            },
            "MS_ROLE",
        ),
    ],
)
def test_half_set_environments_are_refused_by_name(
    tmp_path: Path, environ: dict[str, str], words: str
) -> None:
    code, _, err = finish(start(tmp_path, "pdrun.init(group=False)", environ))
    assert code == 78
    (line,) = err.splitlines()
    assert line.startswith("pdrun: error: ") and words in line


HALF = {"RANK": "0"}


def test_an_error_of_init_can_be_caught_and_others_keep_their_traceback(tmp_path: Path) -> None:
    body = """
try:
    pdrun.init(group=False)
except pdrun.PdrunError as error:
    print("caught", error.exit_code)
raise KeyError("mine")
"""
    code, out, err = finish(start(tmp_path, body, HALF))
    assert (code, out) == (1, "caught 78\n")
    assert err.startswith("Traceback") and err.rstrip().endswith("KeyError: 'mine'")


def test_a_hook_of_the_scripts_own_is_left_alone(tmp_path: Path) -> None:
    body = (
        "sys.excepthook = lambda kind, error, trace: print('mine', kind.__name__)\n"
        "pdrun.init(group=False)"
    )
    assert finish(start(tmp_path, body, HALF)) == (1, "mine ConfigError\n", "")


def test_an_error_of_init_under_a_command_line_is_one_line_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pdrun; pdrun.init(group=False)"],
        env=clean(HALF),
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (
        78,
        "pdrun: error: WORLD_SIZE: is not set, but other variables of a launcher are\n",
    )


@torch
def test_a_wrong_argument_before_init_is_one_line_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pdrun; pdrun.rows('adam')"],
        env=clean({}),
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pdrun: error: pdrun.rows: optimizer must be one of")
    assert done.stderr.count("\n") == 1


@torch
def test_a_world_without_a_meeting_place_is_refused(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    _, _, err = finish(start(tmp_path, "pdrun.init()", environ))
    assert "MASTER_ADDR: is not set, but RANK and WORLD_SIZE are" in err


WITHOUT_TORCH = """
class Missing:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, Missing())
import importlib.util
importlib.util.find_spec = lambda *_: None
"""


def test_without_torch_a_context_has_its_device_as_text(tmp_path: Path) -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "PDRUN_DEVICE_KIND": "cuda",
    }
    code, out, err = finish(
        start(tmp_path, WITHOUT_TORCH + "report(pdrun.init(group=False))", environ)
    )
    assert code == 0, err
    assert (reports(out)[0]["device"], reports(out)[0]["collective"]) == ("cuda:1", "nccl")
    _, _, err = finish(start(tmp_path, WITHOUT_TORCH + "pdrun.init()", environ))
    assert "torch is not installed; pip install torch, or init(group=False)" in err


CANNOT = {
    "backend='cuda'": "does not support NVIDIA GPU (CUDA) here",
    "backend='gloo'": "'gloo' is not one of",
    "timeout=0": "timeout must be above 0, got 0",
    "backend='npu'": "needs the package torch_npu",
    "collective='nccl'": "nccl",  # this torch, or this worker, has not
}


@torch
def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    """All in one process; the last one of CANNOT has found the CPU before it is refused."""
    import torch as module

    wanted = dict(CANNOT)
    if module.cuda.is_available():  # this machine has what is to be missing
        del wanted["backend='cuda'"], wanted["collective='nccl'"]
    calls = "".join(
        f"try:\n    pdrun.init({words})\nexcept pdrun.PdrunError as error:\n"
        "    print(error.exit_code, str(error).replace('\\n', ' '))\n"
        for words in wanted
    )
    last = "pdrun.init(backend='cpu')\npdrun.init(backend='mps')\n"
    code, out, err = finish(fork(tmp_path, calls + last))
    assert code in (2, 78)
    assert "this process already has cpu" in err and "Traceback" not in err
    assert len(out.splitlines()) == len(wanted), out
    for line, words in zip(out.splitlines(), wanted.values(), strict=True):
        assert line.startswith(("2 ", "78 ")) and words in line


@torch
def test_a_group_made_by_the_script_is_kept_and_left_alone(tmp_path: Path) -> None:
    body = """
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
dist.init_process_group("fake", store=dist.HashStore(), rank={rank}, world_size={world})
with pdrun.init() as ctx: pass
report(ctx, still=dist.is_initialized())
"""
    code, out, err = finish(fork(tmp_path, body.format(rank=0, world=1)))
    assert code == 0, err
    assert reports(out)[0]["still"]
    _, _, err = finish(fork(tmp_path, body.format(rank=1, world=2)))
    assert "the script's process group has rank 1 of 2, the launcher assigned rank 0 of 1" in err


@torch
def test_a_timeout_bounds_a_collective(tmp_path: Path) -> None:
    port = free_port()
    body = """
ctx = pdrun.init(timeout=2)
import torch.distributed as dist
if ctx.is_main:
    dist.barrier()
import time
time.sleep(30)
"""
    workers = [fork(tmp_path, body, worker_environ(rank, 2, port)) for rank in range(2)]
    try:
        code, _, err = finish(workers[0])
        assert code == 1
        assert "Timed out" in err or "timeout" in err.lower()
    finally:
        workers[1].kill()
        workers[1].communicate()


@torch
def test_uncaught_exceptions_end_at_once_with_their_traceback(tmp_path: Path) -> None:
    code, _, err = finish(fork(tmp_path, "pdrun.init()\nraise ValueError('boom')"))
    assert code == 1
    assert err.rstrip().endswith("ValueError: boom")


@torch
@pytest.mark.parametrize(
    "environ",
    [
        {"PDRUN_ROLE": "worker", "PDRUN_SCHEDULER": "127.0.0.1:9", "PDRUN_WORKERS": "9"},
        {
            "PMI_RANK": "0",
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": "0",
            "MPI_LOCALNRANKS": "2",
            "PMI_FD": "0",
        },
    ],
)
def test_torch_is_imported_before_anybody_counts_on_heartbeats(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """
    An import from a slow disk holds the interpreter for longer than the scheduler bears to hear
    nothing.
    """
    body = (
        "import sys\nfrom pdrun.parallel.startup import mpi_tasks as tasks\nfrom pdrun.rendezvous.clients import dynamic\n"
        "def seen(*_): print('there', 'torch' in sys.modules); sys.exit(0)\n"
        "dynamic.join_cluster = tasks.join_as_task = seen\npdrun.init(group=False)\n"
    )
    code, out, err = finish(start(tmp_path, body, environ))
    assert (code, out) == (0, "there True\n"), err
