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

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
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


# ---- how rules are written --------------------------------------------------

Labels = Sequence[Hashable | None]
"""
A name for each dim of a tensor: dims of equal name are cut together; None for one that has to be
whole.
"""


def by_labels(
    view: View,
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    divides: dict[Hashable, int] | None = None,
    lost: Iterable[Hashable] = (),
) -> list[Split]:
    """
    Return a split for each name of a dim.

    Args:
        ins, outs: the names of the dims of every input and output.
        divides: see `Split`.
        lost: names that may be missing in an output, which is partial then (contracted or summed
            dims). A name that
            an output lacks and that isn't here makes the output whole, which is right only for what doesn't depend on
            the cut.
    """
    sums = set(lost)
    found = []
    names = dict.fromkeys(name for labels in (*ins, *outs) for name in labels if name is not None)
    for name in names:
        if max(_size(name, ins, view.ins), _size(name, outs, view.outs)) <= 1:
            continue
        missing: State = PARTIAL if name in sums else WHOLE
        found.append(
            Split(
                tuple(_state(name, labels, WHOLE) for labels in ins),
                tuple(_state(name, labels, missing) for labels in outs),
                (divides or {}).get(name, 0),
            )
        )
    return found


def _state(name: Hashable, labels: Labels, otherwise: State) -> State:
    return list(labels).index(name) if name in labels else otherwise


def _size(name: Hashable, labels: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> int:
    sizes = [
        shape[list(some).index(name)]
        for some, shape in zip(labels, shapes, strict=True)
        if name in some
    ]
    return max(sizes, default=0)


def linear(view: View, *sets: Iterable[int]) -> list[Split]:
    """
    Return the splits in which the inputs of one set are terms of sums, others are whole, and
    results are terms.
    """
    found = []
    for some in sets:
        chosen = set(some)
        ins = tuple(PARTIAL if place in chosen else WHOLE for place in range(len(view.ins)))
        found.append(Split(ins, (PARTIAL,) * len(view.outs)))
    return found


def aligned(
    shape: tuple[int, ...], out: tuple[int, ...], names: Sequence[Hashable] | None = None
) -> list[Hashable | None]:
    """
    Return the names of the dims of an input that is broadcast to ``out``; None where it has one
    element for many.
    """
    names = range(len(out)) if names is None else names
    skip = len(out) - len(shape)
    return [
        names[skip + dim] if size == out[skip + dim] else None for dim, size in enumerate(shape)
    ]


def dims(value: Any, rank: int) -> tuple[int, ...]:
    """Return dims as numbers from 0; None means all."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(rank))
    some = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(dim % rank if rank else 0 for dim in some)


def numel(shape: Iterable[int]) -> int:
    """Return the number of elements."""
    return prod(shape)


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """
    Return which dims of a reshaped tensor come from which: the shortest runs of dims with equal
    products.

    Dims of size 1 belong to no group.
    """
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    found = []
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        some = [left[i]]
        others = [right[j]]
        a = before[left[i]]
        b = after[right[j]]
        i = i + 1
        j = j + 1
        while a != b:
            if a < b and i < len(left):
                a *= before[left[i]]
                some.append(left[i])
                i += 1
            elif j < len(right):
                b *= after[right[j]]
                others.append(right[j])
                j += 1
            else:
                return []
        found.append((some, others))
    return found


def product(*ranges: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    """Return all combinations."""
    return itertools.product(*ranges)
