"""
The mesh: how many devices each kind of parallelism gets, as named axes.

    mesh(dp=-1)              every device works on its own part of the batch
    mesh(pp=2, dp=-1, tp=2)  the degrees multiply to the number of devices; -1 is what is left
    mesh(dp=2, ep=4)         rows are cut over both; experts over ep (`pdrun.experts`)
    mesh(dp=2, x=2, y=2)     any other name is a tensor axis as tp is, for layouts over several

From outer to inner: pp (pipeline stages), dp (data), ep (experts), cp (context: parts of each
sequence), and the tensor axes in the order in which they are given. Ranks are numbered so that the
inner axis changes first: neighbours share a tensor axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid

STAGE_AXIS = "pp"
EXPERT_AXIS = "ep"
ROW_AXES = ("dp", EXPERT_AXIS)
"""Axes along which ranks have other rows."""
DATA_AXES = (*ROW_AXES, "cp")
FIXED_AXES = (STAGE_AXIS, *DATA_AXES)
"""Axes with a meaning of their own, outer to inner; every other axis is a tensor axis."""


@dataclass(frozen=True)
class Mesh:
    """
    Devices along named axes.

    Attributes:
        grid: all axes, outer to inner: pp, dp, ep if a degree was given for it, cp and at least
            one tensor axis.
    """

    grid: Grid

    def degree(self, axis: str) -> int:
        """Return the number of parts along an axis; 1 for one that the mesh lacks."""
        return self.grid.degree(axis) if axis in self.grid.names else 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.grid.size

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The axes over which operators may be cut, outer to inner."""
        return tuple(name for name in self.grid.names if name not in FIXED_AXES)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """
        The axes along which ranks compute other parts of the loss with the same weights, as far as
        there are any.
        """
        return tuple(name for name in DATA_AXES if self.degree(name) > 1)

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return self.degree("pp")

    @property
    def dp(self) -> int:
        """Degree of the axis dp."""
        return self.degree("dp")

    @property
    def ep(self) -> int:
        """Number of parts of the experts that are cut over ep."""
        return self.degree(EXPERT_AXIS)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have other rows, as far as there are any."""
        return tuple(name for name in ROW_AXES if self.degree(name) > 1)

    @property
    def row_parts(self) -> int:
        """Number of parts of a batch."""
        return self.dp * self.ep

    @property
    def cp(self) -> int:
        """Number of parts of each sequence."""
        return self.degree("cp")

    @property
    def tp(self) -> int:
        """Degree of the axis tp."""
        return self.degree("tp")

    def __str__(self) -> str:
        named = [
            f"{axis}={self.degree(axis)}"
            for axis in self.grid.names
            if axis == "dp" or self.degree(axis) > 1
        ]
        return f"mesh({', '.join(named)})"


def make_mesh(**degrees: int) -> Mesh:
    """Return the mesh with these degrees; those that aren't given are 1."""
    tensor = [axis for axis in degrees if axis not in FIXED_AXES] or ["tp"]
    fixed = [axis for axis in FIXED_AXES if axis != EXPERT_AXIS or axis in degrees]
    names = (*fixed, *tensor)
    return Mesh(Grid(names, tuple(degrees.get(name, 1) for name in names)))


def solve_mesh(world: int, degrees: dict[str, int]) -> Mesh:
    """
    Fill in the one degree that is -1, and check the product against the number of devices.

    Raises:
        UsageError: a degree is neither -1 nor at least 1, two are -1, or the product is wrong.
    """
    for axis, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != -1):
            raise UsageError(
                f"{axis}={degree!r} is neither -1 nor a count of at least 1", where="pdrun.mesh"
            )
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        raise UsageError(
            f"{' and '.join(free)} are both -1: only one degree can be what is left",
            where="pdrun.mesh",
        )
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if free and world % fixed == 0:
        degrees = {**degrees, free[0]: world // fixed}
    elif free or fixed != world:
        given = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        verb = "does not divide" if free else "is not"
        raise UsageError(
            f"the product of ({given}), {fixed}, {verb} the number of devices, {world}",
            where="pdrun.mesh",
        )
    return make_mesh(**degrees)


def mesh(**degrees: int) -> Mesh:
    """
    Return the mesh over all devices of the job; joins the job first (`pdrun.init`) if needed.

    Args:
        degrees: ``pp``, ``dp``, ``ep``, ``cp``, ``tp`` or any name of a tensor axis. An axis that
            is left out has degree 1; -1 means all remaining devices. Default: ``dp=-1``.

    Raises:
        UsageError: the degrees do not fit the number of devices.
    """
    from pdrun.parallel.startup.init import init

    return solve_mesh(init().world_size, dict(degrees) or {"dp": -1})
