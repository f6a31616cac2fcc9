"""
The cheapest way between two layouts of one shape on one grid, by Dijkstra's search over layouts.

A state is a layout, an edge a step. Rules alone (`redistribute`) send too much where axes change
places: to come from ("tp", None) to (("dp", "tp"), None) they gather dim 0, where tp can wait on
dim 1 meanwhile.
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
    LATENCY,
    LOCAL,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    Step,
)
from pdrun.parallel.layouts.view import View

MOST = 3000
"""States that are looked at before the search is given up."""
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Move:
    """A step by its parts; see `Step`."""

    kind: str
    axis: str
    dim: int = -1
    origin: int = -1


@dataclass(frozen=True, order=True)
class State:
    """A layout on the way."""

    dims: Dims
    sums: tuple[str, ...]


def cheapest(start: View, end: View) -> list[Move] | None:
    """
    Return the moves that send least, a collective counting as `LATENCY` elements more; None: given
    up.

    Sums that the end has and the start lacks are left to the caller, who makes them last.
    """
    maze = _Maze(start, end)
    first = State(start.layout.dims, start.layout.sums)
    costs = {first: 0}
    came: dict[State, tuple[State, Move]] = {}
    queue = [(0, 0, first)]
    for looked in range(MOST):
        if not queue:
            return None
        cost, _, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        if maze.is_end(state):
            return _path(came, state)
        for move, price, after in maze.moves(state):
            total = cost + price
            if total < costs.get(after, total + 1):
                costs[after], came[after] = total, (state, move)
                heapq.heappush(queue, (total, looked, after))
    return None


def _path(came: dict[State, tuple[State, Move]], state: State) -> list[Move]:
    found = []
    while state in came:
        state, move = came[state]
        found.append(move)
    return found[::-1]


class _Maze:
    """The steps that may be of use between two layouts."""

    def __init__(self, start: View, end: View) -> None:
        self.shape = start.shape
        self.grid = start.grid
        self.dims = end.layout.dims
        self.sums = set(end.layout.sums)
        self.needed = end.layout.axes
        self._sizes: dict[tuple[int, tuple[str, ...]], int] = {}

    def is_end(self, state: State) -> bool:
        """Whether nothing is left to do but to make sums of replicated axes."""
        return state.dims == self.dims and set(state.sums) <= self.sums

    def moves(self, state: State) -> Iterator[tuple[Move, int, State]]:
        """Yield (move, price, layout after it)."""
        dims = state.dims
        used = {axis for dim in state.dims for axis in dim}
        every = range(len(dims))
        before = self._count(dims)
        for axis in self.needed:
            if axis not in used and axis not in state.sums:
                for dim in every:
                    yield Move(SLICE, axis, dim), 1, State(_pushed(dims, dim, axis), state.sums)
        for axis in state.sums:
            if axis in self.sums:
                continue
            rest = tuple(other for other in state.sums if other != axis)
            reduced = 2 * (before - -(-before // self.grid.degree(axis)))
            yield Move(ALL_REDUCE, axis), reduced + LATENCY, State(dims, rest)
            for dim in every:
                after = _pushed(dims, dim, axis)
                price = (self.grid.degree(axis) - 1) * self._count(after) + LATENCY
                yield Move(REDUCE_SCATTER, axis, dim), price, State(after, rest)
        for origin in every:
            if not dims[origin]:
                continue
            axis = dims[origin][-1]
            bare = (*dims[:origin], dims[origin][:-1], *dims[origin + 1 :])
            if axis in self.sums:
                yield Move(PAD, axis, origin), 1, State(bare, (*state.sums, axis))
                continue
            price = (self.grid.degree(axis) - 1) * before + LATENCY
            yield Move(ALL_GATHER, axis, origin), price, State(bare, state.sums)
            for dim in every if axis in self.needed else ():
                if dim != origin:
                    after = _pushed(bare, dim, axis)
                    sent = max(before, self._count(after)) - self._common(dims, after)
                    yield (
                        Move(ALL_TO_ALL, axis, dim, origin),
                        sent + LATENCY,
                        State(after, state.sums),
                    )

    def _size(self, dim: int, axes: tuple[str, ...]) -> int:
        if (dim, axes) not in self._sizes:
            size = self.shape[dim]
            for axis in axes:
                size = -(-size // self.grid.degree(axis))
            self._sizes[dim, axes] = size
        return self._sizes[dim, axes]

    def _count(self, dims: Dims) -> int:
        """Return the number of elements of the largest part."""
        return math.prod(self._size(dim, axes) for dim, axes in enumerate(dims))

    def _common(self, before: Dims, after: Dims) -> int:
        pairs = zip(before, after, strict=True)
        return math.prod(
            min(self._size(dim, a), self._size(dim, b)) for dim, (a, b) in enumerate(pairs)
        )


def _pushed(dims: Dims, dim: int, axis: str) -> Dims:
    return (*dims[:dim], (*dims[dim], axis), *dims[dim + 1 :])


def is_roundabout(steps: Sequence[Step]) -> bool:
    """Return whether something is cut after it was sent: a search may do better."""
    sent = [step.kind not in LOCAL for step in steps]
    return True in sent and any(step.kind == SLICE for step in steps[sent.index(True) :])
