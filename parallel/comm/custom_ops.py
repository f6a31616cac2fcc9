"""
Collectives as operators of torch, for torch.compile.

The compiler sees functions of tensors and of the number of an axis, with shapes and without bodies.
When compiled code runs, they call the methods of the `AxisGroup`: counted, watched, and in turn
with another copy of the step. `overlap_pass` splits them into a start and a wait. `matmul_pass`
joins two of them with neighbouring products (`overlapped_matmul`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdrun.parallel.comm.axis_members import find_axis
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.overlapped_matmul import all_gather_matmul, matmul_reduce_scatter
from pdrun.parallel.layouts.layout import shard_range


def _group_of(axis_id: int) -> AxisGroup:
    axis = find_axis(axis_id)
    assert isinstance(axis, AxisGroup)
    return axis


# ---- collectives ------------------------------------------------------------


def _run_all_reduce(x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
    return _group_of(axis).all_reduce(x, op)


def _run_all_gather(x: torch.Tensor, axis: int, dim: int, total: int | None) -> torch.Tensor:
    return _group_of(axis).all_gather(x, dim, total)


def _run_reduce_scatter(x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    return _group_of(axis).reduce_scatter(x, dim)


def _run_all_to_all(
    x: torch.Tensor, axis: int, split_dim: int, concat_dim: int, total: int
) -> torch.Tensor:
    return _group_of(axis).all_to_all(x, split_dim, concat_dim, total)


def _run_all_gather_matmul(
    x: torch.Tensor, full: torch.Tensor, axis: int, dim: int, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    group = _group_of(axis)
    pending = group.state.in_flight.pop(full.data_ptr(), None)
    with torch.no_grad():  # results are written into existing tensors
        return all_gather_matmul(group, x, full, dim, weights, pending)


def _run_matmul_reduce_scatter(
    inputs: list[torch.Tensor], axis: int, weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    with torch.no_grad():
        return matmul_reduce_scatter(_group_of(axis), inputs, weights, shape, dim)


# ---- shapes of the results --------------------------------------------------


def _reduced_shape(x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gathered_shape(x: torch.Tensor, axis: int, dim: int, total: int | None) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = find_axis(axis).size * shape[dim] if total is None else total
    return x.new_empty(shape)


def _scattered_shape(x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    members = find_axis(axis)
    low, high = shard_range(shape[dim], members.size, members.index)
    shape[dim] = high - low
    return x.new_empty(shape)


def _swapped_shape(
    x: torch.Tensor, axis: int, split_dim: int, concat_dim: int, total: int
) -> torch.Tensor:
    shape = list(x.shape)
    members = find_axis(axis)
    low, high = shard_range(shape[split_dim], members.size, members.index)
    shape[split_dim] = high - low
    shape[concat_dim] = total
    return x.new_empty(shape)


def _product_shapes(
    x: torch.Tensor, full: torch.Tensor, axis: int, dim: int, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    rows = full.numel() // full.shape[-1]
    return [full.new_empty(rows, weight.shape[1]) for weight in weights]


def _scattered_product_shape(
    inputs: list[torch.Tensor], axis: int, weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    product = inputs[0].new_empty(inputs[0].shape[0], weights[0].shape[1])
    return _scattered_shape(product.view(shape), axis, dim)


# ---- starts and the wait ----------------------------------------------------


def _start_deferred(axis: int, call: Callable[[AxisGroup], torch.Tensor]) -> torch.Tensor:
    """Call a collective without its wait, if the result needs no further work after the wait."""
    group = _group_of(axis)
    with group.state.deferring() as started:
        out = call(group)
    if started:
        group.state.in_flight[out.data_ptr()] = started[0]
    return out


def _start_all_reduce(x: torch.Tensor, axis: int, op: str) -> torch.Tensor:
    return _start_deferred(axis, lambda group: group.all_reduce(x, op))


def _start_all_gather(x: torch.Tensor, axis: int, dim: int, total: int | None) -> torch.Tensor:
    return _start_deferred(axis, lambda group: group.all_gather(x, dim, total))


def _start_reduce_scatter(x: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    return _start_deferred(axis, lambda group: group.reduce_scatter(x, dim))


def _start_matmul_reduce_scatter(
    inputs: list[torch.Tensor], axis: int, weights: list[torch.Tensor], shape: list[int], dim: int
) -> torch.Tensor:
    with torch.no_grad():
        return _start_deferred(
            axis, lambda group: matmul_reduce_scatter(group, inputs, weights, shape, dim)
        )


def _wait_pending(out: torch.Tensor, after: list[torch.Tensor], axis: int) -> None:
    pending = _group_of(axis).state.in_flight.pop(out.data_ptr(), None)
    if pending is not None:
        pending.wait()


def _no_result(out: torch.Tensor, after: list[torch.Tensor], axis: int) -> None:
    return None


# ---- registration -----------------------------------------------------------

_MATMUL_REDUCE_SCATTER = (
    "matmul_reduce_scatter(Tensor[] inputs, int axis, Tensor[] weights, SymInt[] shape, int dim)"
    " -> Tensor"
)
_OPERATORS: tuple[tuple[str, Callable[..., object], Callable[..., object]], ...] = (
    (
        "all_reduce(Tensor x, int axis, str op) -> Tensor",
        _run_all_reduce,
        _reduced_shape,
    ),
    (
        "all_gather(Tensor x, int axis, int dim, SymInt? total) -> Tensor",
        _run_all_gather,
        _gathered_shape,
    ),
    (
        "reduce_scatter(Tensor x, int axis, int dim) -> Tensor",
        _run_reduce_scatter,
        _scattered_shape,
    ),
    (
        "all_to_all(Tensor x, int axis, int split_dim, int concat_dim, SymInt total) -> Tensor",
        _run_all_to_all,
        _swapped_shape,
    ),
    (
        "start_all_reduce(Tensor x, int axis, str op) -> Tensor",
        _start_all_reduce,
        _reduced_shape,
    ),
    (
        "start_all_gather(Tensor x, int axis, int dim, SymInt? total) -> Tensor",
        _start_all_gather,
        _gathered_shape,
    ),
    (
        "start_reduce_scatter(Tensor x, int axis, int dim) -> Tensor",
        _start_reduce_scatter,
        _scattered_shape,
    ),
    (
        "all_gather_matmul(Tensor x, Tensor full, int axis, int dim, Tensor[] weights) -> Tensor[]",
        _run_all_gather_matmul,
        _product_shapes,
    ),
    (
        _MATMUL_REDUCE_SCATTER,
        _run_matmul_reduce_scatter,
        _scattered_product_shape,
    ),
    (
        f"start_{_MATMUL_REDUCE_SCATTER}",
        _start_matmul_reduce_scatter,
        _scattered_product_shape,
    ),
    (
        "wait(Tensor(a!) out, Tensor[] after, int axis) -> ()",
        _wait_pending,
        _no_result,
    ),
)
_LIBRARY = torch.library.Library("pdrun_axis", "DEF")

for _schema, _run, _shape in _OPERATORS:
    _name = _schema.partition("(")[0]
    # The compiler relies on strides, too: results are contiguous, as those of the methods are.
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pdrun_axis::{_name}", _shape, lib=_LIBRARY)

_OPS = torch.ops.pdrun_axis
ALL_GATHER_OP = _OPS.all_gather.default
REDUCE_SCATTER_OP = _OPS.reduce_scatter.default
ALL_GATHER_MATMUL_OP = _OPS.all_gather_matmul.default
"""Multiplies gathered shards while they arrive: (shard, full, axis, dim, weights)."""
MATMUL_REDUCE_SCATTER_OP = _OPS.matmul_reduce_scatter.default
"""Sums products over the ranks: (inputs, axis, weights, shape, dim)."""
WAIT_OP = _OPS.wait.default
"""Waits for a started collective: (result, tensors needed before or kept until then, axis)."""
START_OPS = {
    _OPS.all_reduce.default: _OPS.start_all_reduce.default,
    ALL_GATHER_OP: _OPS.start_all_gather.default,
    REDUCE_SCATTER_OP: _OPS.start_reduce_scatter.default,
    MATMUL_REDUCE_SCATTER_OP: _OPS.start_matmul_reduce_scatter.default,
}
"""For each collective the operator that starts it only."""
