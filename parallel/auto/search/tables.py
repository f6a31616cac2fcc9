"""
The tables of a search problem: one variable per operator, one table per tensor.

    ("operator", position, 0)   the candidate of an operator
    ("moves", tensor, step)     for a tensor with many users or a weight with several: its layout
                                and the moves made so far, after `step` users

A table of a tensor has the maker's variable and those of its users. Users share equal first moves,
as in the plan: q, k and v gather their input once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdrun.parallel.auto.search.eliminate import INFINITE, CostNetwork, Variable, make_table
from pdrun.parallel.auto.search.problem import (
    RESULT,
    Prefix,
    SearchProblem,
    Source,
    TensorUser,
    operator_variable,
    result_indices,
)

MAX_JOINT_USERS = 3
"""Users of a tensor up to which one table has them all; with more, a chain of tables has them."""
ChainState = tuple[Source, frozenset[Prefix]]
"""A layout of a tensor, and the moves of it that were made."""


class NetworkBuilder:
    """Builds the tables of parts of one problem; parts share the variables of chained weights."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._chain_ends: dict[int, list[ChainState]] = {}

    def build_network(self, begin: int, end: int) -> tuple[CostNetwork, list[Variable]]:
        """
        Return the tables of the operators from ``begin`` to ``end``, and the variables that they
        share with operators before.

        Users of a tensor must all be in the range, or all outside. Chained weights, and tensors
        that are replicated and need no gradient, can have some of both.
        """
        network = CostNetwork()
        outside: set[Variable] = set()
        tensors = dict[int, None]()
        for position in range(begin, end):
            variable = operator_variable(position)
            network.add_variable(variable, len(self.problem.candidates.of(position)))
            network.add_table([variable], self._own_costs(position))
            tensors.update(dict.fromkeys(self.problem.graph.operators[position].inputs))
        if end == len(self.problem.graph.operators):
            tensors.update(dict.fromkeys(result_indices(self.problem.graph)))
        for index in tensors:
            if index in self.problem.chained_weights:
                outside |= self._add_weight(network, index, begin, end)
            elif self.problem.graph.tensors[index].kind != "param" or index in result_indices(
                self.problem.graph
            ):
                users = [u for u in self.problem.users[index] if self._is_inside(u, begin, end)]
                outside |= self._add_tensor(network, index, users, begin)
        return network, sorted(outside)

    def _own_costs(self, position: int) -> list[float]:
        """Return the costs of each candidate: its computation and its own weights."""
        operator = self.problem.graph.operators[position]
        found = []
        for candidate in self.problem.candidates.of(position):
            seconds = sum(self.problem.prices.operator_seconds(position, candidate.sharding))
            for slot, index in enumerate(operator.inputs):
                if (
                    self.problem.graph.tensors[index].kind == "param"
                    and index not in self.problem.chained_weights
                ):
                    layout = candidate.in_layouts[slot]
                    if layout.sums:
                        seconds = INFINITE
                        break
                    axes = candidate.grad_sums[slot]
                    seconds += self.problem.prices.weight_seconds(index, layout, axes)
            if position in self.problem.user.results:
                made, index = candidate.out_layouts[0], operator.outputs[0]
                path = self.problem.prices.path_prices(
                    index, made, self.problem.user.results[position]
                )
                seconds += INFINITE if path is None else sum(price for _, price in path)
            found.append(seconds)
        return found

    def _add_tensor(
        self, network: CostNetwork, index: int, users: Sequence[TensorUser], begin: int
    ) -> set[Variable]:
        """Add the table of an activation or input; return its maker's variable if it is outside."""
        sources, maker = self.problem.list_sources(index)
        outside = set[Variable]()
        if maker is None and not self.problem.graph.tensors[index].requires_grad:
            self._forbid_impossible(network, index, sources[0], users)
            return outside
        if maker is not None:
            if maker[1] < begin:
                outside.add(maker)
            network.add_variable(maker, len(sources))
        if len(users) > MAX_JOINT_USERS:
            self._add_chain(network, index, sources, maker, users)
            return outside
        numbers = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        table = torch.stack(
            [
                _joint_costs([self.problem.user_moves(user, index, source)[0] for user in users])
                for source in numbers
            ]
        )
        variables = []
        if maker is not None:
            variables.append(maker)
            table = _select(table, 0, [numbers[source] for source in sources])
        else:
            table = table.squeeze(0)
        for user in users:
            if user.position == RESULT:
                table = table.squeeze(len(variables))
            else:
                rows = self.problem.list_uses(user, index, sources[0]).rows
                table = _select(table, len(variables), rows)
                variables.append(operator_variable(user.position))
        if variables and bool(table.any()):
            network.add_table(variables, table)
        return outside

    def _forbid_impossible(
        self, network: CostNetwork, index: int, source: Source, users: Sequence[TensorUser]
    ) -> None:
        """
        Forbid candidates that need a partial sum of a replicated tensor without a gradient. All
        others slice it for nothing.
        """
        for user in users:
            moves, rows = self.problem.user_moves(user, index, source)
            if user.position != RESULT and any(one is None for one in moves):
                costs = [INFINITE if moves[row] is None else 0.0 for row in rows]
                network.add_table([operator_variable(user.position)], costs)

    # ---- chains -------------------------------------------------------------

    def _add_chain(
        self,
        network: CostNetwork,
        index: int,
        sources: Sequence[Source],
        maker: Variable | None,
        users: Sequence[TensorUser],
    ) -> None:
        """Add the tables of a tensor with many users: one per user, in their order."""
        states: list[ChainState] = [(one, frozenset()) for one in dict.fromkeys(sources)]
        first: Variable = ("moves", index, 0)
        network.add_variable(first, len(states))
        if maker is not None:
            places = {source: place for place, (source, _) in enumerate(states)}
            links = [(row, places[source], 0.0) for row, source in enumerate(sources)]
            network.add_table([maker, first], _fill_table((len(sources), len(states)), links))
        self._extend_chain(network, index, states, users, 0)

    def _extend_chain(
        self,
        network: CostNetwork,
        index: int,
        states: list[ChainState],
        users: Sequence[TensorUser],
        step: int,
    ) -> list[ChainState]:
        """Add one table per user behind the states after ``step`` users; return the last states."""
        for user in users:
            after: dict[ChainState, int] = {}
            entries: list[tuple[int, int, int, float]] = []
            rows = self.problem.list_uses(user, index, states[0][0]).rows
            for before, (source, done) in enumerate(states):
                for use, moves in enumerate(self.problem.user_moves(user, index, source)[0]):
                    if moves is None:
                        continue
                    cost = sum(price for move, price in moves.items() if move not in done)
                    state = (source, done.union(move for move, price in moves.items() if price))
                    entries.append((before, use, after.setdefault(state, len(after)), cost))
            if not after:  # no way at all: one state that costs infinitely much
                after[states[0]] = 0
            shape = (len(states), max(rows) + 1, len(after))
            table = _fill_table(shape, entries)
            first: Variable = ("moves", index, step)
            last: Variable = ("moves", index, step + 1)
            network.add_variable(last, len(after))
            if user.position == RESULT:
                network.add_table([first, last], table[:, 0])
            else:
                table = _select(table, 1, rows)
                network.add_table([first, operator_variable(user.position), last], table)
            states = list(after)
            step += 1
        return states

    def _add_weight(self, network: CostNetwork, index: int, begin: int, end: int) -> set[Variable]:
        """
        Add the tables of a weight that has several users or a layout from the user.

        If some users are before ``begin``, the state after them is shared with their network.
        """
        users = self.problem.users[index]
        inside = [u for u in users if self._is_inside(u, begin, end)]
        skipped = sum(RESULT < u.position < begin for u in users)
        if not skipped:
            sources = list(self.problem.stored_sources(index))
            states: list[ChainState] = [(source, frozenset()) for source in sources]
            first: Variable = ("moves", index, 0)
            network.add_variable(first, len(states))
            network.add_table(
                [first], [self.problem.prices.weight_seconds(index, *source) for source in sources]
            )
            shared = set[Variable]()
        else:
            states = self._chain_ends[index]
            shared = {("moves", index, skipped)}
            network.add_variable(("moves", index, skipped), len(states))
        self._chain_ends[index] = self._extend_chain(network, index, states, inside, skipped)
        return shared

    def _is_inside(self, user: TensorUser, begin: int, end: int) -> bool:
        """Return whether a part has a user; the results belong to the last part, even if empty."""
        if user.position == RESULT:
            return end == len(self.problem.graph.operators)
        return begin <= user.position < end


def _select(table: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    return table.index_select(dim, torch.tensor(rows, device="cpu"))


def _fill_table(shape: tuple[int, ...], entries: Sequence[tuple[float, ...]]) -> Tensor:
    """Return a table from entries of indices and a cost; all others are infinite."""
    table = torch.full(shape, INFINITE, dtype=torch.float64, device="cpu")
    if entries:
        *places, costs = zip(*entries, strict=True)
        indices = tuple(torch.tensor(place, device="cpu") for place in places)
        table[indices] = make_table(costs)
    return table


def _joint_costs(users: Sequence[Sequence[dict[Prefix, float] | None]]) -> Tensor:
    """Return the seconds of each combination of candidates: every move counts once."""
    prices: dict[Prefix, float] = {}
    for options in users:
        for moves in options:
            prices.update(moves or {})
    places = {move: place for place, move in enumerate(prices)}
    needed: Tensor | None = None
    possible: Tensor | None = None
    for options in users:
        own = torch.zeros((len(options), len(prices)), dtype=torch.bool, device="cpu")
        for row, moves in enumerate(options):
            for move in moves or ():
                own[row, places[move]] = True
        works = torch.tensor([moves is not None for moves in options], device="cpu")
        if needed is None or possible is None:
            needed, possible = own, works
        else:
            needed = needed.unsqueeze(-2) | own
            possible = possible.unsqueeze(-1) & works
    assert needed is not None and possible is not None
    costs = needed.to(torch.float64) @ make_table(list(prices.values()))
    return costs.masked_fill(~possible, INFINITE)
