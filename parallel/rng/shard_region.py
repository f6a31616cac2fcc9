"""
Which part of a full tensor a shard is; its dropout mask is the same part of the full mask.

The code that shards a tensor enters `shard_region` (any dims) or `sharded_sequence` (positions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from pdrun.parallel.layouts.sequence_order import Ranges, positions_within

DimShard = tuple[int, int, int] | tuple[tuple[tuple[int, int], ...], int]
"""
(low, high, total) of a dim, or (ranges, total) where several ranges lie here, one after the other.
"""
_regions: list[dict[int, DimShard]] = []
"""The regions that are entered, the innermost last."""
_sequence: Callable[[], tuple[Ranges, int]] | None = None
"""Returns which positions of the sequences this rank has, and their total."""


class shard_region:
    """
    Inside, tensors in dropout are shards: their masks are parts of the masks of full tensors.

    Args:
        cuts: for each sharded dim (negative: from the end) the elements of the shard:
            ``{1: (0, 512, 2048)}`` or ``{1: (((0, 256), (1792, 2048)), 2048)}``. A dim counts for
            tensors that have the size of the shard in it.

    An empty mapping ends the surrounding region.
    """

    def __init__(self, cuts: Mapping[int, DimShard]) -> None:
        self.cuts = cuts

    def __enter__(self) -> None:
        _regions.append(dict(self.cuts))

    def __exit__(self, *error: object) -> None:
        _regions.pop()


@contextmanager
def sharded_sequence(where: Callable[[], tuple[Ranges, int]]) -> Iterator[None]:
    """
    Inside, dim 1 of tensors is sharded, before a `shard_region` shards the rest.

    Args:
        where: returns the ranges of this rank, and the full size.
    """
    global _sequence
    before = _sequence
    _sequence = where
    try:
        yield
    finally:
        _sequence = before


def cuts_of(shape: tuple[int, ...]) -> dict[int, tuple[tuple[tuple[int, int], ...], int]]:
    """
    Return the sharded dims of a tensor in the innermost region: the ranges of the shard and the
    total.
    """
    if not _regions:
        return {}
    found = {}
    for dim, cut in _regions[-1].items():
        place = dim + len(shape) if dim < 0 else dim
        if len(cut) == 2:
            ranges, total = cut
        else:
            ranges = ((cut[0], cut[1]),)
            total = cut[2]
        if 0 <= place < len(shape) and shape[place] == sum(high - low for low, high in ranges):
            found[place] = (ranges, total)
    return found


def apply_sequence(
    shape: tuple[int, ...], rows: int, cuts: dict[int, tuple[Ranges, int]]
) -> tuple[tuple[int, ...], dict[int, tuple[Ranges, int]]]:
    """
    Return shape and cuts of a tensor with a sharded sequence in dim 1, or in dim 0 behind the rows.
    """
    if _sequence is None or not shape:
        return shape, cuts
    ranges, total = _sequence()
    held = sum(high - low for low, high in ranges)
    inner, size = cuts.get(1, (((0, shape[1]),), shape[1])) if len(shape) > 1 else ((), 0)
    if size == held:
        return shape, {
            **cuts,
            1: (
                tuple(one for low, high in inner for one in positions_within(ranges, low, high)),
                total,
            ),
        }
    if rows and shape[0] == rows * held and 0 not in cuts:
        apart = {dim + 1: cut for dim, cut in cuts.items()}
        return (rows, held, *shape[1:]), {**apart, 1: (ranges, total)}
    return shape, cuts


def flat_indices(
    shape: tuple[int, ...],
    cuts: Mapping[int, tuple[tuple[tuple[int, int], ...], int]],
    device: torch.device,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """
    Return the index of each element of a shard in the flattened full tensor, and the full shape.
    """
    whole = tuple(cuts[dim][1] if dim in cuts else size for dim, size in enumerate(shape))
    found = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        ranges = cuts[dim][0] if dim in cuts else ((0, size),)
        along = torch.cat([torch.arange(low, high, device=device) for low, high in ranges])
        found = found.unsqueeze(-1) + along * torch.Size(whole[dim + 1 :]).numel()
    return found.reshape(-1), whole


def save_regions() -> list[dict[int, DimShard]]:
    """Return the regions that are entered, for `restore_regions`."""
    return list(_regions)


def restore_regions(regions: list[dict[int, DimShard]]) -> None:
    """Enter the regions that `save_regions` returned, instead of the present ones."""
    _regions[:] = regions
