"""
Propagation: operators without an entry follow those with one.

Along one axis after the other, breadth first from the configured operators, successors before
predecessors. Each operator takes the split that, in this order,

1. needs no redistribution towards its neighbours that have a split
2. communicates least
3. communicates least for gradients of weights
4. is first in the rule

If redistribution is unavoidable, the split with least redistribution is taken, a sharded one before
the replicated one. Operators that are never reached compute everything on every rank, on the rows
of their data rank. Nothing depends on hashes: every rank finds the same plan.

The criteria and their order are those of MindSpore's sharding propagation.
"""

from __future__ import annotations

from collections import deque

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.interleaving.splits import find_interleaved
from pdrun.parallel.operators.plan import (
    OperatorPlan,
    OperatorSharding,
    UserLayouts,
    layout_of,
    states_of,
)
from pdrun.parallel.operators.rules.rule import (
    PARTIAL,
    REPLICATED,
    OpSplit,
    State,
    list_splits,
    view_operator,
)


def propagate_layouts(graph: OperatorGraph, grid: Grid, user_layouts: UserLayouts) -> OperatorPlan:
    """
    Return the plan for a graph and the user's layouts.

    Args:
        grid: the tensor axes.

    An operator without a rule is computed in full on every rank; the plan's notes list them.
    """
    return _Propagation(graph, grid, user_layouts).make_plan()


CostKey = tuple[int, float, float, int, int]


class _Propagation:
    """Propagation over all axes of a grid."""

    def __init__(self, graph: OperatorGraph, grid: Grid, user_layouts: UserLayouts) -> None:
        self.graph = graph
        self.grid = grid
        self.user_layouts = user_layouts
        self.options: list[list[OpSplit]] = []
        self.without_rule: list[int] = []
        for position, operator in enumerate(graph.operators):
            view = view_operator(graph, operator)
            options = list_splits(view)
            if options is None:
                self.without_rule.append(position)
            if options is None or position in user_layouts.replicated:
                options = [
                    OpSplit(
                        (REPLICATED,) * len(view.in_shapes), (REPLICATED,) * len(view.out_shapes)
                    )
                ]
            self.options.append(options)
        self.users = graph.tensor_users()
        self.producers = graph.tensor_producers()
        self.chosen: list[dict[str, OpSplit]] = [{} for _ in graph.operators]
        self.weight_states: dict[int, dict[str, State]] = {}
        self.out_layouts = {
            graph.operators[position].outputs[0]: layout
            for position, layout in user_layouts.results.items()
        }
        self.out_states = {index: states_of(layout) for index, layout in self.out_layouts.items()}
        for index, layout in user_layouts.weights.items():
            self.weight_states[index] = {axis: states_of(layout).get(axis) for axis in grid.names}

    def make_plan(self) -> OperatorPlan:
        """Choose the splits along each axis and return the plan."""
        for position, sharding in self.user_layouts.shardings.items():
            self.chosen[position] = dict(sharding.splits)
        for axis in self.grid.names:
            if self.grid.degree(axis) > 1:
                _AxisPropagation(self, axis).choose_splits()
        shardings: list[OperatorSharding] = []
        for position in range(len(self.graph.operators)):
            shardings.append(self._make_sharding(position, shardings))
        plan = OperatorPlan(self.graph, self.grid, shardings, out_layouts=self.out_layouts)
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.kind == "param":
                plan.weights[index] = self._weight_layout(index, plan)
        find_grad_sums(plan, self.users)
        plan.interleaved = find_interleaved(plan, self.user_layouts)
        if self.grid.size > 1:
            plan.notes += [
                f"no rule for {operator.kind}, so every rank computes it in full:"
                f" {operator.display_name}{f' at {operator.source}' if operator.source else ''}"
                for operator in (self.graph.operators[position] for position in self.without_rule)
            ]
        return plan

    def _make_sharding(self, position: int, before: list[OperatorSharding]) -> OperatorSharding:
        """
        Return an operator's sharding. Axes on one dim are nested as the user gave them, or as in
        its first input.
        """
        given = self.user_layouts.shardings.get(position)
        splits = {
            axis: self.chosen[position][axis]
            for axis in self.grid.names
            if axis in self.chosen[position]
        }
        if given is not None and given.axis_order:
            return OperatorSharding(splits, given.axis_order, given.fixed_axes)
        producers = [
            self.producers[index]
            for index in self.graph.operators[position].inputs
            if index in self.producers
        ]
        if producers:
            return OperatorSharding(splits, before[producers[0]].axis_order)
        return OperatorSharding(splits, self.grid.names)

    def _weight_layout(self, index: int, plan: OperatorPlan) -> L:
        if index in self.user_layouts.weights:
            return self.user_layouts.weights[index]
        states = self.weight_states.get(index, {})
        order = self.grid.names
        if self.users[index]:
            order = plan.shardings[self.users[index][0]].axis_order
        return layout_of(states, order, len(self.graph.shape_of(index)))


class _AxisPropagation:
    """Propagation along one axis."""

    def __init__(self, parent: _Propagation, axis: str) -> None:
        self.parent = parent
        self.axis = axis
        self.degree = parent.grid.degree(axis)
        self.graph = parent.graph
        self.options = parent.options
        self.decided: dict[int, OpSplit] = {}
        self.summed_inputs: set[int] = set()
        for position, sharding in parent.user_layouts.shardings.items():
            if axis in sharding.fixed_axes:
                self.decided[position] = sharding.splits.get(axis, self.options[position][0])

    def choose_splits(self) -> None:
        """Choose a split for every operator that can be reached."""
        queue = deque(sorted(self.decided))
        for position in queue:
            self._record_choice(position)
        while queue:
            for position in self._find_neighbours(queue.popleft()):
                if position not in self.decided:
                    self.decided[position] = self._best_split(position)
                    self._record_choice(position)
                    queue.append(position)
        for position, split in self.decided.items():
            if not split.is_replicated:
                self.parent.chosen[position][self.axis] = split

    def _record_choice(self, position: int) -> None:
        """Record what a choice means for weights, and for inputs whose gradients are summed."""
        split = self.decided[position]
        for input_position, index in enumerate(self.graph.operators[position].inputs):
            if self.graph.tensors[index].kind == "param":
                self.parent.weight_states.setdefault(index, {}).setdefault(
                    self.axis, _weight_state(split.in_states[input_position])
                )
            if split.in_states[input_position] is REPLICATED and not split.is_replicated:
                self.summed_inputs.add(index)

    def _find_neighbours(self, position: int) -> list[int]:
        """
        Return the operators after one, those before it, and those that share a weight with it.
        """
        operator = self.graph.operators[position]
        after = [user for index in operator.outputs for user in self.parent.users[index]]
        before = [
            self.parent.producers[index]
            for index in operator.inputs
            if index in self.parent.producers
        ]
        shared = [
            user
            for index in operator.inputs
            if self.graph.tensors[index].kind == "param"
            for user in self.parent.users[index]
        ]
        return list(dict.fromkeys((*sorted(after), *before, *shared)))

    def _best_split(self, position: int) -> OpSplit:
        keys = [
            (self._cost_key(position, split, option), option)
            for option, split in enumerate(self.options[position])
        ]
        allowed = [(key, option) for key, option in keys if key is not None]
        return self.options[position][min(allowed)[1]]

    # ---- costs, in bytes of full tensors ------------------------------------

    def _cost_key(self, position: int, split: OpSplit, option: int) -> CostKey | None:
        """
        Return the cost of a split, in the order of the criteria; None if the split cannot be used.
        """
        operator = self.graph.operators[position]
        if split.takes_partial() or not self._can_use(position, split):
            return None
        moved = summed = grads = 0.0
        for input_position, index in enumerate(operator.inputs):
            tensor = self.graph.tensors[index]
            wanted = split.in_states[input_position]
            state_now, is_decided = self._tensor_state(index)
            sums_grad = wanted is REPLICATED and not split.is_replicated and tensor.requires_grad
            if tensor.kind == "param":
                if is_decided and state_now != wanted:
                    moved += self._redistribution_bytes(state_now, wanted, tensor.nbytes, True)
                grads += sums_grad * tensor.nbytes
            elif is_decided:
                moved += self._redistribution_bytes(
                    state_now, wanted, tensor.nbytes, tensor.requires_grad
                )
            if sums_grad and tensor.kind != "param" and index not in self.summed_inputs:
                summed += 2 * tensor.nbytes * (self.degree - 1) / self.degree
        for output_position, index in enumerate(operator.outputs):
            tensor = self.graph.tensors[index]
            state = split.out_states[output_position]
            if state == PARTIAL:
                summed += 2 * tensor.nbytes * (self.degree - 1) / self.degree
                state = REPLICATED
            if index in self.parent.out_layouts:
                state = self.parent.out_states[index].get(self.axis)
            for user in self.parent.users[index]:
                if user in self.decided:
                    for input_position, other in enumerate(self.graph.operators[user].inputs):
                        if other == index:
                            wanted = self.decided[user].in_states[input_position]
                            moved += self._redistribution_bytes(
                                state, wanted, tensor.nbytes, tensor.requires_grad
                            )
        return (
            int(moved > 0),
            moved + summed,
            grads,
            int(moved > 0 and split.is_replicated),
            option,
        )

    def _can_use(self, position: int, split: OpSplit) -> bool:
        """
        Return whether a split can be used on this axis, together with those on the axes before.
        """
        if split.is_replicated:
            return True
        same_axes = [
            axis
            for axis, other in self.parent.chosen[position].items()
            if other == split and axis != self.axis
        ]
        if split.must_divide and split.must_divide % (
            self.parent.grid.group_size(tuple(same_axes)) * self.degree
        ):
            return False
        return all(
            state is None or state == PARTIAL or self.graph.shape_of(index)[state] >= self.degree
            for states, tensors in (
                (split.in_states, self.graph.operators[position].inputs),
                (split.out_states, self.graph.operators[position].outputs),
            )
            for state, index in zip(states, tensors, strict=True)
        )

    def _tensor_state(self, index: int) -> tuple[State, bool]:
        """Return the state of a tensor along the axis, and whether it is decided."""
        if index in self.parent.out_layouts:
            return self.parent.out_states[index].get(self.axis), True
        if index in self.parent.producers:
            position = self.parent.producers[index]
            if position not in self.decided:
                return REPLICATED, False
            return self.decided[position].out_states[
                self.graph.operators[position].outputs.index(index)
            ], True
        if self.graph.tensors[index].kind == "param":
            states = self.parent.weight_states.get(index, {})
            return states.get(self.axis), self.axis in states
        return REPLICATED, True

    def _redistribution_bytes(self, have: State, wanted: State, nbytes: int, grad: bool) -> float:
        """
        Return the bytes of a redistribution, forward and backward.

        The all-reduce of a partial sum counts for the operator that makes it.
        """
        gathered = nbytes * (self.degree - 1) / self.degree
        if have == wanted or (have == PARTIAL and wanted is REPLICATED):
            return 0.0
        if wanted == PARTIAL:
            return float("inf")
        if have is REPLICATED:
            # a slice costs nothing, its backward pass is an all-gather
            return grad * gathered
        if have == PARTIAL or wanted is REPLICATED:
            return gathered
        return 2 * gathered / self.degree


def _weight_state(state: State) -> State:
    """Return the state in which a weight is stored: never a partial sum."""
    if state == PARTIAL:
        return REPLICATED
    return state


def find_grad_sums(plan: OperatorPlan, users: list[list[int]]) -> None:
    """
    Record the axes over which gradients of weights are sums: some user computes another part along
    them.

    Users that compute the same on all ranks contribute a share (`redistribute.SCALE_GRAD`).
    """
    for index, layout in plan.weights.items():
        axes = []
        for axis in plan.grid.names:
            uses = [
                plan.shardings[position].sums_input_grad(axis, input_position)
                for position in users[index]
                for input_position, other in enumerate(plan.graph.operators[position].inputs)
                if other == index
            ]
            if any(uses) and axis not in layout.axes and plan.graph.tensors[index].requires_grad:
                axes.append(axis)
        plan.grad_sums[index] = tuple(axes)
