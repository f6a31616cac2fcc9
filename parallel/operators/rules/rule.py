"""
Rules: in which ways an operator may be cut along one axis of the mesh.

A rule looks at an operator (its kind, arguments and shapes) and returns its `Split`s, each of which
says for every input and output what the ranks along the axis hold of it: a part along one dim,
everything, or a term of a sum. The rule of a matrix product of [I, K] and [K, J] has three, beside
the one in which all ranks compute everything:

    cut I   (0, WHOLE) -> 0          cut J   (WHOLE, 1) -> 1          cut K   (1, 0) -> PARTIAL

Along several axes the splits are chosen one by one and hold together. What a rank computes is the
same operator on its parts, unless the rule names a function that says otherwise (`Place`): global
shapes among the arguments, offsets.

`checker` proves every split of every rule against the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph, TensorRef

State = int | None
"""
What the ranks along an axis hold of a tensor: their part along a dim (its number), all (`WHOLE`),
or `PARTIAL`.
"""
REPLICATED: State = None
PARTIAL: State = -1
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class OpSplit:
    """
    One way to cut an operator along one axis.

    Attributes:
        ins, outs: the state of every input and output.
        divides: 0, or a number that the number of parts has to divide (all axes with this split
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
        """Whether some input is a term of a sum."""
        return PARTIAL in self.in_states

    def makes_partial(self) -> bool:
        """Whether the results have to be added up, though no input was a term of a sum."""
        return PARTIAL in self.out_states and PARTIAL not in self.in_states


@dataclass(frozen=True)
class OperatorView:
    """What a rule sees of an operator: the operator, and the shapes of its tensors."""

    operator: Operator
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]

    def get_arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that is no tensor, by place or by name."""
        return self.operator.get_arg(position, name, default)

    def input_index(self, position: int, name: str) -> int | None:
        """Return which of the inputs a tensor argument is; None where it isn't given."""
        value = self.operator.get_arg(position, name)
        if not isinstance(value, TensorRef):
            return None
        before = (
            [one for one in self.operator.args[:position] if one is not None]
            if position < len(self.operator.args)
            else []
        )
        at = sum(_count_refs(one) for one in before)
        if position >= len(self.operator.args):
            at = sum(_count_refs(one) for one in self.operator.args)
            for key, one in self.operator.kwargs.items():
                if key == name:
                    break
                at += _count_refs(one)
        return at


def _count_refs(value: Any) -> int:
    if isinstance(value, TensorRef):
        return 1
    if isinstance(value, (list, tuple)):
        return sum(_count_refs(one) for one in value)
    return 0


def view_operator(graph: OperatorGraph, operator: Operator) -> OperatorView:
    """Return what a rule sees of an operator."""
    ins = tuple(graph.shape_of(index) for index in operator.inputs)
    return OperatorView(operator, ins, tuple(graph.shape_of(index) for index in operator.outputs))


@dataclass(frozen=True)
class LocalContext:
    """
    One rank's share of an operator.

    Attributes:
        operator: the operator with its whole shapes.
        splits: the split along each axis that cuts it, and along no other.
        ins, outs: the whole shapes.
        in_boxes, out_boxes: this rank's (low, high) in every dim.
        index, size: this rank's place along each axis, and how many there are.
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
        """Return an argument by place or by name."""
        return self.operator.get_arg(position, name, default)

    def local_out_shape(self, which: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's part of an output."""
        return tuple(high - low for low, high in self.out_boxes[which])

    def local_in_shape(self, which: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's part of an input."""
        return tuple(high - low for low, high in self.in_boxes[which])

    def is_partial_sum(self) -> bool:
        """Whether this rank computes a term of a sum from whole or cut inputs."""
        return any(split.makes_partial() for split in self.splits.values())

    def is_first_term(self) -> bool:
        """
        Whether this rank is the first of those whose results are added up: it alone adds what is to
        count once.
        """
        return all(
            self.axis_index[axis] == 0
            for axis, split in self.splits.items()
            if split.makes_partial()
        )


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
    Register the rule of some kinds of operators, and what a rank computes where that isn't the same
    call.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for kind in kinds:
            RULES[kind] = function
            if local_call is not None:
                LOCAL_CALLS[kind] = local_call
        return function

    return register


def list_splits(view: OperatorView) -> list[OpSplit] | None:
    """Return the ways to cut an operator, the whole first; None where there is no rule."""
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
