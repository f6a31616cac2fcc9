"""
The cheapest steps between two layouts of one shape on one grid, by Dijkstra's algorithm.

A node is a layout, an edge a step. The rules of `redistribute` send too much if axes exchange dims:
from ("tp", None) to (("dp", "tp"), None) they gather dim 0, although tp can wait on dim 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdrun.parallel.layouts.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LATENCY_ELEMENTS,
    LOCAL_KINDS,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    LayoutStep,
)
from pdrun.parallel.layouts.view import View

MAX_STATES = 3000
"""Layouts that are visited before the search gives up."""
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SearchMove:
    """A step without its views; see `LayoutStep`."""

    kind: str
    axis: str
    dim: int = -1
    origin: int = -1


@dataclass(frozen=True, order=True)
class LayoutState:
    """A node: the axes of each dim, and the partial sums."""

    dims: Dims
    sums: tuple[str, ...]


def find_cheapest(start: View, end: View) -> list[SearchMove] | None:
    """
    Return the moves with the least cost; None if the search gives up. A collective costs
    `LATENCY_ELEMENTS` more.

    The caller adds sums that the end has and the start lacks, as the last step.
    """
    maze = _LayoutGraph(start, end)
    first = LayoutState(start.layout.dims, start.layout.sums)
    costs = {first: 0}
    came: dict[LayoutState, tuple[LayoutState, SearchMove]] = {}
    queue = [(0, 0, first)]
    for looked in range(MAX_STATES):
        if not queue:
            return None
        cost, _, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        if maze.is_end(state):
            return _trace_path(came, state)
        for move, price, after in maze.next_moves(state):
            total = cost + price
            if total < costs.get(after, total + 1):
                costs[after], came[after] = total, (state, move)
                heapq.heappush(queue, (total, looked, after))
    return None


def _trace_path(
    came: dict[LayoutState, tuple[LayoutState, SearchMove]], state: LayoutState
) -> list[SearchMove]:
    found = []
    while state in came:
        state, move = came[state]
        found.append(move)
    return found[::-1]


class _LayoutGraph:
    """The steps that can be useful between two layouts."""

    def __init__(self, start: View, end: View) -> None:
        self.shape = start.shape
        self.grid = start.grid
        self.dims = end.layout.dims
        self.sums = set(end.layout.sums)
        self.needed = end.layout.axes
        self._sizes: dict[tuple[int, tuple[str, ...]], int] = {}

    def is_end(self, state: LayoutState) -> bool:
        """Whether only partial sums of replicated axes are left to do."""
        return state.dims == self.dims and set(state.sums) <= self.sums

    def next_moves(self, state: LayoutState) -> Iterator[tuple[SearchMove, int, LayoutState]]:
        """Yield (move, cost, layout after it)."""
        dims = state.dims
        used = {axis for dim in state.dims for axis in dim}
        every = range(len(dims))
        before = self._part_elements(dims)
        for axis in self.needed:
            if axis not in used and axis not in state.sums:
                for dim in every:
                    yield (
                        SearchMove(SLICE, axis, dim),
                        1,
                        LayoutState(_with_axis(dims, dim, axis), state.sums),
                    )
        for axis in state.sums:
            if axis in self.sums:
                continue
            rest = tuple(other for other in state.sums if other != axis)
            reduced = 2 * (before - -(-before // self.grid.degree(axis)))
            yield SearchMove(ALL_REDUCE, axis), reduced + LATENCY_ELEMENTS, LayoutState(dims, rest)
            for dim in every:
                after = _with_axis(dims, dim, axis)
                price = (self.grid.degree(axis) - 1) * self._part_elements(after) + LATENCY_ELEMENTS
                yield SearchMove(REDUCE_SCATTER, axis, dim), price, LayoutState(after, rest)
        for origin in every:
            if not dims[origin]:
                continue
            axis = dims[origin][-1]
            bare = (*dims[:origin], dims[origin][:-1], *dims[origin + 1 :])
            if axis in self.sums:
                yield SearchMove(PAD, axis, origin), 1, LayoutState(bare, (*state.sums, axis))
                continue
            price = (self.grid.degree(axis) - 1) * before + LATENCY_ELEMENTS
            yield SearchMove(ALL_GATHER, axis, origin), price, LayoutState(bare, state.sums)
            for dim in every if axis in self.needed else ():
                if dim != origin:
                    after = _with_axis(bare, dim, axis)
                    sent = max(before, self._part_elements(after)) - self._shared_elements(
                        dims, after
                    )
                    yield (
                        SearchMove(ALL_TO_ALL, axis, dim, origin),
                        sent + LATENCY_ELEMENTS,
                        LayoutState(after, state.sums),
                    )

    def _part_size(self, dim: int, axes: tuple[str, ...]) -> int:
        if (dim, axes) not in self._sizes:
            size = self.shape[dim]
            for axis in axes:
                size = -(-size // self.grid.degree(axis))
            self._sizes[dim, axes] = size
        return self._sizes[dim, axes]

    def _part_elements(self, dims: Dims) -> int:
        """Return the number of elements of the largest shard."""
        return math.prod(self._part_size(dim, axes) for dim, axes in enumerate(dims))

    def _shared_elements(self, before: Dims, after: Dims) -> int:
        pairs = zip(before, after, strict=True)
        return math.prod(
            min(self._part_size(dim, a), self._part_size(dim, b))
            for dim, (a, b) in enumerate(pairs)
        )


def _with_axis(dims: Dims, dim: int, axis: str) -> Dims:
    return (*dims[:dim], (*dims[dim], axis), *dims[dim + 1 :])


def is_roundabout(steps: Sequence[LayoutStep]) -> bool:
    """Return whether something is sliced after it was sent: a search can do better."""
    sent = [step.kind not in LOCAL_KINDS for step in steps]
    return True in sent and any(step.kind == SLICE for step in steps[sent.index(True) :])
