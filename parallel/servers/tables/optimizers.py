"""
The optimizers of a server: settings, their state, and one update.

Dense weights have torch's arithmetic, to the bit. A row optimizer changes only the rows that have a
gradient, as torch's SparseAdam does. Momentum and decay of other rows wait until they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from pdrun.errors import UsageError, did_you_mean

DENSE_OPTIMIZERS = ("sgd", "momentum", "adagrad", "lazy_adam", "ftrl", "adamw")
ROW_OPTIMIZERS = ("sgd", "momentum", "adagrad", "lazy_adam", "ftrl")
TWINS = {"adam": "lazy_adam", "sparseadam": "lazy_adam", "lazyadam": "lazy_adam"}
"""Names that users try, and what a server has instead."""


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer with its numbers; those that it does not use are ignored and refused if set."""

    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    accumulator: float = 0.0
    """First value of the sum of squared gradients (adagrad, ftrl)."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> OptimizerSettings:
        """
        Inverse of `to_json`, for data from the network.

        Raises:
            ValueError: a value is missing or out of range.
        """
        if not isinstance(data, dict) or set(data) != {item.name for item in fields(cls)}:
            raise ValueError("an optimizer has other settings")
        numbers = {name: value for name, value in data.items() if name != "name"}
        if data["name"] not in DENSE_OPTIMIZERS or not all(map(_is_finite, numbers.values())):
            raise ValueError("an optimizer's settings are out of range")
        return cls(data["name"], **{name: float(value) for name, value in numbers.items()})


_USED = {
    "sgd": ("weight_decay",),
    "momentum": ("momentum", "weight_decay"),
    "adagrad": ("eps", "weight_decay", "accumulator"),
    "lazy_adam": ("beta1", "beta2", "eps"),
    "ftrl": ("l1", "l2", "accumulator"),
    "adamw": ("beta1", "beta2", "eps", "weight_decay"),
}
_DEFAULTS: dict[str, dict[str, float]] = {
    "momentum": {"momentum": 0.9},
    "adagrad": {"eps": 1e-10},
    "ftrl": {"accumulator": 0.1},
    "adamw": {"weight_decay": 1e-2},
}


def make_optimizer(
    name: Any, lr: Any, options: dict[str, Any], known: Sequence[str], where: str
) -> OptimizerSettings:
    """
    Return checked settings.

    Args:
        options: the numbers of this optimizer; ``betas`` is a pair.
        known: names that the kind of table allows.

    Raises:
        UsageError: an unknown name, an option that this optimizer does not have, or a number out of
            range.
    """
    if name not in known:
        hint = did_you_mean(str(name), known)
        twin = TWINS.get(str(name).lower().replace("_", ""))
        if twin:
            hint = f"use {twin!r}: it updates only what has a gradient"
        what = f"optimizer must be one of {', '.join(known)}, got {name!r}"
        raise UsageError(what, where=where, hint=hint)
    given = dict(options)
    if "betas" in given:
        betas = given.pop("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise UsageError(f"betas must be two numbers, got {betas!r}", where=where)
        given |= {"beta1": betas[0], "beta2": betas[1]}
    used = _USED[name]
    for option in given:
        if option not in used:
            what = f"{name} has no option {option!r}"
            raise UsageError(what, where=where, hint=f"it has lr, {', '.join(used)}")
    numbers = {"lr": lr, **_DEFAULTS.get(name, {}), **given}
    for option, value in numbers.items():
        limit = 1.0 if option in ("momentum", "beta1", "beta2") else math.inf
        is_good = _is_finite(value) and 0 <= value < limit and (value > 0 or option != "lr")
        if not is_good:
            raise UsageError(f"{option} is out of range: {value!r}", where=where)
    if name == "ftrl" and numbers["accumulator"] <= 0:
        raise UsageError("accumulator of ftrl must be above 0", where=where)
    return OptimizerSettings(name, **{option: float(value) for option, value in numbers.items()})


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def count_states(settings: OptimizerSettings) -> int:
    """Return the number of state tensors, each with the shape of the weight."""
    counts = {"sgd": 0, "momentum": 1, "adagrad": 1, "lazy_adam": 2, "ftrl": 2, "adamw": 2}
    return counts[settings.name]


def first_state(settings: OptimizerSettings, index: int) -> float:
    """Return the first value of a state tensor."""
    if index == 0 and settings.name in ("adagrad", "ftrl"):
        return settings.accumulator
    return 0.0


def apply_update(
    settings: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    """
    Update a weight and its states in place; the gradient may be changed.

    Args:
        step: number of this update, from 1.
    """
    _UPDATES[settings.name](settings, weight, grad, states, step)


def _add_decay(s: OptimizerSettings, weight: torch.Tensor, grad: torch.Tensor) -> None:
    if s.weight_decay:
        grad.add_(weight, alpha=s.weight_decay)


def _apply_sgd(
    s: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    _add_decay(s, weight, grad)
    weight.add_(grad, alpha=-s.lr)


def _apply_momentum(
    s: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    _add_decay(s, weight, grad)
    states[0].mul_(s.momentum).add_(grad)
    weight.add_(states[0], alpha=-s.lr)


def _apply_adagrad(
    s: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    _add_decay(s, weight, grad)
    states[0].addcmul_(grad, grad, value=1)
    weight.addcdiv_(grad, states[0].sqrt().add_(s.eps), value=-s.lr)


def _apply_adam(
    s: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    states[0].lerp_(grad, 1 - s.beta1)
    states[1].mul_(s.beta2).addcmul_(grad, grad, value=1 - s.beta2)
    denominator = states[1].sqrt().div_(math.sqrt(1 - s.beta2**step)).add_(s.eps)
    weight.addcdiv_(states[0], denominator, value=-s.lr / (1 - s.beta1**step))


def _apply_adamw(
    s: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    weight.mul_(1 - s.lr * s.weight_decay)
    _apply_adam(s, weight, grad, states, step)


def _apply_ftrl(
    s: OptimizerSettings,
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    step: int,
) -> None:
    # FTRL-Proximal, McMahan et al. 2013, with the names of MindSpore's and TensorFlow's kernels
    accumulator, linear = states
    before = accumulator.sqrt()
    accumulator.addcmul_(grad, grad, value=1)
    root = accumulator.sqrt()
    linear.add_(grad).sub_((root - before).div_(s.lr).mul_(weight))
    excess = (linear.abs() - s.l1).clamp_(min=0).mul_(linear.sign()).neg_()
    weight.copy_(excess.div_(root.div_(s.lr).add_(2 * s.l2)))


_Update = Callable[
    [OptimizerSettings, torch.Tensor, torch.Tensor, Sequence[torch.Tensor], int], None
]
_UPDATES: dict[str, _Update] = {
    "sgd": _apply_sgd,
    "momentum": _apply_momentum,
    "adagrad": _apply_adagrad,
    "lazy_adam": _apply_adam,
    "ftrl": _apply_ftrl,
    "adamw": _apply_adamw,
}
