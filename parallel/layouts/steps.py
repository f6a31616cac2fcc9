"""
The steps of a redistribution, and their costs.

    kind            before -> after              network           backward
    slice           replicated -> sharded        nothing           all-gather
    all_to_all      sharded -> on another dim    all-to-all        all-to-all
    all_gather      sharded -> replicated        all-gather        slice
    all_reduce      partial -> replicated        all-reduce        nothing
    reduce_scatter  partial -> sharded           reduce-scatter    all-gather
    first           replicated -> partial        nothing           nothing; others have zeros
    pad             sharded -> partial           nothing           slice; each shard among zeros
    reshape         another shape                nothing           reshape

Backward follows one convention: the gradient of a tensor that is replicated or partial along an
axis is replicated along it.
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
"""Cost of a collective in elements, in addition to the elements sent."""
LOCAL_KINDS = (SLICE, FIRST, PAD, RESHAPE)
"""Steps without communication."""


@dataclass(frozen=True)
class LayoutStep:
    """
    One step.

    Attributes:
        kind: see above.
        before, after: views of the tensor.
        axes: axes of the grid of ``after`` over which it runs.
        dim: the dim that is sliced, gathered or padded; -1 without.
        origin: of an all-to-all, the dim that was sharded before; -1 otherwise.
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
        Return the number of elements that a rank sends, by ring and pairwise algorithms: the
        minimum.

        * all-gather: its shard to all others; reduce-scatter: as many; all-reduce: both.
        * all-to-all: the elements that it does not keep, or receives if that is more.

        If shards differ, each counts as the largest one: collectives pad to it.
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
        if self.kind == ALL_REDUCE:
            return 2 * (before - -(-before // n))
        return 0

    def message_rounds(self, backward: bool = False) -> int:
        """
        Return the number of consecutive messages: n - 1 around a ring, twice that for an
        all-reduce.
        """
        if self.sent_elements(backward) == 0:
            return 0
        return (self.group_size - 1) * (2 if self.kind == ALL_REDUCE else 1)

    def mindspore_cost(self) -> MindSporeCost:
        """Return the cost by MindSpore's formulas, in elements."""
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
    The cost of a redistribution in MindSpore's searches.

    With s elements per rank before the step and n ranks:

    * communication: all-gather n*s/2 forward and s/2 backward, all-to-all 2s both, all-reduce s
      forward. MindSpore plans no reduce-scatter; here it is the all-gather with the two exchanged.
    * computation and memory: all-gather s and n*s on dim 0, otherwise s + 2sn and 2sn + s (an
      additional slice and concatenation), slice s, reshape 2s.
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
    The steps from one view to another.

    Attributes:
        source, target: the views.
        steps: in order; empty if nothing has to be done.
    """

    source: View
    target: View
    steps: tuple[LayoutStep, ...]

    def sent_bytes(self, itemsize: int = 1, backward: bool = False) -> int:
        """
        Return the bytes that a rank sends, with ``itemsize`` bytes per element (`sent_elements`).
        """
        return itemsize * sum(step.sent_elements(backward) for step in self.steps)

    def estimate_seconds(
        self, alpha: float, beta: float, itemsize: int, backward: bool = False
    ) -> float:
        """
        Return the time by the alpha-beta model: a latency per round and a time per byte.

        Args:
            alpha: latency of a message in seconds.
            beta: seconds per byte, the inverse of the bandwidth.
            itemsize: bytes per element.
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
        """The elements sent, and `LATENCY_ELEMENTS` for each collective."""
        return self.sent_bytes() + LATENCY_ELEMENTS * len(self.collectives)

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps) or "nothing"
