"""Convolutions that compute a shard of their channels, which are gathered."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn

from pdrun.parallel.comm.autograd import all_gather
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.tensor.linear import ColumnParallel
from pdrun.parallel.tensor.style import (
    AxisNames,
    GridPosition,
    ModuleContext,
    ModuleStyle,
    SharedInput,
    check_forward,
    format_axes,
    style_error,
    swap_class,
)

SPATIAL_DIMS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def is_plain_convolution(module: nn.Module) -> bool:
    """Return whether each output channel of a module is a convolution of all input channels."""
    return type(module) in SPATIAL_DIMS and getattr(module, "groups", 0) == 1


@dataclass(frozen=True)
class ChannelStyle(ModuleStyle):
    """A convolution: each rank computes some output channels, and all are gathered."""

    axis: AxisNames

    def __str__(self) -> str:
        return f"channels over {format_axes(self.axis)}, gathered"

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Shard weight and bias on the output channels."""
        check_forward(name, module)
        if not is_plain_convolution(module):
            raise style_error(name, f"a {type(module).__name__} is not a plain convolution")
        return {
            key: position.shard_weight(name, tuple(param.shape), 0, self.axis)
            for key, param in module.named_parameters(recurse=False)
        }

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Compute a shard of the output channels, and gather them."""
        dim = -1 - SPATIAL_DIMS[type(module)]
        leave = functools.partial(all_gather, axis=axis, dim=dim, total=module.out_channels)
        swap_class(module, ColumnParallel, ModuleContext(axis, shared_input, leave))
