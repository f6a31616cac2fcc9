"""
The mesh: how many devices each kind of parallelism gets, as named axes.

    mesh(dp=-1)              every device works on its own part of the batch
    mesh(pp=2, dp=-1)        the degrees multiply to the number of devices; -1 is what is left

The axes are fixed, from outer to inner: pp (pipeline stages), dp (data), cp (context), tp (tensors). Ranks are numbered
so that the inner axis changes first. The engine of this version cuts along dp; a degree above 1 elsewhere is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdrun.errors import UsageError

AXES = ("pp", "dp", "cp", "tp")
ENGINES = ("dp",)
"""Axes along which this version can cut."""


@dataclass(frozen=True)
class Mesh:
    """Degrees by axis, outer to inner; their product is the number of devices."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def degree(self, axis: str) -> int:
        """Return the number of parts along an axis."""
        return int(getattr(self, axis))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.degree(axis) for axis in AXES)

    def __str__(self) -> str:
        named = [f"{axis}={self.degree(axis)}" for axis in AXES if axis == "dp" or self.degree(axis) > 1]
        return f"mesh({', '.join(named)})"


def solve(world: int, degrees: dict[str, int]) -> Mesh:
    """
    Fill in the one degree that is -1, and hold the product against the number of devices.

    Raises:
        UsageError: an unknown axis, a degree that is neither -1 nor at least 1, two that are -1, or a wrong product.
    """
    for axis, degree in degrees.items():
        if axis not in AXES:
            raise UsageError(f"there is no axis {axis!r}", where="pdrun.mesh", hint=f"the axes are {', '.join(AXES)}")
        if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != -1):
            raise UsageError(f"{axis}={degree!r} is neither -1 nor a count of at least 1", where="pdrun.mesh")
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        raise UsageError(f"{' and '.join(free)} are both -1: only one degree can be what is left", where="pdrun.mesh")
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if free and world % fixed == 0:
        degrees = {**degrees, free[0]: world // fixed}
    elif free or fixed != world:
        given = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        verb = "does not divide" if free else "is not"
        raise UsageError(
            f"the product of ({given}), {fixed}, {verb} the number of devices, {world}", where="pdrun.mesh"
        )
    _refuse_missing(degrees)
    return Mesh(**degrees)


def mesh(**degrees: int) -> Mesh:
    """
    Return the mesh over all devices of the job, which is joined first (`pdrun.init`) where that hasn't been done.

    Args:
        degrees: ``pp``, ``dp``, ``cp``, ``tp``; an axis left out has degree 1, and -1 stands for what is left.
            Nothing at all means ``dp=-1``.

    Raises:
        UsageError: the degrees do not fit the number of devices, or one above 1 stands on an axis without an engine.
    """
    from pdrun.parallel.context import init

    return solve(init().world_size, dict(degrees) or {"dp": -1})


def _refuse_missing(degrees: dict[str, int]) -> None:
    for axis, degree in degrees.items():
        if degree > 1 and axis not in ENGINES:
            raise UsageError(
                f"{axis}={degree}: this version of pdrun cuts along {', '.join(ENGINES)} only", where="pdrun.mesh",
                hint=f"leave {axis} at 1",
            )  # fmt: skip
