"""
Matrix products that overlap with the collective of their input or of their output.

    all_gather_matmul       this rank's shard is multiplied while the others' are received
    matmul_reduce_scatter   the others' shards are multiplied and sent before this rank's own

Results agree with a product of the full tensor to rounding. Rows that are not contiguous are
multiplied batch by batch, straight out of and into their places: nothing is copied.
"""

from __future__ import annotations

import math

import torch

from pdrun.parallel.comm.axis_transport import PendingTensor
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.p2p.exchanges import P2PReduceScatter
from pdrun.parallel.layouts.layout import shard_range


def all_gather_matmul(
    axis: AxisGroup,
    shard: torch.Tensor,
    full: torch.Tensor,
    dim: int,
    weights: list[torch.Tensor],
    pending: PendingTensor | None,
) -> list[torch.Tensor]:
    """
    Return ``full.flatten(0, -2) @ weight`` for each weight.

    Args:
        shard: this rank's input of the all-gather: ``[.., shard of dim, .., in]``.
        full: ``[.., dim, .., in]``, complete after ``pending`` (None: complete now).
        weights: each ``[in, out]``.
    """
    lead = math.prod(full.shape[:dim])
    inner = math.prod(full.shape[dim + 1 : -1])
    size = full.shape[dim]
    width = full.shape[-1]
    low, high = (bound * inner for bound in shard_range(size, axis.size, axis.index))
    rows = full.view(lead, size * inner, width)
    results = [rows.new_empty(lead, size * inner, weight.shape[1]) for weight in weights]

    def multiply_rows(part: torch.Tensor, start: int, stop: int) -> None:
        for weight, result in zip(weights, results, strict=True):
            _multiply_into(part, weight, result[:, start:stop])

    multiply_rows(shard.reshape(lead, high - low, width), low, high)
    if pending is not None:
        pending.wait()
    for start, stop in ((0, low), (high, size * inner)):
        if stop > start:
            multiply_rows(rows[:, start:stop], start, stop)
    return [result.view(-1, result.shape[-1]) for result in results]


def matmul_reduce_scatter(
    axis: AxisGroup,
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    shape: list[int],
    dim: int,
) -> torch.Tensor:
    """
    Return this rank's shard along ``dim`` of the sum of ``inputs[0] @ weights[0] + ...`` over the
    ranks.

    Args:
        inputs: each ``[rows, in]``; ``in`` can differ.
        weights: each ``[in, out]``.
        shape: of the product, ``[..., out]``; one size can be -1.
    """
    rows = inputs[0].shape[0]
    width = weights[0].shape[1]
    fixed = math.prod(size for size in shape if size >= 0)
    shape = [size if size >= 0 else rows * width // fixed for size in shape]
    size = shape[dim]
    lead = math.prod(shape[:dim])
    inner = math.prod(shape[dim + 1 : -1])
    low, high = shard_range(size, axis.size, axis.index)
    out = inputs[0].new_empty(*shape[:dim], high - low, *shape[dim + 1 :])
    copier = axis.find_copier(out) if size % axis.size == 0 else None
    if copier is None:
        total = inputs[0] @ weights[0]
        for x, weight in zip(inputs[1:], weights[1:], strict=True):
            total.addmm_(x, weight)
        return axis.reduce_scatter(total.view(shape), dim)
    batches = [x.reshape(lead, size * inner, -1) for x in inputs]
    shard_rows = (high - low) * inner
    result = out.view(lead, shard_rows, width)

    def compute_shard(index: int) -> torch.Tensor:
        shard = result if index == axis.index else out.new_empty(lead, shard_rows, width)
        start = index * shard_rows
        for number, (x, weight) in enumerate(zip(batches, weights, strict=True)):
            _multiply_into(x[:, start : start + shard_rows], weight, shard, add=number > 0)
        return shard

    nbytes = rows * width * out.element_size()
    axis.start_collective(
        "reduce_scatter",
        nbytes,
        lambda: P2PReduceScatter(copier, result, compute_shard),
        out,
        is_final=True,
    )
    return out


def _multiply_into(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False
) -> None:
    """Write ``rows @ weight`` into ``out``, or add it: ``[batches, rows, in]``, ``[in, out]``."""
    if rows.shape[0] == 1:  # a plain product has the best kernels
        if add:
            out[0].addmm_(rows[0], weight)
        else:
            torch.mm(rows[0], weight, out=out[0])
        return
    weights = weight.expand(rows.shape[0], *weight.shape)
    if add:
        out.baddbmm_(rows, weights)
    else:
        torch.bmm(rows, weights, out=out)
