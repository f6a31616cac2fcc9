"""
Sequence parts between the cut linear modules (Korthikanti et al., Reducing Activation
Recomputation, 2022), and weights that stay whole.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pdrun.parallel.comm import autograd as collectives
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shards import Tile
from pdrun.parallel.rng.shard_region import shard_region
from pdrun.parallel.tensor.style import (
    Cuts,
    Entry,
    Names,
    Place,
    Seat,
    Style,
    become,
    check_forward,
    check_parts,
    names,
    refuse,
    same,
    shown,
)


class Region:
    """
    A module that works on parts: its first argument or its result may be where parts begin or end,
    and what is dropped in it is a part of a whole tensor.
    """

    _place: Place
    _first: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Bring in the first argument, call the module, and return what its result becomes."""
        place = self._place
        if args:
            x = place.enter(args[0])
            args = (x, *args[1:])
        else:
            x = kwargs[self._first] = place.enter(kwargs[self._first])
        with shard_region(place.cuts(x)):
            found = super().forward(*args, **kwargs)  # type: ignore[misc]
        return place.leave(found)


def make_region(module: nn.Module, place: Place) -> None:
    """
    Have a module bring in its first argument, by position or by name, and hand out its result.
    """
    module._first = next(iter(inspect.signature(module.forward).parameters))
    become(module, Region, place)


def drops(module: nn.Module) -> bool:
    """Whether a module is a dropout, or holds others, which may drop."""
    return isinstance(module, _DropoutNd) or any(True for _ in module.children())


def parts_along(x: torch.Tensor, axis: AxisGroup, dim: int, total: int | None) -> Cuts:
    """Return which part of the whole a tensor is; without ``total`` all parts have its size."""
    if axis.size == 1:
        return {}
    if total is None:
        size = x.shape[dim]
        return {dim: (axis.index * size, axis.index * size + size, axis.size * size)}
    ((here,),) = L(axis.names).ranges(
        axis.grid, (total,), axis.rank
    )  # axis after axis, as weights are cut
    return {dim: (*here, total)}


def part_of(x: torch.Tensor, axis: AxisGroup, dim: int, name: str) -> torch.Tensor:
    """Return this rank's part of a replicated sequence."""
    check_parts(x, axis, dim, name)
    return collectives.slice_to_shard(x, axis, dim)


@dataclass(frozen=True)
class Seq(Style):
    """See `pdrun.parallel.tensor.seq`."""

    axis: Names
    dim: int = 1
    cut: bool = False
    gather: bool = False
    total: int | None = None

    def __str__(self) -> str:
        return f"parts of dim {self.dim} over {shown(self.axis)}"

    def tiles(self, name: str, module: nn.Module, seat: Seat) -> dict[str, Tile]:
        """Keep the module's own weights, each rank's gradients of which are for its part."""
        if self.cut or self.gather or drops(module):
            check_forward(name, module)
        several = len(names(self.axis)) > 1
        if (
            self.gather
            and several
            and self.total is not None
            and self.total % seat.parts(self.axis)
        ):
            raise refuse(
                name,
                f"{self.total} does not divide by {seat.parts(self.axis)}, which gathers over several axes need",
            )
        found = module.named_parameters(recurse=False)
        return {key: seat.kept(tuple(param.shape), self.axis) for key, param in found}

    def change(self, name: str, module: nn.Module, axis: AxisGroup, entry: Entry) -> None:
        """
        Cut what comes in, gather what goes out, and have masks be parts, where there is any of it.
        """
        if not (self.cut or self.gather or drops(module)):
            return
        enter = functools.partial(part_of, axis=axis, dim=self.dim, name=name) if self.cut else same
        leave = functools.partial(collectives.all_gather, axis=axis, dim=self.dim, total=self.total)
        cuts = functools.partial(parts_along, axis=axis, dim=self.dim, total=self.total)
        make_region(module, Place(axis, enter, leave if self.gather else same, cuts))


@dataclass(frozen=True)
class Replicate(Style):
    """See `pdrun.parallel.tensor.replicate`."""

    axis: Names = ()

    def __str__(self) -> str:
        return "whole" + (f", used for parts over {shown(self.axis)}" if self.axis else "")

    def tiles(self, name: str, module: nn.Module, seat: Seat) -> dict[str, Tile]:
        """Keep the module's own weights."""
        if isinstance(module, _DropoutNd):
            check_forward(name, module)
        found = module.named_parameters(recurse=False)
        return {key: seat.kept(tuple(param.shape), self.axis) for key, param in found}

    def change(self, name: str, module: nn.Module, axis: AxisGroup, entry: Entry) -> None:
        """Leave the module as it is; what a dropout gets is whole, whatever is cut around it."""
        if isinstance(module, _DropoutNd) and not self.axis:
            make_region(module, Place(axis, same))
