"""
Sequence parts between the cut linear modules (Korthikanti et al., Reducing Activation Recomputation, 2022), and weights
that stay whole.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdrun.parallel import collectives
from pdrun.parallel.axes import Axis
from pdrun.parallel.modules.style import (
    Entry,
    Names,
    Place,
    Seat,
    Style,
    become,
    check_forward,
    check_parts,
    same,
    shown,
)
from pdrun.parallel.tiles import Tile


class Edge:
    """A module whose first argument or whose result is where sequences become parts, or whole again."""

    _place: Place
    _first: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Bring in the first argument, call the module, and return what its result becomes."""
        place = self._place
        if args:
            args = (place.enter(args[0]), *args[1:])
        else:
            kwargs[self._first] = place.enter(kwargs[self._first])
        return place.leave(super().forward(*args, **kwargs))  # type: ignore[misc]


def make_edge(module: nn.Module, place: Place) -> None:
    """Have a module bring in its first argument, by position or by name, and hand out its result."""
    module._first = next(iter(inspect.signature(module.forward).parameters))
    become(module, Edge, place)


def part_of(x: torch.Tensor, axis: Axis, dim: int, name: str) -> torch.Tensor:
    """Return this rank's part of a replicated sequence."""
    check_parts(x, axis, dim, name)
    return collectives.part(x, axis, dim)


@dataclass(frozen=True)
class Seq(Style):
    """See `pdrun.parallel.modules.seq`."""

    axis: Names
    dim: int = 1
    cut: bool = False
    gather: bool = False

    def __str__(self) -> str:
        return f"parts of dim {self.dim} over {shown(self.axis)}"

    def tiles(self, name: str, module: nn.Module, seat: Seat) -> dict[str, Tile]:
        """Keep the module's own weights, each rank's gradients of which are for its part."""
        if self.cut or self.gather:
            check_forward(name, module)
        found = module.named_parameters(recurse=False)
        return {key: seat.kept(tuple(param.shape), self.axis) for key, param in found}

    def change(self, name: str, module: nn.Module, axis: Axis, entry: Entry) -> None:
        """Cut what comes in and gather what goes out, where that was asked for."""
        if not (self.cut or self.gather):
            return
        enter = functools.partial(part_of, axis=axis, dim=self.dim, name=name) if self.cut else same
        leave = functools.partial(collectives.gather, axis=axis, dim=self.dim) if self.gather else same
        make_edge(module, Place(axis, enter, leave))


@dataclass(frozen=True)
class Replicate(Style):
    """See `pdrun.parallel.modules.replicate`."""

    axis: Names = ()

    def __str__(self) -> str:
        return "whole" + (f", used for parts over {shown(self.axis)}" if self.axis else "")

    def tiles(self, name: str, module: nn.Module, seat: Seat) -> dict[str, Tile]:
        """Keep the module's own weights."""
        found = module.named_parameters(recurse=False)
        return {key: seat.kept(tuple(param.shape), self.axis) for key, param in found}

    def change(self, name: str, module: nn.Module, axis: Axis, entry: Entry) -> None:
        """Leave the module as it is."""
