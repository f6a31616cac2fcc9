"""
Measure the cost of pdrun's runtime per step, compared with torch on the same work: DDP for level 0,
FSDP2 for level 3, and ZeroRedundancyOptimizer for level 1, on CPUs.

    python benchmarks/parallel_overhead.py [--devices 2] [--rounds 7] [--exact]

Each pair takes turns, block of steps by block of steps in the same processes, so that noise hits
both alike. The result is the median of the blocks' ratios.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pdrun


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def total_loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def torch_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None
) -> Callable[[Tensor, Tensor], float]:
    def step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach()
        dist.all_reduce(told)  # who trains looks at the loss
        return float(told)

    return step


def pdrun_step(run: pdrun.Run) -> Callable[[Tensor, Tensor], float]:
    return lambda x, y: run.step((x, y)).loss


def pairs(args: argparse.Namespace) -> dict[str, tuple[Callable[..., float], Callable[..., float]]]:
    adam = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    fresh = functools.partial(Model, args.width, args.layers)
    own = functools.partial(
        pdrun.parallelize,
        optimizer=adam,
        loss=total_loss,
        dataset_strategy="data_parallel",
        clip=args.clip,
        exact=args.exact,
    )
    ddp, zero, sharded = DistributedDataParallel(fresh()), DistributedDataParallel(fresh()), fresh()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    zero_adam = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return {
        "level 0 / DDP": (
            pdrun_step(own(fresh())),
            torch_step(ddp, adam(ddp.parameters()), args.clip),
        ),
        "level 1 / ZeRO-1": (
            pdrun_step(own(fresh(), optimizer_level=1)),
            torch_step(zero, zero_adam, args.clip),
        ),
        "level 3 / FSDP2": (
            pdrun_step(own(fresh(), optimizer_level=3)),
            torch_step(sharded, adam(sharded.parameters()), args.clip),
        ),
    }


def time_steps(step: Callable[..., float], x: Tensor, y: Tensor, steps: int) -> tuple[float, float]:
    """Return wall time and this process's CPU time per step, in ms."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(x, y)
    return (time.perf_counter() - begin) / steps * 1e3, (time.process_time() - used) / steps * 1e3


def measure_pairs(args: argparse.Namespace) -> dict[str, tuple[float, float, float, float]]:
    """Return (pdrun ms, torch ms, median ratio, median ratio of CPU time) of each pair."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pdrun.init()
    torch.manual_seed(dist.get_rank())
    x, y = torch.randint(256, (2, args.rows, args.length))
    found = {}
    for name, (ours, theirs) in pairs(args).items():
        for step in (ours, theirs):
            time_steps(step, x, y, 3)
        times = []
        for turn in range(args.rounds):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            one, two = (time_steps(step, x, y, args.steps) for step in order)
            times.append((one, two) if turn % 2 else (two, one))
        walls = [(a[0], b[0]) for a, b in times]
        found[name] = (
            statistics.median(a for a, _ in walls),
            statistics.median(b for _, b in walls),
            statistics.median(a / b for a, b in walls),
            statistics.median(a[1] / b[1] for a, b in times),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare a step of pdrun with a step of torch on CPUs."
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--clip", type=float, help="clip gradients, on both sides")
    parser.add_argument("--exact", action="store_true", help="the bits of one process")
    args = parser.parse_args()
    told = pdrun.launch(measure_pairs, args, devices=args.devices, backend="cpu")[0]
    print(
        f"torch {torch.__version__}, {args.devices} ranks, width {args.width}, {args.layers}"
        f" layers, clip {args.clip}"
    )
    for name, (ours, theirs, ratio, cpu) in told.items():
        print(
            f"{name:18} {ours:8.2f} ms {theirs:8.2f} ms   ratio {ratio:.3f}   ratio of CPU time"
            f" {cpu:.3f}"
        )


if __name__ == "__main__":
    main()
