"""
Hooks that a program has put on weights: what they do must not depend on how a step is cut.

A hook on a tensor (`register_hook`) sees the gradient of one micro-batch on one rank, and of a sum
of losses: what it makes of that is added up and divided later. A mask or a factor may come before
or after; what limits, rounds or normalises may not, and the numbers would be others on each number
of ranks. Which of the two a hook is, is tried out, as with optimizers. A hook that has its turn
when a gradient has come (`register_post_accumulate_grad_hook`) could only take away or change what
the run is about to add up: there is no place for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.model.weights import Weight

TRIAL_FACTOR = 64.0
"""
Gradients are tried out in two sizes; a power of two, so that what is linear gives the same bits.
"""
HOOK_RULE = "hooks see one rank's gradient of a micro-batch's summed loss, before it is added up and divided"
HOOK_HINT = (
    "clip=, or a function in run.watchers; hooks that are linear (a mask, a factor) may stay"
)


def count_hooks(weights: Iterable[Weight]) -> list[tuple[int, int]]:
    """Return how many hooks each weight has: on its gradient, and after that has come."""
    return [tuple(len(kind or ()) for kind in _hooks_of(weight.param)) for weight in weights]  # type: ignore[misc]


def copy_hooks(old: torch.nn.Parameter, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """
    Return a weight with the hooks on another one's gradient, for a copy that computes the same.
    """
    for hook in (old._backward_hooks or {}).values() if new.requires_grad else ():
        new.register_hook(hook)
    return new


def _hooks_of(param: torch.Tensor) -> tuple[Any, Any]:
    return param._backward_hooks, param._post_accumulate_grad_hooks


def check_hooks(weights: Sequence[Weight], own: Sequence[int], where: str) -> None:
    """
    Refuse hooks of which a step's numbers would depend on the ranks.

    Args:
        own: for each weight how many hooks after its gradient are the run's.

    Raises:
        UsageError: names the weight, and why.
    """
    for weight, mine in zip(weights, own, strict=True):
        before, after = _hooks_of(weight.param)
        if len(after or ()) > mine:
            what = f"{weight.name} has a hook of register_post_accumulate_grad_hook, which would take the gradient "
            what += "before it is added up over micro-batches and ranks"
            raise UsageError(
                what,
                where=where,
                hint="the run calls the optimizer; run.watchers see whole gradients",
            )
        if before and not weight.shard.is_full:
            what = f"{weight.name} is cut, and has a hook on its gradient, which would get a part of it"
            raise UsageError(what, where=where, hint="without it, or without the cut")
        if (
            before
            and weight.param.device.type != "meta"
            and not _is_linear(list(before.values()), weight.param)
        ):
            what = f"{weight.name} has a hook on its gradient that is not linear: {HOOK_RULE}"
            raise UsageError(what, where=where, hint=HOOK_HINT)


def _is_linear(hooks: list[Any], param: torch.Tensor) -> bool:
    """
    Whether gradients may be added up and multiplied before or after some hooks; one that fails may
    not be known.
    """

    def after(grad: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            made = hook(grad.clone())
            grad = grad if made is None else made
        return grad

    dice = torch.Generator().manual_seed(1)
    kind = torch.float32 if not param.dtype.is_complex else torch.complex64
    one, other = (
        (torch.randn(param.shape, generator=dice, dtype=kind) * spread).to(param)
        for spread in (
            torch.logspace(-4, 4, max(param.numel(), 1))[: param.numel()].view(param.shape),
            1.0,
        )
    )
    with torch.no_grad():
        try:
            first = after(one)
            if not torch.equal(after(one * -TRIAL_FACTOR), first * -TRIAL_FACTOR):
                return False
            return bool(
                torch.allclose(after(one + other), first + after(other), rtol=1e-2, atol=1e-3)
            )
        except Exception:
            return False
