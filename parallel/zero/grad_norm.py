"""The global norm of the gradients, each weight once, and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pdrun.parallel.torch_compat import widest_float

if TYPE_CHECKING:
    from pdrun.parallel.comm.rank_groups import RankGroups
    from pdrun.parallel.model.weights import Weight
    from pdrun.parallel.zero.gradients import GradientBucket

CHUNK_ELEMENTS = 65536
"""Elements that are widened at a time; they stay in a core's cache."""


def square_sum(tensors: Sequence[torch.Tensor], exact: bool) -> torch.Tensor:
    """
    Return the sum of the squares of all elements, in fp64 (fp32 on devices that lack it).

    Args:
        exact: widen every element first. The sum is then the same to about 1e-15 for any sharding
            of the tensors, and the norm in fp32 has the same bits. Otherwise norms of tensors are
            computed in their own type, which is faster.
    """
    first = tensors[0]
    wide = widest_float(first.device)
    if exact:
        total = torch.zeros((), dtype=wide, device=first.device)
        for tensor in tensors:
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor.resolve_conj())
            for piece in tensor.reshape(-1).split(CHUNK_ELEMENTS):
                widened = piece.to(wide)
                total += torch.dot(widened, widened)
        return total
    norms = torch._foreach_norm(list(tensors), 2)
    return torch.stack([norm.to(wide) for norm in norms]).square().sum()


def _sum_squares(tensors: Sequence[torch.Tensor], exact: bool, like: torch.Tensor) -> torch.Tensor:
    """Return the `square_sum` of tensors on the device or on the host, in the place of ``like``."""
    by_place: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_place.setdefault(tensor.device, []).append(tensor)
    found = [square_sum(some, exact).to(like) for some in by_place.values()]
    return sum(found[1:], start=found[0]) if found else torch.zeros_like(like)


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """
    Return the factor that clips gradients of this norm, at most 1 (as
    `torch.nn.utils.clip_grad_norm_`).
    """
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def global_norm(
    totals: Sequence[tuple[GradientBucket, torch.Tensor]],
    alone: Sequence[Weight],
    place: RankGroups,
    exact: bool,
) -> torch.Tensor:
    """
    Return the norm of the gradients of all ranks, each weight once. A layerwise weight counts once
    per rank.

    Args:
        totals: each gradient bucket and its total on this rank.
        alone: the layerwise weights.
        place: the groups to sum over.
        exact: see `square_sum`.
    """
    device = place.data.device
    square = torch.zeros((), dtype=widest_float(device), device=device)
    expert_square = torch.zeros_like(square)
    # which collectives run depends on the weights, never on the gradients that came
    for is_expert, onto in ((False, square), (True, expert_square)):
        for shared in (True, False):
            some = [
                (part, total)
                for part, total in totals
                if (part.comm.shards > 1) == shared and part.weights[0].is_expert == is_expert
            ]
            if some:
                mine = [tensor for part, total in some for tensor in _counted_parts(part, total)]
                found = _sum_squares(mine, exact, square)
                if shared:
                    group = place.groups_of(is_expert).sharded
                    found = group.sum_small(found, "the norm", shards_only=True).wait()
                onto += found
    if alone:
        loose = [
            grad
            for weight in alone
            if weight.counts_in_norm and (grad := weight.param.grad) is not None
        ]
        found = _sum_squares(loose, exact, square)
        square += place.data.sum_small(found, "the norm of the layerwise weights").wait()
    total: torch.Tensor = place.dense.parts.sum_small(square, "the norm over the model axes").wait()
    if place.experts is not None:
        total = total + place.experts.parts.sum_small(expert_square, "the norm of experts").wait()
    return total.sqrt()


def _counted_parts(part: GradientBucket, total: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a bucket's total that count in the norm on this rank."""
    if all(weight.counts_in_norm for weight in part.weights):
        return [total]
    pieces = zip(part.segments, part.total_segments(), strict=True)
    return [piece for segment, piece in pieces if part.weights[segment.slot].counts_in_norm]
