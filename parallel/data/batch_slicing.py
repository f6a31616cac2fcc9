"""
Slices a global batch into the rows of each rank: integers and pytrees, no network.

The rows of one step's global batch are cut into ``world * accumulate`` slices of nearly equal size,
in order. Slice ``a * world + r`` is micro-batch ``a`` of rank ``r``. A step on 4 ranks and a step
on 2 ranks with twice the accumulation therefore have the same slices. A batch with fewer rows than
slices leaves some slices empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_structure import (
    Rebuild,
    flatten_batch,
    flatten_columns,
    has_rows,
    length_of,
    map_tensors,
    narrow_leaf,
    shape_of,
)
from pdrun.parallel.layouts.device_matrix import is_counts
from pdrun.parallel.layouts.layout import L

DATASET_STRATEGY = "dataset_strategy"


def slice_rows(rows: int, world: int, accumulate: int) -> list[list[range]]:
    """Return ``[rank][micro-batch] -> range of global rows``; sizes differ by at most one."""
    parts = world * accumulate
    bounds = [rows * i // parts for i in range(parts + 1)]
    pieces = [range(low, high) for low, high in pairwise(bounds)]
    return [[pieces[a * world + rank] for a in range(accumulate)] for rank in range(world)]


def ranges_of_sizes(sizes: Sequence[int]) -> list[range]:
    """Return consecutive ranges of the given sizes, from 0."""
    found = []
    start = 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return found


@dataclass(frozen=True)
class BatchSlicing:
    """
    How the leaves of a batch are sliced: a dim for each leaf, or None for a leaf that is not
    sliced.
    """

    dims: tuple[int | None, ...] | None = None
    """
    In the order of the leaves. None: every tensor along dim 0, and other leaves with as many
    entries.
    """
    data_parallel: bool = False
    """The user's batches are this rank's own rows."""
    full_batch: bool = False
    """Every rank computes all rows."""
    forward: Callable[[Any, Any], Any] | None = field(default=None, compare=False, repr=False)
    """How the user's model is called: shows whether a list of tensors has samples."""
    rows: int | None = field(default=None, compare=False, repr=False)
    """Number of rows of the batch, if it is known."""

    def for_rows(self) -> BatchSlicing:
        """Return how a batch is sliced if it has all rows that are sliced."""
        return BatchSlicing(dims=self.dims, forward=self.forward)

    def dims_of(self, leaves: Sequence[Any]) -> list[int | None]:
        """
        Return the dim along which each leaf is sliced, or None.

        Tensors define the number of rows. Arrays and lists of strings may not be rows: they are
        sliced if they have as many entries, or if the batch has no tensor.
        """
        if self.full_batch:
            return [None] * len(leaves)
        if self.dims is not None:
            return [
                None if shape_of(leaf) is None else dim
                for leaf, dim in zip(leaves, self.dims, strict=True)
            ]
        if all(type(leaf) is torch.Tensor and leaf.dim() for leaf in leaves):
            return [0] * len(leaves)
        rows = _rows_of_first(leaves)
        lengths = [length_of(leaf) for leaf in leaves]
        dims: list[int | None] = []
        for leaf, length in zip(leaves, lengths, strict=True):
            is_sliced = length is not None and (length == rows or has_rows(leaf))
            dims.append(0 if is_sliced else None)
        return dims

    def flatten(self, batch: Any) -> tuple[list[Any], Rebuild]:
        """Take a batch apart into its leaves; see `batch_structure`."""
        if self.dims is not None or self.full_batch:
            return flatten_columns(batch)
        return flatten_batch(batch, self.forward, self.rows)


def _rows_of_first(leaves: Sequence[Any]) -> int | None:
    """
    Return the rows of the first leaf that defines them, or of the first array or list of strings
    without one.
    """
    if leaves and type(leaves[0]) is torch.Tensor and leaves[0].dim():
        return length_of(leaves[0])
    sized = [leaf for leaf in leaves if shape_of(leaf) is not None]
    for leaf in [*(leaf for leaf in sized if has_rows(leaf)), *sized]:
        return length_of(leaf)
    return None


def parse_batch_slicing(value: Any, world: int) -> BatchSlicing:
    """
    Return the meaning of a user's ``dataset_strategy``.

    Args:
        value: None or "sliced": every rank gets the same global batch, each tensor is sliced along
            dim 0; "data_parallel": every rank gets its own rows; "full_batch": every rank computes
            all rows; or one entry per tensor of the batch, in order: a dim, None (not sliced), or a
            tuple of counts per dim, ``(4, 1)``.
        world: degree of the data axis.

    Counts slice rows, which are dim 0: each rank computes its slice alone, and slices of images or
    of sequences would be another model. Rows on another dim are named by dims.

    Raises:
        UsageError: another value, counts that are neither 1 nor ``world``, two sliced dims, or
            counts that slice another dim than 0.
    """
    if value is None or value == "sliced":
        return BatchSlicing()
    if value in ("data_parallel", "full_batch"):
        return BatchSlicing(
            data_parallel=value == "data_parallel", full_batch=value == "full_batch"
        )
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(
            f"must be a text or a list of dims, got {value!r}",
            where=DATASET_STRATEGY,
            hint="use 'sliced', 'data_parallel', 'full_batch' or dims",
        )
    dims = tuple(_parse_entry(entry, world) for entry in value)
    for index, (entry, dim) in enumerate(zip(value, dims, strict=True)):
        if dim and isinstance(entry, Sequence):
            hint = "use strategy=pdrun.Operators({}), which shards other dims, or a cp axis"
            if None not in dims:
                hint = f"if these are rows, name their dims: {dims}; {hint}"
            raise UsageError(
                f"{value!r} slices dim {dim} of tensor {index}; counts can slice rows (dim 0) only",
                where=DATASET_STRATEGY,
                hint=hint,
            )
    return BatchSlicing(dims)


def slice_by_layouts(layouts: Sequence[Any], row_parts: int) -> BatchSlicing:
    """
    Return how rows are sliced if each tensor of the batch has a layout of an operator.

    Args:
        layouts: per tensor counts or a layout by axes; None: not sharded.
        row_parts: number of ranks with other rows.
    """
    if row_parts == 1:
        return BatchSlicing()
    dims = tuple(0 if _shards_rows(layout, row_parts) else None for layout in layouts)
    if not any(dim is not None for dim in dims):
        return BatchSlicing(full_batch=True)
    return BatchSlicing(dims)


def _shards_rows(layout: Any, row_parts: int) -> bool:
    """Return whether a layout shards dim 0 over the ranks with other rows."""
    if layout is None:
        return False
    if is_counts(layout):
        return bool(layout) and layout[0] % row_parts == 0
    plain: L = getattr(layout, "layout", layout)
    return bool(plain.dims) and "dp" in plain.dims[0]


def _parse_entry(entry: Any, world: int) -> int | None:
    """Return the dim that one entry slices."""
    if entry is None or (isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0):
        return entry
    if (
        isinstance(entry, Sequence)
        and not isinstance(entry, str)
        and all(isinstance(count, int) for count in entry)
    ):
        cut = [dim for dim, count in enumerate(entry) if count != 1]
        if len(cut) <= 1 and all(entry[dim] == world for dim in cut):
            if cut:
                return cut[0]
            return 0 if world == 1 and entry else None
        raise UsageError(
            f"{entry!r} must slice at most one dim, into {world} (the degree of dp)",
            where=DATASET_STRATEGY,
        )
    raise UsageError(
        f"entries must be a dim, None or a tuple of counts, got {entry!r}", where=DATASET_STRATEGY
    )


class FlatBatch:
    """
    The leaves of a batch, taken apart once for all of its slices.

    Attributes:
        rows: number of rows of the batch.

    Raises:
        UsageError: it has no tensor to slice, or its tensors disagree.
    """

    def __init__(self, batch: Any, strategy: BatchSlicing) -> None:
        self._leaves, self._rebuild = strategy.flatten(batch)
        self._dims: list[int | None]
        if strategy.full_batch:
            first = _rows_of_first(self._leaves)
            self.rows = 1 if first is None else first
            self._dims = [None] * len(self._leaves)
            return
        if strategy.dims is not None and len(strategy.dims) != len(self._leaves):
            raise UsageError(
                f"has {len(strategy.dims)} entries, the batch has {len(self._leaves)} leaves",
                where=DATASET_STRATEGY,
            )
        self._dims = strategy.dims_of(self._leaves)
        self.rows = _count_rows(self._leaves, self._dims)

    def take_rows(self, rows: range) -> Any:
        """Return some rows without copying tensors and arrays; other leaves are unchanged."""
        is_all = rows == range(self.rows)
        return self._rebuild(
            [
                leaf
                if dim is None or (is_all and type(leaf) is torch.Tensor)
                else narrow_leaf(leaf, dim, rows)
                for leaf, dim in zip(self._leaves, self._dims, strict=True)
            ]
        )


def _count_rows(leaves: Sequence[Any], dims: Sequence[int | None]) -> int:
    found = {}
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        shape = shape_of(leaf) or ()
        if dim >= len(shape):
            raise UsageError(
                f"leaf {index} has {len(shape)} dims and no dim {dim}",
                where=DATASET_STRATEGY,
            )
        found[index] = shape[dim]
    if not found:
        raise UsageError(
            "the batch has no tensor to slice",
            where=DATASET_STRATEGY,
            hint="pass a tensor, or tensors in a tuple or dict",
        )
    if len(set(found.values())) > 1:
        row_counts = ", ".join(f"{rows} in leaf {index}" for index, rows in found.items())
        raise UsageError(
            f"the tensors of the batch have different numbers of rows: {row_counts}",
            where=DATASET_STRATEGY,
        )
    return int(next(iter(found.values())))


def count_rows(batch: Any, strategy: BatchSlicing) -> int:
    """
    Return the number of rows of a batch.

    Raises:
        UsageError: it has no tensor to slice, or its tensors disagree.
    """
    return FlatBatch(batch, strategy).rows


def take_rows(batch: Any, rows: range, strategy: BatchSlicing) -> Any:
    """
    Return some rows of a batch without copying tensors and arrays; other leaves are unchanged.
    """
    return FlatBatch(batch, strategy).take_rows(rows)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """
    Move the tensors of a batch to a device, and floating point tensors to a type if one is given.
    """

    def move(leaf: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=device, dtype=kind, non_blocking=True)

    return map_tensors(batch, move)
