"""Attention: batch dims and heads are sharded, and queries if each of them sees all keys."""

from __future__ import annotations

from collections.abc import Hashable
from math import gcd
from typing import Any

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import splits_by_labels
from pdrun.parallel.operators.rules.pointwise import local_dropout
from pdrun.parallel.operators.rules.rule import (
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)


def local_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    shape: tuple[int, ...],
    box: Any,
) -> torch.Tensor:
    """
    Return this rank's part of attention with dropout, step by step: the mask is that of the full
    tensor.

    Args:
        shape: of the full matrix of weights, [..., heads, queries, keys].
        box: this rank's (low, high) in it.
    """
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(times, -3)
        value = value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    return local_dropout(scores.softmax(-1), p, True, shape, box) @ value


def _call_attention(context: LocalContext) -> LocalCall:
    p = context.get_arg(4, "dropout_p", 0.0)
    operator = context.operator
    if p == 0:
        return operator.target, operator.args, operator.kwargs
    query = operator.args[0]
    key = operator.args[1]
    mask = context.get_arg(3, "attn_mask")
    options = (
        context.get_arg(5, "is_causal", False),
        operator.kwargs.get("scale"),
        operator.kwargs.get("enable_gqa", False),
    )
    if not context.splits:
        kwargs = {"scale": options[1], "enable_gqa": options[2]}
        return (
            functional.scaled_dot_product_attention,
            (query, key, operator.args[2], mask, p, options[0]),
            kwargs,
        )
    shape = (*context.in_shapes[0][:-1], context.in_shapes[1][-2])
    box = (*context.in_boxes[0][:-1], (0, context.in_shapes[1][-2]))
    return local_attention, (query, key, operator.args[2], mask, p, *options, shape, box), {}


@register_rule("scaled_dot_product_attention", local_call=_call_attention)
def split_attention(view: OperatorView) -> list[OpSplit]:
    """
    query [..., H, S, E], key and value [..., G, T, E], mask broadcast to [..., H, S, T]: split
    batch dims and H (at most into G), S without a causal mask.

    G divides H.
    """
    query, key, _, *masks = view.in_shapes
    lead: list[Hashable] = list(range(len(query) - 2))
    causal = view.get_arg(5, "is_causal", False)
    query_label = None if causal else "s"
    head_dim = len(query) - 3
    divides: dict[Hashable, int] = {}
    if head_dim >= 0 and query[head_dim] != key[head_dim]:
        divides[head_dim] = gcd(query[head_dim], key[head_dim])
    if any(
        a != b
        for dim, (a, b) in enumerate(zip(query[:-2], key[:-2], strict=True))
        if dim != head_dim
    ):
        return []
    ins: list[list[Hashable | None]] = [
        [*lead, query_label, None],
        [*lead, None, None],
        [*lead, None, None],
    ]
    for mask in masks:
        full_shape = (*query[:-1], key[-2])
        names = [*lead, query_label, None]
        skip = len(full_shape) - len(mask)
        ins.append(
            [
                names[skip + dim] if size == full_shape[skip + dim] else None
                for dim, size in enumerate(mask)
            ]
        )
    return splits_by_labels(view, ins, [[*lead, query_label, None]], divides)
