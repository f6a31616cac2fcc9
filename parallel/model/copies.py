"""Copies of a run's model that pdrun does nothing to: with whole weights, or with none at all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdrun.parallel.model import param_hooks as hooks
from pdrun.parallel.model.forward_wrapper import unwrap
from pdrun.parallel.model.shards import set_tile
from pdrun.parallel.zero.full_tensors import buffers

if TYPE_CHECKING:
    from pdrun.parallel.model.shard_map import Entry
    from pdrun.parallel.model.weights import Weight
    from pdrun.parallel.run import Run


def blank(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device; buffers are copied."""
    memo: dict[int, Any] = {
        id(param): hooks.carry(
            param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        )
        for param in model.parameters()
    }
    return copy.deepcopy(model, memo)


def plain_copy(run: Run) -> nn.Module:
    """Return the model as it would be in one process; every rank must call this."""
    memo: dict[int, Any] = {}
    full = run.full_weights()

    def value_of(weight: Entry | Weight, param: nn.Parameter) -> nn.Parameter:
        dtype = run.settings.precision.weights(weight.dtype, weight.wide)
        return hooks.carry(
            param, nn.Parameter(full[weight.name].to(dtype, copy=True), weight.trained)
        )

    if run.original is not None:
        params = dict(run.original.named_parameters())
        for entry in run.engine.catalogue.entries:
            memo[id(params[entry.name])] = value_of(entry, params[entry.name])
        made = copy.deepcopy(run.original, memo)
        here = buffers(run)
        with torch.no_grad():
            for name, buffer in made.named_buffers():
                if name in here and here[name].shape == buffer.shape:
                    buffer.copy_(here[name])
        return made
    for weight in run.engine.weights:
        memo[id(weight.param)] = value_of(weight, weight.param)
    made = copy.deepcopy(run.model, memo)
    unwrap(made)
    return made


def shell(run: Run, fake: Any) -> nn.Module:
    """
    Return the model with fake weights and buffers, which have shapes and no data; recomputation
    works in it.
    """
    from pdrun.parallel.model.recompute import apply

    memo: dict[int, Any] = {}
    for weight in run.engine.weights:
        dtype = run.settings.precision.weights(weight.dtype, weight.wide)
        value = torch.empty(weight.shape, dtype=dtype, device=run.device)
        memo[id(weight.param)] = set_tile(nn.Parameter(value, weight.trained), weight.tile)
    for buffer in run.model.buffers():
        memo[id(buffer)] = fake.from_tensor(buffer)
    made = copy.deepcopy(run.model, memo)
    unwrap(made)
    if run.recompute is not None:
        apply(made, run.recompute)
    return made
