"""
Propagation: operators that nobody configured follow those that were.

Along one axis after the other, breadth first from the configured operators, successors before
predecessors. The next operator takes, of all ways that its rule allows, one that needs no
redistribution towards its neighbours that are already cut; of these the one that communicates
least, then the one whose weights' gradients do, then the first of the rule. Where redistribution
can't be avoided, the way with the least of it is taken, a cut one before the whole. Operators that
are never reached compute everything on every rank, on the rows of their data rank. Nothing here
depends on hashes: every rank finds the same plan.

The order of the criteria is that of MindSpore's sharding propagation.
"""

from __future__ import annotations

from collections import deque

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.choose_splits import missing
from pdrun.parallel.operators.graph.graph import Graph
from pdrun.parallel.operators.plan import Choice, Plan, layout_of, states_of
from pdrun.parallel.operators.rules.rule import PARTIAL, WHOLE, Split, State, splits_of, view_of
from pdrun.parallel.operators.strategy import Wishes


def propagate(graph: Graph, grid: Grid, wishes: Wishes) -> Plan:
    """
    Return the plan for a graph under what the user configured.

    Args:
        grid: the tensor axes.

    Raises:
        UsageError: an operator has no rule, and isn't to be replicated.
    """
    return _Propagation(graph, grid, wishes).run()


Key = tuple[int, float, float, int, int]


class _Propagation:
    def __init__(self, graph: Graph, grid: Grid, wishes: Wishes) -> None:
        self.graph = graph
        self.grid = grid
        self.wishes = wishes
        self.options: list[list[Split]] = []
        for place, operator in enumerate(graph.operators):
            view = view_of(graph, operator)
            options = splits_of(view)
            if place in wishes.whole:
                options = [Split((WHOLE,) * len(view.ins), (WHOLE,) * len(view.outs))]
            if options is None:
                raise missing(operator)
            self.options.append(options)
        self.users = graph.users()
        self.makers = graph.makers()
        self.chosen: list[dict[str, Split]] = [{} for _ in graph.operators]
        self.weights: dict[int, dict[str, State]] = {}
        self.placed = {
            graph.operators[place].outputs[0]: layout for place, layout in wishes.outs.items()
        }
        self.placed_states = {index: states_of(layout) for index, layout in self.placed.items()}
        for index, layout in wishes.weights.items():
            self.weights[index] = {axis: states_of(layout).get(axis) for axis in grid.names}

    def run(self) -> Plan:
        """Return the plan."""
        for place, choice in self.wishes.choices.items():
            self.chosen[place] = dict(choice.splits)
        for axis in self.grid.names:
            if self.grid.degree(axis) > 1:
                _Axis(self, axis).run()
        choices: list[Choice] = []
        for place in range(len(self.graph.operators)):
            choices.append(self._choice(place, choices))
        plan = Plan(self.graph, self.grid, choices, placed=self.placed)
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.kind == "param":
                plan.weights[index] = self._stored(index, plan)
        sums_of_weights(plan, self.users)
        return plan

    def _choice(self, place: int, before: list[Choice]) -> Choice:
        """
        Return an operator's choice; axes that cut one dim are nested as the user said, or as in its
        first input.
        """
        given = self.wishes.choices.get(place)
        splits = {
            axis: self.chosen[place][axis] for axis in self.grid.names if axis in self.chosen[place]
        }
        if given is not None and given.order:
            return Choice(splits, given.order, given.fixed)
        makers = [
            self.makers[index]
            for index in self.graph.operators[place].inputs
            if index in self.makers
        ]
        return Choice(splits, before[makers[0]].order if makers else self.grid.names)

    def _stored(self, index: int, plan: Plan) -> L:
        if index in self.wishes.weights:
            return self.wishes.weights[index]
        states = self.weights.get(index, {})
        order = self.grid.names
        if self.users[index]:
            order = plan.choices[self.users[index][0]].order
        return layout_of(states, order, len(self.graph.shape(index)))


class _Axis:
    """Propagation along one axis."""

    def __init__(self, whole: _Propagation, axis: str) -> None:
        self.whole = whole
        self.axis = axis
        self.n = whole.grid.degree(axis)
        self.graph = whole.graph
        self.options = whole.options
        self.known: dict[int, Split] = {}
        self.fanned: set[int] = set()
        for place, choice in whole.wishes.choices.items():
            if axis in choice.fixed:
                self.known[place] = choice.splits.get(axis, self.options[place][0])

    def run(self) -> None:
        """Choose a split for every operator that can be reached."""
        queue = deque(sorted(self.known))
        for place in queue:
            self._settle(place)
        while queue:
            for place in self._neighbours(queue.popleft()):
                if place not in self.known:
                    self.known[place] = self._best(place)
                    self._settle(place)
                    queue.append(place)
        for place, split in self.known.items():
            if not split.is_whole:
                self.whole.chosen[place][self.axis] = split

    def _settle(self, place: int) -> None:
        """Note what a choice means for weights, and for inputs that are used for other parts."""
        split = self.known[place]
        for at, index in enumerate(self.graph.operators[place].inputs):
            if self.graph.tensors[index].kind == "param":
                self.whole.weights.setdefault(index, {}).setdefault(
                    self.axis, _stored(split.ins[at])
                )
            if split.ins[at] is WHOLE and not split.is_whole:
                self.fanned.add(index)

    def _neighbours(self, place: int) -> list[int]:
        """
        Return the operators after one, those before it, and those that share a weight with it.
        """
        operator = self.graph.operators[place]
        after = [user for index in operator.outputs for user in self.whole.users[index]]
        before = [
            self.whole.makers[index] for index in operator.inputs if index in self.whole.makers
        ]
        shared = [
            user
            for index in operator.inputs
            if self.graph.tensors[index].kind == "param"
            for user in self.whole.users[index]
        ]
        return list(dict.fromkeys((*sorted(after), *before, *shared)))

    def _best(self, place: int) -> Split:
        keys = [(self._key(place, split, at), at) for at, split in enumerate(self.options[place])]
        allowed = [(key, at) for key, at in keys if key is not None]
        return self.options[place][min(allowed)[1]]

    # ---- costs, in bytes of whole tensors -----------------------------------

    def _key(self, place: int, split: Split, at: int) -> Key | None:
        """Return what a split costs, in the order of the criteria; None where it can't be."""
        operator = self.graph.operators[place]
        if split.takes_partial() or not self._fits(place, split):
            return None
        moved = own = grads = 0.0
        for input_at, index in enumerate(operator.inputs):
            tensor = self.graph.tensors[index]
            wanted = split.ins[input_at]
            have, known = self._state(index)
            fans = wanted is WHOLE and not split.is_whole and tensor.grad
            if tensor.kind == "param":
                if known and have != wanted:
                    moved += self._cost(have, wanted, tensor.nbytes, True)
                grads += tensor.nbytes if fans else 0
            elif known:
                moved += self._cost(have, wanted, tensor.nbytes, tensor.grad)
            if fans and tensor.kind != "param" and index not in self.fanned:
                own += 2 * tensor.nbytes * (self.n - 1) / self.n
        for output_at, index in enumerate(operator.outputs):
            tensor = self.graph.tensors[index]
            state = split.outs[output_at]
            if state == PARTIAL:
                own += 2 * tensor.nbytes * (self.n - 1) / self.n
                state = WHOLE
            if index in self.whole.placed:
                state = self.whole.placed_states[index].get(self.axis)
            for user in self.whole.users[index]:
                if user in self.known:
                    for input_at, other in enumerate(self.graph.operators[user].inputs):
                        if other == index:
                            wanted = self.known[user].ins[input_at]
                            moved += self._cost(state, wanted, tensor.nbytes, tensor.grad)
        return (int(moved > 0), moved + own, grads, int(moved > 0 and split.is_whole), at)

    def _fits(self, place: int, split: Split) -> bool:
        """
        Whether a split may be used along this axis too, beside those along the axes before it.
        """
        if split.is_whole:
            return True
        others = [
            axis
            for axis, other in self.whole.chosen[place].items()
            if other == split and axis != self.axis
        ]
        if split.divides and split.divides % (self.whole.grid.group_size(tuple(others)) * self.n):
            return False
        return all(
            state is None or state == PARTIAL or self.graph.shape(index)[state] >= self.n
            for states, tensors in (
                (split.ins, self.graph.operators[place].inputs),
                (split.outs, self.graph.operators[place].outputs),
            )
            for state, index in zip(states, tensors, strict=True)
        )

    def _state(self, index: int) -> tuple[State, bool]:
        """Return how a tensor lies along the axis, and whether that is settled."""
        if index in self.whole.placed:
            return self.whole.placed_states[index].get(self.axis), True
        if index in self.whole.makers:
            place = self.whole.makers[index]
            if place not in self.known:
                return WHOLE, False
            return self.known[place].outs[self.graph.operators[place].outputs.index(index)], True
        if self.graph.tensors[index].kind == "param":
            states = self.whole.weights.get(index, {})
            return states.get(self.axis), self.axis in states
        return WHOLE, True

    def _cost(self, have: State, wanted: State, nbytes: int, grad: bool) -> float:
        """Return the bytes of a redistribution, forward and backward; adding up is the maker's."""
        part = nbytes * (self.n - 1) / self.n
        if have == wanted or (have == PARTIAL and wanted is WHOLE):
            return 0.0
        if wanted == PARTIAL:
            return float("inf")
        if have is WHOLE:
            return part if grad else 0.0
        if have == PARTIAL:
            return part
        return part if wanted is WHOLE else 2 * part / self.n


def _stored(state: State) -> State:
    return WHOLE if state == PARTIAL else state


def sums_of_weights(plan: Plan, users: list[list[int]]) -> None:
    """
    Note the axes over which gradients of weights are sums: those along which some user computes
    another part.

    Users that compute the same on all ranks there contribute a share (`convert.SHARE`).
    """
    for index, layout in plan.weights.items():
        axes = []
        for axis in plan.grid.names:
            uses = [
                plan.choices[place].fans(axis, at)
                for place in users[index]
                for at, other in enumerate(plan.graph.operators[place].inputs)
                if other == index
            ]
            if any(uses) and axis not in layout.axes and plan.graph.tensors[index].grad:
                axes.append(axis)
        plan.sums[index] = tuple(axes)
