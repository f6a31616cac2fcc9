"""
Which experts a token goes to, and with which weights; in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

SCORES = ("softmax", "sigmoid")
GROUP_TOP = 2
"""A group's score is the sum of its best scores, this many."""


@dataclass(frozen=True)
class RoutingRule:
    """
    How experts are chosen.

    Attributes:
        experts, top_k: their number, and how many a token goes to.
        score: "softmax" over the experts, or "sigmoid" of each.
        normalize: divide a token's weights by their sum.
        scale: factor of the weights.
        groups: (number of groups, groups that a token's experts are chosen from); None: one group.
    """

    experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: tuple[int, int] | None = None


@dataclass(frozen=True)
class Routing:
    """
    Where tokens go.

    Attributes:
        index: ``[tokens, top_k]``, the experts; ``experts`` (one too many) where a token is
            dropped.
        weights: ``[tokens, top_k]``, fp32.
        shares: ``[tokens, experts]``, scores that add up to 1; for balance losses.
    """

    index: torch.Tensor
    weights: torch.Tensor
    shares: torch.Tensor


def router_logits(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the router's product in fp32, also under autocast; fp64 stays."""
    wide = torch.promote_types(tokens.dtype, torch.float32)
    with torch.autocast(tokens.device.type, enabled=False):
        return functional.linear(tokens.to(wide), weight.to(wide))


def route_tokens(logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None) -> Routing:
    """
    Choose the experts of each token.

    Args:
        logits: ``[tokens, experts]``.
        bias: added to the scores for the choice only, not for the weights.
    """
    if rule.score == "softmax":
        scores = shares = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if rule.groups is not None:
        choice = _keep_best_groups(choice, *rule.groups)
    index = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, index)
    if rule.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    return Routing(index, weights, shares)


def _keep_best_groups(choice: torch.Tensor, count: int, kept: int) -> torch.Tensor:
    """Set the scores of all but the best groups of experts to -inf."""
    by_group = choice.view(len(choice), count, choice.shape[1] // count)
    best = by_group.topk(min(GROUP_TOP, by_group.shape[2]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(
        1, best.topk(kept, dim=-1).indices, torch.ones_like(best, dtype=torch.bool)
    )
    return by_group.masked_fill(~chosen.unsqueeze(-1), float("-inf")).view_as(choice)


def count_rows(index: torch.Tensor, experts: int) -> torch.Tensor:
    """Return how many rows each expert gets, and after them how many are dropped."""
    flat = index.reshape(-1)
    zeros = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add(0, flat, torch.ones_like(flat))


def drop_beyond(routing: Routing, rows: int, limit: int, experts: int) -> Routing:
    """
    Drop what an expert gets beyond a limit of each sequence, in the order of the tokens.

    The order within a sequence decides, so that it does not matter which rank computes it.

    Args:
        rows: number of sequences of equal length that the tokens are.
        limit: tokens per expert and sequence.
    """
    flat = routing.index.view(rows, -1)
    hot = functional.one_hot(flat, experts)
    place = (hot.cumsum(1) * hot).sum(-1)  # from 1, among the rows of the same expert
    is_kept = (place <= limit).view_as(routing.index)
    return Routing(
        routing.index.masked_fill(~is_kept, experts),
        routing.weights * is_kept,
        routing.shares,
    )
