"""Copies of a run's model without pdrun: with full weights, or with fake tensors."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdrun.parallel.checkpoint.export import full_buffers
from pdrun.parallel.fp8.modules import use_fp8
from pdrun.parallel.model import param_hooks
from pdrun.parallel.model.forward_wrapper import unwrap_forwards
from pdrun.parallel.model.shards import set_shard
from pdrun.parallel.zero.full_tensors import weights_by_name

if TYPE_CHECKING:
    from pdrun.parallel.model.shard_map import WeightInfo
    from pdrun.parallel.model.weights import Weight
    from pdrun.parallel.training.state import RunState


def reference_copy(state: RunState) -> nn.Module:
    """Return the model as it is in one process, with full weights; every rank must call this."""
    memo: dict[int, Any] = {}
    full = weights_by_name(state.engine)

    def value_of(weight: WeightInfo | Weight, param: nn.Parameter) -> nn.Parameter:
        dtype = state.settings.precision.weight_dtype(weight.dtype, weight.keep_dtype)
        return param_hooks.copy_hooks(
            param,
            nn.Parameter(
                full[weight.name].to(device=state.device, dtype=dtype, copy=True), weight.is_trained
            ),
        )

    if state.original_model is not None:
        params = dict(state.original_model.named_parameters())
        for entry in state.engine.catalogue.weights:
            memo[id(params[entry.name])] = value_of(entry, params[entry.name])
        made = copy.deepcopy(state.original_model, memo)
        use_fp8(made, state.fp8.everywhere, state.fp8.scales)
        here = full_buffers(state)
        with torch.no_grad():
            for name, buffer in made.named_buffers():
                if name in here and here[name].shape == buffer.shape:
                    buffer.copy_(here[name])
        return made
    for weight in state.engine.weights:
        memo[id(weight.param)] = value_of(weight, weight.param)
    made = copy.deepcopy(state.model, memo)
    unwrap_forwards(made)
    return made.to(state.device)  # buffers of modules on the host, too


def meta_copy(state: RunState, fake: Any) -> nn.Module:
    """
    Return the model with fake weights and buffers, which have shapes and no data. Nothing is
    compiled or recomputed in it.
    """
    memo: dict[int, Any] = {}
    for weight in state.engine.weights:
        dtype = state.settings.precision.weight_dtype(weight.dtype, weight.keep_dtype)
        value = torch.empty(weight.shape, dtype=dtype, device=state.device)
        memo[id(weight.param)] = set_shard(nn.Parameter(value, weight.is_trained), weight.shard)
    for buffer in state.model.buffers():
        memo[id(buffer)] = fake.from_tensor(buffer)
    made = copy.deepcopy(state.model, memo)
    unwrap_forwards(made)
    return made
