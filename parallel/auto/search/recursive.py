"""
The recursive search: axis after axis, each operator in turn.

In the round of an axis every operator takes the split that is cheapest towards the neighbours that
have chosen in this round; the last operator chooses first. Axes are taken from the outermost links
inwards. It is fast for graphs of any size, and not exact.
"""

from __future__ import annotations

import math

from pdrun.parallel.auto.prices import price_plan
from pdrun.parallel.auto.search.candidates import Candidate
from pdrun.parallel.auto.search.exact import PlanSearchResult
from pdrun.parallel.auto.search.problem import RESULT, Prefix, SearchProblem
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.rules.rule import OpSplit


def search_recursive(problem: SearchProblem) -> PlanSearchResult:
    """Return the plan of a round per axis."""
    chosen: list[dict[str, OpSplit]] = [{} for _ in problem.graph.operators]
    for axis in problem.candidates.axes:
        _AxisRound(problem, axis, chosen).choose_splits()
    choices = []
    for position, splits in enumerate(chosen):
        place = _find_candidate(problem, position, splits)
        assert place is not None
        choices.append(place)
    plan = problem.make_plan(choices)
    return PlanSearchResult(plan, price_plan(problem.prices, plan).total, is_exact=False)


def _find_candidate(
    problem: SearchProblem, position: int, splits: dict[str, OpSplit]
) -> int | None:
    for place, candidate in enumerate(problem.candidates.of(position)):
        if candidate.sharding.splits == splits:
            return place
    return None


class _AxisRound:
    """One round: the split of every operator along one axis."""

    def __init__(self, problem: SearchProblem, axis: str, chosen: list[dict[str, OpSplit]]) -> None:
        self.problem = problem
        self.axis = axis
        self.chosen = chosen
        self.decided: dict[int, Candidate] = {}

    def choose_splits(self) -> None:
        """Choose the split of every operator, the last one first."""
        for position in reversed(range(len(self.chosen))):
            best: tuple[float, Candidate] | None = None
            for candidate in self._list_candidates(position):
                seconds = self._price(position, candidate)
                if best is None or seconds < best[0] * (1 - 1e-12):
                    best = seconds, candidate
            assert best is not None
            self.decided[position] = best[1]
            self.chosen[position] = dict(best[1].sharding.splits)

    def _list_candidates(self, position: int) -> list[Candidate]:
        """
        Return the candidates that keep the splits of earlier rounds. Those of later axes are not
        split yet, unless the user fixed them.
        """
        given = self.problem.user.shardings.get(position)
        fixed = given.fixed_axes if given is not None else ()
        later = self.problem.candidates.axes
        later = later[later.index(self.axis) + 1 :]
        before = self.chosen[position]
        return [
            candidate
            for candidate in self.problem.candidates.of(position)
            if all(
                candidate.sharding.splits.get(axis) == before.get(axis)
                for axis in self.problem.candidates.axes
                if axis != self.axis and axis not in later
            )
            and not any(axis in candidate.sharding.splits for axis in later if axis not in fixed)
        ]

    def _price(self, position: int, candidate: Candidate) -> float:
        """Return the price of a candidate: its computation, weights, and moves to neighbours."""
        problem = self.problem
        operator = problem.graph.operators[position]
        seconds = sum(problem.prices.operator_seconds(position, candidate.sharding))
        for slot, index in enumerate(operator.inputs):
            axes = candidate.grad_sums[slot]
            target = candidate.in_layouts[slot]
            if problem.graph.tensors[index].kind == "param":
                if target.sums:
                    return math.inf
                seconds += problem.prices.weight_seconds(index, target, axes)
                continue
            seconds += self._input_seconds(index, target, axes)
        for slot, index in enumerate(operator.outputs):
            seconds += self._output_seconds(index, candidate.out_layouts[slot])
        return seconds

    def _input_seconds(self, index: int, target: L, axes: tuple[str, ...]) -> float:
        maker = self.problem.producers.get(index)
        if maker is not None and maker not in self.decided:
            # its maker decides later: what the gradient's sum costs is known
            source = target.whole()
            if target.sums:
                return 0.0
        elif maker is not None:
            slot = self.problem.graph.operators[maker].outputs.index(index)
            source = self.decided[maker].out_layouts[slot]
        else:
            source = L(*[None] * len(target.dims))
        path = self.problem.prices.path_prices(index, source, target, axes)
        return math.inf if path is None else sum(price for _, price in path)

    def _output_seconds(self, index: int, source: L) -> float:
        moves: dict[Prefix, float] = {}
        decided = False
        for user in self.problem.users[index]:
            needs: list[tuple[L, tuple[str, ...]]] = []
            if user.position == RESULT:
                needs = [(self.problem.result_layout(index, source), ())]
            elif user.position in self.decided:
                candidate = self.decided[user.position]
                needs = [
                    (candidate.in_layouts[slot], candidate.grad_sums[slot]) for slot in user.slots
                ]
            for target, axes in needs:
                decided = True
                path = self.problem.prices.path_prices(index, source, target, axes)
                if path is None:
                    return math.inf
                moves.update(path)
        if not decided and source.sums:
            path = self.problem.prices.path_prices(index, source, source.whole())
            moves.update(path or ())
        return sum(moves.values())
