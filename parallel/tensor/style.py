"""
What a style is: how one kind of module is cut over tensor axes, and what it then does in its
forward pass.

A style is said (`pdrun.parallel.tensor.col` and its like), found to fit (`Style.tiles`: no process
is needed) and carried out (`Style.change`). A module that is changed stays the same object under
the same name: its class becomes a subclass of the old one, and its weights become tiles of what
they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """A rank's place in a grid: all that is needed to know which part of a weight it holds."""

    grid: Grid
    rank: int

    def part_count(self, axis: AxisNames) -> int:
        """Return into how many parts some axes cut."""
        return self.grid.group_size(axis_names(axis))

    def part_index(self, axis: AxisNames) -> int:
        """Return which of the parts is this rank's."""
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
        Return this rank's part of a weight that is cut along one dim.

        Args:
            name: of the weight, for errors.
            blocks: sizes of the matrices that lie side by side along ``dim``; empty: one.

        Raises:
            UsageError: some rank would be left with nothing, or the parts of several axes would be
                uneven.
        """
        parts = self.part_count(axis)
        axes = axis_names(axis)
        for size in blocks or (shape[dim],):
            if size < parts:
                raise style_error(
                    name,
                    f"{size} cannot be cut into {parts} parts over {format_axes(axis)}: some would be empty",
                )
            if size % parts and len(axes) > 1:
                # layouts cut axis after axis, collectives along all at once: uneven parts would
                # differ
                raise style_error(
                    name, f"{size} does not divide by {parts}, which cuts over several axes need"
                )
        dims: list[Any] = [None] * len(shape)
        dims[dim] = axes
        return make_shard(
            shape, L(*dims), self.grid, self.rank, blocks={dim: blocks} if blocks else None
        )

    def keep_full(self, shape: tuple[int, ...], sums: AxisNames = ()) -> Shard:
        """
        Return all of a weight; over ``sums`` the gradients of the ranks are still to be added up.
        """
        return make_shard(
            shape, L(*[None] * len(shape)), self.grid, self.rank, sum_axes=axis_names(sums)
        )


class ModuleStyle(ABC):
    """
    How a module is cut. Equal styles are equal objects, so that a module may be matched twice by
    the same.
    """

    axis: AxisNames

    @abstractmethod
    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """
        Return the part of each of the module's own weights (names within the module).

        Raises:
            UsageError: the module is none that the style can cut.
        """

    @abstractmethod
    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Have the module compute with its tiles, which it holds already."""


def axis_names(axis: AxisNames) -> tuple[str, ...]:
    """Return axes as a tuple of names."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def format_axes(axis: AxisNames) -> str:
    """Return axes in words."""
    return " x ".join(axis_names(axis))


class SharedInput:
    """
    The way of a tensor into modules that each use it for another part, such as q, k and v: taken
    once for all.

    What goes through an entry is replicated and becomes `collectives.fan_out`'s result, or it is
    cut along ``dim`` and becomes `collectives.collect`'s. Modules that are called with the same
    tensor share one collective, forward and backward.

    Args:
        axes: this rank's groups.
        names: axes over which the modules are cut.
        dim: along which the tensor is cut over the same axes; None: it is replicated.
        members: how many modules share the entry; when so many have come, nothing is kept any
            longer.
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
        """Return what a module computes its part from."""
        compiling = (
            torch.compiler.is_compiling()
        )  # which knows neither inference tensors nor versions
        if self.members == 1 or (not compiling and x.is_inference()):
            return self._bring_in(x)
        version = 0 if compiling else x._version
        key = (x, version, torch.is_grad_enabled())
        if self._key is None or self._key[0] is not x or self._key[1:] != key[1:]:
            self._key, self._result, self._calls_left = key, self._bring_in(x), self.members
        made = self._result
        self._calls_left = self._calls_left - 1
        if self._calls_left == 0:
            self._key = self._result = None
        assert made is not None  # set together with the key
        return made

    def _bring_in(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return copy_to_axis(x, self.axis)
        return all_gather_sum_grad(x, self.axis, self.dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        # it holds a process group, which has no copy; a copied model computes in the same place
        return self


def identity(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return x


ShardRanges = Mapping[int, tuple[int, int, int]]
"""
For each dim of a tensor that is cut: where this rank's part begins and ends, and the size of the
whole.
"""


def no_shard_ranges(x: torch.Tensor) -> ShardRanges:
    """Return that a tensor is whole."""
    return {}


@dataclass(frozen=True)
class ModuleContext:
    """
    What a changed module knows of the mesh.

    Attributes:
        axis: where it is.
        enter: what its input becomes.
        leave: what its output becomes.
        cuts: from the input, which dims of the tensors in it are cut.
    """

    axis: AxisGroup
    enter: Callable[[torch.Tensor], torch.Tensor]
    leave: Callable[[torch.Tensor], torch.Tensor] = identity
    shard_ranges: Callable[[torch.Tensor], ShardRanges] = no_shard_ranges

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleContext:
        return self


_swapped_classes: dict[tuple[type, type], type] = {}


def swap_class(module: nn.Module, kind: type, context: Any) -> None:
    """
    Make a module's class a subclass of what it was, with the forward pass of ``kind``, at a place
    of the mesh.
    """
    old = type(module)
    if (kind, old) not in _swapped_classes:
        _swapped_classes[kind, old] = type(
            f"{kind.__name__}{old.__name__}", (kind, old), {"__module__": old.__module__}
        )
    module.__class__ = _swapped_classes[kind, old]
    module._place = context


def check_forward(name: str, module: nn.Module) -> None:
    """
    Refuse a module whose forward pass has been replaced on the object: the style's would never be
    called.
    """
    if "forward" in vars(module):
        raise style_error(
            name,
            "its forward has been replaced on the object",
            "cut the model first, then wrap its modules",
        )


def check_even_parts(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> None:
    """
    Refuse a sequence whose parts would differ: modules further on could not tell where it is cut.
    """
    if x.shape[dim] % axis.size:
        what = (
            f"dim {dim} of {list(x.shape)} does not divide into {axis.size} parts of the sequence"
        )
        raise style_error(name, what, f"pad to a multiple of {axis.size}")


def reduce_scatter_parts(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> torch.Tensor:
    """Return this rank's part of the sequence of a sum over the ranks."""
    check_even_parts(x, axis, dim, name)
    return reduce_scatter(x, axis, dim)
