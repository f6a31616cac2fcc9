"""
The zoo's model cut over tensor axes by hand: vocabulary, heads, hidden units, and sequences between
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.comm import autograd as c
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.layout import L, shard_range
from pdrun.parallel.model.shards import make_shard, set_shard, shard_of
from pdrun.parallel.rng.shard_region import shard_region
from tests.lib.small_models import LENGTH, WIDTH, WORDS, Block


class CutBlock(Block):
    """
    Heads and hidden units are cut; what lies between the second norm and the residual is cut along
    the sequence.
    """

    axis: AxisGroup

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = c.copy_to_axis(self.norm1(x), self.axis)
        heads = self.qkv.weight.shape[0] // (3 * (WIDTH // 4))
        q, k, v = (
            F.linear(h, self.qkv.weight, self.qkv.bias)
            .view(rows, length, 3, heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(rows, length, -1)
        )
        x = x + self.drop(
            c.all_reduce(F.linear(mixed, self.proj.weight), self.axis) + self.proj.bias
        )
        part = c.slice_to_shard(x, self.axis, 1)
        h = c.all_gather_sum_grad(self.norm2(part), self.axis, 1, length)
        hidden = F.gelu(F.linear(h, self.up.weight, self.up.bias))
        y = c.reduce_scatter(F.linear(hidden, self.down.weight), self.axis, 1) + self.down.bias
        with shard_region({1: (*shard_range(length, self.axis.size, self.axis.index), length)}):
            y = self.drop(y)
        return x + c.all_gather(y, self.axis, 1, length)


class CutWords(nn.Embedding):
    """A part of the vocabulary."""

    axis: AxisGroup

    def forward(self, x: Tensor) -> Tensor:
        low, high = shard_range(WORDS, self.axis.size, self.axis.index)
        mine = (x >= low) & (x < high)
        found = F.embedding((x - low).masked_fill(~mine, 0), self.weight)
        return c.all_reduce(found * mine.unsqueeze(-1), self.axis)


class CutHead(nn.Linear):
    """Logits of a part of the vocabulary, gathered."""

    axis: AxisGroup

    def forward(self, x: Tensor) -> Tensor:
        return c.all_gather(
            F.linear(c.copy_to_axis(x, self.axis), self.weight), self.axis, -1, WORDS
        )


class Megatron:
    """Cuts `zoo.Tiny` over one tensor axis, or over several that count as one."""

    def __init__(self, *names: str) -> None:
        self.names = names or ("tp",)

    def apply(self, model: Any, axes: MeshGroups, sample: Any) -> nn.Module:
        """See `tiles.Cutter`."""
        axis = axes[self.names]
        done: dict[int, nn.Parameter] = {}

        def put(module: nn.Module, key: str, *dims: Any, **more: Any) -> None:
            old = getattr(module, key)
            if id(old) not in done:
                part = make_shard(tuple(old.shape), L(*dims), axes.grid, axes.rank, **more)
                value = (
                    torch.empty(part.local_shape, device="meta")
                    if old.is_meta
                    else part.take_from(old.detach())
                )
                done[id(old)] = set_shard(nn.Parameter(value), part)
            module._parameters[key] = done[id(old)]

        model.emb.__class__, model.head.__class__ = CutWords, CutHead
        put(model.emb, "weight", self.names, None)
        put(model.head, "weight", self.names, None)
        for module in (model.emb, model.head, *model.blocks):
            module.axis = axis
        for block in model.blocks:
            block.__class__ = CutBlock
            put(block.qkv, "weight", self.names, None, blocks={0: (WIDTH, WIDTH, WIDTH)})
            put(block.qkv, "bias", self.names, blocks={0: (WIDTH, WIDTH, WIDTH)})
            put(block.proj, "weight", None, self.names)
            put(block.up, "weight", self.names, None)
            put(block.up, "bias", self.names)
            put(block.down, "weight", None, self.names)
            for owner, key in (
                (block.norm2, "weight"),
                (block.norm2, "bias"),
                (block.down, "bias"),
            ):
                put(owner, key, None, sum_axes=self.names)  # used for a part of the sequence
        assert shard_of(model.norm.weight).is_full
        assert LENGTH > 1
        return model  # type: ignore[no-any-return]
