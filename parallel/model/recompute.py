"""
Recomputation: activations of a module are dropped after its forward pass and recomputed in the
backward pass.

    "full"                     each unit (member of a ModuleList or Sequential) keeps its input only
    "selective"                each unit also keeps results of matrix products and attention
    ["blocks.*"]               the modules of these names, in full
    ("blocks.*", "selective")  the modules of these names, with a policy

Dropout masks are the same: see `pdrun.parallel.rng.step_rng`.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.model.find_units import find_units
from pdrun.parallel.model.forward_wrapper import wrap_forward

API_NAME = "recompute"
SAVED_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""
ATen operators whose results ``selective`` keeps: they take long for the memory of their result.
"""


def apply_recompute(model: nn.Module, value: Any) -> list[str]:
    """
    Make modules recompute; return their names.

    Raises:
        UsageError: an unknown policy, or a glob that matches no module.
    """
    if value is None or value is False or value == "none":
        return []
    policy, globs = _parse_policy(value)
    names = find_units(model, None) if globs is None else match_modules(model, globs, API_NAME)
    for name in names:
        wrap_forward(model.get_submodule(name), functools.partial(_wrap_checkpoint, policy=policy))
    return names


def _parse_policy(value: Any) -> tuple[str, Sequence[str] | None]:
    if value is True or value in ("full", "selective"):
        return ("full" if value is True else value), None
    if isinstance(value, tuple) and len(value) == 2 and value[1] in ("full", "selective"):
        globs = [value[0]] if isinstance(value[0], str) else list(value[0])
        return value[1], globs
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(glob, str) for glob in value)
    ):
        return "full", list(value)
    what = "recompute must be 'full', 'selective', a list of globs or (globs, 'selective')"
    raise UsageError(f"{what}, got {value!r}", where=API_NAME)


def match_modules(model: nn.Module, globs: Sequence[str], where: str) -> list[str]:
    """
    Return the names of modules that globs match, outermost ones only.

    Raises:
        UsageError: a glob that matches no module.
    """
    known = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for glob in globs:
        hits = fnmatch.filter(known, glob)
        if not hits:
            raise UsageError(
                f"{glob!r} matches no module", where=where, hint=did_you_mean(glob, known)
            )
        chosen += [name for name in hits if name not in chosen]
    # an outer module includes the modules inside it
    return [name for name in chosen if not any(name.startswith(other + ".") for other in chosen)]


def _wrap_checkpoint(forward: Callable[..., Any], policy: str) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if policy == "selective":
        options["context_fn"] = functools.partial(
            torch_checkpoint.create_selective_checkpoint_contexts, _choose_policy
        )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch_checkpoint.checkpoint(forward, *args, **options, **kwargs)

    return run


def _choose_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    policy = torch_checkpoint.CheckpointPolicy
    name = (
        operator.overloadpacket.__name__ if hasattr(operator, "overloadpacket") else str(operator)
    )
    return policy.MUST_SAVE if name in SAVED_OPERATORS else policy.PREFER_RECOMPUTE
