"""
Which rows of a batch each rank computes, and how a batch is cut: integers and pytrees, no network.

The rows of one step's global batch are cut into ``world * accumulate`` slices of nearly equal size, in order. Slice
``a * world + r`` is micro-batch ``a`` of rank ``r``; so a step on 4 ranks and one on 2 ranks with twice the
accumulation work on the same slices. A batch with fewer rows than slices leaves some slices empty.
"""

from __future__ import annotations

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
    found, start = [], 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return found


@dataclass(frozen=True)
class Strategy:
    """How the leaves of a batch are cut: for each leaf a dim, or None for one that every rank gets whole."""

    dims: tuple[int | None, ...] | None = None
    """In the order of the leaves; None cuts every tensor along dim 0."""
    local: bool = False
    """The batches that the user hands over are this rank's own rows already."""
    whole: bool = False
    """Every rank computes all rows."""

    def dim(self, index: int, leaf: Any) -> int | None:
        """Return the dim along which a leaf is cut, or None."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or self.whole:
            return None
        return self.dims[index] if self.dims is not None else 0


def parse(value: Any, world: int) -> Strategy:
    """
    Return the strategy that a user's ``dataset_strategy`` means.

    Args:
        value: None or "sliced": every rank is handed the same global batch, and each tensor is cut along dim 0;
            "data_parallel": every rank is handed its own rows; "full_batch": every rank computes all rows;
            or one entry a tensor of the batch, in order: a dim, None (whole), or a tuple of counts a dim, ``(4, 1)``.
        world: degree of the data axis.

    Raises:
        UsageError: an unknown word, or counts that are neither 1 nor ``world``, or that cut two dims.
    """
    if value is None or value == "sliced":
        return Strategy()
    if value in ("data_parallel", "full_batch"):
        return Strategy(local=value == "data_parallel", whole=value == "full_batch")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            f"{value!r} is no way to cut a batch", where=WHERE, hint="sliced, data_parallel, full_batch or dims"
        )
    return Strategy(tuple(_entry(entry, world) for entry in value))


def _entry(entry: Any, world: int) -> int | None:
    """Return the dim that one entry cuts."""
    if entry is None or (isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0):
        return entry
    if isinstance(entry, Sequence) and not isinstance(entry, str) and all(isinstance(count, int) for count in entry):
        cut = [dim for dim, count in enumerate(entry) if count != 1]
        if len(cut) <= 1 and all(entry[dim] == world for dim in cut):
            return cut[0] if cut else (0 if world == 1 and entry else None)
        raise UsageError(f"{entry!r}: one dim may be cut, into {world} (the degree of dp)", where=WHERE)
    raise UsageError(f"{entry!r} is neither a dim, None nor a tuple of counts", where=WHERE)


def count_rows(batch: Any, strategy: Strategy) -> int:
    """
    Return the number of rows of a batch.

    Raises:
        UsageError: it has no tensor to cut, or its tensors disagree.
    """
    leaves = pytree.tree_leaves(batch)
    if strategy.whole:
        return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
    if strategy.dims is not None and len(strategy.dims) != len(leaves):
        raise UsageError(f"{len(strategy.dims)} entries for a batch of {len(leaves)} leaves", where=WHERE)
    found = {}
    for index, leaf in enumerate(leaves):
        dim = strategy.dim(index, leaf)
        if dim is None:
            continue
        if dim >= leaf.dim():
            raise UsageError(f"leaf {index} has {leaf.dim()} dims, none of them dim {dim}", where=WHERE)
        found[index] = leaf.shape[dim]
    if not found:
        raise UsageError(
            "the batch has no tensor to cut", where=WHERE, hint="a batch is a tensor, or tensors in a tuple or dict"
        )
    if len(set(found.values())) > 1:
        told = ", ".join(f"{rows} in leaf {index}" for index, rows in found.items())
        raise UsageError(f"the tensors of the batch have different numbers of rows: {told}", where=WHERE)
    return int(next(iter(found.values())))


def take(batch: Any, rows: range, strategy: Strategy) -> Any:
    """Return the rows of a batch, without a copy; leaves that are not cut are passed on."""
    leaves, form = pytree.tree_flatten(batch)
    cut = []
    for index, leaf in enumerate(leaves):
        dim = strategy.dim(index, leaf)
        cut.append(leaf if dim is None else leaf.narrow(dim, rows.start, len(rows)))
    return pytree.tree_unflatten(cut, form)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move the tensors of a batch to a device, and its floating point ones to a type where one is given."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=device, dtype=kind, non_blocking=True)

    return pytree.tree_map(move, batch)
