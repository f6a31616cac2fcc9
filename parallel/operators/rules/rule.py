"""
Rules: the ways to split an operator along one axis of the mesh.

A rule takes an operator (its kind, arguments and shapes) and returns its splits. A split has a
state for every input and output: what the ranks along the axis have of the tensor. The rule of a
matrix product of [I, K] and [K, J] has three splits, in addition to the one in which all ranks
compute everything:

    shard I   (0, REPLICATED) -> 0
    shard J   (REPLICATED, 1) -> 1
    shard K   (1, 0) -> PARTIAL

On several axes, the splits of the axes are chosen one by one and combine. A rank computes the same
operator on its shards, unless the rule registers another call (`LocalContext`): global shapes among
the arguments, offsets.

`rule_checker` proves every split of every rule against the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph, TensorRef

State = int | None
"""
The state of a tensor along an axis: sharded on a dim (its number), `REPLICATED` (each rank has the
full tensor), or `PARTIAL` (each rank has a term of the sum).
"""
REPLICATED: State = None
PARTIAL: State = -1
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class OpSplit:
    """
    One way to split an operator along one axis.

    Attributes:
        in_states, out_states: the state of every input and output.
        must_divide: 0, or a number that the number of shards must divide (all axes with this split
            together).
    """

    in_states: tuple[State, ...]
    out_states: tuple[State, ...]
    must_divide: int = 0

    @property
    def is_replicated(self) -> bool:
        """Whether every rank computes everything."""
        return all(state is None for state in (*self.in_states, *self.out_states))

    def takes_partial(self) -> bool:
        """Return whether some input is a partial sum."""
        return PARTIAL in self.in_states

    def makes_partial(self) -> bool:
        """Return whether the results are partial sums although no input is."""
        return PARTIAL in self.out_states and PARTIAL not in self.in_states


@dataclass(frozen=True)
class OperatorView:
    """What a rule sees of an operator: the operator, and the shapes of its tensors."""

    operator: Operator
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]

    def get_arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that is not a tensor, by position or by name."""
        return self.operator.get_arg(position, name, default)

    def input_index(self, position: int, name: str) -> int | None:
        """Return the index of a tensor argument among the inputs; None if it is not given."""
        value = self.operator.get_arg(position, name)
        if not isinstance(value, TensorRef):
            return None
        if position < len(self.operator.args):
            return sum(_count_refs(before) for before in self.operator.args[:position])
        index = sum(_count_refs(before) for before in self.operator.args)
        for key, before in self.operator.kwargs.items():
            if key == name:
                break
            index += _count_refs(before)
        return index


def _count_refs(value: Any) -> int:
    if isinstance(value, TensorRef):
        return 1
    if isinstance(value, (list, tuple)):
        return sum(_count_refs(item) for item in value)
    return 0


def view_operator(graph: OperatorGraph, operator: Operator) -> OperatorView:
    """Return what a rule sees of an operator."""
    ins = tuple(graph.shape_of(index) for index in operator.inputs)
    return OperatorView(operator, ins, tuple(graph.shape_of(index) for index in operator.outputs))


@dataclass(frozen=True)
class LocalContext:
    """
    One rank's part of an operator.

    Attributes:
        operator: the operator with its full shapes.
        splits: the split along each axis that splits it, and along no other.
        in_shapes, out_shapes: the full shapes.
        in_boxes, out_boxes: this rank's (low, high) in every dim.
        axis_index, axis_size: this rank's index along each axis, and the size of the axis.
    """

    operator: Operator
    splits: dict[str, OpSplit]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_boxes: tuple[Box, ...]
    out_boxes: tuple[Box, ...]
    axis_index: dict[str, int] = field(default_factory=dict)
    axis_size: dict[str, int] = field(default_factory=dict)

    def get_arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or by name."""
        return self.operator.get_arg(position, name, default)

    def local_out_shape(self, which: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's shard of an output."""
        return tuple(high - low for low, high in self.out_boxes[which])

    def local_in_shape(self, which: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's shard of an input."""
        return tuple(high - low for low, high in self.in_boxes[which])

    def is_partial_sum(self) -> bool:
        """Return whether this rank computes a term of a sum from inputs that are not partial."""
        return any(split.makes_partial() for split in self.splits.values())

    def is_first_term(self) -> bool:
        """
        Return whether this rank computes the first term of the sum.

        Only that rank adds what must count once, such as a bias.
        """
        return all(
            self.axis_index[axis] == 0
            for axis, split in self.splits.items()
            if split.makes_partial()
        )


def full_context(graph: OperatorGraph, operator: Operator) -> LocalContext:
    """Return the context of a rank that computes an operator in full."""
    view = view_operator(graph, operator)
    in_boxes, out_boxes = (
        tuple(tuple((0, size) for size in shape) for shape in shapes)
        for shapes in (view.in_shapes, view.out_shapes)
    )
    return LocalContext(operator, {}, view.in_shapes, view.out_shapes, in_boxes, out_boxes)


LocalCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""
What a rank computes: a function of local tensors, and its arguments with references in place of
tensors.
"""
RuleFunction = Callable[[OperatorView], list[OpSplit]]
LocalCallFunction = Callable[[LocalContext], LocalCall]

RULES: dict[str, RuleFunction] = {}
LOCAL_CALLS: dict[str, LocalCallFunction] = {}


def register_rule(
    *kinds: str, local_call: LocalCallFunction | None = None
) -> Callable[[RuleFunction], RuleFunction]:
    """
    Register the rule of some kinds of operators.

    Args:
        local_call: what a rank computes, if it is not the same call.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for kind in kinds:
            RULES[kind] = function
            if local_call is not None:
                LOCAL_CALLS[kind] = local_call
        return function

    return register


def list_splits(view: OperatorView) -> list[OpSplit] | None:
    """Return the ways to split an operator, the replicated one first; None without a rule."""
    function = RULES.get(view.operator.kind)
    if function is None:
        return None
    found = [OpSplit((REPLICATED,) * len(view.in_shapes), (REPLICATED,) * len(view.out_shapes))]
    for split in function(view):
        if split not in found:
            found.append(split)
    return found


def make_local_call(context: LocalContext) -> LocalCall:
    """Return what a rank computes."""
    run = LOCAL_CALLS.get(context.operator.kind)
    if run is not None:
        return run(context)
    return context.operator.target, context.operator.args, context.operator.kwargs
