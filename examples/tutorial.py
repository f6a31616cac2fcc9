"""
The script of the tutorial: a small network on one process, on several devices, and on a cluster.

    python examples/tutorial.py
    pdrun --devices 2 examples/tutorial.py
    pdrun --nodes 2 --devices 1 --local --max-restarts 1 examples/tutorial.py --checkpoints run

All print the same losses. With --checkpoints it continues from its last checkpoint.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

import pdrun


class Rings(torch.utils.data.Dataset):
    """Points of a plane; the label is the ring that a point is in."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(count, 2, generator=generator)
        self.labels = (2 * self.points.norm(dim=1)).long().clamp(max=4)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


def loss_of(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--level", type=int, default=0, help="optimizer level, 0 to 3")
    parser.add_argument("--checkpoints", help="folder to save to and to continue from")
    parser.add_argument("--fail-at", type=int, default=-1, help="step at which rank 1 fails once")
    args = parser.parse_args()
    torch.manual_seed(1)
    context = pdrun.init()
    run = pdrun.parallelize(
        nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=loss_of,
        optimizer_level=args.level,
    )
    if args.checkpoints and run.resume(args.checkpoints) and context.is_main:
        print(f"continues after step {run.steps}", flush=True)
    loader = pdrun.Loader(Rings(64 * args.steps), 64, shuffle=True)
    for batch in run.data(loader) if run.steps < args.steps else ():
        m = run.step(batch)
        if m.step % 20 == 0 and context.is_main:
            print(f"step {m.step:3}/{args.steps}  loss {m.loss:.4f}", flush=True)
        if args.checkpoints and m.step % 20 == 0:
            run.save(args.checkpoints, keep=2)
        is_first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if m.step == args.fail_at and context.rank == 1 and is_first_try:
            raise ValueError("a fault at one rank")


if __name__ == "__main__":
    main()
