"""
Workers that wait with a busy CPU, as those do that wait for a device: which of them hang, by their
stacks and by torch's flight recorder, and which do not.
"""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Shell
from tests.lib.tiers import thorough

SPIN = """
import hashlib, os, sys, threading, time
how, rank = sys.argv[1], int(os.environ["RANK"])

def spin_in_c():
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", (1 << 31) - 1)

def all_reduce():
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", (1 << 31) - 1)

def barrier():
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", (1 << 31) - 1)

def end_after(seconds):
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()

print("up", rank, flush=True)
if how == "asleep":
    if rank == 1:
        time.sleep(1000)
    all_reduce()
elif how == "elsewhere":
    (barrier if rank == 1 else all_reduce)()
elif how == "kernel":  # rank 1 is in a long kernel, and rank 0 waits for it
    end_after(5)
    (spin_in_c if rank == 1 else all_reduce)()
elif how == "same":  # a long kernel before a collective that all have called
    end_after(14)
    all_reduce()
"""

RECORDER = """
import hashlib, os, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
how, rank = sys.argv[1], int(os.environ["RANK"])

def answer_requests():  # as a thread of ProcessGroupNCCL does
    path = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{rank}.pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    while True:
        time.sleep(0.1)
        try:
            data = os.read(pipe, 100)
        except BlockingIOError:
            continue
        if data:
            print("preparing to dump debug info", file=sys.stderr, flush=True)
            with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
                file.write(_dump_fr_trace())

def synchronize():
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", (1 << 31) - 1)

dist.init_process_group("gloo")
threading.Thread(target=answer_requests, daemon=True).start()
for _ in range(5):
    dist.all_reduce(torch.ones(4))
if how == "asleep" and rank == 1:
    time.sleep(1000)
if how == "elsewhere" and rank == 1:
    work = dist.barrier(async_op=True)
else:
    work = dist.all_reduce(torch.ones(4), async_op=True)
synchronize()
"""

OPTIONS = ("--start", "fork", "--grace", "1")
"""Only a forked worker shows its stack without a call of pdrun."""

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.fixture(autouse=True)
def torch_here() -> None:
    pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("layout", [("--devices", "2"), thorough(("--local", "--nodes", "2"))])
def test_a_rank_that_is_not_in_the_collective_of_a_spinning_one_hangs(
    shell: Shell, layout: tuple[str, ...]
) -> None:
    script = shell.script(SPIN)
    code, _, err = shell.run(*layout, *OPTIONS, "--hang-timeout", "2", script, "asleep", timeout=90)
    assert code == 124, err
    assert "rank 1 on " in err[: err.index(" hangs: ")][-40:]
    assert "it is missing in all_reduce, in which rank 0 waits" in err
    assert "rank 0 waits in all_reduce: rank 1 is missing" in err


@pytest.mark.parametrize("how", [thorough("elsewhere")])
def test_two_ranks_in_different_collectives_hang(shell: Shell, how: str) -> None:
    script = shell.script(SPIN)
    code, _, err = shell.run(
        "--devices", "2", *OPTIONS, "--hang-timeout", "3", script, how, timeout=90
    )
    assert code == 124, err
    assert "rank 0 waits in all_reduce: rank 1 is missing" in err
    assert "rank 1 waits in barrier: rank 0 is missing" in err


@pytest.mark.parametrize(("how", "seconds"), [("kernel", "2"), thorough("same", "4")])
def test_a_long_kernel_is_no_hang(shell: Shell, how: str, seconds: str) -> None:
    script = shell.script(SPIN)
    code, _, err = shell.run(
        "--devices", "2", *OPTIONS, "--hang-timeout", seconds, script, how, timeout=90
    )
    assert (code, "hang" in err) == (0, False), err


@pytest.mark.parametrize("how", ["asleep", thorough("elsewhere")])
def test_the_flight_recorder_names_the_collective_and_its_number(shell: Shell, how: str) -> None:
    script = shell.script(RECORDER)
    code, _, err = shell.run(
        "--devices", "2", *OPTIONS, "--hang-timeout", "3", script, how, timeout=150
    )
    assert code == 124, err
    waits = "rank 0 waits in all_reduce (sequence 6, group 0 (default_pg)): rank 1 is missing"
    assert waits in err
    if how == "elsewhere":
        assert "rank 1 waits in barrier (sequence 6, group 0 (default_pg))" in err
