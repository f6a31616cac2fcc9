"""
Tiles: what a rank holds of a weight that is cut over the model axes of a mesh (tensor axes and
pipeline stages).

Whoever cuts a model (module styles, the operator engine) replaces a parameter by this rank's part
and tells with `set_tile` what part of which whole it is. Everything that deals in whole weights
(gradient sums, norms, checkpoints, proofs) reads that with `tile_of` and knows nothing else of how
the model was cut.
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
    A part of a weight.

    Attributes:
        shape: of the whole weight.
        layout: the axes that cut each dim; over all others the tile is replicated.
        ranges: for each dim the (low, high) ranges that this rank holds, in order. One each, as a
            rule; more where a
            weight holds several matrices side by side (fused q, k and v), each of which is cut.
        sums: tensor axes over which the ranks' gradients of this weight have to be added up (norms
            under sequence
            parallel). Data axes go without saying.
    """

    shape: tuple[int, ...]
    layout: L
    ranges: tuple[Ranges, ...]
    sum_axes: tuple[str, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(high - low for low, high in dim) for dim in self.ranges)

    @property
    def is_full(self) -> bool:
        """Whether the part is everything."""
        return self.local_shape == self.shape

    def take_from(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a whole tensor, contiguous and with memory of its own."""
        found = whole
        for dim, ranges in enumerate(self.ranges):
            if sum(high - low for low, high in ranges) != whole.shape[dim] or len(ranges) > 1:
                found = torch.cat([found.narrow(dim, low, high - low) for low, high in ranges], dim)
        return found.clone(memory_format=torch.contiguous_format)

    def put_into(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this part where it belongs in a whole tensor."""
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
    Return what a rank holds of a weight.

    Args:
        shape: of the whole weight.
        layout: how it is cut.
        sums: see `Tile`.
        blocks: dims that hold several matrices side by side, with the size of each: every one of
            them is cut, as
            ``{0: (512, 128, 128)}`` for fused q, k and v. The sizes add up to the dim.
    """
    return Shard(shape, layout, layout.ranges(grid, shape, rank, blocks), sum_axes)


def full_shard(param: torch.Tensor) -> Shard:
    """Return the tile that is all of a tensor."""
    shape = tuple(param.shape)
    return Shard(shape, L(*[None] * len(shape)), tuple(((0, size),) for size in shape))


def set_shard(param: nn.Parameter, shard: Shard) -> nn.Parameter:
    """
    Note on a parameter which part of which weight it is; its shape must be the tile's local one.
    """
    if tuple(param.shape) != shard.local_shape:
        raise ValueError(f"a parameter of {tuple(param.shape)} is no tile of {shard.local_shape}")
    param._pdrun_shard = shard
    return param


def shard_of(param: torch.Tensor) -> Shard:
    """Return what part a parameter is; one that nobody has cut is whole."""
    found: Shard | None = getattr(param, "_pdrun_shard", None)
    return found if found is not None else full_shard(param)


def shard_numel(tile: Shard) -> int:
    """Return the number of elements of a tile."""
    return prod(tile.local_shape)
