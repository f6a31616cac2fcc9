"""
One layer of experts on one or several devices, forward and backward: pdrun's, a dispatcher written
by hand as torchtitan has it, and equal groups in a bmm. In alternation, in one command.

    python -m pdrun --devices 2 benchmarks/experts_gpu.py
    python -m pdrun --devices 1 benchmarks/experts_gpu.py      # nothing travels on either side
    python -m pdrun --devices 2 benchmarks/experts_gpu.py --eager
    python -m pdrun --devices 2 --backend cpu benchmarks/experts_gpu.py --tiny

    routed     tokens go where the router sends them
      pdrun    `pdrun.MoE` with ``experts("ep")``
      titan    counts and rows by all_to_all_single, index permutations, _grouped_mm, scatter_add
    balanced   every expert gets the same number of rows
      pdrun    the same
      bmm      all-to-alls of equal parts, torch.bmm over the experts

Tokens per second are of all ranks together. The rows of a kind have the same weights; the first
pass compares their outputs. ``--profile`` prints the kernels of each row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

import pdrun
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.comm.watchdog import CollectiveWatchdog

Layer = Callable[[Tensor], Tensor]
KERNELS = 16
"""Kernels that are printed."""


def grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return torch's grouped product."""
    return F.grouped_mm(x, weight, offs=offsets)


class TitanDispatch:
    """torchtitan's all-to-all dispatcher and GroupedExperts, on the weights of a `pdrun.MoE`."""

    def __init__(self, moe: pdrun.MoE, top_k: int, experts: int, is_compiled: bool) -> None:
        self.moe, self.top_k, self.experts = moe, top_k, experts
        self.world = dist.get_world_size()
        compiled = torch.compile if is_compiled else lambda function: function
        self.compute = compiled(self._compute)
        self.route = compiled(self._route)
        self.combine = compiled(self._combine)
        self.alone = compiled(self._alone)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores = F.linear(x.float(), self.moe.router.weight.float()).softmax(-1)
        weights, index = scores.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = index.reshape(-1).argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, index.reshape(-1), torch.ones_like(index.reshape(-1)))
        tokens = order // self.top_k
        return x[tokens], tokens, counts, weights.reshape(-1)[order]

    def _compute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        gate, up = grouped(rows, self.moe.up, offsets).chunk(2, dim=-1)
        return grouped(F.silu(gate) * up, self.moe.down, offsets)

    def _combine(self, x: Tensor, rows: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        rows = (rows.float() * weights.unsqueeze(1)).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, tokens.unsqueeze(1).expand_as(rows), rows)

    def _alone(self, x: Tensor) -> Tensor:
        rows, tokens, counts, weights = self._route(x)
        rows = self._compute(rows, counts.cumsum(0).to(torch.int32))
        return self._combine(x, rows, tokens, weights)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output; weights multiply after the experts."""
        group = dist.group.WORLD
        if self.world == 1:
            return self.alone(x)
        rows, tokens, counts, weights = self.route(x)
        with torch.no_grad():
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sizes = torch.stack([counts, theirs]).view(2, self.world, -1).sum(2).cpu().tolist()
            sent, received = sizes
        rows = funcol.all_to_all_single_autograd(rows, received, sent, group)
        with torch.no_grad():
            local = theirs.view(self.world, -1)
            ids = torch.arange(local.shape[1], device=x.device).repeat(self.world)
            ids = ids.repeat_interleave(theirs, output_size=sum(received))
            order = ids.argsort(stable=True)
            offsets = local.sum(0).cumsum(0).to(torch.int32)
        shape = rows.shape
        rows = self.compute(rows[order], offsets)
        back = rows.new_empty(shape)
        back[order] = rows
        back = funcol.all_to_all_single_autograd(back, sent, received, group)
        return self.combine(x, back, tokens, weights)


class EqualGroups:
    """Every expert gets the same number of rows: no index is sorted, nothing is uneven."""

    def __init__(self, moe: pdrun.MoE, top_k: int, experts: int, is_compiled: bool) -> None:
        self.moe, self.top_k, self.experts = moe, top_k, experts
        self.world = dist.get_world_size()
        self.compute = torch.compile(self._compute) if is_compiled else self._compute

    def _experts(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows, self.moe.up).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.moe.down)

    def _exchange(self, rows: Tensor) -> Tensor:
        if self.world == 1:
            return rows
        equal = [len(rows) // self.world] * self.world
        return funcol.all_to_all_single_autograd(rows, equal, equal, dist.group.WORLD)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output for tokens that go to the experts in turn."""
        return self.compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        count, dim = x.shape
        each = count * self.top_k // self.experts
        rows = x.unsqueeze(1).expand(count, self.top_k, dim).reshape(each, self.experts, dim)
        rows = rows.transpose(0, 1).reshape(-1, dim)
        rows = self._exchange(rows)
        local = self.experts // self.world
        rows = rows.view(self.world, local, each, dim).transpose(0, 1).reshape(local, -1, dim)
        rows = self._experts(rows).view(local, self.world, each, dim).transpose(0, 1)
        rows = self._exchange(rows.reshape(-1, dim))
        rows = rows.view(self.experts, each, dim).transpose(0, 1).reshape(count, self.top_k, dim)
        return rows.sum(1) / self.top_k


def build_layer(options: argparse.Namespace, dtype: torch.dtype) -> pdrun.MoE:
    """Return the layer with its experts cut over ep."""
    context = pdrun.init()
    device = torch.device(context.device)
    torch.manual_seed(0)
    holder = nn.Module()
    holder.moe = pdrun.MoE(
        options.dim, options.hidden, experts=options.experts, top_k=options.top_k
    )
    holder = holder.to(device, dtype)
    mesh = make_mesh(ep=context.world_size)
    axes = MeshGroups(mesh.grid, context.rank, device, CollectiveWatchdog(600.0, context.rank))
    pdrun.Strategy({"moe": pdrun.experts("ep")}).apply(holder, axes, None)
    return holder.moe


def time_step(layer: Layer, x: Tensor, repeats: int) -> float:
    """Return the seconds of a forward and backward."""
    wait = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    dist.barrier()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        layer(x).square().mean().backward()
        x.grad = None
    wait()
    return (time.perf_counter() - start) / repeats


def print_kernels(name: str, layer: Layer, x: Tensor) -> None:
    """Print the milliseconds of a pass by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        time_step(layer, x, 1)
    events = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in events)
    print(f"  {name}: {total / 1e3:.2f} ms in kernels")
    for each in events[:KERNELS]:
        print(f"    {each.self_device_time_total / 1e3:7.3f} ms {each.count:3} x {each.key[:90]}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1408)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="per rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each row")
    parser.add_argument("--tiny", action="store_true", help="a small layer, for a trial on CPUs")
    options = parser.parse_args()
    if options.tiny:
        options.dim, options.hidden, options.experts, options.tokens = 64, 96, 8, 256
        options.rounds = options.repeats = 2
    context = pdrun.init()
    device = torch.device(context.device)
    dtype = torch.bfloat16
    moe = build_layer(options, dtype)
    torch.manual_seed(1 + context.rank)
    x = torch.randn(options.tokens, options.dim, device=device, dtype=dtype, requires_grad=True)
    turn = torch.arange(options.tokens * options.top_k, device=device) % options.experts
    index = turn.view(options.tokens, options.top_k)
    even = torch.full(index.shape, 1 / options.top_k, device=device)
    is_compiled = not options.eager
    whole: Layer = torch.compile(moe) if is_compiled else moe
    balanced = torch.compile(moe.compute_tokens) if is_compiled else moe.compute_tokens
    rest = moe, options.top_k, options.experts, is_compiled
    kinds: dict[str, dict[str, Layer]] = {
        "routed": {"pdrun": whole, "titan": TitanDispatch(*rest)},
        "balanced": {
            "pdrun": lambda x: balanced(x, index, even),
            "bmm": EqualGroups(*rest),
        },
    }
    for kind, rows in kinds.items():
        outputs = [layer(x).detach().float() for layer in rows.values()]
        off = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for layer in rows.values():
            time_step(layer, x, 3)
        for _ in range(options.rounds):
            for name, layer in rows.items():
                seconds[name].append(time_step(layer, x, options.repeats))
        if context.rank == 0:
            print(f"{kind}: outputs differ by {off:.1e} of their norm")
            other = statistics.median(list(seconds.values())[1])
            for name, each in seconds.items():
                middle = statistics.median(each)
                rate = options.tokens * context.world_size / middle
                print(
                    f"  {name:6} {middle * 1e3:8.2f} ms ({min(each) * 1e3:.2f} to"
                    f" {max(each) * 1e3:.2f}), {rate:12,.0f} tokens/s, {other / middle:.3f} of it",
                    flush=True,
                )
        if options.profile and x.is_cuda:
            for name, layer in rows.items():
                print_kernels(name, layer, x)
    dist.barrier()


if __name__ == "__main__":
    main()
