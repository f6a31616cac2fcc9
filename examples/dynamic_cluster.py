"""
A cluster without a launcher: one scheduler and two workers, started by hand, in any order, on any
machines.

    export PDRUN_SCHEDULER=127.0.0.1:7077 PDRUN_WORKERS=2
    PDRUN_ROLE=scheduler python examples/dynamic_cluster.py &
    PDRUN_ROLE=worker    python examples/dynamic_cluster.py &
    PDRUN_ROLE=worker    python examples/dynamic_cluster.py

All three run this file. In the scheduler, `pdrun.init()` serves until the job is over and never
returns. In a worker, it returns the rank that the scheduler assigned. The processes authenticate
with the user's secret file, or with PDRUN_TOKEN_FILE. MindSpore's variables (MS_ROLE,
MS_SCHED_HOST, MS_SCHED_PORT, MS_WORKER_NUM) work as well.

`python examples/dynamic_cluster.py demo` starts all three on this machine.
"""

import os
import socket
import subprocess
import sys

import pdrun


def work() -> None:
    context = pdrun.init()
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(context.rank)], device=context.device)
    dist.all_reduce(value)
    print(
        f"rank {context.rank} of {context.world_size} on {context.device}: all ranks sum up to"
        f" {value.item():g}"
    )


def demo() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {**os.environ, "PDRUN_SCHEDULER": address, "PDRUN_WORKERS": "2"}
    parts = [
        subprocess.Popen([sys.executable, __file__], env={**shared, "PDRUN_ROLE": role})
        for role in ("scheduler", "worker", "worker")
    ]
    return max(abs(part.wait()) for part in parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["demo"]:
        sys.exit(demo())
    work()
