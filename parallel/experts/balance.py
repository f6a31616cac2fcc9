"""
How many tokens experts get, and what evens it out.

A layer counts the rows of its experts while it computes. After the optimizer's step the counts of
all ranks are summed, once, and each layer with a `Balance` moves:

* "bias": the bias of each expert by ``rate``, towards the mean (Wang et al., 2024);
* "loss": gradients of the balance loss of Switch Transformers (Fedus et al., 2021), with the loads
  of the step before. Those are known before a step and are the same for all of its slices: a
  gradient does not depend on how a batch is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.experts.routing import count_rows

KINDS = ("bias", "loss")


@dataclass(frozen=True)
class Balance:
    """
    What evens out the load of experts.

    Attributes:
        kind: "bias" moves a bias of the choice; "loss" adds a loss to the gradients.
        rate: change of the bias per step, or factor of the loss.
    """

    kind: str = "bias"
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            what = f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            raise UsageError(what, where="pdrun.Balance")
        if type(self.rate) not in (int, float) or not 0 < self.rate < math.inf:
            raise UsageError(f"rate must be above 0, got {self.rate!r}", where="pdrun.Balance")


@dataclass
class PassState:
    """
    What a forward pass must know of the step around it.

    Attributes:
        row_weight: 0.0 for rows that are not part of the step.
        loss_scale: factor of the loss in fp16.
        backwards: backward passes in progress; forwards inside are recomputed and not counted.
    """

    row_weight: float = 1.0
    loss_scale: float = 1.0
    backwards: int = 0

    def begin_pass(self, row_weight: float = 1.0, loss_scale: float = 1.0) -> None:
        """Note whether and how the rows of the next forward pass count."""
        self.row_weight = row_weight
        self.loss_scale = loss_scale


pass_state = PassState()
"""Of this process; drivers set it, as they set that of batch normalisations."""


class LoadCounter:
    """Counts the rows of a layer's experts."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.counts: torch.Tensor | None = None
        """``[experts + 1]``: rows of each expert, and dropped ones."""

    def add(self, index: torch.Tensor, is_training: bool) -> None:
        """Count the rows of a forward pass, unless it is recomputed or not part of a step."""
        if is_training and pass_state.backwards == 0 and pass_state.row_weight:
            found = count_rows(index.detach(), self.experts)
            self.counts = found if self.counts is None else self.counts + found

    def take(self) -> torch.Tensor | None:
        """Return the counts and begin again."""
        found = self.counts
        self.counts = None
        return found


def counted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the modules whose experts are counted, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "expert_loads", None), LoadCounter)
    }


def move_balance(module: nn.Module, counts: torch.Tensor) -> None:
    """
    Move a layer's bias, or take over its loads, after a step.

    Args:
        counts: rows of each expert, of all ranks.
    """
    balance: Balance | None = getattr(module, "balance", None)
    if balance is None:
        return
    buffer: Any = module.balance_state
    loads = counts.to(device=buffer.device, dtype=torch.float64)
    if balance.kind == "bias":
        buffer.add_(torch.sign(loads.mean() - loads).to(buffer.dtype), alpha=balance.rate)
    else:
        total = loads.sum()
        shares = (loads / total.clamp_min(1)).to(buffer.dtype)
        buffer.copy_(torch.where(total > 0, shares, buffer))  # no wait for the device


def add_balance_loss(
    weights: torch.Tensor, shares: torch.Tensor, loads: torch.Tensor, rate: float
) -> torch.Tensor:
    """
    Return the weights; their backward adds the gradient of a balance loss.

    The loss is ``rate * experts * sum over tokens and experts of load * share``. Like every other
    term it is divided by the count of the step's loss.
    """
    factor = rate * len(loads) * pass_state.row_weight * pass_state.loss_scale
    found: torch.Tensor = _BalanceLoss.apply(weights, shares, loads, factor)
    return found


class _BalanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, shares: torch.Tensor, loads: torch.Tensor, factor: float
    ) -> torch.Tensor:
        # a copy: the buffer moves after the step
        ctx.grad = loads.clone() * factor
        ctx.tokens = len(shares)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, ctx.grad.expand(ctx.tokens, -1), None, None
