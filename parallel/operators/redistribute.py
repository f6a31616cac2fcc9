"""
Redistribution: the moves from one layout of a tensor to another, each a differentiable collective.

If ranks use a replicated tensor for different parts, `COPY_TO_AXIS` is last, or is merged with the
gather before it (`ALL_GATHER_SUM_GRAD`). `pdrun.parallel.comm.autograd` defines the convention.
Moves are the same on all ranks. Equal first moves of several paths are shared: q, k and v gather
their input once.

Moves come from rules. On several axes the rules can send too much (a sum that becomes shards of
another axis is reduced in full): then the steps of `pdrun.parallel.layouts.redistribute` are taken,
so that no path sends more than they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdrun.parallel.layouts import redistribute, steps
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import View

COPY_TO_AXIS = "copy_to_axis"
ALL_REDUCE = steps.ALL_REDUCE
ALL_GATHER = steps.ALL_GATHER
ALL_GATHER_SUM_GRAD = "all_gather_sum_grad"
SLICE = steps.SLICE
REDUCE_SCATTER = steps.REDUCE_SCATTER
ALL_TO_ALL = steps.ALL_TO_ALL
RESHAPE = steps.RESHAPE
"""One dim is seen as several, or several as one; nothing is sent."""
SCALE_GRAD = "scale_grad"
"""
For a weight whose gradients are summed over an axis, at a use that is the same on all ranks of the
axis. Forward: nothing. Backward: each rank takes its share of the gradient, which all have in full.
"""


@dataclass(frozen=True)
class LayoutMove:
    """
    One move.

    Attributes:
        kind: one of the names above, which are those of `pdrun.parallel.comm.autograd`.
        axes: the axes of the grid of ``after`` over which it runs, outermost first.
        before, after: the tensor before and after it.
        dim: the dim that is sharded, gathered or scattered.
        origin_dim: of an all-to-all, the dim that was sharded before.
    """

    kind: str
    axes: tuple[str, ...]
    before: View
    after: View
    dim: int = -1
    origin_dim: int = -1

    def count_bytes(self, itemsize: int, has_grad: bool) -> tuple[int, int]:
        """
        Return the bytes that the rank with the largest shard sends, forward and backward, with ring
        algorithms.

        Args:
            has_grad: whether the tensor has a gradient.
        """
        n = self.after.grid.group_size(self.axes)
        small, large = sorted(
            view.local_elements() * itemsize for view in (self.before, self.after)
        )
        gathered = large - small
        summed = 2 * (large - large // n)
        exchanged = 0
        if self.kind == ALL_TO_ALL:
            exchanged = large - self._kept_elements() * itemsize
        costs = {
            COPY_TO_AXIS: (0, summed),
            SCALE_GRAD: (0, 0),
            RESHAPE: (0, 0),
            ALL_REDUCE: (summed, 0),
            ALL_GATHER: (gathered, 0),
            ALL_GATHER_SUM_GRAD: (gathered, gathered),
            SLICE: (0, gathered),
            REDUCE_SCATTER: (gathered, gathered),
            ALL_TO_ALL: (exchanged, exchanged),
        }
        forward, backward = costs[self.kind]
        if not has_grad:
            return forward, 0
        return forward, backward

    def _kept_elements(self) -> int:
        """Return the number of elements that a rank has before and after an all-to-all."""
        shapes = zip(self.before.local_shape(), self.after.local_shape(), strict=True)
        return math.prod(min(sizes) for sizes in shapes)

    def describe(self, has_grad: bool = True) -> str:
        """Return the move as text, including its backward pass if there is one."""
        if self.kind == RESHAPE:
            return f"seen as {list(self.after.shape)}"
        names = {
            COPY_TO_AXIS: ("", "all-reduce"),
            SCALE_GRAD: ("", "share"),
            ALL_REDUCE: ("all-reduce", ""),
            ALL_GATHER: ("all-gather", ""),
            ALL_GATHER_SUM_GRAD: ("all-gather", "reduce-scatter"),
            SLICE: ("slice", "all-gather"),
            REDUCE_SCATTER: ("reduce-scatter", "all-gather"),
            ALL_TO_ALL: ("all-to-all", "all-to-all"),
        }
        forward, backward = names[self.kind]
        passes = []
        if forward:
            passes.append(forward)
        if backward and has_grad:
            passes.append(f"backward {backward}")
        text = f"{', '.join(passes)} over {'*'.join(self.axes)}"
        if self.dim >= 0:
            text += f" dim {self.dim}"
        return text


def largest_shard_numel(grid: Grid, layout: L, shape: tuple[int, ...]) -> int:
    """Return the number of elements of the largest shard of a tensor."""
    total = 1
    for low, high in layout.box(grid, shape, 0):
        total *= high - low
    return total


def count_path_bytes(moves: Sequence[LayoutMove], itemsize: int, has_grad: bool) -> tuple[int, int]:
    """Return the bytes that a rank sends in some moves, forward and backward."""
    counted = [move.count_bytes(itemsize, has_grad) for move in moves]
    return sum(forward for forward, _ in counted), sum(backward for _, backward in counted)


@lru_cache(maxsize=65536)
def redistribution_path(
    source: View,
    target: L,
    has_grad: bool,
    grad_sum_axes: tuple[str, ...] = (),
    grad_share_axes: tuple[str, ...] = (),
) -> tuple[LayoutMove, ...]:
    """
    Return the moves from one layout to another that send least, forward and backward together.

    Args:
        has_grad: whether the tensor has a gradient.
        grad_sum_axes: axes along which the target is replicated and used for another part on each
            rank.
        grad_share_axes: see `SCALE_GRAD`.

    Raises:
        ValueError: the target is a partial sum and the source is not.
    """
    by_rules = rule_path(source, target, grad_sum_axes, grad_share_axes)
    if len({axis for move in by_rules for axis in move.axes}) < 2:
        return by_rules  # along one axis the rules send least
    by_search = _search_path(source, target, grad_sum_axes, grad_share_axes)

    def cost(moves: tuple[LayoutMove, ...]) -> int:
        return sum(count_path_bytes(moves, 1, has_grad))

    return by_search if cost(by_search) < cost(by_rules) else by_rules


def rule_path(
    source: View,
    target: L,
    grad_sum_axes: tuple[str, ...] = (),
    grad_share_axes: tuple[str, ...] = (),
) -> tuple[LayoutMove, ...]:
    """Return the moves of the rules (see `redistribution_path`); all are on the source's grid."""
    return _PathBuilder(source, target, grad_sum_axes).build_path(grad_share_axes)


def _search_path(
    source: View, target: L, grad_sum_axes: tuple[str, ...], grad_share_axes: tuple[str, ...]
) -> tuple[LayoutMove, ...]:
    """Return the moves that `layouts.redistribute` finds, with the gradients' own around them."""
    end = View(source.grid, target, source.shape)
    moves = [LayoutMove(SCALE_GRAD, (axis,), source, source) for axis in grad_share_axes]
    to_sum = list(grad_sum_axes)
    found = redistribute.plan_redistribution(source, end).steps
    for index, step in enumerate(found):
        kind = step.kind
        later = {axis for after in found[index + 1 :] for axis in after.axes}
        if (
            kind == ALL_GATHER
            and step.after.grid == source.grid
            and set(step.axes) <= set(to_sum) - later
        ):
            kind = ALL_GATHER_SUM_GRAD
            to_sum = [axis for axis in to_sum if axis not in step.axes]
        moves.append(LayoutMove(kind, step.axes, step.before, step.after, step.dim, step.origin))
    return (*moves, *(LayoutMove(COPY_TO_AXIS, (axis,), end, end) for axis in to_sum))


class _PathBuilder:
    """Builds a list of moves, one collective at a time."""

    def __init__(self, source: View, target: L, grad_sum_axes: tuple[str, ...]) -> None:
        self.view = source
        self.dims = [list(dim) for dim in source.layout.dims]
        self.sums = list(source.layout.sums)
        self.target = target
        self.grad_sum_axes = list(grad_sum_axes)
        self.moves: list[LayoutMove] = []
        if set(target.sums) - set(source.layout.sums):
            raise ValueError(
                f"{source.layout} does not become {target}: nothing makes a tensor a sum"
            )

    def build_path(self, grad_share_axes: tuple[str, ...]) -> tuple[LayoutMove, ...]:
        """Return the moves."""
        for axis in grad_share_axes:
            self._add_move(SCALE_GRAD, axis)
        changed = True
        while changed:
            changed = (
                self._try_reduce_scatter()
                or self._try_all_to_all()
                or self._try_all_reduce()
                or self._try_all_gather()
            )
        for dim, wanted in enumerate(self.target.dims):
            for axis in wanted[len(self.dims[dim]) :]:
                self._add_move(SLICE, axis, dim)
        for axis in self.grad_sum_axes:
            self._add_move(COPY_TO_AXIS, axis)
        return tuple(self.moves)

    def _add_move(self, kind: str, axis: str, dim: int = -1, origin_dim: int = -1) -> bool:
        before = self.view
        if kind in (ALL_GATHER, ALL_GATHER_SUM_GRAD):
            self.dims[dim].remove(axis)
        elif kind in (ALL_REDUCE, REDUCE_SCATTER):
            self.sums.remove(axis)
        elif kind == ALL_TO_ALL:
            self.dims[origin_dim].remove(axis)
        if kind in (SLICE, REDUCE_SCATTER, ALL_TO_ALL):
            self.dims[dim].append(axis)
        layout = L(*map(tuple, self.dims), sums=tuple(self.sums))
        if layout != before.layout:
            self.view = View(before.grid, layout, before.shape)
        self.moves.append(LayoutMove(kind, (axis,), before, self.view, dim, origin_dim))
        return True

    def _next_dim(self, axis: str) -> int | None:
        """
        Return the dim that the target shards over an axis, if that axis is the next one on it.
        """
        for dim, wanted in enumerate(self.target.dims):
            here = self.dims[dim]
            if tuple(here) == wanted[: len(here)] and wanted[len(here) : len(here) + 1] == (axis,):
                return dim
        return None

    def _try_reduce_scatter(self) -> bool:
        for axis in self.sums:
            dim = self._next_dim(axis) if axis not in self.target.sums else None
            if dim is not None:
                return self._add_move(REDUCE_SCATTER, axis, dim)
        return False

    def _try_all_to_all(self) -> bool:
        for origin, axes in enumerate(self.dims):
            if axes and axes[-1] not in self.target.dims[origin]:
                dim = self._next_dim(axes[-1])
                if dim is not None:
                    return self._add_move(ALL_TO_ALL, axes[-1], dim, origin)
        return False

    def _try_all_reduce(self) -> bool:
        for axis in self.sums:
            if axis not in self.target.sums and axis not in self.target.axes:
                return self._add_move(ALL_REDUCE, axis)
        return False

    def _try_all_gather(self) -> bool:
        for dim, axes in enumerate(self.dims):
            if tuple(axes) != self.target.dims[dim][: len(axes)]:
                axis = axes[-1]
                if axis in self.grad_sum_axes:
                    self.grad_sum_axes.remove(axis)
                    return self._add_move(ALL_GATHER_SUM_GRAD, axis, dim)
                return self._add_move(ALL_GATHER, axis, dim)
        for axis in self.sums:
            if axis not in self.target.sums:
                return self._add_move(ALL_REDUCE, axis)
        return False
