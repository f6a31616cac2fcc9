"""
How rules are written: with a label for each dim of the inputs and outputs.

Dims with the same label are sharded together. `partial_sum_splits` adds the splits in which partial
sums pass through.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import Any

from pdrun.parallel.operators.rules.rule import PARTIAL, REPLICATED, OperatorView, OpSplit, State

Labels = Sequence[Hashable | None]
"""
A label for each dim of a tensor. Dims with equal labels are sharded together. A dim with None stays
replicated.
"""


def labels_except(ndim: int, *replicated: int) -> list[Hashable | None]:
    """Return the number of each dim as its label; the dims in ``replicated`` have none."""
    labels: list[Hashable | None] = list(range(ndim))
    for dim in replicated:
        labels[dim] = None
    return labels


def splits_by_labels(
    view: OperatorView,
    in_labels: Sequence[Labels],
    out_labels: Sequence[Labels],
    must_divide: dict[Hashable, int] | None = None,
    summed: Iterable[Hashable] = (),
) -> list[OpSplit]:
    """
    Return a split for each label.

    Args:
        in_labels, out_labels: the labels of the dims of every input and output.
        must_divide: see `OpSplit`.
        summed: labels that can be missing in an output, which is a partial sum then (contracted or
            summed dims). A label that an output lacks and that is not listed here makes the output
            replicated. That is right only for outputs that do not depend on the split.
    """
    summed_labels = set(summed)
    splits = []
    labels = dict.fromkeys(
        label
        for dim_labels in (*in_labels, *out_labels)
        for label in dim_labels
        if label is not None
    )
    for label in labels:
        in_size = _label_size(label, in_labels, view.in_shapes)
        out_size = _label_size(label, out_labels, view.out_shapes)
        if max(in_size, out_size) <= 1:
            continue
        missing_state: State = PARTIAL if label in summed_labels else REPLICATED
        splits.append(
            OpSplit(
                tuple(_label_state(label, dim_labels, REPLICATED) for dim_labels in in_labels),
                tuple(_label_state(label, dim_labels, missing_state) for dim_labels in out_labels),
                (must_divide or {}).get(label, 0),
            )
        )
    return splits


def _label_state(name: Hashable, labels: Labels, otherwise: State) -> State:
    if name not in labels:
        return otherwise
    return list(labels).index(name)


def _label_size(name: Hashable, labels: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> int:
    sizes = [
        shape[list(dim_labels).index(name)]
        for dim_labels, shape in zip(labels, shapes, strict=True)
        if name in dim_labels
    ]
    return max(sizes, default=0)


def partial_sum_splits(view: OperatorView, *sets: Iterable[int]) -> list[OpSplit]:
    """
    Return splits in which inputs and results are partial sums.

    Args:
        sets: for each split the inputs that are partial sums; the others are replicated.
    """
    splits = []
    for positions in sets:
        chosen = set(positions)
        ins = tuple(
            PARTIAL if position in chosen else REPLICATED for position in range(len(view.in_shapes))
        )
        splits.append(OpSplit(ins, (PARTIAL,) * len(view.out_shapes)))
    return splits


def broadcast_labels(
    shape: tuple[int, ...], out: tuple[int, ...], names: Sequence[Hashable | None] | None = None
) -> list[Hashable | None]:
    """
    Return the labels of an input that is broadcast to ``out``; None for dims that are broadcast.
    """
    if names is None:
        names = range(len(out))
    skip = len(out) - len(shape)
    labels: list[Hashable | None] = [None] * len(shape)
    for dim, size in enumerate(shape):
        if size == out[skip + dim]:
            labels[dim] = names[skip + dim]
    return labels


def normalize_dims(value: Any, ndim: int) -> tuple[int, ...]:
    """Return dims as numbers from 0; None means all dims."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(ndim))
    if not isinstance(value, (list, tuple)):
        value = (value,)
    return tuple(dim % max(ndim, 1) for dim in value)


def count_elements(shape: Iterable[int]) -> int:
    """Return the number of elements."""
    return prod(shape)


def group_reshaped_dims(
    before: tuple[int, ...], after: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """
    Return which dims of a reshaped tensor belong together: the shortest runs of dims with equal
    products.

    Dims of size 1 belong to no group. If the runs do not match, there are no groups.
    """
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    groups = []
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        left_group = [left[i]]
        right_group = [right[j]]
        left_size = before[left[i]]
        right_size = after[right[j]]
        i = i + 1
        j = j + 1
        while left_size != right_size:
            if left_size < right_size and i < len(left):
                left_size *= before[left[i]]
                left_group.append(left[i])
                i += 1
            elif j < len(right):
                right_size *= after[right[j]]
                right_group.append(right[j])
                j += 1
            else:
                return []
        groups.append((left_group, right_group))
    return groups
