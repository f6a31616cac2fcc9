"""
Measure the cost of a step of pdrun's module styles, compared with tensor parallel written by hand
on plain tensors, and with torch's `parallelize_module` on DTensors: same model, same sharding, same
losses.

    python benchmarks/tensor_overhead.py [--devices 2] [--rounds 9]

The three take turns, block of steps by block of steps in the same processes, so that noise hits all
alike. The result is the median of the blocks' ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import pdrun
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid

Step = Callable[[Tensor, Tensor], float]


class Attention(nn.Module):
    """Causal, by heads."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, width // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            w(x).view(rows, length, self.n_heads, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Perceptron(nn.Module):
    """A gated perceptron."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, 4), Perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A small language model; embedding and head are replicated."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# ---- by hand ----------------------------------------------------------------


class Copy(torch.autograd.Function):
    """Identity forward, sum backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class HandAttention(Attention):
    """The same with this rank's heads."""

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(super().forward(Copy.apply(x)))


class HandPerceptron(Perceptron):
    """The same with this rank's hidden units."""

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(super().forward(Copy.apply(x)))


def shard_by_hand(model: Model, rank: int, world: int) -> Model:
    """Shard the model in the shortest way."""
    for layer in model.layers:
        layer.attn.__class__, layer.mlp.__class__ = HandAttention, HandPerceptron
        layer.attn.n_heads //= world
        for linear in (layer.attn.wq, layer.attn.wk, layer.attn.wv, layer.mlp.gate, layer.mlp.up):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(world, 0)[rank].clone())
        for linear in (layer.attn.wo, layer.mlp.down):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(world, 1)[rank].clone())
    return model


# ---- the three --------------------------------------------------------------


def by_pdrun(model: Model, rank: int, world: int) -> Model:
    axes = MeshGroups(
        Grid(("tp",), (world,)), rank, torch.device("cpu"), CollectiveWatchdog(60.0, rank, world)
    )
    return pdrun.Strategy(
        {
            "layers.*.attn": pdrun.heads("tp"),
            "layers.*.attn.w[qkv]|layers.*.mlp.gate|layers.*.mlp.up": pdrun.col("tp"),
            "layers.*.attn.wo|layers.*.mlp.down": pdrun.row("tp"),
        }
    ).apply(model, axes)


def shard_with_dtensor(model: Model, world: int) -> Model:
    """
    Shard with torch; the rest is replicated DTensors, too, since one optimizer needs one kind.
    """
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for layer in model.layers:
        layer.attn.n_heads //= world
        plan = {f"attn.w{name}": ColwiseParallel() for name in "qkv"} | {
            "attn.wo": RowwiseParallel()
        }
        plan |= {
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


def stepper(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def time_steps(step: Step, x: Tensor, y: Tensor, steps: int) -> tuple[float, float]:
    """Return wall time and this process's CPU time per step, in ms."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(x, y)
    return (time.perf_counter() - begin) / steps * 1e3, (time.process_time() - used) / steps * 1e3


def measure_variants(args: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """Return (ms per step, median ratio of pdrun's to it, median ratio of CPU time) of each."""
    torch.set_num_threads(1)
    pdrun.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Model(args.width, args.layers)
    x, y = torch.randint(256, (2, args.rows, args.length))
    steps = {
        "pdrun": stepper(by_pdrun(copy.deepcopy(model), rank, world)),
        "by hand": stepper(shard_by_hand(copy.deepcopy(model), rank, world)),
        "DTensor": stepper(shard_with_dtensor(copy.deepcopy(model), world)),
    }
    losses = {name: [step(x, y) for _ in range(3)] for name, step in steps.items()}
    for name, found in losses.items():
        assert all(abs(a - b) < 1e-5 for a, b in zip(found, losses["by hand"], strict=True)), (
            name,
            losses,
        )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(args.rounds):
        order = list(steps) if turn % 2 else list(reversed(steps))
        for name in order:
            times[name].append(time_steps(steps[name], x, y, args.steps))
    own = times["pdrun"]
    return {
        name: (
            statistics.median(wall for wall, _ in found),
            statistics.median(a[0] / b[0] for a, b in zip(own, found, strict=True)),
            statistics.median(a[1] / b[1] for a, b in zip(own, found, strict=True)),
        )
        for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare three ways of tensor parallel on CPUs.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()
    told = pdrun.launch(measure_variants, args, devices=args.devices, backend="cpu")[0]
    print(
        f"torch {torch.__version__}, {args.devices} ranks, width {args.width}, {args.layers} layers"
    )
    for name, (mine, ratio, cpu) in told.items():
        print(
            f"{name:10} {mine:8.2f} ms a step   pdrun / {name} {ratio:.3f}   of CPU time {cpu:.3f}"
        )


if __name__ == "__main__":
    main()
