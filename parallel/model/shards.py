"""
Shards of weights over the model axes of a mesh (tensor axes and pipeline stages).

The code that shards a model (module styles, the operator engine) replaces a parameter by this
rank's shard and notes with `set_shard` which part of which weight it is. Gradient sums, norms,
checkpoints and verification read it with `shard_of`; they do not depend on how the model was
sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shard:
    """
    A shard of a weight.

    Attributes:
        shape: of the full weight.
        layout: the axes that shard each dim; over all others the shard is replicated.
        ranges: for each dim the (low, high) ranges of this rank, in order. One range each, or
            several if a weight has several matrices side by side (fused q, k and v), each of which
            is sharded.
        sum_axes: tensor axes over which gradients of this weight must be summed (norms under
            sequence parallel), in addition to the data axes.
        own_axes: axes along which other ranks do not have this weight at all (experts of a list).
    """

    shape: tuple[int, ...]
    layout: L
    ranges: tuple[Ranges, ...]
    sum_axes: tuple[str, ...] = ()
    own_axes: tuple[str, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(sum(high - low for low, high in dim) for dim in self.ranges)

    @property
    def is_full(self) -> bool:
        """Whether the shard is the full weight."""
        return self.local_shape == self.shape

    def take_from(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this shard of a full tensor, contiguous and in new memory."""
        found = whole
        for dim, ranges in enumerate(self.ranges):
            parts = [found.narrow(dim, low, high - low) for low, high in ranges]
            # one part is copied once, below
            found = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return found.clone(memory_format=torch.contiguous_format)

    def put_into(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this shard to its place in a full tensor."""
        views = [(part, whole)]
        for dim, ranges in enumerate(self.ranges):
            cut_up = []
            for source, target in views:
                at = 0
                for low, high in ranges:
                    cut_up.append(
                        (source.narrow(dim, at, high - low), target.narrow(dim, low, high - low))
                    )
                    at += high - low
            views = cut_up
        for source, target in views:
            target.copy_(source)


def make_shard(
    shape: tuple[int, ...],
    layout: L,
    grid: Grid,
    rank: int,
    sum_axes: tuple[str, ...] = (),
    blocks: dict[int, tuple[int, ...]] | None = None,
) -> Shard:
    """
    Return the shard of a weight on a rank.

    Args:
        shape: of the full weight.
        layout: the axes that shard each dim.
        sum_axes: see `Shard`.
        blocks: dims with several matrices side by side, and the size of each, such as ``{0: (512,
            128, 128)}`` for fused q, k and v. Each of them is sharded. The sizes add up to the dim.
    """
    return Shard(shape, layout, layout.ranges(grid, shape, rank, blocks), sum_axes)


def full_shard(param: torch.Tensor) -> Shard:
    """Return the shard that is all of a tensor."""
    shape = tuple(param.shape)
    return Shard(shape, L(*[None] * len(shape)), tuple(((0, size),) for size in shape))


def set_shard(param: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Note on a parameter which shard it is; its shape must be the shard's local shape."""
    if tuple(param.shape) != shard.local_shape:
        what = f"a parameter of the shard {shard.local_shape} has the shape {tuple(param.shape)}"
        raise ValueError(what)
    param._pdrun_shard = shard
    return param


def shard_of(param: torch.Tensor) -> Shard:
    """Return the shard that a parameter is; by default the full weight."""
    found: Shard | None = getattr(param, "_pdrun_shard", None)
    return found if found is not None else full_shard(param)


def shard_numel(tile: Shard) -> int:
    """Return the number of elements of a shard."""
    return prod(tile.local_shape)
