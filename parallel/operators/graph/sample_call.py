"""The arguments with which a run calls its model on the sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.operators.graph.export_hooks import OPERATORS_API
from pdrun.parallel.operators.graph.trace_check import same_generators
from pdrun.parallel.training.loss import ForwardFunction, call_model


class _CallCaptured(BaseException):
    """Ends a call of ``forward=`` where it calls the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


def capture_call(
    model: nn.Module, forward: ForwardFunction | None, batch: Any, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    Return the arguments with which ``forward(model, batch)`` calls the model first. The model
    computes nothing.

    Args:
        forward: None: as `parallelize` calls a model.

    Raises:
        UsageError: it does not call the model.
    """

    def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CallCaptured(args, kwargs)

    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    handle = model.register_forward_pre_hook(capture, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad(), same_generators(device):
            (forward or call_model)(model, batch)
    except _CallCaptured as captured:
        return captured.call
    finally:
        handle.remove()
    raise UsageError(
        "forward= did not call the model on the sample",
        where=OPERATORS_API,
        hint="forward=lambda model, batch: model(...): pdrun.Operators shards the forward of the"
        " model, not its other methods",
    )
