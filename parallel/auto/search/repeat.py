"""
Repetition in a graph: equal layers are searched once.

The signature of an operator is its kind, its arguments, and for each tensor the distance to its
maker. The longest run of equal periods makes the graph a head, a block that repeats, and a tail.
No names are used. A graph without repetition, or one whose layers share tensors, is not folded,
which is slower and gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdrun.parallel.auto.search.problem import RESULT, SearchProblem
from pdrun.parallel.operators.graph.graph import TensorRef

MIN_REPETITIONS = 3


@dataclass(frozen=True)
class Repetition:
    """
    A run of equal periods.

    Attributes:
        begin: first operator of the first period.
        period: operators of one period.
        times: number of periods.
    """

    begin: int
    period: int
    times: int

    @property
    def head_end(self) -> int:
        """First operator behind the first period: the blocks from there on are equal."""
        return self.begin + self.period

    @property
    def end(self) -> int:
        """First operator behind the last period."""
        return self.begin + self.period * self.times

    def crossing_operators(self, problem: SearchProblem) -> list[int] | None:
        """
        Return the operators of the first period whose results the second one reads; None if the
        run cannot be folded.
        """
        if self._has_shared_weight(problem):
            return None
        crossing: set[int] = set()
        for index, users in enumerate(problem.users):
            maker = problem.producers.get(index)
            if problem.graph.tensors[index].kind == "param" or not users:
                continue
            segments = {self._segment_of(problem, user.position) for user in users}
            if maker is None or len(problem.candidates.of(self._first_of(maker))) == 1:
                if len(segments) > 1 and problem.graph.tensors[index].requires_grad:
                    return None
                continue
            made = self._segment_of(problem, maker)
            if segments == {made}:
                continue
            if segments != {made + 1}:
                return None
            if made == 0 and maker < self.begin:
                return None
            if made < self.times:
                crossing.add(maker - made * self.period)
        return sorted(crossing)

    def _has_shared_weight(self, problem: SearchProblem) -> bool:
        return any(
            self.begin <= user.position < self.end
            for index in problem.chained_weights
            for user in problem.users[index]
        )

    def _first_of(self, position: int) -> int:
        """Return the same operator of the second period: only its candidates are needed."""
        if self.head_end <= position < self.end:
            return self.head_end + (position - self.head_end) % self.period
        return position

    def _segment_of(self, problem: SearchProblem, position: int) -> int:
        """Return 0 for the head, then one number per period, and `times` for the tail."""
        if position == RESULT:
            return self.times
        if position < self.head_end:
            return 0
        return min(self.times, (position - self.begin) // self.period)


def find_repetition(problem: SearchProblem) -> Repetition | None:
    """Return the run of equal periods that covers most operators; None: there is no such run."""
    numbers: dict[object, int] = {}
    ids = [
        numbers.setdefault(_signature(problem, position), len(numbers))
        for position in range(len(problem.graph.operators))
    ]
    best: tuple[int, Repetition | None] = (0, None)
    for period in range(2, len(ids) // MIN_REPETITIONS + 1):
        if (len(ids) // period) * period <= best[0]:
            continue
        position = 0
        while position + period < len(ids):
            if ids[position] != ids[position + period]:
                position += 1
                continue
            end = position
            while end + period < len(ids) and ids[end] == ids[end + period]:
                end += 1
            times = (end - position) // period + 1
            if times >= MIN_REPETITIONS and (times - 1) * period > best[0]:
                best = ((times - 1) * period, Repetition(position, period, times))
            position = end + 1
    return best[1]


def _signature(problem: SearchProblem, position: int) -> object:
    """Return what must be equal for two operators to have equal candidates and prices."""
    graph = problem.graph
    operator = graph.operators[position]

    def plain(value: Any) -> object:
        if isinstance(value, TensorRef):
            return _tensor_signature(problem, position, value.index)
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, plain(item)) for key, item in value.items())
        return str(value)

    given = problem.user.shardings.get(position)
    fixed: Sequence[object] = ()
    if given is not None:
        fixed = (given.axis_order, given.fixed_axes, *given.splits.items())
    results = problem.user.results.get(position)
    outs = tuple(
        (graph.shape_of(i), graph.tensors[i].dtype, graph.tensors[i].requires_grad)
        for i in operator.outputs
    )
    return (
        operator.kind,
        str(operator.target),
        plain(operator.args),
        plain(operator.kwargs),
        outs,
        tuple(fixed),
        results,
        position in problem.candidates.constants,
        position in problem.user.replicated,
    )


def _tensor_signature(problem: SearchProblem, position: int, index: int) -> object:
    tensor = problem.graph.tensors[index]
    plain = (tensor.shape, tensor.dtype, tensor.requires_grad)
    maker = problem.producers.get(index)
    if maker is None:
        return (tensor.kind, *plain, problem.user.weights.get(index))
    if maker in problem.candidates.constants:
        return ("constant", *plain)
    slot = problem.graph.operators[maker].outputs.index(index)
    return ("distance", position - maker, slot, *plain)
