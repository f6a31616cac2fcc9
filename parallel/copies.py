"""Copies of a run's model that pdrun does nothing to: with whole weights, or with none at all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from pdrun.parallel.run import Run


def plain_copy(run: Run) -> nn.Module:
    """Return the model as it would be in one process; every rank must call this."""
    memo: dict[int, Any] = {}
    full = run.full_weights()
    for weight in run.engine.weights:
        value = full[weight.name].to(run.settings.precision.weights(weight.dtype), copy=True)
        memo[id(weight.param)] = nn.Parameter(value, weight.trained)
    made = copy.deepcopy(run.model, memo)
    for name in run.recomputed:
        made.get_submodule(name).__dict__.pop("forward")  # the class's own comes to light
    return made


def shell(run: Run, fake: Any) -> nn.Module:
    """Return the model with fake weights and buffers, which have shapes and no data; recomputation works in it."""
    from pdrun.parallel.recompute import apply

    memo: dict[int, Any] = {}
    for weight in run.engine.weights:
        dtype = run.settings.precision.weights(weight.dtype)
        value = torch.empty(weight.shape, dtype=dtype, device=run.device)
        memo[id(weight.param)] = nn.Parameter(value, weight.trained)
    for buffer in run.model.buffers():
        memo[id(buffer)] = fake.from_tensor(buffer)
    made = copy.deepcopy(run.model, memo)
    for name in run.recomputed:
        made.get_submodule(name).__dict__.pop("forward")
    if run.recompute is not None:
        apply(made, run.recompute)
    return made
