"""
A decoder whose attention counts its heads, and what the ranks do to compare a cut copy of it with
the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.tensor import Strategy, col, heads, row, seq, vocab

WIDTH, LENGTH, ROWS = 32, 8, 3


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, n_heads: int, n_kv: int, bias: bool, p: float) -> None:
        super().__init__()
        self.p = p
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv, WIDTH // n_heads
        self.wq = nn.Linear(WIDTH, WIDTH, bias)
        self.wk, self.wv = (nn.Linear(WIDTH, n_kv * self.head_dim, bias) for _ in range(2))
        self.wo = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.wq(x).view(rows, length, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(rows, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(rows, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        times = self.n_heads // self.n_kv_heads
        mixed = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(times, 1),
            v.repeat_interleave(times, 1),
            is_causal=True,
            dropout_p=self.p if self.training else 0.0,
        )
        return self.wo(mixed.transpose(1, 2).reshape(rows, length, -1))


class Perceptron(nn.Module):
    """A gated one."""

    def __init__(self, hidden: int, bias: bool, p: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias), nn.Linear(WIDTH, hidden, bias)
        self.down, self.thin = nn.Linear(hidden, WIDTH, bias), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.thin(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """Attention, then a perceptron."""

    def __init__(self, n_heads: int, n_kv: int, hidden: int, bias: bool, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(n_heads, n_kv, bias, p), Perceptron(hidden, bias, p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A language model."""

    def __init__(
        self,
        n_heads: int = 8,
        n_kv: int = 4,
        hidden: int = 50,
        words: int = 37,
        layers: int = 2,
        bias: bool = True,
        tied: bool = False,
        padding: int | None = None,
        p: float = 0.0,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, WIDTH, padding)
        self.layers = nn.ModuleList(Block(n_heads, n_kv, hidden, bias, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=bias and not tied)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def build(dtype: torch.dtype = torch.float64, **sizes: Any) -> Decoder:
    """Return a decoder with the weights of seed 0; norms and biases don't start at one and zero."""
    torch.manual_seed(0)
    model = Decoder(**sizes).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.3)
    return model


def strategy(
    axis: Any = "tp", sequence: bool = False, gather: bool = True, hidden: int = 50
) -> Strategy:
    """Return Megatron's cut of a decoder."""
    dim = 1 if sequence else None
    norms = {"*norm*|layers.*.drop": seq(axis)} if sequence else {}
    return Strategy(
        {
            "layers.*.attn.w[qkv]|layers.*.mlp.gate|layers.*.mlp.up": col(axis, sequence=dim),
            "layers.*.attn.wo|*.down": row(axis, sequence=dim),
            "layers.*.attn": heads(axis),
            "emb|head": vocab(axis, gather=gather, sequence=dim),
            "*.thin": seq(axis, dim=-1, total=hidden),
            **norms,
        }
    )


def axes_of(grid: Grid) -> MeshGroups:
    """Return this process's place."""
    rank = torch.distributed.get_rank()
    return MeshGroups(grid, rank, torch.device("cpu"), CollectiveWatchdog(30.0, rank, grid.size))


def tokens(words: int = 37, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return ids and targets, some of which are padding."""
    dice = torch.Generator().manual_seed(1)
    drawn = torch.randint(words, (rows, length + 1), generator=dice)
    return drawn[:, :-1], drawn[:, 1:].masked_fill(
        torch.rand(rows, length, generator=dice) < 0.2, -100
    )


def plain_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a model whose logits are whole."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def whole_gradients(model: nn.Module, axes: MeshGroups) -> dict[str, Tensor]:
    """
    Return the gradients of whole weights, put together from all ranks' tiles, after the sums that
    tiles ask for.
    """
    world = axes[axes.grid.names]
    found = {}
    for name, param in model.named_parameters():
        tile = shard_of(param)
        assert tuple(param.shape) == tile.local_shape
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if tile.sum_axes:
            grad = axes[tile.sum_axes].all_reduce(grad)
        held = torch.zeros(2, *tile.shape, dtype=grad.dtype)
        tile.put_into(grad, held[0])
        tile.put_into(torch.ones_like(grad), held[1])
        total = world.all_reduce(held)
        assert total[1].min() > 0, f"nobody holds a part of {name}"
        # where several ranks hold the same, each must have the same gradient
        torch.testing.assert_close(grad, tile.take_from(total[0] / total[1]))
        found[name] = total[0] / total[1]
    return found


def compare(
    model: nn.Module,
    how: Strategy,
    grid: Grid,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor] = plain_loss,
    cut_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    exact: bool | None = None,
) -> tuple[nn.Module, MeshGroups]:
    """
    Compare loss and gradients of a model and of its cut copy, which is returned with its counted
    axes.

    Args:
        exact: whether everything is computed in fp64; default: whether the loss is.
    """
    cut, axes = copy.deepcopy(model), axes_of(grid)
    assert how.apply(cut, axes) is cut
    axes.reset_counts()
    mine = (cut_loss or loss)(cut, batch)
    mine.backward()
    counts = copy.deepcopy(axes.counts)
    whole = loss(model, batch)
    whole.backward()
    exact = whole.dtype == torch.float64 if exact is None else exact
    torch.testing.assert_close(mine, whole, rtol=1e-12 if exact else 1e-6, atol=0)
    found = whole_gradients(cut, axes)
    assert set(found) == {name for name, _ in model.named_parameters()}
    wanted = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }
    largest = max(float(want.abs().max()) for want in wanted.values())
    for name, want in wanted.items():
        scale = max(
            float(want.abs().max()), (0.01 if exact else 0.1) * largest
        )  # keys' biases have a gradient of zero, but for rounding
        told = f"gradient of {name}"
        torch.testing.assert_close(
            found[name],
            want,
            rtol=1e-10 if exact else 1e-5,
            atol=(1e-12 if exact else 1e-6) * scale,
            msg=lambda text, told=told: f"{told}: {text}",
        )
    axes.state.counts = counts
    return cut, axes
