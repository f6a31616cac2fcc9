"""
The search problem of a graph: its candidates, where tensors are made and used, the moves that each
use needs, and the plan of a choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdrun.parallel.auto.prices import PriceList
from pdrun.parallel.auto.search.candidates import Candidate, CandidateLists
from pdrun.parallel.auto.search.eliminate import Variable
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import OperatorGraph, TensorRef
from pdrun.parallel.operators.interleaving.splits import find_interleaved
from pdrun.parallel.operators.plan import OperatorPlan, UserLayouts
from pdrun.parallel.operators.propagate import find_grad_sums

RESULT = -1
"""Position of the user that stands for the results of the model."""
Prefix = tuple[object, ...]
Use = tuple[tuple[L, tuple[str, ...]], ...]
"""
For each place of a tensor among an operator's inputs the layout that is needed, and the axes along
which the gradients that come back are terms of a sum.
"""
Source = tuple[L, tuple[str, ...]]
"""A layout in which a tensor is made or stored, and the axes over which its gradient is summed."""


def operator_variable(position: int) -> Variable:
    """Return the variable of an operator."""
    return ("operator", position, 0)


@dataclass(frozen=True)
class TensorUser:
    """An operator that reads a tensor, and where among its inputs."""

    position: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class DistinctUses:
    """The different uses that an operator's candidates make of a tensor, and that of each one."""

    uses: list[Use]
    rows: list[int]


class SearchProblem:
    """
    What is searched: candidates and prices of one graph.

    Args:
        gather: see `pdrun.parallel.operators.module.Operators`.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        grid: Grid,
        prices: PriceList,
        user: UserLayouts | None = None,
        gather: bool = True,
    ) -> None:
        self.graph = graph
        self.grid = grid
        self.prices = prices
        self.user = user or UserLayouts()
        self.gather = gather
        self.candidates = CandidateLists(graph, grid, self.user)
        self.producers = graph.tensor_producers()
        self.users = _list_users(graph)
        self.chained_weights = {
            index
            for index, tensor in enumerate(graph.tensors)
            if tensor.kind == "param" and self.users[index] and self._is_chained(index)
        }
        self._uses: dict[TensorUser, DistinctUses] = {}

    def _is_chained(self, weight: int) -> bool:
        uses = self.users[weight]
        return len(uses) > 1 or len(uses[0].slots) > 1 or weight in self.user.weights

    def list_sources(self, index: int) -> tuple[list[Source], Variable | None]:
        """Return the layouts in which a tensor is made, and the variable that chooses one."""
        replicated = L(*[None] * len(self.graph.shape_of(index)))
        maker = self.producers.get(index)
        if maker is None:
            return [(replicated, ())], None
        slot = self.graph.operators[maker].outputs.index(index)
        if slot == 0 and maker in self.user.results:
            return [(self.user.results[maker], ())], None
        made: list[Source] = [(one.out_layouts[slot], ()) for one in self.candidates.of(maker)]
        if len(made) == 1:
            return [made[0]], None
        return made, operator_variable(maker)

    def list_uses(self, user: TensorUser, index: int, source: Source) -> DistinctUses:
        """Return the different uses that a user's candidates make of a tensor."""
        if user.position == RESULT:
            return DistinctUses([((self.result_layout(index, source[0]), ()),)], [0])
        if user not in self._uses:
            numbers: dict[Use, int] = {}
            rows = []
            for candidate in self.candidates.of(user.position):
                use = tuple(
                    (candidate.in_layouts[slot], candidate.grad_sums[slot]) for slot in user.slots
                )
                rows.append(numbers.setdefault(use, len(numbers)))
            self._uses[user] = DistinctUses(list(numbers), rows)
        return self._uses[user]

    def result_layout(self, index: int, made: L) -> L:
        """Return the layout in which the model returns a tensor; see `keep_results_sharded`."""
        tensor = self.graph.tensors[index]
        full: list[tuple[str, ...] | None] = [None] * len(tensor.shape)
        if not self.gather and len(full) > 1 and tensor.dtype.is_floating_point:
            full[-1] = made.dims[-1] or None
        return L(*full)

    def _moves_for(self, index: int, source: Source, use: Use) -> dict[Prefix, float] | None:
        """Return the moves for a use of a tensor and their seconds; None if there is no way."""
        layout, sums = source
        moves: dict[Prefix, float] = {}
        for target, axes in use:
            shares: tuple[str, ...] = ()
            if self.graph.tensors[index].kind == "param":
                shares = tuple(axis for axis in sums if axis not in axes)
                axes = tuple(axis for axis in axes if axis not in sums)
                if any(axis not in layout.axes for axis in axes):
                    return None  # its gradient would be summed over more axes
            path = self.prices.path_prices(index, layout, target, axes, shares)
            if path is None:
                return None
            moves.update(path)
        return moves

    def user_moves(
        self, user: TensorUser, index: int, source: Source
    ) -> tuple[list[dict[Prefix, float] | None], list[int]]:
        """Return the moves of each different use, and the use of each candidate."""
        uses = self.list_uses(user, index, source)
        return [self._moves_for(index, source, use) for use in uses.uses], uses.rows

    def stored_sources(self, index: int) -> Iterator[Source]:
        """Yield the ways to store a weight: its layout, and the axes that sum its gradient."""
        replicated = L(*[None] * len(self.graph.shape_of(index)))
        layouts = {replicated: None}
        if index in self.user.weights:
            layouts = {self.user.weights[index]: None}
        else:
            for user in self.users[index]:
                if user.position != RESULT:
                    for candidate in self.candidates.of(user.position):
                        for slot in user.slots:
                            layouts[candidate.in_layouts[slot].whole()] = None
        axes_of_sums = {
            axis
            for user in self.users[index]
            if user.position != RESULT
            for candidate in self.candidates.of(user.position)
            for slot in user.slots
            for axis in candidate.grad_sums[slot]
        }
        for layout in layouts:
            free = [axis for axis in self.grid.names if axis in axes_of_sums - set(layout.axes)]
            for count in range(len(free) + 1):
                for axes in itertools.combinations(free, count):
                    yield layout, axes

    def stored_layout(self, index: int, values: dict[Variable, int]) -> L:
        """Return the layout of a chained weight that a solution chose."""
        return list(self.stored_sources(index))[values["moves", index, 0]][0]

    # ---- plans --------------------------------------------------------------

    def make_plan(self, choices: Sequence[int], stored: dict[int, L] | None = None) -> OperatorPlan:
        """
        Return the plan of one candidate per operator.

        Args:
            stored: layouts of weights with several uses; default: what the first use needs.
        """
        chosen = [self.candidates.of(place)[choice] for place, choice in enumerate(choices)]
        plan = OperatorPlan(
            self.graph,
            self.grid,
            [candidate.sharding for candidate in chosen],
            out_layouts={
                self.graph.operators[position].outputs[0]: layout
                for position, layout in self.user.results.items()
            },
        )
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.kind == "param":
                plan.weights[index] = self._weight_layout(index, chosen, stored or {})
        find_grad_sums(plan, self.graph.tensor_users())
        plan.interleaved = find_interleaved(plan, self.user)
        if not self.gather:
            plan.keep_results_sharded()
        return plan

    def _weight_layout(self, index: int, chosen: Sequence[Candidate], stored: dict[int, L]) -> L:
        if index in self.user.weights:
            return self.user.weights[index]
        if index in stored:
            return stored[index]
        for user in self.users[index]:
            if user.position != RESULT:
                return chosen[user.position].in_layouts[user.slots[0]].whole()
        return L(*[None] * len(self.graph.shape_of(index)))


def result_indices(graph: OperatorGraph) -> list[int]:
    """Return the tensors that the model returns, each once."""
    return list(
        dict.fromkeys(value.index for value in graph.results if isinstance(value, TensorRef))
    )


def _list_users(graph: OperatorGraph) -> list[list[TensorUser]]:
    """Return for each tensor its users, in order; results are the last."""
    found: list[list[TensorUser]] = [[] for _ in graph.tensors]
    for position, operator in enumerate(graph.operators):
        for index in dict.fromkeys(operator.inputs):
            slots = tuple(slot for slot, other in enumerate(operator.inputs) if other == index)
            found[index].append(TensorUser(position, slots))
    for index in result_indices(graph):
        found[index].append(TensorUser(RESULT, ()))
    return found
