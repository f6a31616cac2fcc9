"""
Products of matrices beside the collective that brings what they need, or takes what they make.

    gather, then multiply       this rank's part is multiplied while the others' are on their way
    multiply, then scatter      the others' parts are multiplied first, and go while this rank's own is multiplied

Results agree with a product of the whole to rounding. Rows that lie apart are multiplied batch by
batch, straight out of and into their places: nothing is copied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pdrun.parallel.comm.p2p_copy import Sum
from pdrun.parallel.layouts.layout import shard_range

if TYPE_CHECKING:
    from pdrun.parallel.comm.communicator import Axis, Pending


def gathered(
    axis: Axis,
    part: torch.Tensor,
    whole: torch.Tensor,
    dim: int,
    weights: list[torch.Tensor],
    coming: Pending | None,
) -> list[torch.Tensor]:
    """
    Return ``whole.flatten(0, -2) @ weight`` for each weight.

    Args:
        part: what this rank has given: ``[.., part of dim, .., in]``.
        whole: ``[.., dim, .., in]``, which is complete when ``coming`` has been waited for (None:
            is).
        weights: each ``[in, out]``.
    """
    lead = math.prod(whole.shape[:dim])
    inner = math.prod(whole.shape[dim + 1 : -1])
    size = whole.shape[dim]
    width = whole.shape[-1]
    low, high = (bound * inner for bound in shard_range(size, axis.size, axis.index))
    rows = whole.view(lead, size * inner, width)
    results = [rows.new_empty(lead, size * inner, weight.shape[1]) for weight in weights]

    def multiply(some: torch.Tensor, begin: int, end: int) -> None:
        for weight, result in zip(weights, results, strict=True):
            _multiply(some, weight, result[:, begin:end])

    multiply(part.reshape(lead, high - low, width), low, high)
    if coming is not None:
        coming.wait()
    for begin, end in ((0, low), (high, size * inner)):
        if end > begin:
            multiply(rows[:, begin:end], begin, end)
    return [result.view(-1, result.shape[-1]) for result in results]


def scattered(
    axis: Axis, inputs: list[torch.Tensor], weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    """
    Return this rank's part along ``dim`` of the ranks' sum of ``inputs[0] @ weights[0] + ...``.

    Args:
        inputs: each ``[rows, in]``, with an ``in`` of its own.
        weights: each ``[in, out]``.
        shape: of the product, ``[..., out]``; one size may be -1.
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
    peers = axis.peers(out) if size % axis.size == 0 else None
    if peers is None:
        total = inputs[0] @ weights[0]
        for x, weight in zip(inputs[1:], weights[1:], strict=True):
            total.addmm_(x, weight)
        return axis.reduce_scatter(total.view(shape), dim)
    places = [x.reshape(lead, size * inner, -1) for x in inputs]
    step = (high - low) * inner

    def part(place: int) -> torch.Tensor:
        found = (
            out.view(lead, step, width) if place == axis.index else out.new_empty(lead, step, width)
        )
        for number, (x, weight) in enumerate(zip(places, weights, strict=True)):
            _multiply(x[:, place * step : (place + 1) * step], weight, found, add=number > 0)
        return found

    nbytes = rows * width * out.element_size()
    result = out.view(lead, step, width)
    axis.begin("reduce_scatter", nbytes, lambda: Sum(peers, result, part), out, whole=True)
    return out


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool = False
) -> None:
    """Write ``rows @ weight`` into ``out``, or add it: ``[batches, rows, in]``, ``[in, out]``."""
    if rows.shape[0] == 1:  # one product is what most is known of
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
