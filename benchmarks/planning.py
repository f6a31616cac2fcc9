"""
Measure how long the operator engine takes to plan a decoder for many ranks. No device is needed:
the weights are on the meta device.

    python benchmarks/planning.py --layers 32 --axes tp=64
    python benchmarks/planning.py --layers 32 --axes x=8,y=8
    python benchmarks/planning.py --layers 32 --axes tp=8 --whole  # export each layer, though equal
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.explain import explain_plan, list_moves
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.module import Operators


class Layer(nn.Module):
    """Attention with rotary positions and grouped heads, and a gated perceptron."""

    def __init__(self, width: int, heads: int, groups: int, wide: int) -> None:
        super().__init__()
        self.size, self.heads, self.groups = width // heads, heads, groups
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(rows, length, self.heads, self.size).transpose(1, 2)
        k = self.k(h).view(rows, length, self.groups, self.size).transpose(1, 2)
        v = self.v(h).view(rows, length, self.groups, self.size).transpose(1, 2)
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.size // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Decoder(nn.Module):
    """A decoder like Llama 3 8B: 4096 wide, 32 heads in 8 groups, a vocabulary of 128,256."""

    def __init__(self, layers: int, width: int = 4096, words: int = 128256) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Layer(width, 32, 8, 14336) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.register_buffer("rates", 5e5 ** (-torch.arange(0, 128, 2) / 128), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.rates[None]
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def strategy(axes: list[str]) -> Operators:
    """Megatron's layout over one axis; over two, rows and columns of the weights."""
    first, rest = axes[0], axes[1] if len(axes) > 1 else None
    return Operators(
        {
            "layers.*.[qkv].weight": L(first, rest),
            "layers.*.o.weight": L(rest, first),
            "emb.weight": L(first, None),
            "layers.*.gate.weight": L(first, rest),
            "layers.*.up.weight": L(first, rest),
            "layers.*.down.weight": L(rest, first),
            "head.weight": L(first, rest),
        }
    )


def time_call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function and print how long it took."""
    start, busy = time.monotonic(), time.process_time()
    result = function(*args)
    print(
        f"{what:10} {time.monotonic() - start:6.2f} s, {time.process_time() - busy:6.2f} s of CPU"
    )
    return result


def main() -> None:
    """Plan, and print times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--axes", default="tp=8")
    parser.add_argument("--whole", action="store_true")
    chosen = parser.parse_args()
    degrees = {name: int(size) for name, size in (one.split("=") for one in chosen.axes.split(","))}
    grid = Grid(
        ("dp", *degrees),
        (64 // Grid(tuple(degrees), tuple(degrees.values())).size, *degrees.values()),
    )
    with torch.device("meta"):
        model = Decoder(chosen.layers)
    tokens = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    print(f"torch {torch.__version__}, {chosen.layers} layers on ({grid})")
    graph = time_call("export", export_graph, model, (tokens,), None, not chosen.whole)
    engine = strategy(list(degrees))
    plan = time_call("plan", engine.plan_of, graph, grid, {})
    found = time_call("moves", lambda: list(list_moves(plan)))
    text = time_call("explain", explain_plan, plan)
    print(
        f"{len(graph.operators)} operators, {len(found)} moves, {len(text.splitlines())} lines"
        " of explanation"
    )
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
