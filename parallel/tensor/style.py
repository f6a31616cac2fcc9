"""
Styles: how one kind of module is sharded over tensor axes, and what its forward pass does then.

1. A user creates a style (`pdrun.parallel.tensor.col` and others).
2. `ModuleStyle.shard_weights` checks that it fits. It needs no process.
3. `ModuleStyle.apply_to` carries it out.

A sharded module stays the same object under the same name. Its class becomes a subclass of the old
one. Its weights become shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.autograd import all_gather_sum_grad, copy_to_axis, reduce_scatter
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shards import Shard, make_shard

AxisNames = str | tuple[str, ...]
STRATEGY_API = "Strategy"


def style_error(name: str, what: str, hint: str = "") -> UsageError:
    """Return the error about one module or weight of the model."""
    return UsageError(what, where=f"{STRATEGY_API}, {name}", hint=hint)


@dataclass(frozen=True)
class GridPosition:
    """A rank in a grid: all that is needed to find its shard of a weight."""

    grid: Grid
    rank: int

    def part_count(self, axis: AxisNames) -> int:
        """Return the number of shards over some axes."""
        return self.grid.group_size(axis_names(axis))

    def part_index(self, axis: AxisNames) -> int:
        """Return the index of this rank's shard."""
        return self.grid.group_index(axis_names(axis), self.rank)

    def shard_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        axis: AxisNames,
        blocks: tuple[int, ...] = (),
    ) -> Shard:
        """
        Return this rank's shard of a weight that is sharded on one dim.

        Args:
            name: of the weight, for errors.
            blocks: sizes of the matrices side by side along ``dim``; empty: one.

        Raises:
            UsageError: some rank would have nothing, or the shards over several axes would be
                uneven.
        """
        parts = self.part_count(axis)
        axes = axis_names(axis)
        for size in blocks or (shape[dim],):
            if size < parts:
                raise style_error(
                    name,
                    f"{size} cannot be split into {parts} parts over {format_axes(axis)}: some"
                    " would be empty",
                )
            if size % parts and len(axes) > 1:
                # layouts shard axis after axis, collectives along all axes together: uneven
                # shards would differ
                raise style_error(
                    name, f"{size} must be a multiple of {parts} to be sharded over several axes"
                )
        dims: list[Any] = [None] * len(shape)
        dims[dim] = axes
        blocks_by_dim = {dim: blocks} if blocks else None
        return make_shard(shape, L(*dims), self.grid, self.rank, blocks=blocks_by_dim)

    def keep_full(self, shape: tuple[int, ...], sums: AxisNames = ()) -> Shard:
        """Return the full weight; the gradients of the ranks must be summed over ``sums``."""
        return make_shard(
            shape, L(*[None] * len(shape)), self.grid, self.rank, sum_axes=axis_names(sums)
        )


class ModuleStyle(ABC):
    """
    How a module is sharded. Equal styles are equal objects: a module can be matched twice by the
    same style.
    """

    axis: AxisNames
    cuts_experts: ClassVar[bool] = False
    """Whether it gives ranks other experts, which can be done over ep."""

    @abstractmethod
    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """
        Return the shard of each of the module's direct weights, by name within the module.

        Raises:
            UsageError: the style cannot shard this module.
        """

    @abstractmethod
    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Make the module compute with its shards, which it has already."""


def axis_names(axis: AxisNames) -> tuple[str, ...]:
    """Return axes as a tuple of names."""
    if isinstance(axis, str):
        return (axis,)
    return tuple(axis)


def format_axes(axis: AxisNames) -> str:
    """Return axes as text."""
    return " x ".join(axis_names(axis))


class SharedInput:
    """
    The input of modules that each use it for another part, such as q, k and v: one collective for
    all.

    A replicated input goes through `copy_to_axis`. An input that is sharded on ``dim`` goes through
    `all_gather_sum_grad`. Modules that are called with the same tensor share one collective,
    forward and backward.

    Args:
        axis: over which the modules are sharded.
        dim: on which the tensor is sharded over the same axis; None: it is replicated.
        members: how many modules share the input; after that many calls the result is dropped.
    """

    def __init__(
        self, axes: MeshGroups, names: tuple[str, ...], dim: int | None, members: int = 1
    ) -> None:
        self.axes = axes
        self.axis = axes[names]
        self.dim = dim
        self.members = members
        self._key: tuple[Any, ...] | None = None
        self._calls_left = 0
        self._result: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor from which a module computes its part."""
        # compiled code has neither inference tensors nor versions
        is_compiling = torch.compiler.is_compiling()
        if self.members == 1 or (not is_compiling and x.is_inference()):
            return self._bring_in(x)
        version = 0 if is_compiling else x._version
        key = (x, version, torch.is_grad_enabled())
        if self._key is None or self._key[0] is not x or self._key[1:] != key[1:]:
            self._key = key
            self._result = self._bring_in(x)
            self._calls_left = self.members
        result = self._result
        self._calls_left -= 1
        if self._calls_left == 0:
            self._key = self._result = None
        assert result is not None  # set together with the key
        return result

    def _bring_in(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return copy_to_axis(x, self.axis)
        return all_gather_sum_grad(x, self.axis, self.dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        # it has a process group, which cannot be copied; a copy of the model uses the same group
        return self


def identity(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return x


ShardRanges = Mapping[int, tuple[int, int, int]]
"""
For each sharded dim of a tensor: start and end of this rank's shard, and the size of the full dim.
"""


def no_shard_ranges(x: torch.Tensor) -> ShardRanges:
    """Return the ranges of a tensor that is not sharded."""
    return {}


@dataclass(frozen=True)
class ModuleContext:
    """
    What a sharded module knows of the mesh.

    Attributes:
        axis: its axis group.
        enter: applied to its input.
        leave: applied to its output.
        shard_ranges: from the input, the sharded dims of the tensors in the module.
    """

    axis: AxisGroup
    enter: Callable[[torch.Tensor], torch.Tensor]
    leave: Callable[[torch.Tensor], torch.Tensor] = identity
    shard_ranges: Callable[[torch.Tensor], ShardRanges] = no_shard_ranges

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleContext:
        return self


_swapped_classes: dict[tuple[type, type], type] = {}


def swap_class(module: nn.Module, kind: type, context: Any) -> None:
    """Make a module's class a subclass of the old class, with the forward pass of ``kind``."""
    old_class = type(module)
    if (kind, old_class) not in _swapped_classes:
        _swapped_classes[kind, old_class] = type(
            f"{kind.__name__}{old_class.__name__}",
            (kind, old_class),
            {"__module__": old_class.__module__},
        )
    module.__class__ = _swapped_classes[kind, old_class]
    module._context = context


def check_forward(name: str, module: nn.Module) -> None:
    """
    Raise UsageError if the forward of a module object was replaced: the style's would never be
    called.
    """
    if "forward" in vars(module):
        raise style_error(
            name,
            "its forward has been replaced on the object",
            "apply the strategy first, then wrap the modules",
        )


def check_even_parts(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> None:
    """
    Raise UsageError if the shards of a sequence would differ: later modules could not find its
    bounds.
    """
    if x.shape[dim] % axis.size:
        raise style_error(
            name,
            f"dim {dim} of {list(x.shape)}, the sequence, must be a multiple of {axis.size}",
            f"pad it to a multiple of {axis.size}",
        )


def reduce_scatter_parts(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> torch.Tensor:
    """Return this rank's shard of the sequence of a sum over the ranks."""
    check_even_parts(x, axis, dim, name)
    return reduce_scatter(x, axis, dim)
