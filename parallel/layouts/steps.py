"""
The steps from one layout to another, and what they cost.

    kind            before -> after            over the network    backward
    slice           replicated -> cut          nothing             all-gather
    all_to_all      cut -> cut on another dim  all-to-all          all-to-all
    all_gather      cut -> replicated          all-gather          slice
    all_reduce      partial -> replicated      all-reduce          nothing
    reduce_scatter  partial -> cut             reduce-scatter      all-gather
    first           replicated -> partial      nothing             nothing       all but the first hold zeros
    pad             cut -> partial             nothing             slice         each part among zeros
    reshape         another shape              nothing             reshape

Backward follows one convention: the gradient of a tensor that all ranks of an axis hold alike, or
that their parts add up to, is held alike by all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdrun.parallel.layouts.view import View

SLICE = "slice"
ALL_TO_ALL = "all_to_all"
ALL_GATHER = "all_gather"
ALL_REDUCE = "all_reduce"
REDUCE_SCATTER = "reduce_scatter"
FIRST = "first"
PAD = "pad"
RESHAPE = "reshape"
LATENCY_ELEMENTS = 1 << 16
"""
How many elements a collective counts for besides what it sends, where bytes are weighed against
steps.
"""
LOCAL_KINDS = (SLICE, FIRST, PAD, RESHAPE)
"""Steps without communication."""


@dataclass(frozen=True)
class LayoutStep:
    """
    One step.

    Attributes:
        kind: see above.
        before, after: how the tensor lies.
        axes: of the grid of ``after``, over which it happens.
        dim: the one that is cut, gathered or padded; -1 without.
        origin: of an all-to-all, the dim that was cut before; -1 otherwise.
    """

    kind: str
    before: View
    after: View
    axes: tuple[str, ...] = ()
    dim: int = -1
    origin: int = -1

    @property
    def group_size(self) -> int:
        """Number of ranks that act together."""
        return self.after.grid.group_size(self.axes)

    def sent_elements(self, backward: bool = False) -> int:
        """
        Return how many elements a rank sends, by ring and pairwise algorithms: the least that the
        step can do with.

        All-gather: its part to all others, and reduce-scatter as many; all-reduce: both;
        all-to-all: what it does not keep, or receives if that is more. Where parts differ, each
        counts as the largest one, to which collectives pad.
        """
        before = self.before.local_elements()
        after = self.after.local_elements()
        n = self.group_size
        if self.kind == ALL_TO_ALL:
            old = self.before.local_shape()
            new = self.after.local_shape()
            return max(before, after) - math.prod(min(pair) for pair in zip(old, new, strict=True))
        if backward:
            return (n - 1) * after if self.kind in (SLICE, REDUCE_SCATTER) else 0
        if self.kind == ALL_GATHER:
            return (n - 1) * before
        if self.kind == REDUCE_SCATTER:
            return (n - 1) * after
        return 2 * (before - -(-before // n)) if self.kind == ALL_REDUCE else 0

    def message_rounds(self, backward: bool = False) -> int:
        """
        Return how many messages follow one another: n - 1 around a ring, twice that for an
        all-reduce.
        """
        if self.sent_elements(backward) == 0:
            return 0
        return (self.group_size - 1) * (2 if self.kind == ALL_REDUCE else 1)

    def mindspore_cost(self) -> MindSporeCost:
        """Return the cost by MindSpore's forms, in elements."""
        s = self.before.local_elements()
        n = self.group_size
        if self.kind == ALL_GATHER:
            whole = (s, n * s) if self.dim == 0 else (s + 2 * s * n, 2 * s * n + s)
            return MindSporeCost(n * s * 0.5, s * 0.5, *whole)
        if self.kind == ALL_TO_ALL:
            return MindSporeCost(2.0 * s, 2.0 * s, 0, 0)
        if self.kind == REDUCE_SCATTER:
            return MindSporeCost(self.after.local_elements() * 0.5, s * 0.5, s, s)
        if self.kind == ALL_REDUCE:
            return MindSporeCost(s, 0, 0, 0)
        return MindSporeCost(0, 0, 2 * s if self.kind == RESHAPE else s, s)

    def __str__(self) -> str:
        over = "/".join(self.axes)
        if self.kind == RESHAPE:
            return f"reshape to {list(self.after.shape)}"
        if self.kind == ALL_TO_ALL:
            return f"all_to_all over {over}: dim {self.origin} -> dim {self.dim}"
        return f"{self.kind} over {over}" + (f": dim {self.dim}" if self.dim >= 0 else "")


@dataclass(frozen=True)
class MindSporeCost:
    """
    What MindSpore's searches take a redistribution to cost.

    With s elements of a rank before the step and n ranks: all-gather n*s/2 forward and s/2
    backward, all-to-all 2s both, an all-reduce its s forward; a reduce-scatter, which MindSpore
    plans none of, is the all-gather turned round. Computation and memory: all-gather s and n*s on
    dim 0, elsewhere s + 2sn and 2sn + s (a slice and a concatenation more), slice s, reshape 2s.
    """

    forward: float
    backward: float
    computation: float
    memory: float

    def __add__(self, other: MindSporeCost) -> MindSporeCost:
        return MindSporeCost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.computation + other.computation,
            self.memory + other.memory,
        )


@dataclass(frozen=True)
class RedistributionPlan:
    """
    The way from one view to another.

    Attributes:
        source, target: both ends.
        steps: in order; none where nothing has to be done.
    """

    source: View
    target: View
    steps: tuple[LayoutStep, ...]

    def sent_bytes(self, itemsize: int = 1, backward: bool = False) -> int:
        """
        Return how many bytes a rank sends, of elements of ``itemsize`` bytes (see `Step.moved`).
        """
        return itemsize * sum(step.sent_elements(backward) for step in self.steps)

    def estimate_seconds(
        self, alpha: float, beta: float, itemsize: int, backward: bool = False
    ) -> float:
        """
        Return the time by the alpha-beta model: a latency for each round and a time for each byte.

        Args:
            alpha: seconds that a message takes at least.
            beta: seconds per byte, the inverse of the bandwidth.
            itemsize: bytes of an element.
        """
        return sum(
            alpha * step.message_rounds(backward) + beta * itemsize * step.sent_elements(backward)
            for step in self.steps
        )

    def mindspore_cost(self) -> MindSporeCost:
        """Return the cost by MindSpore's forms, in elements."""
        return sum((step.mindspore_cost() for step in self.steps), MindSporeCost(0, 0, 0, 0))

    @property
    def collectives(self) -> tuple[LayoutStep, ...]:
        """The steps that communicate."""
        return tuple(step for step in self.steps if step.kind not in LOCAL_KINDS)

    @property
    def search_cost(self) -> int:
        """The elements sent, and `LATENCY` for each collective."""
        return self.sent_bytes() + LATENCY_ELEMENTS * len(self.collectives)

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps) or "nothing"
