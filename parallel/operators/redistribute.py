"""
From one layout of a tensor to the one that an operator wants: a list of moves, each a
differentiable collective.

Where an operator uses a whole tensor for another part on each rank, `fan_out` comes last, or is one
with the gather before it (`collect`); see `pdrun.parallel.comm.autograd` for the convention. Moves
are the same on all ranks, and equal beginnings of several ways are shared: q, k and v gather and
fan out their input once.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L

FAN_OUT = "fan_out"
ADD_UP = "add_up"
GATHER = "gather"
COLLECT = "collect"
PART = "part"
SCATTER = "scatter"
SWAP = "swap"
SHARE = "share"
"""
Of a weight whose gradients are added up over an axis, where it is used alike by all ranks there:
nothing forward, and backward each takes its share of the gradient, of which all have the whole.
"""


@dataclass(frozen=True)
class Move:
    """
    One move over one axis.

    Attributes:
        kind: one of the names above, which are those of `pdrun.parallel.comm.autograd`.
        dim: the dim that is cut, gathered or scattered.
        origin: of a swap, the dim that was cut before.
        before, after: the layouts.
    """

    kind: str
    axis: str
    before: L
    after: L
    dim: int = -1
    origin: int = -1

    def moved(
        self, grid: Grid, shape: tuple[int, ...], itemsize: int, grad: bool
    ) -> tuple[int, int]:
        """
        Return the bytes that the rank with the largest part sends, forward and backward, as rings
        send them.

        Args:
            shape: of the whole tensor.
            grad: whether a gradient comes back.
        """
        n = grid.degree(self.axis)
        small, large = sorted(
            count(grid, layout, shape) * itemsize for layout in (self.before, self.after)
        )
        gathered = large - small
        summed = 2 * (large - large // n)
        ways = {
            FAN_OUT: (0, summed),
            SHARE: (0, 0),
            ADD_UP: (summed, 0),
            GATHER: (gathered, 0),
            COLLECT: (gathered, gathered),
            PART: (0, gathered),
            SCATTER: (gathered, gathered),
            SWAP: (small - small // n, small - small // n),
        }
        forward, backward = ways[self.kind]
        return forward, backward if grad else 0

    def told(self, grad: bool = True) -> str:
        """Return the move as text, with what happens in the backward pass if there is one."""
        names = {
            FAN_OUT: ("", "all-reduce"),
            SHARE: ("", "share"),
            ADD_UP: ("all-reduce", ""),
            GATHER: ("all-gather", ""),
            COLLECT: ("all-gather", "reduce-scatter"),
            PART: ("slice", "all-gather"),
            SCATTER: ("reduce-scatter", "all-gather"),
            SWAP: ("all-to-all", "all-to-all"),
        }
        forward, backward = names[self.kind]
        dim = f" dim {self.dim}" if self.dim >= 0 else ""
        said = [
            text for text in (forward, f"backward {backward}" if backward and grad else "") if text
        ]
        return f"{', '.join(said)} over {self.axis}{dim}"


def count(grid: Grid, layout: L, shape: tuple[int, ...]) -> int:
    """Return the number of elements of the largest part of a tensor."""
    total = 1
    for low, high in layout.box(grid, shape, 0):
        total *= high - low
    return total


def way(
    source: L, target: L, fans: tuple[str, ...] = (), shares: tuple[str, ...] = ()
) -> tuple[Move, ...]:
    """
    Return the moves from one layout to another.

    Args:
        fans: axes along which the target is whole and used for another part on each rank.
        shares: see `SHARE`.

    Raises:
        ValueError: the target is partial where the source isn't.
    """
    return _Way(source, target, fans).run(shares)


class _Way:
    """Builds a list of moves."""

    def __init__(self, source: L, target: L, fans: tuple[str, ...]) -> None:
        self.dims = [list(dim) for dim in source.dims]
        self.sums = list(source.sums)
        self.target = target
        self.fans = list(fans)
        self.moves: list[Move] = []
        if set(target.sums) - set(source.sums):
            raise ValueError(f"{source} does not become {target}: nothing makes a tensor a sum")

    def run(self, shares: tuple[str, ...]) -> tuple[Move, ...]:
        """Return the moves."""
        for axis in shares:
            self._move(SHARE, axis)
        changed = True
        while changed:
            changed = self._scatter() or self._swap() or self._add_up() or self._gather()
        for dim, wanted in enumerate(self.target.dims):
            for axis in wanted[len(self.dims[dim]) :]:
                self._move(PART, axis, dim)
        for axis in self.fans:
            self._move(FAN_OUT, axis)
        return tuple(self.moves)

    def _layout(self) -> L:
        return L(*map(tuple, self.dims), sums=tuple(self.sums))

    def _move(self, kind: str, axis: str, dim: int = -1, origin: int = -1) -> bool:
        before = self._layout()
        if kind in (GATHER, COLLECT):
            self.dims[dim].remove(axis)
        elif kind in (ADD_UP, SCATTER):
            self.sums.remove(axis)
        elif kind == SWAP:
            self.dims[origin].remove(axis)
        if kind in (PART, SCATTER, SWAP):
            self.dims[dim].append(axis)
        self.moves.append(Move(kind, axis, before, self._layout(), dim, origin))
        return True

    def _next(self, axis: str) -> int | None:
        """Return the dim that the target cuts over an axis, if that is what comes next there."""
        for dim, wanted in enumerate(self.target.dims):
            here = self.dims[dim]
            if tuple(here) == wanted[: len(here)] and wanted[len(here) : len(here) + 1] == (axis,):
                return dim
        return None

    def _scatter(self) -> bool:
        for axis in self.sums:
            dim = self._next(axis) if axis not in self.target.sums else None
            if dim is not None:
                return self._move(SCATTER, axis, dim)
        return False

    def _swap(self) -> bool:
        for origin, axes in enumerate(self.dims):
            if axes and axes[-1] not in self.target.dims[origin]:
                dim = self._next(axes[-1])
                if dim is not None:
                    return self._move(SWAP, axes[-1], dim, origin)
        return False

    def _add_up(self) -> bool:
        for axis in self.sums:
            if axis not in self.target.sums and axis not in self.target.axes:
                return self._move(ADD_UP, axis)
        return False

    def _gather(self) -> bool:
        for dim, axes in enumerate(self.dims):
            if tuple(axes) != self.target.dims[dim][: len(axes)]:
                axis = axes[-1]
                if axis in self.fans:
                    self.fans.remove(axis)
                    return self._move(COLLECT, axis, dim)
                return self._move(GATHER, axis, dim)
        for axis in self.sums:
            if axis not in self.target.sums:
                return self._move(ADD_UP, axis)
        return False
