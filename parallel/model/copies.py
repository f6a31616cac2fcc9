"""Copies of a model on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pdrun.parallel.model import param_hooks


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device; buffers are copied."""
    memo: dict[int, Any] = {
        id(param): param_hooks.copy_hooks(
            param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        )
        for param in model.parameters()
    }
    return copy.deepcopy(model, memo)
