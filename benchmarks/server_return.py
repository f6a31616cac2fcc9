"""
A killed parameter server with a table of 1 GB: seconds until it answers again.

    pdrun --devices 1 --servers 1 benchmarks/server_return.py FOLDER

Mode async; the server goes back to the tables that it wrote to FOLDER (1.1 GB), which is emptied.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from server_processes import cpu_seconds, find_servers

import pdrun

ROWS, DIM, PART = 8_000_000, 32, 400_000
ROUNDS = 3


def find_server() -> int:
    """Return the server of this job."""
    found = find_servers()
    return found[0] if found else sys.exit("there is no server: start this with pdrun --servers 1")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: server_return.py FOLDER; it is emptied")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    client = pdrun.servers.connect("async", timeout=300)
    client.add_rows("table", pdrun.rows("sgd", lr=1.0), dim=DIM)
    grads = torch.ones(PART, DIM)
    for first in range(0, ROWS, PART):
        client.push_rows("table", torch.arange(first, first + PART), grads)
    began = time.monotonic()
    client.save(folder)
    print(f"written in {time.monotonic() - began:.1f} s", flush=True)
    for _ in range(ROUNDS):
        os.kill(find_server(), signal.SIGKILL)
        began = time.monotonic()
        client.rows("table", torch.arange(1000))
        seconds = time.monotonic() - began
        load = os.getloadavg()[0]
        cpu = cpu_seconds(find_server())
        print(f"answers after {seconds:.2f} s, {cpu:.2f} s of CPU, load {load:.0f}", flush=True)
        time.sleep(1.0)
    client.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
