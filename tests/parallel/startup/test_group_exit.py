"""A finished worker ends with its own exit code, however the script ends."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.lib.tiers import by_tier
from tests.lib.worker_processes import run_program, torch

pytestmark = pytest.mark.torch

ENDS = {"forgets": 0, "closes": 0, "sys.exit": 7, "raises": 1, "keeps groups": 0, "leaves work": 1}
"""Ways in which the script ends, and the exit code of each."""

PARENT = '''
"""Import torch once; fork many jobs of two ranks, which run the job and end as scripts do."""
import json, os, signal, socket, sys
import torch, torch.distributed as dist, torch._dynamo
import pdrun, pdrun.parallel.parallelize
from pdrun.parallel.startup import init as _

def job(rank, port, how):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    ctx = pdrun.init()
    global kept
    if how in ("keeps groups", "leaves work"):
        kept = [dist.new_group([0, 1]), torch.ones(64)]
        for _ in range(5):
            dist.all_reduce(kept[1], group=kept[0])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    kept = (globals().get("kept"), pdrun.parallelize(
        model, lambda p: torch.optim.SGD(p, 0.1), lambda o, b: (o.sum(), len(b)),
        mesh=pdrun.mesh(dp=2), optimizer_level=3))
    kept[1].step(torch.ones(8, 4))
    if how == "closes":
        ctx.close()
    if how == "sys.exit":
        sys.exit(7)
    if how == "raises":
        raise RuntimeError("by the script")
    if how == "leaves work":
        if rank == 0:
            dist.all_reduce(torch.ones(64), group=kept[0][0], async_op=True)
        raise RuntimeError("by the script")

def fork(rank, port, how):
    pid = os.fork()
    if pid == 0:
        raise SystemExitIn(rank, port, how)
    return pid

class SystemExitIn(BaseException):
    """Leaves the parent's loop in a child."""

def main(runs):
    found = []
    for number in range(runs):
        how = HOW[number % len(HOW)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = [fork(rank, port, how) for rank in range(2)]
        signal.alarm(240)
        for pid in pids:
            found.append((how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        signal.alarm(0)
    print("FOUND " + json.dumps(found), flush=True)

HOW = json.loads(sys.argv[2])
child = None
try:
    main(int(sys.argv[1]))
except SystemExitIn as leave:
    child = leave.args
if child is not None:
    sys.stderr = open(os.devnull, "w")
    job(*child)
'''


@torch
def test_no_worker_aborts_after_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    ends = by_tier(["keeps groups", "leaves work"], list(ENDS))
    runs = by_tier(len(ends), 500)
    words = (str(runs), json.dumps(ends))
    out = run_program(tmp_path, script, *words, timeout=300.0 + runs * 20)
    lines = [line for line in out.splitlines() if line.startswith("FOUND ")]
    assert lines, out
    found = Counter((how, code) for how, code in json.loads(lines[0].removeprefix("FOUND ")))
    wrong = {f"{how}: {code}": times for (how, code), times in found.items() if ENDS[how] != code}
    assert not wrong, found


TRAINS = """
import os, time, torch, torch.distributed as dist
from pathlib import Path
ctx = pdrun.init()
def threads():
    found = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        try:
            found += name.read_text().strip() == "pt_gloo_runloop"
        except OSError:
            pass
    return found
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
run = pdrun.parallelize(
    model, lambda p: torch.optim.SGD(p, 0.1), lambda o, b: (o.sum(), len(b)), optimizer_level=3)
run.step(torch.ones(8, 4))
from pdrun.parallel import collectives
collectives.all_reduce(torch.ones(2), collectives.group(ranks=[1, 0]))
collectives.barrier(collectives.group("dp", pdrun.mesh(dp=2)))
before = threads()
ctx.close()
end = time.monotonic() + 20
while threads() and time.monotonic() < end:  # a joined thread is listed a moment longer
    time.sleep(0.01)
after = threads()
try:
    run.step(torch.ones(8, 4))
    refused = ""
except pdrun.UsageError as error:
    refused = str(error)
report(ctx, before=before, after=after, refused=refused)
"""


@torch
def test_close_joins_the_threads_of_all_groups(tmp_path: Path) -> None:
    from tests.lib.worker_processes import finish_all, fork, free_port, reports
    from tests.parallel.startup.test_init import worker_environ

    port = free_port()
    workers = [fork(tmp_path, TRAINS, worker_environ(rank, 2, port)) for rank in range(2)]
    ended = finish_all(workers)
    assert [code for code, _, _ in ended] == [0, 0], ended
    for one in reports("".join(out for _, out, _ in ended)):
        assert one["before"] > 0
        assert one["after"] == 0
        assert "the job's process groups are closed" in one["refused"]
