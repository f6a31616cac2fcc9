"""
A mixture of experts: each token goes to the experts that a router chooses (Shazeer et al., 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.experts.balance import Balance, LoadCounter, add_balance_loss
from pdrun.parallel.experts.dispatch import compute_experts
from pdrun.parallel.experts.grouped import ExpertRows, grouped_product, why_looped
from pdrun.parallel.experts.routing import (
    SCORES,
    RoutingRule,
    drop_beyond,
    route_tokens,
    router_logits,
)

MOE_API = "pdrun.MoE"
ACTIVATIONS: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "swiglu": (True, functional.silu),
    "geglu": (True, functional.gelu),
    "gelu": (False, functional.gelu),
    "relu": (False, functional.relu),
}
"""Whether a gate multiplies, and the function, by name."""


class MoE(nn.Module):
    """
    Feed-forward networks of which each token uses ``top_k``.

    The output of a token is the weighted sum of its experts, plus the shared ones. It is computed
    in plain torch; ``pdrun.experts("ep")`` in a strategy cuts the experts over an axis of the mesh.

    Args:
        dim, hidden: width of tokens, and of an expert's hidden layer.
        experts: number of experts.
        top_k: experts per token.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalize: divide a token's weights by their sum; default: with a ``top_k`` above 1. With 1
            every weight would be 1, and the router would not learn.
        scale: factor of the weights.
        shared: experts that every token uses, as one network of ``shared * hidden``.
        groups: (number of groups of experts, groups per token): the experts of a token are chosen
            from its best groups (DeepSeek-V3).
        balance: what evens out the loads of experts.
        capacity: tokens per expert and sequence, as a multiple of the mean; tokens beyond it are
            dropped in the order of the sequence. Default: none is dropped.
        activation: "swiglu", "geglu", "gelu" or "relu".

    Raises:
        UsageError: the numbers do not fit together.
    """

    balance_state: torch.Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        experts: int,
        top_k: int = 1,
        score: str = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        shared: int = 0,
        groups: tuple[int, int] | None = None,
        balance: Balance | None = None,
        capacity: float | None = None,
        activation: str = "swiglu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_counts(dim=dim, hidden=hidden, experts=experts, top_k=top_k)
        _check_choices(experts, top_k, score, groups, shared, activation)
        _check_weighting(top_k, normalize, scale, capacity)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(f"dtype must be a floating-point type, got {dtype!r}", where=MOE_API)
        if balance is not None and not isinstance(balance, Balance):
            what = f"balance must be a pdrun.Balance, got {balance!r}"
            raise UsageError(what, where=MOE_API, hint='pdrun.Balance("bias", 1e-3)')
        is_normalized = top_k > 1 if normalize is None else normalize
        self.rule = RoutingRule(experts, top_k, score, is_normalized, scale, groups)
        self.balance = balance
        self.capacity = capacity
        self.activation = activation
        self.is_gated, self._activate = ACTIVATIONS[activation]
        width = hidden * (2 if self.is_gated else 1)
        where = {"device": device, "dtype": dtype}
        self.router = nn.Linear(dim, experts, bias=False, **where)
        self.up = nn.Parameter(torch.empty(experts, dim, width, **where))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim, **where))
        self.shared_up = self.shared_down = None
        if shared:
            widened = shared * width
            self.shared_up = nn.Linear(dim, widened, bias=False, **where)
            self.shared_down = nn.Linear(shared * hidden, dim, bias=False, **where)
        if balance is not None:
            start = torch.full((experts,), 0.0 if balance.kind == "bias" else 1.0 / experts)
            self.register_buffer("balance_state", start.to(device=device))
        self.expert_loads = LoadCounter(experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts' weights as nn.Linear draws its own."""
        with torch.no_grad():
            for weight in (self.up, self.down):
                bound = 1.0 / math.sqrt(weight.shape[1])
                weight.uniform_(-bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., dim]`` of ``[..., dim]``."""
        tokens = x.reshape(-1, x.shape[-1])
        rule = self.rule
        is_biased = self.balance is not None and self.balance.kind == "bias"
        bias = self.balance_state if is_biased else None
        routing = route_tokens(router_logits(tokens, self.router.weight), rule, bias)
        if self.capacity is not None:
            routing = drop_beyond(routing, *self._find_limit(x), rule.experts)
        self.expert_loads.add(routing.index, self.training)
        weights = routing.weights
        if self.balance is not None and self.balance.kind == "loss" and self.training:
            weights = add_balance_loss(
                weights, routing.shares, self.balance_state, self.balance.rate
            )
        if torch.is_autocast_enabled(x.device.type):
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        out = self.compute_tokens(tokens, routing.index, weights)
        return out.view(*x.shape[:-1], out.shape[-1])

    def compute_tokens(
        self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of each token's experts and of the shared ones."""
        may_drop = self.capacity is not None
        experts = self.rule.experts
        out = compute_experts(tokens, index, weights, experts, self.compute_rows, may_drop)
        if self.shared_up is not None:
            out = out + self.compute_shared(tokens)
        return out

    def compute_rows(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Return the outputs of the experts for rows that are sorted by expert."""
        return grouped_product(
            self._activate_rows(grouped_product(x, self.up, rows)), self.down, rows
        )

    def compute_shared(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the output of the shared experts."""
        assert self.shared_up is not None and self.shared_down is not None
        found: torch.Tensor = self.shared_down(self._activate_rows(self.shared_up(tokens)))
        return found

    def why_looped(self) -> str:
        """Return why the products of the experts are a loop; empty if torch computes groups."""
        sizes = (self.up.shape[1], self.up.shape[2], self.down.shape[1], self.down.shape[2])
        return why_looped(self.up.device.type, self.up.dtype, sizes)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        rule = self.rule
        return f"experts={rule.experts}, top_k={rule.top_k}, score={rule.score!r}"

    def _activate_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self._activate(gate) * up
        return self._activate(x)

    def _find_limit(self, x: torch.Tensor) -> tuple[int, int]:
        """Return the number of sequences, and the tokens that an expert takes of each."""
        if x.dim() != 3:
            what = f"capacity needs an input [rows, positions, dim], got {list(x.shape)}"
            raise UsageError(
                what, where=MOE_API, hint="capacity counts the tokens of each sequence"
            )
        assert self.capacity is not None
        rows, positions, _ = x.shape
        mean = positions * self.rule.top_k / self.rule.experts
        # an expert gets a token once
        return rows, max(1, math.ceil(min(self.capacity * mean, positions)))


def router_params(model: nn.Module) -> Iterator[int]:
    """Yield the ids of the routers' weights: they stay in their own type."""
    for module in model.modules():
        if isinstance(module, MoE):
            yield id(module.router.weight)


def check_experts(model: nn.Module, sequence_parts: int) -> None:
    """
    Refuse layers whose result would depend on the number of ranks, or whose balance has no effect.

    Args:
        sequence_parts: ranks that each have a part of every sequence.

    Raises:
        UsageError: names the layer.
    """
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        if module.capacity is not None and sequence_parts > 1:
            what = (
                f"{name}: capacity is not supported with parts of sequences: it counts their tokens"
            )
            raise UsageError(
                what, where=MOE_API, hint="leave capacity out, or use tp for cp, and no slices"
            )
        is_loss = module.balance is not None and module.balance.kind == "loss"
        if is_loss and not module.router.weight.requires_grad:
            what = f'{name}: its router is frozen: Balance("loss") would change nothing'
            raise UsageError(what, where=MOE_API, hint='use Balance("bias"), or train the router')


def describe_routers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what must be equal on all ranks, by a name for errors."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            choices = module.rule, module.balance, module.capacity, module.activation
            yield f"the experts of {name}", str(choices)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a count of at least 1, got {value!r}", where=MOE_API)


def _check_choices(
    experts: int,
    top_k: int,
    score: str,
    groups: tuple[int, int] | None,
    shared: int,
    activation: str,
) -> None:
    if top_k > experts:
        raise UsageError(f"top_k={top_k} is more than the {experts} experts", where=MOE_API)
    if score not in SCORES:
        what = f"score must be one of {', '.join(SCORES)}, got {score!r}"
        raise UsageError(what, where=MOE_API)
    if activation not in tuple(ACTIVATIONS):
        what = f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        raise UsageError(what, where=MOE_API)
    if isinstance(shared, bool) or not isinstance(shared, int) or shared < 0:
        raise UsageError(f"shared must be a count, got {shared!r}", where=MOE_API)
    if groups is not None:
        _check_groups(experts, top_k, groups)


def _check_weighting(top_k: int, normalize: Any, scale: Any, capacity: Any) -> None:
    if normalize is not None and type(normalize) is not bool:
        raise UsageError(f"normalize must be True or False, got {normalize!r}", where=MOE_API)
    if normalize and top_k == 1:
        what = "normalize=True with top_k=1: every weight is 1, and the router would not learn"
        raise UsageError(what, where=MOE_API, hint="leave normalize out")
    for name, value in (("scale", scale), ("capacity", capacity)):
        is_number = type(value) in (int, float) and 0 < value < math.inf
        if not is_number and not (name == "capacity" and value is None):
            raise UsageError(f"{name} must be above 0, got {value!r}", where=MOE_API)


def _check_groups(experts: int, top_k: int, groups: tuple[int, int]) -> None:
    is_pair = isinstance(groups, tuple) and len(groups) == 2
    if not is_pair or not all(type(each) is int and each > 0 for each in groups):
        what = f"groups must be (number of groups, groups per token), got {groups!r}"
        raise UsageError(what, where=MOE_API, hint="groups=(8, 4)")
    count, kept = groups
    if experts % count or kept > count:
        what = f"groups={groups}: {experts} experts make no {count} equal groups of which {kept}"
        raise UsageError(f"{what} are chosen", where=MOE_API)
    if top_k > experts // count * kept:
        what = f"top_k={top_k} is more than the {experts // count * kept} experts of {kept} groups"
        raise UsageError(what, where=MOE_API)
