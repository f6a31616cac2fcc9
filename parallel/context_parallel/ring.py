"""
Ring attention: each rank has its part of every sequence; keys and values move around a ring.

In each of n steps a rank attends with its queries to the keys and values that it has, while it
sends them to the next rank (Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers,
2023). Outputs are combined by their log-sum-exps, in fp32.

In the backward keys and values move around once more, and their gradients one step behind them
until they are back: n - 1 shifts each. A rank has at most two parts in addition to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.context_parallel import block_attention as block_attention
from pdrun.parallel.context_parallel.block_attention import AttentionResult
from pdrun.parallel.context_parallel.ring_exchange import (
    DropoutFactors,
    GradientRing,
    KeyValueRing,
    RingPlan,
    flat_pair_of,
)
from pdrun.parallel.layouts.sequence_order import (
    ZIGZAG,
    AttentionBlock,
    Ranges,
    attention_blocks,
    count_positions,
    positions_of,
    positions_within,
)
from pdrun.parallel.torch_compat import untraced

API_NAME = "ring_attention"


@untraced
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: AxisGroup,
    *,
    length: int | None = None,
    order: str = ZIGZAG,
    causal: bool = False,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    drop: DropoutFactors | None = None,
) -> torch.Tensor:
    """
    Return this rank's part of softmax(q k^T scale + mask) v over sequences sharded over an axis.

    Args:
        q, k, v: this rank's positions, [batch, heads, positions, size] or without batch. k and v
            can have fewer heads, each for a group of query heads.
        axis: the axis of the sequences.
        length: of the full sequences, sharded by `sequence_order.positions_of`; default: all ranks
            have as many positions as this one.
        order: placement of positions on the ranks, "zigzag" or "contiguous".
        causal: a position sees itself and earlier positions.
        scale: default: size ** -0.5.
        mask: for this rank's queries and *all* positions as keys, in sequence order, broadcast to
            [batch, heads, queries, length]: bool, True for a visible key, or a bias on the scores.
        drop: dropout of the weights, by position.

    Raises:
        UsageError: shapes that do not fit.
    """
    mine = q.shape[-2]
    length = mine * axis.size if length is None else length
    parts = tuple(positions_of(length, axis.size, index, order) for index in range(axis.size))
    _check_shapes(q, k, v, mask, length, count_positions(parts[axis.index]))
    if q.dim() == 3:
        batched = ring_attention(
            q[None],
            k[None],
            v[None],
            axis,
            length=length,
            order=order,
            causal=causal,
            scale=scale,
            mask=mask,
            drop=drop,
        )
        return batched[0]
    plan = RingPlan(axis, parts, causal, q.shape[-1] ** -0.5 if scale is None else scale, drop)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (
            x.to(torch.get_autocast_dtype(device)) for x in (q, k, v)
        )  # as torch's own attention does
    with torch.autocast(device, enabled=False):
        found: torch.Tensor = _RingAttention.apply(
            q, k, v, None if mask is None else as_bias(mask, q.dtype), plan
        )
    return found


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as a bias on the scores, [1 or batch, 1 or heads, ...]."""
    if mask.dtype == torch.bool:
        kind = block_attention.accumulate_dtype(dtype)
        mask = torch.zeros((), dtype=kind, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)


def _check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    length: int,
    mine: int,
) -> None:
    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        dims = f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dims"
        raise UsageError(
            dims, where=API_NAME, hint="[batch, heads, positions, size], or without batch"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-2] != mine:
            what = f"{name} has {x.shape[-2]} positions; this rank's part of {length} is {mine}"
            raise UsageError(what, where=API_NAME, hint="length= is that of whole sequences")
    if q.shape[-3] % k.shape[-3] or k.shape[-3] != v.shape[-3]:
        what = (
            f"{q.shape[-3]} heads of queries over {k.shape[-3]} of keys and {v.shape[-3]} of values"
        )
        raise UsageError(
            what,
            where=API_NAME,
            hint="each head of keys and values serves the same number of query heads",
        )
    if mask is not None and (
        mask.dim() < 2 or mask.shape[-2] not in (1, mine) or mask.shape[-1] != length
    ):
        what = f"a mask of {list(mask.shape)} for {mine} queries of this rank and {length} keys"
        raise UsageError(
            what, where=API_NAME, hint="rows for this rank's positions, columns for all"
        )


# ---- inside -----------------------------------------------------------------


@dataclass
class RunningOutput:
    """Output and lse over the keys seen so far, in the wide type."""

    out: torch.Tensor
    lse: torch.Tensor

    def add_block(self, low: int, high: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Combine a block of keys into queries ``low`` to ``high``."""
        old = self.lse[:, :, low:high]
        so_far = self.out[:, :, low:high]
        lse = lse.to(old.dtype)
        both = torch.logaddexp(old, lse)
        shown = both.masked_fill(
            both == float("-inf"), 0.0
        )  # no key seen yet: weights exp(-inf), which are 0
        so_far.mul_((old - shown).exp().unsqueeze(-1))
        so_far.add_(out * (lse - shown).exp().unsqueeze(-1))
        old.copy_(both)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        plan: RingPlan,
    ) -> torch.Tensor:
        kind = block_attention.accumulate_dtype(q.dtype)
        found = RunningOutput(
            q.new_zeros(*q.shape[:3], v.shape[3], dtype=kind),
            q.new_full(q.shape[:3], float("-inf"), dtype=kind),
        )
        ring = KeyValueRing(k, v, plan)
        for step in range(plan.axis.size):
            source = plan.source_of(step)
            keys, values = ring.take_step(step)
            for block in attention_blocks(plan.own_positions, plan.positions[source], plan.causal):
                (low, high), (first, last) = block.q, block.k
                out, lse = block_attention.attend_block(
                    q[:, :, low:high],
                    keys[:, :, first:last],
                    values[:, :, first:last],
                    block.causal,
                    plan.scale,
                    plan.score_terms(block, source, bias),
                )
                found.add_block(low, high, out, lse)
        out = found.out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, bias, out, found.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, bias, out, lse = ctx.saved_tensors
        plan = ctx.plan
        kind = block_attention.accumulate_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=kind, memory_format=torch.contiguous_format)
        dbias = (
            torch.zeros_like(bias, dtype=kind)
            if bias is not None and ctx.needs_input_grad[3]
            else None
        )
        ring = KeyValueRing(k, v, plan)
        pair = flat_pair_of(k, v)
        back = GradientRing(plan, pair)
        for step in range(plan.axis.size):
            source = plan.source_of(step)
            keys, values = ring.take_step(step)
            back.start_step(step)
            flat = q.new_zeros(pair.numel_of(keys.shape[2]), dtype=kind)
            dk, dv = pair.unpack_views(flat, keys.shape[2])
            for block in attention_blocks(plan.own_positions, plan.positions[source], plan.causal):
                (low, high), (first, last) = block.q, block.k
                done = AttentionResult(
                    grad[:, :, low:high], out[:, :, low:high], lse[:, :, low:high]
                )
                parts = block_attention.attend_block_backward(
                    done,
                    q[:, :, low:high],
                    keys[:, :, first:last],
                    values[:, :, first:last],
                    block.causal,
                    plan.scale,
                    plan.score_terms(block, source, bias),
                )
                dq[:, :, low:high] += parts[0]
                dk[:, :, first:last] += parts[1]
                dv[:, :, first:last] += parts[2]
                if dbias is not None:
                    columns = positions_within(plan.positions[source], first, last)
                    _add_bias_grad(dbias, parts[3], block, columns)
            back.finish_step(step, flat)
        dk, dv = pair.unpack_views(back.collect_own(), k.shape[2])
        return (
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
        )


def _add_bias_grad(
    total: torch.Tensor, scores: Any, block: AttentionBlock, columns: Ranges
) -> None:
    """Add a block's gradient of the scores to that of the bias, summed over broadcast dims."""
    rows = total if total.shape[2] == 1 else total[:, :, block.q[0] : block.q[1]]
    start = 0
    for low, high in columns:
        here = rows[..., low:high]
        here += scores[..., start : start + high - low].sum_to_size(here.shape)
        start += high - low
