"""
Click-through rates with embedding tables on parameter servers.

    pdrun --servers 2 --devices 2 train_recommender.py
    pdrun --servers 1/node --nodes 2 --local train_recommender.py --mode bounded:4
    python train_recommender.py                          # one process, tables in its memory

The program makes its own log: users and items have ids of up to 10 million, a few of which occur
often, and each has a hidden taste. A click is likely if the tastes of both agree. The tables of
users and items are on the servers, which store only rows that occur. The network on top is summed
over the workers, as without servers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

import pdrun

TASTES = 4


class ClickModel(nn.Module):
    """Tables of users and items on the servers, and a small network on top."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.users = pdrun.ServedEmbedding("users", dim)
        self.items = pdrun.ServedEmbedding("items", dim)
        self.head = nn.Sequential(nn.Linear(3 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        users, items = self.users(ids[:, 0]), self.items(ids[:, 1])
        return self.head(torch.cat([users, items, users * items], 1)).squeeze(1)


class ClickLog:
    """The log, in memory; every worker makes the same one, and each step takes its own rows."""

    def __init__(self, rows: int, ids: int, batch: int) -> None:
        made = torch.Generator().manual_seed(7)
        skewed = torch.rand(rows, 2, generator=made) ** 6  # low numbers occur more often
        self.ids = (skewed * ids).long()
        taste = torch.sin(self.ids.unsqueeze(2).double() * torch.arange(1, TASTES + 1) * 1.7)
        agreement = (taste[:, 0] * taste[:, 1]).sum(1)
        chance = torch.sigmoid(2.0 * agreement)
        self.clicks = (torch.rand(rows, generator=made) < chance).float()
        self.batch = batch

    def __len__(self) -> int:
        return -(-len(self.clicks) // self.batch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.ids.split(self.batch), self.clicks.split(self.batch), strict=True)


def click_loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    total = functional.binary_cross_entropy_with_logits(output, batch[1], reduction="sum")
    return total, torch.tensor(float(len(output)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the log")
    parser.add_argument("--ids", type=int, default=10_000_000, help="ids of users, and of items")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--mode", default="sync", help="sync, async or bounded:K")
    parser.add_argument("--folder", default="", help="of checkpoints; empty: none")
    options = parser.parse_args()
    torch.manual_seed(0)
    run = pdrun.parallelize(
        ClickModel(options.dim),
        lambda params: torch.optim.Adam(params, 1e-3),
        click_loss,
        servers=pdrun.Servers({"users|items": pdrun.rows("adagrad", lr=0.1)}, mode=options.mode),
    )
    log = ClickLog(options.rows, options.ids, options.batch)
    if options.folder and run.resume(options.folder) and run.context.is_main:
        print(f"continues after step {run.steps}")
    for epoch in range(run.steps // len(log), options.epochs):
        started = time.monotonic()
        total = count = 0.0
        for batch in log:
            metrics = run.step(batch)
            total += metrics.loss * metrics.tokens
            count += metrics.tokens
        if run.context.is_main:
            speed = count / (time.monotonic() - started)
            print(f"epoch {epoch}: loss {total / count:.4f}, {speed:,.0f} rows/s", flush=True)
        if options.folder:
            run.save(options.folder, keep=2)


if __name__ == "__main__":
    main()
