"""
A step of an embedding model on two workers: rows on a parameter server, compared with DDP.

    python benchmarks/embedding_step.py [--rounds 3] [sparse sync ...]

A table of 1,000,000 x 32, 1,024 rows of 26 ids per worker (Zipf, exponent 1.2), a small network on
top, SGD. sync and async have a ServedEmbedding, most of whose rows are new in these steps;
sync-stored and async-stored an nn.Embedding, whose rows the server has from the start, as DDP has.
Figures are CPU-milliseconds of a step, of both workers and the server together; each is
the median of the steps, and of rounds in which the kinds take turns.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from typing import Any

from server_processes import cpu_seconds, find_servers

os.environ["OMP_NUM_THREADS"] = "1"

ROWS, DIM, BATCH, IDS = 1_000_000, 32, 1024, 26
STEPS, WARM_STEPS = 9, 2
KINDS = ("dense", "sparse", "sync", "async", "sync-stored", "async-stored")
RATE = 0.01


def work(kind: str) -> None:
    import torch
    from torch import distributed, nn
    from torch.nn import functional

    import pdrun

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = pdrun.ServedEmbedding("table", DIM, rows=ROWS)
            if kind not in ("sync", "async"):
                self.table = nn.Embedding(ROWS, DIM, sparse=kind == "sparse")
            self.top = nn.Sequential(nn.Linear(IDS * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.top(self.table(ids).flatten(1))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = pdrun.init()
    model = Net()
    if kind in ("dense", "sparse"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), RATE)

        def step(batch: torch.Tensor) -> None:
            mine = batch.chunk(2)[context.rank]
            optimizer.zero_grad()
            functional.mse_loss(wrapped(mine), torch.ones(len(mine), 1)).backward()
            optimizer.step()

    else:
        run = pdrun.parallelize(
            model,
            lambda params: torch.optim.SGD(params, RATE),
            lambda output, batch: functional.mse_loss(output, torch.ones(len(output), 1)),
            servers=pdrun.Servers(
                {"table": pdrun.rows("sgd", lr=RATE)}, mode=kind.partition("-")[0]
            ),
        )
        step = run.step  # type: ignore[assignment]
    pids: list[Any] = [None, None]
    distributed.all_gather_object(pids, os.getpid())
    pids += find_servers()
    made = torch.Generator().manual_seed(1)
    found = []
    for index in range(STEPS + WARM_STEPS):
        batch = (
            torch.rand(2 * BATCH, IDS, generator=made, dtype=torch.float64) ** -5
        ).long() % ROWS
        distributed.barrier()
        before = cpu_seconds(*pids)
        distributed.barrier()
        step(batch)
        distributed.barrier()
        after = cpu_seconds(*pids)
        distributed.barrier()
        if index >= WARM_STEPS:
            found.append(after - before)
    if context.is_main:
        print(f"median {1e3 * statistics.median(found):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", choices=KINDS)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    results: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    for _ in range(options.rounds):
        for kind in options.kinds:
            servers = [] if kind in ("dense", "sparse") else ["--servers", "1"]
            words = ["-m", "pdrun", "--no-files", "--devices", "2", "--backend", "cpu", *servers]
            done = subprocess.run(
                [sys.executable, *words, __file__, "--work", kind],
                capture_output=True,
                text=True,
                check=False,
            )
            match = re.search(r"median ([0-9.]+)", done.stdout)
            if match is None:
                sys.exit(done.stdout + done.stderr)
            results[kind].append(float(match[1]))
    print("| kind | CPU-ms of a step | of sparse DDP | of dense DDP |\n|---|---|---|---|")
    medians = {kind: statistics.median(found) for kind, found in results.items()}
    for kind, median in medians.items():
        ratios = " | ".join(
            f"{median / medians[one]:.2f}" if one in medians else "-" for one in ("sparse", "dense")
        )
        print(f"| {kind} | {median:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
