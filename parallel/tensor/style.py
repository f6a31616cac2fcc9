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
from pdrun.parallel.comm import autograd as collectives
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shards import Tile, tile

Names = str | tuple[str, ...]
WHERE = "Strategy"


def refuse(name: str, what: str, hint: str = "") -> UsageError:
    """Return the error about one module or weight of the model."""
    return UsageError(what, where=f"{WHERE}, {name}", hint=hint)


@dataclass(frozen=True)
class Seat:
    """A rank's place in a grid: all that is needed to know which part of a weight it holds."""

    grid: Grid
    rank: int

    def parts(self, axis: Names) -> int:
        """Return into how many parts some axes cut."""
        return self.grid.group_size(names(axis))

    def index(self, axis: Names) -> int:
        """Return which of the parts is this rank's."""
        return self.grid.group_index(names(axis), self.rank)

    def tile(
        self, name: str, shape: tuple[int, ...], dim: int, axis: Names, blocks: tuple[int, ...] = ()
    ) -> Tile:
        """
        Return this rank's part of a weight that is cut along one dim.

        Args:
            name: of the weight, for errors.
            blocks: sizes of the matrices that lie side by side along ``dim``; empty: one.

        Raises:
            UsageError: some rank would be left with nothing, or the parts of several axes would be
                uneven.
        """
        parts = self.parts(axis)
        axes = names(axis)
        for size in blocks or (shape[dim],):
            if size < parts:
                raise refuse(
                    name,
                    f"{size} cannot be cut into {parts} parts over {shown(axis)}: some would be empty",
                )
            if size % parts and len(axes) > 1:
                # layouts cut axis after axis, collectives along all at once: uneven parts would
                # differ
                raise refuse(
                    name, f"{size} does not divide by {parts}, which cuts over several axes need"
                )
        dims: list[Any] = [None] * len(shape)
        dims[dim] = axes
        return tile(shape, L(*dims), self.grid, self.rank, blocks={dim: blocks} if blocks else None)

    def kept(self, shape: tuple[int, ...], sums: Names = ()) -> Tile:
        """
        Return all of a weight; over ``sums`` the gradients of the ranks are still to be added up.
        """
        return tile(shape, L(*[None] * len(shape)), self.grid, self.rank, sums=names(sums))


class Style(ABC):
    """
    How a module is cut. Equal styles are equal objects, so that a module may be matched twice by
    the same.
    """

    axis: Names

    @abstractmethod
    def tiles(self, name: str, module: nn.Module, seat: Seat) -> dict[str, Tile]:
        """
        Return the part of each of the module's own weights (names within the module).

        Raises:
            UsageError: the module is none that the style can cut.
        """

    @abstractmethod
    def change(self, name: str, module: nn.Module, axis: AxisGroup, entry: Entry) -> None:
        """Have the module compute with its tiles, which it holds already."""


def names(axis: Names) -> tuple[str, ...]:
    """Return axes as a tuple of names."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def shown(axis: Names) -> str:
    """Return axes in words."""
    return " x ".join(names(axis))


class Entry:
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
        self._left = 0
        self._made: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a module computes its part from."""
        compiling = (
            torch.compiler.is_compiling()
        )  # which knows neither inference tensors nor versions
        if self.members == 1 or (not compiling and x.is_inference()):
            return self._make(x)
        version = 0 if compiling else x._version
        key = (x, version, torch.is_grad_enabled())
        if self._key is None or self._key[0] is not x or self._key[1:] != key[1:]:
            self._key, self._made, self._left = key, self._make(x), self.members
        made = self._made
        self._left = self._left - 1
        if self._left == 0:
            self._key = self._made = None
        assert made is not None  # set together with the key
        return made

    def _make(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return collectives.copy_to_axis(x, self.axis)
        return collectives.all_gather_sum_grad(x, self.axis, self.dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        # it holds a process group, which has no copy; a copied model computes in the same place
        return self


def same(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return x


Cuts = Mapping[int, tuple[int, int, int]]
"""
For each dim of a tensor that is cut: where this rank's part begins and ends, and the size of the
whole.
"""


def nothing_cut(x: torch.Tensor) -> Cuts:
    """Return that a tensor is whole."""
    return {}


@dataclass(frozen=True)
class Place:
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
    leave: Callable[[torch.Tensor], torch.Tensor] = same
    cuts: Callable[[torch.Tensor], Cuts] = nothing_cut

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self


_KINDS: dict[tuple[type, type], type] = {}


def become(module: nn.Module, kind: type, place: Any) -> None:
    """
    Make a module's class a subclass of what it was, with the forward pass of ``kind``, at a place
    of the mesh.
    """
    old = type(module)
    if (kind, old) not in _KINDS:
        _KINDS[kind, old] = type(
            f"{kind.__name__}{old.__name__}", (kind, old), {"__module__": old.__module__}
        )
    module.__class__ = _KINDS[kind, old]
    module._place = place


def check_forward(name: str, module: nn.Module) -> None:
    """
    Refuse a module whose forward pass has been replaced on the object: the style's would never be
    called.
    """
    if "forward" in vars(module):
        raise refuse(
            name,
            "its forward has been replaced on the object",
            "cut the model first, then wrap its modules",
        )


def check_parts(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> None:
    """
    Refuse a sequence whose parts would differ: modules further on could not tell where it is cut.
    """
    if x.shape[dim] % axis.size:
        what = (
            f"dim {dim} of {list(x.shape)} does not divide into {axis.size} parts of the sequence"
        )
        raise refuse(name, what, f"pad to a multiple of {axis.size}")


def scatter_parts(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> torch.Tensor:
    """Return this rank's part of the sequence of a sum over the ranks."""
    check_parts(x, axis, dim, name)
    return collectives.reduce_scatter(x, axis, dim)
