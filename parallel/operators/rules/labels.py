"""
How rules are written: by a label for each dim of the inputs and outputs.

Dims of the same label are cut together. `linear` adds the splits in which partial sums pass
through.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import Any

from pdrun.parallel.operators.rules.rule import PARTIAL, REPLICATED, OperatorView, OpSplit, State

Labels = Sequence[Hashable | None]
"""
A name for each dim of a tensor: dims of equal name are cut together; None for one that has to be
whole.
"""


def splits_by_labels(
    view: OperatorView,
    in_labels: Sequence[Labels],
    out_labels: Sequence[Labels],
    must_divide: dict[Hashable, int] | None = None,
    summed: Iterable[Hashable] = (),
) -> list[OpSplit]:
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
    sums = set(summed)
    found = []
    names = dict.fromkeys(
        name for labels in (*in_labels, *out_labels) for name in labels if name is not None
    )
    for name in names:
        if (
            max(
                _label_size(name, in_labels, view.in_shapes),
                _label_size(name, out_labels, view.out_shapes),
            )
            <= 1
        ):
            continue
        missing: State = PARTIAL if name in sums else REPLICATED
        found.append(
            OpSplit(
                tuple(_label_state(name, labels, REPLICATED) for labels in in_labels),
                tuple(_label_state(name, labels, missing) for labels in out_labels),
                (must_divide or {}).get(name, 0),
            )
        )
    return found


def _label_state(name: Hashable, labels: Labels, otherwise: State) -> State:
    return list(labels).index(name) if name in labels else otherwise


def _label_size(name: Hashable, labels: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> int:
    sizes = [
        shape[list(some).index(name)]
        for some, shape in zip(labels, shapes, strict=True)
        if name in some
    ]
    return max(sizes, default=0)


def partial_sum_splits(view: OperatorView, *sets: Iterable[int]) -> list[OpSplit]:
    """
    Return the splits in which the inputs of one set are terms of sums, others are whole, and
    results are terms.
    """
    found = []
    for some in sets:
        chosen = set(some)
        ins = tuple(
            PARTIAL if place in chosen else REPLICATED for place in range(len(view.in_shapes))
        )
        found.append(OpSplit(ins, (PARTIAL,) * len(view.out_shapes)))
    return found


def broadcast_labels(
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


def normalize_dims(value: Any, ndim: int) -> tuple[int, ...]:
    """Return dims as numbers from 0; None means all."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(ndim))
    some = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(dim % ndim if ndim else 0 for dim in some)


def count_elements(shape: Iterable[int]) -> int:
    """Return the number of elements."""
    return prod(shape)


def group_reshaped_dims(
    before: tuple[int, ...], after: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
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
