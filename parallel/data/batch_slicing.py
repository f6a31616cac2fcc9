"""
Which rows of a batch each rank computes, and how a batch is cut: integers and pytrees, no network.

The rows of one step's global batch are cut into ``world * accumulate`` slices of nearly equal size,
in order. Slice ``a * world + r`` is micro-batch ``a`` of rank ``r``; so a step on 4 ranks and one
on 2 ranks with twice the accumulation work on the same slices. A batch with fewer rows than slices
leaves some slices empty.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError

WHERE = "dataset_strategy"


def cut_rows(rows: int, world: int, accumulate: int) -> list[list[range]]:
    """Return ``[rank][micro-batch] -> range of global rows``; sizes differ by at most one."""
    parts = world * accumulate
    bounds = [rows * i // parts for i in range(parts + 1)]
    pieces = [range(low, high) for low, high in pairwise(bounds)]
    return [[pieces[a * world + rank] for a in range(accumulate)] for rank in range(world)]


def cut_sizes(sizes: Sequence[int]) -> list[range]:
    """Return consecutive ranges of the given sizes, from 0."""
    found = []
    start = 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return found


@dataclass(frozen=True)
class Strategy:
    """
    How the leaves of a batch are cut: for each leaf a dim, or None for one that every rank gets
    whole.
    """

    dims: tuple[int | None, ...] | None = None
    """
    In the order of the leaves; None cuts every tensor along dim 0, and what has as many entries.
    """
    local: bool = False
    """The batches that the user hands over are this rank's own rows already."""
    whole: bool = False
    """Every rank computes all rows."""

    def cuts(self, leaves: Sequence[Any]) -> list[int | None]:
        """
        Return the dim along which each leaf is cut, or None.

        Tensors say how many rows there are. Arrays and lists of strings may be something else than
        rows: without a word about them they are cut where they have as many entries, or where there
        is no tensor.
        """
        if self.whole:
            return [None] * len(leaves)
        if self.dims is not None:
            return [
                None if _shape(leaf) is None else dim
                for leaf, dim in zip(leaves, self.dims, strict=True)
            ]
        rows = _rows(leaves)
        lengths = [_length(leaf) for leaf in leaves]
        return [
            0 if length is not None and (length == rows or isinstance(leaf, torch.Tensor)) else None
            for leaf, length in zip(leaves, lengths, strict=True)
        ]


def words(value: Any) -> bool:
    """
    Whether something is a list or tuple of strings, as torch's collate makes of the strings of
    samples.
    """
    return (
        type(value) in (list, tuple)
        and bool(value)
        and all(isinstance(each, (str, bytes)) for each in value)
    )


def _flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Take a batch apart into tensors, arrays, lists of strings and whatever else there is."""
    leaves, form = pytree.tree_flatten(batch, is_leaf=words)
    return leaves, form


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape of what can be cut, None of anything else."""
    numpy = sys.modules.get("numpy")
    if isinstance(leaf, torch.Tensor) or (numpy is not None and isinstance(leaf, numpy.ndarray)):
        return tuple(leaf.shape) or None
    return (len(leaf),) if words(leaf) else None


def _length(leaf: Any) -> int | None:
    shape = _shape(leaf)
    return None if shape is None else shape[0]


def _rows(leaves: Sequence[Any]) -> int | None:
    """
    Return the rows of the first tensor, or of the first array or list of strings where there is no
    tensor.
    """
    sized = [leaf for leaf in leaves if _shape(leaf) is not None]
    first = next(
        (leaf for leaf in sized if isinstance(leaf, torch.Tensor)), sized[0] if sized else None
    )
    return _length(first)


def parse(value: Any, world: int) -> Strategy:
    """
    Return the strategy that a user's ``dataset_strategy`` means.

    Args:
        value: None or "sliced": every rank is handed the same global batch, and each tensor is cut
            along dim 0;
            "data_parallel": every rank is handed its own rows; "full_batch": every rank computes all rows;
            or one entry a tensor of the batch, in order: a dim, None (whole), or a tuple of counts a dim, ``(4, 1)``.
        world: degree of the data axis.

    Raises:
        UsageError: an unknown word, or counts that are neither 1 nor ``world``, or that cut two
            dims.
    """
    if value is None or value == "sliced":
        return Strategy()
    if value in ("data_parallel", "full_batch"):
        return Strategy(local=value == "data_parallel", whole=value == "full_batch")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            f"{value!r} is no way to cut a batch",
            where=WHERE,
            hint="sliced, data_parallel, full_batch or dims",
        )
    return Strategy(tuple(_entry(entry, world) for entry in value))


def _entry(entry: Any, world: int) -> int | None:
    """Return the dim that one entry cuts."""
    if entry is None or (isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0):
        return entry
    if (
        isinstance(entry, Sequence)
        and not isinstance(entry, str)
        and all(isinstance(count, int) for count in entry)
    ):
        cut = [dim for dim, count in enumerate(entry) if count != 1]
        if len(cut) <= 1 and all(entry[dim] == world for dim in cut):
            return cut[0] if cut else (0 if world == 1 and entry else None)
        raise UsageError(
            f"{entry!r}: one dim may be cut, into {world} (the degree of dp)", where=WHERE
        )
    raise UsageError(f"{entry!r} is neither a dim, None nor a tuple of counts", where=WHERE)


def count_rows(batch: Any, strategy: Strategy) -> int:
    """
    Return the number of rows of a batch.

    Raises:
        UsageError: it has no tensor to cut, or its tensors disagree.
    """
    leaves, _ = _flatten(batch)
    if strategy.whole:
        rows = _rows(leaves)
        return 1 if rows is None else rows
    if strategy.dims is not None and len(strategy.dims) != len(leaves):
        raise UsageError(
            f"{len(strategy.dims)} entries for a batch of {len(leaves)} leaves", where=WHERE
        )
    found = {}
    for index, (leaf, dim) in enumerate(zip(leaves, strategy.cuts(leaves), strict=True)):
        if dim is None:
            continue
        shape = _shape(leaf) or ()
        if dim >= len(shape):
            raise UsageError(
                f"leaf {index} has {len(shape)} dims, none of them dim {dim}", where=WHERE
            )
        found[index] = shape[dim]
    if not found:
        raise UsageError(
            "the batch has no tensor to cut",
            where=WHERE,
            hint="a batch is a tensor, or tensors in a tuple or dict",
        )
    if len(set(found.values())) > 1:
        told = ", ".join(f"{rows} in leaf {index}" for index, rows in found.items())
        raise UsageError(
            f"the tensors of the batch have different numbers of rows: {told}", where=WHERE
        )
    return int(next(iter(found.values())))


def take(batch: Any, rows: range, strategy: Strategy) -> Any:
    """
    Return the rows of a batch, without copies of tensors and arrays; leaves that are not cut are
    passed on.
    """
    leaves, form = _flatten(batch)
    dims = strategy.cuts(leaves)
    cut = [
        leaf if dim is None else _narrow(leaf, dim, rows)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return pytree.tree_unflatten(cut, form)


def _narrow(leaf: Any, dim: int, rows: range) -> Any:
    """Return some rows of a tensor, an array or a list."""
    if isinstance(leaf, torch.Tensor):
        return leaf.narrow(dim, rows.start, len(rows))
    part = slice(rows.start, rows.stop)
    return leaf[part] if words(leaf) else leaf[(slice(None),) * dim + (part,)]


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """
    Move the tensors of a batch to a device, and its floating point ones to a type where one is
    given.
    """

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=device, dtype=kind, non_blocking=True)

    return pytree.tree_map(move, batch)
