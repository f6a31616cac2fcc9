"""Copies of a model on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pdrun.parallel.model import param_hooks


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device; buffers are copied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        made = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        copy_attributes(param, made)
        memo[id(param)] = param_hooks.copy_hooks(param, made)
    return copy.deepcopy(model, memo)


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give a stand-in the public attributes of a weight, such as how it is quantised."""
    for name, value in vars(source).items():
        if not name.startswith("_"):
            setattr(target, name, value)
