"""
Variable elimination: the minimum of a sum of tables, exactly.

A variable has a number of values. A table gives a cost for each combination of values of some
variables. Variables are removed one by one, the one with the smallest resulting table first: all
tables that contain it are added, and its minimum is taken for each combination of the others. The
removed choices are found backwards. Ties are decided by the order of the variables, so that every
process finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Variable = tuple[str, int, int]
"""A kind and two numbers: unique in a problem, and in a fixed order."""
MAX_TABLE_ENTRIES = 8_000_000
"""Above this a table is narrowed to the best values of its variables: then it is not exact."""
INFINITE = math.inf


@dataclass(frozen=True)
class CostTable:
    """Costs of combinations of values; one dim per variable."""

    variables: tuple[Variable, ...]
    costs: Tensor


def make_table(costs: object) -> Tensor:
    """Return costs as a table."""
    return torch.as_tensor(costs, dtype=torch.float64, device="cpu")


def add_tables(tables: Sequence[CostTable], order: Sequence[Variable]) -> Tensor:
    """Return the sum of some tables, with a dim (possibly of one element) for each variable."""
    total = torch.zeros([1] * len(order), dtype=torch.float64, device="cpu")
    for table in tables:
        inside = [variable for variable in order if variable in table.variables]
        costs = table.costs.permute([table.variables.index(variable) for variable in inside])
        sizes = iter(costs.shape)
        total = total + costs.reshape(
            [next(sizes) if variable in table.variables else 1 for variable in order]
        )
    return total


class CostNetwork:
    """
    A sum of tables to be minimised.

    Attributes:
        sizes: number of values of each variable.
        is_exact: False if a table was narrowed.
        largest: entries of the largest table so far.
    """

    def __init__(self, max_entries: int = MAX_TABLE_ENTRIES) -> None:
        self.sizes: dict[Variable, int] = {}
        self.is_exact = True
        self.largest = 0
        self._max_entries = max_entries
        self._kept: tuple[Variable, ...] = ()
        self._tables: list[CostTable] = []
        self._removed: list[tuple[Variable, tuple[Variable, ...], Tensor]] = []
        self._values: dict[Variable, Tensor] = {}
        """Values that are left of variables that were narrowed."""

    def add_variable(self, variable: Variable, size: int) -> None:
        """Add a variable; a second time does nothing."""
        self.sizes.setdefault(variable, size)

    def add_table(self, variables: Sequence[Variable], costs: object) -> None:
        """Add a table with one dim per variable."""
        self._tables.append(CostTable(tuple(variables), make_table(costs)))

    def eliminate(self, keep: Sequence[Variable] = ()) -> Tensor:
        """Remove all variables but some; return the table of these, in their order."""
        self._kept = tuple(keep)
        left = sorted(variable for variable in self.sizes if variable not in keep)
        touching: dict[Variable, list[CostTable]] = {variable: [] for variable in self.sizes}
        for table in self._tables:
            for variable in table.variables:
                touching[variable].append(table)
        prices = {variable: self._scope_size(variable, touching) for variable in left}
        while left:
            best = min(left, key=lambda variable: (prices[variable], variable))
            self._shrink_scope(best, touching)
            scope = _neighbours(best, touching[best])
            costs = add_tables(touching[best], [*scope, best])
            costs = costs.expand([*(self.sizes[one] for one in scope), self.sizes[best]])
            self.largest = max(self.largest, costs.numel())
            lowest, values = costs.min(-1)
            self._removed.append((best, scope, values))
            made = CostTable(scope, lowest)
            used = set(map(id, touching[best]))
            self._tables = [one for one in self._tables if id(one) not in used] + [made]
            for variable in scope:
                touching[variable] = [one for one in touching[variable] if id(one) not in used] + [
                    made
                ]
            left.remove(best)
            for variable in scope:
                if variable in prices:
                    prices[variable] = self._scope_size(variable, touching)
        total = add_tables(self._tables, keep)
        return total.expand([self.sizes[variable] for variable in keep])

    def recover(self, known: dict[Variable, int]) -> dict[Variable, int]:
        """Return the values of all variables, given those that `eliminate` kept."""
        found = dict(known)
        for variable, scope, values in reversed(self._removed):
            found[variable] = int(values[tuple(found[one] for one in scope)])
        return {
            variable: int(self._values[variable][value]) if variable in self._values else value
            for variable, value in found.items()
        }

    def _scope_size(self, variable: Variable, touching: dict[Variable, list[CostTable]]) -> int:
        scope = _neighbours(variable, touching[variable])
        return math.prod(self.sizes[one] for one in scope) * self.sizes[variable]

    def _shrink_scope(self, variable: Variable, touching: dict[Variable, list[CostTable]]) -> None:
        """Halve the values of the largest variables until a table has at most the maximum size."""
        while self._scope_size(variable, touching) > self._max_entries:
            scope = (*_neighbours(variable, touching[variable]), variable)
            free = [one for one in scope if one not in self._kept and self.sizes[one] >= 4]
            if not free:
                return
            widest = max(free, key=lambda one: (self.sizes[one], one))
            bound = torch.zeros(self.sizes[widest], dtype=torch.float64, device="cpu")
            for table in touching[widest]:
                place = table.variables.index(widest)
                bound = bound + table.costs.movedim(place, 0).reshape(len(bound), -1).amin(1)
            order = torch.sort(bound, stable=True).indices[: self.sizes[widest] // 2]
            self._narrow(widest, order.sort().values, touching)

    def _narrow(
        self, variable: Variable, values: Tensor, touching: dict[Variable, list[CostTable]]
    ) -> None:
        """Keep some values of a variable."""
        self.is_exact = False
        self._values[variable] = self._values.get(
            variable, torch.arange(self.sizes[variable], device="cpu")
        )[values]
        self.sizes[variable] = len(values)
        for table in list(touching[variable]):
            place = table.variables.index(variable)
            smaller = CostTable(table.variables, table.costs.index_select(place, values))
            self._tables = [smaller if one is table else one for one in self._tables]
            for other in table.variables:
                touching[other] = [smaller if one is table else one for one in touching[other]]
        self._removed = [
            (removed, scope, _take_values(choices, scope, variable, values))
            for removed, scope, choices in self._removed
        ]


def _take_values(
    choices: Tensor, scope: Sequence[Variable], variable: Variable, values: Tensor
) -> Tensor:
    """Return the choices of a removed variable for some values of a variable in their scope."""
    if variable not in scope:
        return choices
    return choices.index_select(scope.index(variable), values)


def _neighbours(variable: Variable, tables: Sequence[CostTable]) -> tuple[Variable, ...]:
    """Return the other variables of some tables, in order."""
    return tuple(sorted({one for table in tables for one in table.variables} - {variable}))
