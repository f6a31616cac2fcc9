"""
Collectives as operators of torch, for what torch.compile makes of a module.

A compiler sees four functions of a tensor and of the number of an `Axis`, with shapes and without
insides. When its code runs, they do what the axis's own methods do: counted, watched, and in turns
with another copy of the step. `overlap` parts three of them into a start and a wait, and joins two
with the products beside them (`products`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pdrun.parallel.comm import overlapped_matmul as products
from pdrun.parallel.layouts.layout import shard_range

if TYPE_CHECKING:
    from pdrun.parallel.comm.communicator import Axis

_LIBRARY = torch.library.Library("pdrun_axis", "DEF")
_count = itertools.count()
_numbers: dict[tuple[tuple[str, ...], tuple[int, ...], int], list[int]] = {}
"""The numbers that have been given to axes of these names and ranks, at this index."""
_known: weakref.WeakValueDictionary[int, Axis] = weakref.WeakValueDictionary()


def number(axis: Axis) -> int:
    """
    Return what stands for an axis in a graph, from now on for as long as it lives.

    After its run has gone the next one's takes its place, and finds code that has been compiled
    already.
    """
    given = _numbers.setdefault((axis.names, axis.ranks, axis.index), [])
    mine = next((one for one in given if one not in _known), -1)
    if mine < 0:
        # shapes of results follow from size and index: torch's caches on disk have to tell such
        # graphs apart
        mine = next(_count) << 32 | len(axis.ranks) << 16 | axis.index
        given.append(mine)
    _known[mine] = axis
    return mine


def size_of(axis: int) -> int:
    """Return how many ranks the axis with a number has."""
    return axis >> 16 & 0xFFFF


def _all_reduce(x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
    return _known[axis].all_reduce(x, op)


def _all_gather(x: torch.Tensor, axis: int, dim: int, total: int | None) -> torch.Tensor:
    return _known[axis].all_gather(x, dim, total)


def _reduce_scatter(x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    return _known[axis].reduce_scatter(x, dim)


def _all_to_all(
    x: torch.Tensor, axis: int, cut_dim: int, whole_dim: int, total: int
) -> torch.Tensor:
    return _known[axis].swap(x, cut_dim, whole_dim, total)


def _reduced(x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gathered(x: torch.Tensor, axis: int, dim: int, total: int | None) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = _known[axis].size * shape[dim] if total is None else total
    return x.new_empty(shape)


def _scattered(x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    place = _known[axis]
    low, high = shard_range(shape[dim], place.size, place.index)
    shape[dim] = high - low
    return x.new_empty(shape)


def _swapped(x: torch.Tensor, axis: int, cut_dim: int, whole_dim: int, total: int) -> torch.Tensor:
    shape = list(x.shape)
    place = _known[axis]
    low, high = shard_range(shape[cut_dim], place.size, place.index)
    shape[cut_dim], shape[whole_dim] = high - low, total
    return x.new_empty(shape)


def _gathered_products(
    x: torch.Tensor, whole: torch.Tensor, axis: int, dim: int, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    place = _known[axis]
    coming = place.axes.on_way.pop(whole.data_ptr(), None)
    with torch.no_grad():  # results are written into their places
        return products.gathered(place, x, whole, dim, weights, coming)


def _product_scatter(
    inputs: list[torch.Tensor], axis: int, weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    with torch.no_grad():
        return products.scattered(_known[axis], inputs, weights, shape, dim)


def _products_of(
    x: torch.Tensor, whole: torch.Tensor, axis: int, dim: int, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    rows = whole.numel() // whole.shape[-1]
    return [whole.new_empty(rows, weight.shape[1]) for weight in weights]


def _product_scattered(
    inputs: list[torch.Tensor], axis: int, weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    return _scattered(
        inputs[0].new_empty(inputs[0].shape[0], weights[0].shape[1]).view(shape), axis, dim
    )


def _start(axis: int, call: Callable[[Axis], torch.Tensor]) -> torch.Tensor:
    """
    Do what an operator does, but for the wait, where the result needs nothing done to it
    afterwards.
    """
    place = _known[axis]
    with place.axes.deferring() as started:
        out = call(place)
    if started:
        place.axes.on_way[out.data_ptr()] = started[0]
    return out


def _start_all_reduce(x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
    return _start(axis, lambda place: place.all_reduce(x, op))


def _start_all_gather(x: torch.Tensor, axis: int, dim: int, total: int | None) -> torch.Tensor:
    return _start(axis, lambda place: place.all_gather(x, dim, total))


def _start_reduce_scatter(x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    return _start(axis, lambda place: place.reduce_scatter(x, dim))


def _start_product_scatter(
    inputs: list[torch.Tensor], axis: int, weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    with torch.no_grad():
        return _start(axis, lambda place: products.scattered(place, inputs, weights, shape, dim))


def _wait(out: torch.Tensor, after: list[torch.Tensor], axis: int) -> None:
    pending = _known[axis].axes.on_way.pop(out.data_ptr(), None)
    if pending is not None:
        pending.wait()


for _schema, _run, _shape in (
    ("all_reduce(Tensor x, int axis, str op) -> Tensor", _all_reduce, _reduced),
    ("all_gather(Tensor x, int axis, int dim, SymInt? total) -> Tensor", _all_gather, _gathered),
    ("reduce_scatter(Tensor x, int axis, int dim) -> Tensor", _reduce_scatter, _scattered),
    (
        "all_to_all(Tensor x, int axis, int cut_dim, int whole_dim, SymInt total) -> Tensor",
        _all_to_all,
        _swapped,
    ),
    ("start_all_reduce(Tensor x, int axis, str op) -> Tensor", _start_all_reduce, _reduced),
    (
        "start_all_gather(Tensor x, int axis, int dim, SymInt? total) -> Tensor",
        _start_all_gather,
        _gathered,
    ),
    (
        "start_reduce_scatter(Tensor x, int axis, int dim) -> Tensor",
        _start_reduce_scatter,
        _scattered,
    ),
    (
        "gathered_products(Tensor x, Tensor whole, int axis, int dim, Tensor[] weights) -> Tensor[]",
        _gathered_products,
        _products_of,
    ),
    (
        "product_scatter(Tensor[] inputs, int axis, Tensor[] weights, SymInt[] shape, int dim) -> Tensor",
        _product_scatter,
        _product_scattered,
    ),
    (
        "start_product_scatter(Tensor[] inputs, int axis, Tensor[] weights, SymInt[] shape, int dim) -> Tensor",
        _start_product_scatter,
        _product_scattered,
    ),
    ("wait(Tensor(a!) out, Tensor[] after, int axis) -> ()", _wait, lambda out, after, axis: None),
):
    _name = _schema.partition("(")[0]
    # strides are part of what the compiler relies on: results are contiguous, as those of the
    # methods
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pdrun_axis::{_name}", _shape, lib=_LIBRARY)

_OPS = torch.ops.pdrun_axis
STARTS = {
    _OPS.all_reduce.default: _OPS.start_all_reduce.default,
    _OPS.all_gather.default: _OPS.start_all_gather.default,
    _OPS.reduce_scatter.default: _OPS.start_reduce_scatter.default,
    _OPS.product_scatter.default: _OPS.start_product_scatter.default,
}
"""Of each collective the operator that only starts it."""
GATHER = _OPS.all_gather.default
SCATTER = _OPS.reduce_scatter.default
PRODUCTS = _OPS.gathered_products.default
"""Multiplies what is gathered while it comes: (part, whole, axis, dim, weights)."""
PRODUCT_SCATTER = _OPS.product_scatter.default
"""Adds up products over the ranks: (inputs, axis, weights, shape, dim)."""
WAIT = _OPS.wait.default
"""Waits for what was started: (its result, what must be there before or stay until then, axis)."""
