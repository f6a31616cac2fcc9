"""
Ulysses attention: sequences are sharded by position, and by heads inside attention.

An all-to-all gives each rank full sequences of some heads; a second one restores the positions
(Jacobs et al., DeepSpeed Ulysses, 2023). Together with a ring, the sequences are full for one
member of the ring (Fang and Zhao, USP, 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm import autograd
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.context_parallel.block_attention import repeat_heads
from pdrun.parallel.layouts.layout import shard_range

API_NAME = "ulysses_attention"
HeadAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""(q, k, v, mask) of some heads and all positions -> attention."""


def heads_of(axis: AxisGroup, heads: int) -> tuple[int, int]:
    """Return the heads (low, high) of a rank."""
    return shard_range(heads, axis.size, axis.index)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: AxisGroup,
    *,
    length: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    attend: HeadAttention | None = None,
) -> torch.Tensor:
    """
    Return this rank's part of softmax(q k^T scale + mask) v over sequences sharded over an axis.

    Args:
        q, k, v: this rank's positions, [batch, heads, positions, size] or without batch. The heads
            of q are divided over the axis. k and v can have fewer; heads that do not divide are
            repeated.
        axis: the axis of the sequences, in order.
        length: of the full sequences; default: all ranks have as many positions as this one.
        causal, scale: like torch's scaled_dot_product_attention.
        mask: for this rank's queries and *all* positions as keys, like `ring.ring_attention`.
        attend: computes the attention of some heads over full sequences, instead of torch's
            function with ``causal`` and ``scale``.

    Raises:
        UsageError: the heads cannot be divided.
    """
    if q.dim() == 3:
        mask = mask if mask is None or mask.dim() < 3 else mask[None]
        batched = ulysses_attention(
            q[None],
            k[None],
            v[None],
            axis,
            length=length,
            causal=causal,
            scale=scale,
            mask=mask,
            attend=attend,
        )
        return batched[0]
    length = q.shape[2] * axis.size if length is None else length
    heads = q.shape[1]
    times = count_repeats(q.shape[1], k.shape[1], axis)
    k = repeat_heads(k, k.shape[1] * times)
    v = repeat_heads(v, v.shape[1] * times)
    q, k, v = (autograd.all_to_all(x, axis, 1, 2, length) for x in (q, k, v))
    mask = None if mask is None else rows_for_heads(mask, axis, heads, length)
    if attend is None:
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        out = attend(q, k, v, mask)
    return autograd.all_to_all(out, axis, 2, 1, heads)


def count_repeats(heads: int, key_heads: int, axis: AxisGroup) -> int:
    """
    Return how often keys and values are repeated so that their heads divide like those of the
    queries.

    Raises:
        UsageError: the heads of the queries do not divide, or no repetition helps.
    """
    where = f"{axis.size} ranks along {'/'.join(axis.names)}"
    if heads % axis.size:
        what = f"{heads} heads of queries do not divide over {where}"
        raise UsageError(
            what,
            where=API_NAME,
            hint="give Ulysses a degree that divides the heads, and the ring the rest",
        )
    times = axis.size // gcd(axis.size, key_heads)
    if heads % key_heads or (heads // key_heads) % times:
        what = (
            f"{key_heads} heads of keys, {times} times each, do not divide {heads} heads of queries"
            f" over {where}"
        )
        raise UsageError(
            what, where=API_NAME, hint="give Ulysses a smaller degree, and the ring the rest"
        )
    return times


def rows_for_heads(mask: torch.Tensor, axis: AxisGroup, heads: int, length: int) -> torch.Tensor:
    """Return a mask of this rank's rows as one of all rows, for this rank's heads."""
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    if mask.shape[1] == 1:
        if mask.shape[2] == 1:
            return mask
        return autograd.all_gather_sum_grad(mask, axis, 2, length)
    if mask.shape[2] == 1:
        low, high = heads_of(axis, heads)
        return mask[:, low:high]
    return autograd.all_to_all(mask, axis, 1, 2, length)
