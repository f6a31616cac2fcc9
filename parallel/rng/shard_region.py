"""
Which part of a full tensor a rank's shard is, for masks that are parts of the full tensor's mask.

The code that shards a tensor enters `region` (any dims) or `sequence` (the positions of a sequence).
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
"""Tells which positions of the sequences are here, and how many there are."""


class shard_region:
    """
    While this lasts, tensors that are dropped are parts: the masks are those of the whole ones.

    Args:
        cuts: for each dim that is cut (it may be counted from the end) which elements are here:
            ``{1: (0, 512, 2048)}``
            or ``{1: (((0, 256), (1792, 2048)), 2048)}``. A dim counts where a tensor has it in the size of the part.

    An empty mapping ends the region that surrounds it.
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
    While this lasts, dim 1 of tensors is cut, before any `region` cuts what is left of it.

    Args:
        where: returns which ranges are here, and the whole size.
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
    Return the dims of a tensor that the innermost region cuts, each with the ranges that are here
    and its total.
    """
    found = {}
    for dim, cut in (_regions[-1] if _regions else {}).items():
        place = dim + len(shape) if dim < 0 else dim
        ranges, total = (cut[0], cut[1]) if len(cut) == 2 else (((cut[0], cut[1]),), cut[2])
        if 0 <= place < len(shape) and shape[place] == sum(high - low for low, high in ranges):
            found[place] = (ranges, total)
    return found


def apply_sequence(
    shape: tuple[int, ...], rows: int, cuts: dict[int, tuple[Ranges, int]]
) -> tuple[tuple[int, ...], dict[int, tuple[Ranges, int]]]:
    """
    Return the shape and the cuts of a tensor whose positions are cut, in dim 1 or flattened behind
    rows in dim 0.
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
    Return where each element of a part is in the flattened whole, flattened, and the whole's shape.
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
