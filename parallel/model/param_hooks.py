"""
Hooks of a program on weights: their effect must not depend on the number of ranks.

A hook on a tensor (`register_hook`) sees the gradient of one micro-batch on one rank, and of a sum
of losses. Its results are summed and divided later. A mask or a factor can run before or after the
sum. A hook that limits, rounds or normalises cannot: its numbers would depend on the number of
ranks. Each hook is tried out to see which kind it is, as with optimizers.

A hook that runs after the gradient is accumulated (`register_post_accumulate_grad_hook`) could only
remove or change what the run is about to sum. It is not supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.model.weights import Weight

TRIAL_FACTOR = 64.0
"""
Gradients are tried in two sizes. The factor is a power of two: a linear hook gives the same bits.
"""
HOOK_RULE = (
    "hooks see one rank's gradient of the summed loss of a micro-batch, before the gradients are"
    " summed and divided"
)
HOOK_HINT = "use clip= or a function in run.watchers; linear hooks (a mask, a factor) are supported"


def count_hooks(weights: Iterable[Weight]) -> list[tuple[int, int]]:
    """Return the number of hooks of each weight: on the gradient, and after its accumulation."""
    found = []
    for weight in weights:  # in each step
        param = weight.param
        before, after = param._backward_hooks, param._post_accumulate_grad_hooks
        found.append((len(before) if before else 0, len(after) if after else 0))
    return found


def copy_hooks(old: torch.nn.Parameter, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """
    Return a weight with the gradient hooks of another one, for a copy with the same computation.
    """
    for hook in (old._backward_hooks or {}).values() if new.requires_grad else ():
        new.register_hook(hook)
    return new


def _hooks_of(param: torch.Tensor) -> tuple[Any, Any]:
    return param._backward_hooks, param._post_accumulate_grad_hooks


def check_hooks(weights: Sequence[Weight], own: Sequence[int], where: str) -> None:
    """
    Refuse hooks whose numbers would depend on the ranks.

    Args:
        own: for each weight the number of the run's hooks after the gradient.

    Raises:
        UsageError: names the weight and the reason.
    """
    for weight, mine in zip(weights, own, strict=True):
        before, after = _hooks_of(weight.param)
        if len(after or ()) > mine:
            what = (
                f"{weight.name} has a hook of register_post_accumulate_grad_hook, which would run"
                " before the gradient is summed over micro-batches and ranks"
            )
            raise UsageError(
                what,
                where=where,
                hint="the run calls the optimizer; run.watchers see full gradients",
            )
        if before and not weight.shard.is_full:
            what = (
                f"{weight.name} is sharded and has a hook on its gradient, which would get a shard"
            )
            hint = "remove the hook, or do not shard the weight"
            raise UsageError(what, where=where, hint=hint)
        if (
            before
            and weight.param.device.type != "meta"
            and not _is_linear(list(before.values()), weight.param)
        ):
            what = f"{weight.name} has a hook on its gradient that is not linear: {HOOK_RULE}"
            raise UsageError(what, where=where, hint=HOOK_HINT)


def _is_linear(hooks: list[Any], param: torch.Tensor) -> bool:
    """
    Whether gradients can be summed and multiplied before or after hooks; False if a hook fails.
    """

    def after(grad: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            made = hook(grad.clone())
            grad = grad if made is None else made
        return grad

    generator = torch.Generator().manual_seed(1)
    kind = torch.float32 if not param.dtype.is_complex else torch.complex64
    one, other = (
        (torch.randn(param.shape, generator=generator, dtype=kind) * spread).to(param)
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
