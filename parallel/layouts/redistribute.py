"""
Redistribution: the list of steps from one layout to another, the same on every rank.

Both views are brought to one grid and one shape (`unify_views`), where they differ in the axes of
some dims. Then, until no dim differs, always by ascending dim:

1. *slice* if the next axis of a dim is free, *reduce-scatter* if there are partial sums over it,
   then *all-to-all* if it shards another dim, until none of these applies;
2. *all-reduce* partial sums over axes that are not needed;
3. *all-gather* dims whose innermost axis is not needed (*pad* if it becomes a partial sum);
4. if nothing has changed, axes exchange their dims in a circle: all-gather the first dim that
   differs.

These are MindSpore's rules, with partial sums. Without a common form the tensor is gathered,
reshaped and sharded again. Dims with several axes can be seen as one dim or as several: the plan
that sends least is taken, and none sends more than gathering everything. If the plan slices
something after it was sent, a search (`search`) can save more than its additional collectives cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pdrun.errors import UsageError
from pdrun.parallel.layouts.common_grid import ViewPair, unify_views
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.search import SearchMove, find_cheapest, is_roundabout
from pdrun.parallel.layouts.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FIRST,
    LATENCY_ELEMENTS,
    PAD,
    REDUCE_SCATTER,
    RESHAPE,
    SLICE,
    LayoutStep,
    RedistributionPlan,
)
from pdrun.parallel.layouts.view import View

API_NAME = "redistribute"


def redistribute(
    source: L,
    target: L,
    shape: tuple[int, ...],
    grid: Grid,
    target_grid: Grid | None = None,
    target_shape: tuple[int, ...] | None = None,
) -> RedistributionPlan:
    """
    Return the steps from one layout of a tensor to another.

    Args:
        source, target: layouts before and after.
        shape: of the full tensor.
        grid: the axes of ``source``, and of ``target`` without ``target_grid``.
        target_grid: other axes of the same ranks.
        target_shape: another shape of the same elements.

    Raises:
        UsageError: layout, grid and shape do not fit, or the two views have different ranks or
        numbers
            of elements.
    """
    return plan_redistribution(
        View(grid, source, shape), View(target_grid or grid, target, target_shape or shape)
    )


def plan_redistribution(source: View, target: View) -> RedistributionPlan:
    """
    Return the steps from one view to another (see `redistribute`).

    Raises:
        UsageError: different numbers of ranks or of elements.
    """
    if source.grid.size != target.grid.size:
        raise UsageError(
            f"({source.grid}) and ({target.grid}) are of other numbers of ranks", where=API_NAME
        )
    if math.prod(source.shape) != math.prod(target.shape):
        what = f"{list(source.shape)} and {list(target.shape)} have other numbers of elements"
        raise UsageError(what, where=API_NAME)
    pairs = [
        pair
        for pair in (unify_views(source, target, expand) for expand in (False, True))
        if pair is not None
    ]
    plans = [
        *(_plan_by_rules(source, target, pair) for pair in pairs),
        plan_full_gather(source, target),
    ]
    best = min(plans, key=lambda plan: (plan.sent_bytes(), len(plan.collectives), len(plan.steps)))
    if best.sent_bytes() > LATENCY_ELEMENTS and is_roundabout(best.steps):
        found = [best, *(_plan_by_search(source, target, pair) for pair in pairs)]
        best = min(
            (plan for plan in found if plan.sent_bytes() <= best.sent_bytes()),
            key=lambda plan: plan.search_cost,
        )
    return best


def plan_full_gather(source: View, target: View) -> RedistributionPlan:
    """Return the steps through the full tensor: gather everything, reshape, slice."""
    before = View(source.grid, L(*[None] * len(source.shape)), source.shape)
    after = View(target.grid, L(*[None] * len(target.shape)), target.shape)
    gathered = _plan_same_grid(source, before).steps
    turned = _reshape_step(before, after) if before.shape != after.shape else ()
    return RedistributionPlan(
        source, target, (*gathered, *turned, *_plan_same_grid(after, target).steps)
    )


def _plan_same_grid(source: View, target: View) -> RedistributionPlan:
    """Return the steps to or from a full tensor on one grid, which always has a common form."""
    pair = unify_views(source, target, expand=False)
    assert pair is not None, f"no common form of {source} and {target}"
    return _plan_by_rules(source, target, pair)


def _plan_by_rules(source: View, target: View, pair: ViewPair) -> RedistributionPlan:
    """Return the steps by the rules."""
    return _make_plan(source, target, pair, _LayoutWalk(pair.source, pair.target).apply_rules())


def _plan_by_search(source: View, target: View, pair: ViewPair) -> RedistributionPlan:
    """Return the steps by a search, or by the rules if the search gives up."""
    moves = find_cheapest(pair.source, pair.target)
    walk = _LayoutWalk(pair.source, pair.target)
    return _make_plan(
        source, target, pair, walk.apply_rules() if moves is None else walk.follow_moves(moves)
    )


def _make_plan(
    source: View, target: View, pair: ViewPair, steps: list[LayoutStep]
) -> RedistributionPlan:
    """Return a plan of steps in the common form, with reshapes to it and back."""
    if source.local_shape() != pair.source.local_shape():
        steps = [*_reshape_step(source, pair.source), *steps]
    if pair.target.local_shape() != target.local_shape():
        steps = [*steps, *_reshape_step(pair.target, target)]
    return RedistributionPlan(source, target, tuple(_merge_steps(steps)))


def _reshape_step(before: View, after: View) -> tuple[LayoutStep, ...]:
    return (LayoutStep(RESHAPE, before, after),)


@dataclass
class _LayoutWalk:
    """The steps between two layouts of one shape on one grid."""

    start: View
    end: View
    steps: list[LayoutStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dims = [list(dim) for dim in self.start.layout.dims]
        self.sums = list(self.start.layout.sums)
        self.wanted = [list(dim) for dim in self.end.layout.dims]
        self.needed = {axis: dim for dim, axes in enumerate(self.wanted) for axis in axes}
        self.view = self.start

    def apply_rules(self) -> list[LayoutStep]:
        """Return the steps by the rules."""
        while True:
            while self._push_free_axes():
                pass
            changed = self._reduce_sums()
            if self.dims == self.wanted:
                break
            if not (self._gather_unneeded() or changed):
                self._gather_first()
        return self._finish_steps()

    def follow_moves(self, moves: list[SearchMove]) -> list[LayoutStep]:
        """Return the steps of some moves."""
        for move in moves:
            if move.kind in (ALL_REDUCE, REDUCE_SCATTER):
                self.sums.remove(move.axis)
            if move.kind in (ALL_GATHER, PAD):
                self._pop_axis(move.dim)
                continue
            if move.kind == ALL_TO_ALL:
                self.dims[move.origin].pop()
            if move.dim >= 0:
                self.dims[move.dim].append(move.axis)
            self._add_step(move.kind, (move.axis,), move.dim, move.origin)
        return self._finish_steps()

    def _finish_steps(self) -> list[LayoutStep]:
        free = [axis for axis in self.end.layout.sums if axis not in self.sums]
        if free:
            self.sums += free
            self._add_step(FIRST, tuple(free))
        return self.steps

    def _push_free_axes(self) -> bool:
        """Give every dim the axes that it can get without a gather; return whether any changed."""
        changed = False
        for how in (SLICE, ALL_TO_ALL):
            for dim in range(len(self.dims)):
                changed |= self._push_axis(dim, how)
        return changed

    def _push_axis(self, dim: int, how: str) -> bool:
        here = self.dims[dim]
        wanted = self.wanted[dim]
        if len(here) >= len(wanted) or wanted[: len(here)] != here:
            return False
        axis = wanted[len(here)]
        origin = next((at for at, axes in enumerate(self.dims) if axis in axes), -1)
        if origin >= 0:
            if how != ALL_TO_ALL or origin == dim or self.dims[origin][-1] != axis:
                return False
            self.dims[origin].pop()
        elif axis in self.sums:
            self.sums.remove(axis)
            how = REDUCE_SCATTER
        elif how != SLICE:
            return False
        here.append(axis)
        self._add_step(how, (axis,), dim, origin)
        return True

    def _reduce_sums(self) -> bool:
        """All-reduce partial sums that are not needed at the end; return whether there were any."""
        done = tuple(
            axis
            for axis in self.sums
            if axis not in self.needed and axis not in self.end.layout.sums
        )
        if done:
            self.sums = [axis for axis in self.sums if axis not in done]
            self._add_step(ALL_REDUCE, done)
        return bool(done)

    def _gather_unneeded(self) -> bool:
        """
        Gather each dim whose innermost axis shards nothing at the end; return whether there were
        any.
        """
        changed = False
        for dim, axes in enumerate(self.dims):
            if axes and axes != self.wanted[dim] and axes[-1] not in self.needed:
                self._pop_axis(dim)
                changed = True
        return changed

    def _gather_first(self) -> None:
        """Gather the first dim that has an axis in the wrong place."""
        for dim, axes in enumerate(self.dims):
            if axes != self.wanted[dim][: len(axes)]:
                self._pop_axis(dim)
                return
        raise AssertionError(f"no way from {self.start} to {self.end}")

    def _pop_axis(self, dim: int) -> None:
        axis = self.dims[dim].pop()
        if axis in self.end.layout.sums:
            self.sums.append(axis)
            self._add_step(PAD, (axis,), dim)
        else:
            self._add_step(ALL_GATHER, (axis,), dim)

    def _add_step(self, kind: str, axes: tuple[str, ...], dim: int = -1, origin: int = -1) -> None:
        layout = L(*[tuple(dim) for dim in self.dims], sums=tuple(self.sums))
        after = View(self.start.grid, layout, self.start.shape)
        self.steps.append(LayoutStep(kind, self.view, after, axes, dim, origin))
        self.view = after


def _merge_steps(steps: list[LayoutStep]) -> list[LayoutStep]:
    """Join consecutive all-reduces, and all-gathers of one dim with equal shards."""
    found: list[LayoutStep] = []
    for step in steps:
        last = found[-1] if found else None
        if last and last.kind == step.kind == ALL_REDUCE:
            found[-1] = LayoutStep(ALL_REDUCE, last.before, step.after, (*last.axes, *step.axes))
            continue
        if last and last.kind == step.kind == ALL_GATHER and last.dim == step.dim:
            axes = (*step.axes, *last.axes)
            all_axes = last.before.layout.dims[last.dim]
            if last.before.shape[last.dim] % last.before.grid.group_size(all_axes) == 0:
                found[-1] = LayoutStep(ALL_GATHER, last.before, step.after, axes, step.dim)
                continue
        found.append(step)
    return found
