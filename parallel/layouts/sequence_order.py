"""
The positions of a sequence on each rank of a context-parallel group, and the blocks of attention.

    contiguous   0 0 0 1 1 1 2 2 2 3 3 3   under a causal mask rank 3 has most work, rank 0 least
    zigzag       0 1 2 3 3 2 1 0           rank i has chunks i and 2n-1-i: equal work

The zigzag placement is that of Brandon et al., Striped Attention (2023), section 5, and of the
"head-tail" balancers of torch and Megatron. Dims are sharded as evenly as possible (see
`shard_range`). Ranges are (low, high) in ascending order. Pure integers, no torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

from pdrun.errors import UsageError
from pdrun.parallel.layouts.layout import shard_range

Ranges = tuple[tuple[int, int], ...]
CONTIGUOUS = "contiguous"
ZIGZAG = "zigzag"
ORDERS = (CONTIGUOUS, ZIGZAG)


@functools.lru_cache(maxsize=1024)
def positions_of(length: int, parts: int, index: int, order: str) -> Ranges:
    """
    Return the positions of shard ``index`` of a sequence.

    Raises:
        UsageError: an order that is neither "zigzag" nor "contiguous".
    """
    if order not in ORDERS:
        raise UsageError(
            f"order must be one of {', '.join(ORDERS)}, got {order!r}",
            where="ContextParallel",
            hint=" or ".join(ORDERS),
        )
    if order == CONTIGUOUS:
        return merge_ranges([shard_range(length, parts, index)])
    return merge_ranges(
        [
            shard_range(length, 2 * parts, index),
            shard_range(length, 2 * parts, 2 * parts - 1 - index),
        ]
    )


def merge_ranges(ranges: list[tuple[int, int]]) -> Ranges:
    """Leave out empty ranges and join ranges that touch."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if low == high:
            continue
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return tuple(found)


def count_positions(ranges: Ranges) -> int:
    """Return the number of positions."""
    return sum(high - low for low, high in ranges)


def positions_within(ranges: Ranges, low: int, high: int) -> Ranges:
    """Return the elements ``low`` to ``high`` of the concatenated ranges."""
    found = []
    start = 0
    for first, last in ranges:
        begin = max(low, start)
        end = min(high, start + last - first)
        if begin < end:
            found.append((first + begin - start, first + end - start))
        start += last - first
    return merge_ranges(found)


@dataclass(frozen=True)
class AttentionBlock:
    """
    Queries and keys that attend to each other: indices (low, high) into the positions of two ranks.

    Attributes:
        causal: whether query i sees keys 0 to i of the block only; otherwise it sees all of them.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    causal: bool


@functools.lru_cache(maxsize=1024)
def attention_blocks(q: Ranges, k: Ranges, causal: bool) -> tuple[AttentionBlock, ...]:
    """Return the fewest blocks of the attention of one rank's queries to one rank's keys."""
    wide = count_positions(q)
    deep = count_positions(k)
    if not wide or not deep:
        return ()
    if not causal:
        return (AttentionBlock((0, wide), (0, deep), False),)
    if q == k:
        return (
            AttentionBlock((0, wide), (0, deep), True),
        )  # ascending on both sides: order in memory is order in the sequence
    edges = sorted({edge for ranges in (q, k) for pair in ranges for edge in pair})
    keys = _split_at_edges(k, edges)
    found: list[AttentionBlock] = []
    for low, high, at in _split_at_edges(q, edges):
        here = (at, at + high - low)
        seen = [(place, place + last - first) for first, last, place in keys if last <= low]
        found += [AttentionBlock(here, span, False) for span in merge_ranges(seen)]
        found += [
            AttentionBlock(here, (place, place + last - first), True)
            for first, last, place in keys
            if first == low
        ]
    return tuple(_merge_blocks(found))


def _split_at_edges(ranges: Ranges, edges: list[int]) -> list[tuple[int, int, int]]:
    """Split ranges at all edges; return (low, high, index in memory) of each piece."""
    found = []
    start = 0
    for low, high in ranges:
        inner = [low, *[edge for edge in edges if low < edge < high], high]
        found += [(first, last, start + first - low) for first, last in pairwise(inner)]
        start += high - low
    return found


def _merge_blocks(found: list[AttentionBlock]) -> list[AttentionBlock]:
    """Join full blocks with the same keys whose queries touch."""
    merged: list[AttentionBlock] = []
    for block in sorted(found, key=lambda one: (one.causal, one.k, one.q)):
        last = merged[-1] if merged else None
        if (
            last
            and not last.causal
            and not block.causal
            and last.k == block.k
            and last.q[1] == block.q[0]
        ):
            merged[-1] = AttentionBlock((last.q[0], block.q[1]), block.k, False)
        else:
            merged.append(block)
    return merged
