"""
A step of an embedding model on two workers: rows on a parameter server, compared with DDP.

    python benchmarks/embedding_step.py [--rounds 7] [--dense] [sync sync-stored ...]

A table of 1,000,000 x 32, 1,024 rows of 26 ids per worker (Zipf, exponent 1.2), a small network on
top, SGD. sync and async have a ServedEmbedding, most of whose rows are new in these steps;
sync-stored and async-stored an nn.Embedding, whose rows the server has from the start, as DDP has.
Each kind is a job whose processes train with DDP, too: a round is a block of steps of each way in
turn. Figures are CPU-milliseconds of a step, of both workers and the server together; the first
table has the medians of all rounds, the second one the minima.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from server_processes import cpu_seconds, find_servers

os.environ["OMP_NUM_THREADS"] = "1"

ROWS, DIM, BATCH, IDS = 1_000_000, 32, 1024, 26
WARM_STEPS, STEPS, DENSE_STEPS = 3, 8, 2
KINDS = ("sync", "sync-stored", "async-stored")
RATE = 0.01


def work(kind: str, rounds: int, with_dense: bool) -> None:
    import torch
    from torch import distributed, nn
    from torch.nn import functional

    import pdrun

    class Net(nn.Module):
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = table
            self.top = nn.Sequential(nn.Linear(IDS * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.top(self.table(ids).flatten(1))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = pdrun.init()

    def make_peer(sparse: bool) -> Callable[[torch.Tensor], None]:
        model = Net(nn.Embedding(ROWS, DIM, sparse=sparse))
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), RATE)

        def step(batch: torch.Tensor) -> None:
            mine = batch.chunk(2)[context.rank]
            optimizer.zero_grad()
            functional.mse_loss(wrapped(mine), torch.ones(len(mine), 1)).backward()
            optimizer.step()

        return step

    mode, _, stored = kind.partition("-")
    table = nn.Embedding(ROWS, DIM) if stored else pdrun.ServedEmbedding("table", DIM, rows=ROWS)
    run = pdrun.parallelize(
        Net(table),
        lambda params: torch.optim.SGD(params, RATE),
        lambda output, batch: functional.mse_loss(output, torch.ones(len(output), 1)),
        servers=pdrun.Servers({"table": pdrun.rows("sgd", lr=RATE)}, mode=mode),
    )
    ways: dict[str, Callable[[torch.Tensor], Any]] = {"sparse DDP": make_peer(True), kind: run.step}
    if with_dense:
        ways["dense DDP"] = make_peer(False)
    pids: list[Any] = [None, None]
    distributed.all_gather_object(pids, os.getpid())
    pids += find_servers()
    made = torch.Generator().manual_seed(1)

    def make_batches(count: int) -> list[torch.Tensor]:
        shape = (count, 2 * BATCH, IDS)
        return list((torch.rand(shape, generator=made, dtype=torch.float64) ** -5).long() % ROWS)

    found: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        for batch in make_batches(WARM_STEPS):
            step(batch)
    for _ in range(rounds):
        for name, step in ways.items():
            batches = make_batches(DENSE_STEPS if name == "dense DDP" else STEPS)
            distributed.barrier()
            before = cpu_seconds(*pids)
            distributed.barrier()
            for batch in batches:
                step(batch)
            distributed.barrier()
            found[name].append(1e3 * (cpu_seconds(*pids) - before) / len(batches))
            distributed.barrier()
    if context.is_main:
        print("found " + json.dumps(found), flush=True)


def print_table(title: str, jobs: list[dict[str, float]]) -> None:
    print(
        f"{title}\n\n| way | CPU-ms of a step | of sparse DDP | of dense DDP |\n|---|---|---|---|"
    )
    for job in jobs:
        for way, value in job.items():
            ratios = (
                f"{value / job[peer]:.2f}" if peer in job else "-"
                for peer in ("sparse DDP", "dense DDP")
            )
            print(f"| {way} | {value:.1f} | {' | '.join(ratios)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dense", action="store_true", help="compare with dense DDP, too")
    parser.add_argument("--work", action="store_true")
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    options = parser.parse_args()
    if options.work:
        work(options.kinds[0], options.rounds, options.dense)
        return
    jobs = []
    for kind in options.kinds:
        words = ["-m", "pdrun", "--no-files", "--devices", "2", "--backend", "cpu"]
        words += ["--servers", "1", __file__, "--work", kind, "--rounds", str(options.rounds)]
        words += ["--dense"] * options.dense
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        _, is_found, text = done.stdout.partition("found ")
        if not is_found:
            sys.exit(done.stdout + done.stderr)
        jobs.append(json.loads(text.splitlines()[0]))
    for title, choose in (("Medians", statistics.median), ("Minima", min)):
        print_table(title, [{way: choose(each) for way, each in job.items()} for job in jobs])


if __name__ == "__main__":
    main()
