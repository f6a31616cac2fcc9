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

from pdrun.parallel.operators.graph.graph import Graph, Operator, Ref

State = int | None
"""
What the ranks along an axis hold of a tensor: their part along a dim (its number), all (`WHOLE`),
or `PARTIAL`.
"""
WHOLE: State = None
PARTIAL: State = -1
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """
    One way to cut an operator along one axis.

    Attributes:
        ins, outs: the state of every input and output.
        divides: 0, or a number that the number of parts has to divide (all axes with this split
            together).
    """

    ins: tuple[State, ...]
    outs: tuple[State, ...]
    divides: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes everything."""
        return all(state is None for state in (*self.ins, *self.outs))

    def takes_partial(self) -> bool:
        """Whether some input is a term of a sum."""
        return PARTIAL in self.ins

    def makes_partial(self) -> bool:
        """Whether the results have to be added up, though no input was a term of a sum."""
        return PARTIAL in self.outs and PARTIAL not in self.ins


@dataclass(frozen=True)
class View:
    """What a rule sees of an operator: the operator, and the shapes of its tensors."""

    operator: Operator
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that is no tensor, by place or by name."""
        return self.operator.arg(place, name, default)

    def given(self, place: int, name: str) -> int | None:
        """Return which of the inputs a tensor argument is; None where it isn't given."""
        value = self.operator.arg(place, name)
        if not isinstance(value, Ref):
            return None
        before = (
            [one for one in self.operator.args[:place] if one is not None]
            if place < len(self.operator.args)
            else []
        )
        at = sum(_count(one) for one in before)
        if place >= len(self.operator.args):
            at = sum(_count(one) for one in self.operator.args)
            for key, one in self.operator.kwargs.items():
                if key == name:
                    break
                at += _count(one)
        return at


def _count(value: Any) -> int:
    if isinstance(value, Ref):
        return 1
    if isinstance(value, (list, tuple)):
        return sum(_count(one) for one in value)
    return 0


def view_of(graph: Graph, operator: Operator) -> View:
    """Return what a rule sees of an operator."""
    ins = tuple(graph.shape(index) for index in operator.inputs)
    return View(operator, ins, tuple(graph.shape(index) for index in operator.outputs))


@dataclass(frozen=True)
class Place:
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
    splits: dict[str, Split]
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    in_boxes: tuple[Box, ...]
    out_boxes: tuple[Box, ...]
    index: dict[str, int] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by place or by name."""
        return self.operator.arg(place, name, default)

    def out(self, which: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's part of an output."""
        return tuple(high - low for low, high in self.out_boxes[which])

    def into(self, which: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's part of an input."""
        return tuple(high - low for low, high in self.in_boxes[which])

    def adds_up(self) -> bool:
        """Whether this rank computes a term of a sum from whole or cut inputs."""
        return any(split.makes_partial() for split in self.splits.values())

    def is_first(self) -> bool:
        """
        Whether this rank is the first of those whose results are added up: it alone adds what is to
        count once.
        """
        return all(
            self.index[axis] == 0 for axis, split in self.splits.items() if split.makes_partial()
        )


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""
What a rank computes: a function of local tensors, and its arguments with references in place of
tensors.
"""
RuleFunction = Callable[[View], list[Split]]
RunFunction = Callable[[Place], Call]

RULES: dict[str, RuleFunction] = {}
RUNS: dict[str, RunFunction] = {}


def rule(*kinds: str, run: RunFunction | None = None) -> Callable[[RuleFunction], RuleFunction]:
    """
    Register the rule of some kinds of operators, and what a rank computes where that isn't the same
    call.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for kind in kinds:
            RULES[kind] = function
            if run is not None:
                RUNS[kind] = run
        return function

    return register


def splits_of(view: View) -> list[Split] | None:
    """Return the ways to cut an operator, the whole first; None where there is no rule."""
    function = RULES.get(view.operator.kind)
    if function is None:
        return None
    found = [Split((WHOLE,) * len(view.ins), (WHOLE,) * len(view.outs))]
    for split in function(view):
        if split not in found:
            found.append(split)
    return found


def call_of(place: Place) -> Call:
    """Return what a rank computes."""
    run = RUNS.get(place.operator.kind)
    if run is not None:
        return run(place)
    return place.operator.target, place.operator.args, place.operator.kwargs
