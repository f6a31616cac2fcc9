"""
Sequence parallel between the sharded linear modules (Korthikanti et al., Reducing Activation
Recomputation, 2022), and weights that stay replicated.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pdrun.parallel.comm.autograd import all_gather, slice_to_shard
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.rng.shard_region import shard_region
from pdrun.parallel.tensor.style import (
    AxisNames,
    GridPosition,
    ModuleContext,
    ModuleStyle,
    ShardRanges,
    SharedInput,
    axis_names,
    check_even_parts,
    check_forward,
    format_axes,
    identity,
    style_error,
    swap_class,
)


class SequenceRegion:
    """
    A module that works on shards of the sequence.

    It can slice its first argument and gather its result. Its dropouts use their part of the full
    mask.
    """

    _context: ModuleContext
    _first_parameter: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Bring in the first argument, call the module, and return its result."""
        context = self._context
        if args:
            x = context.enter(args[0])
            args = (x, *args[1:])
        else:
            x = kwargs[self._first_parameter] = context.enter(kwargs[self._first_parameter])
        with shard_region(context.shard_ranges(x)):
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        return context.leave(result)


def make_region(module: nn.Module, context: ModuleContext) -> None:
    """
    Make a module bring in its first argument, by position or by name, and hand out its result.
    """
    module._first_parameter = first_parameter(module)
    swap_class(module, SequenceRegion, context)


def first_parameter(module: nn.Module) -> str:
    """Return the name of the first argument of a module's forward."""
    return next(iter(inspect.signature(module.forward).parameters))


def may_drop(module: nn.Module) -> bool:
    """Return whether a module is a dropout, or has submodules, which can be dropouts."""
    return isinstance(module, _DropoutNd) or any(True for _ in module.children())


def shard_ranges_along(
    x: torch.Tensor, axis: AxisGroup, dim: int, total: int | None
) -> ShardRanges:
    """
    Return which part of the full tensor a tensor is. Without ``total`` all shards have its size.
    """
    if axis.size == 1:
        return {}
    if total is None:
        size = x.shape[dim]
        return {dim: (axis.index * size, axis.index * size + size, axis.size * size)}
    # sharded axis after axis, like weights
    ((local_range,),) = L(axis.names).ranges(axis.grid, (total,), axis.rank)
    return {dim: (*local_range, total)}


def slice_sequence(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> torch.Tensor:
    """Return this rank's shard of a replicated sequence."""
    check_even_parts(x, axis, dim, name)
    return slice_to_shard(x, axis, dim)


@dataclass(frozen=True)
class SeqStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.seq`."""

    axis: AxisNames
    dim: int = 1
    cut: bool = False
    gather: bool = False
    total: int | None = None

    def __str__(self) -> str:
        return f"dim {self.dim} sharded over {format_axes(self.axis)}"

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Keep the module's weights. Each rank's gradients are for its shard."""
        if self.cut or self.gather or may_drop(module):
            check_forward(name, module)
        has_several_axes = len(axis_names(self.axis)) > 1
        if (
            self.gather
            and has_several_axes
            and self.total is not None
            and self.total % position.part_count(self.axis)
        ):
            raise style_error(
                name,
                f"total={self.total} must be a multiple of {position.part_count(self.axis)} to be"
                " gathered over several axes",
            )
        params = module.named_parameters(recurse=False)
        return {key: position.keep_full(tuple(param.shape), self.axis) for key, param in params}

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """
        Slice the input, gather the output, and use parts of dropout masks, if any of these is
        needed.
        """
        if not (self.cut or self.gather or may_drop(module)):
            return
        enter: Callable[[torch.Tensor], torch.Tensor] = identity
        if self.cut:
            enter = functools.partial(slice_sequence, axis=axis, dim=self.dim, name=name)
        leave: Callable[[torch.Tensor], torch.Tensor] = identity
        if self.gather:
            leave = functools.partial(all_gather, axis=axis, dim=self.dim, total=self.total)
        shard_ranges = functools.partial(
            shard_ranges_along, axis=axis, dim=self.dim, total=self.total
        )
        make_region(module, ModuleContext(axis, enter, leave, shard_ranges))


@dataclass(frozen=True)
class ReplicateStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.replicate`."""

    axis: AxisNames = ()

    def __str__(self) -> str:
        if self.axis:
            return f"replicated, gradients summed over {format_axes(self.axis)}"
        return "replicated"

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Keep the module's weights."""
        if isinstance(module, _DropoutNd):
            check_forward(name, module)
        params = module.named_parameters(recurse=False)
        return {key: position.keep_full(tuple(param.shape), self.axis) for key, param in params}

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """
        Leave the module as it is. The input of a dropout is full, whatever is sharded around it.
        """
        if isinstance(module, _DropoutNd) and not self.axis:
            make_region(module, ModuleContext(axis, identity))
