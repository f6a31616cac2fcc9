"""
Floating point operations of an operator, from the shapes of its inputs and outputs.

Only products, convolutions and attention have any that matter for a price. All other operators are
bound by the bytes that they read and write. `count_flops` counts any operator, to compare operators
with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C import DispatchKey
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph, TensorRef, replace_refs

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ProductCount:
    """
    The work of an operator that multiplies matrices.

    Attributes:
        flops: of the forward pass.
        size: geometric mean of M, N and K of one product; decides how much of the peak is attained.
        operands: inputs that are multiplied.
        backward: FLOPs of the backward pass per FLOP of the forward pass, for each operand that
            needs a gradient.
    """

    flops: float
    size: float
    operands: int = 2
    backward: float = 1.0


Counter = Callable[[Operator, Sequence[Shape], Sequence[Shape]], ProductCount]


def _count_matmul(operator: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> ProductCount:
    inner = ins[0][-1]
    batch = math.prod(outs[0][:-2]) if operator.kind in ("matmul", "bmm") else 1
    return _make_count(2.0 * math.prod(outs[0]) * inner, batch)


def _count_addmm(operator: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> ProductCount:
    inner = ins[1][-1]
    batch = outs[0][0] if operator.kind == "baddbmm" else 1
    return _make_count(2.0 * math.prod(outs[0]) * inner, batch)


def _count_einsum(operator: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> ProductCount:
    equation = str(operator.args[0]).replace(" ", "")
    left, _, right = equation.partition("->")
    sizes: dict[str, int] = {}
    terms = left.split(",")
    if "." in equation or len(terms) != len(ins):
        return _make_count(2.0 * math.prod(outs[0]), 1)
    for term, shape in zip(terms, ins, strict=True):
        sizes.update(zip(term, shape, strict=True))
    in_all = [label for label in sizes if all(label in term for term in (*terms, right))]
    return _make_count(2.0 * math.prod(sizes.values()), math.prod(sizes[label] for label in in_all))


def _count_convolution(
    operator: Operator, ins: Sequence[Shape], outs: Sequence[Shape]
) -> ProductCount:
    return _make_count(2.0 * math.prod(outs[0]) * math.prod(ins[1][1:]), 1)


def _count_attention(
    operator: Operator, ins: Sequence[Shape], outs: Sequence[Shape]
) -> ProductCount:
    *batch, queries, width = ins[0]
    keys = ins[1][-2]
    out_width = ins[2][-1]
    share = 0.5 if operator.get_arg(5, "is_causal", False) else 1.0
    flops = 2.0 * share * math.prod(batch) * queries * keys * (width + out_width)
    # the backward pass computes the scores again: 5 products for 2
    return ProductCount(flops, (queries * keys * width) ** (1 / 3), 3, 2.5 / 3)


def _make_count(flops: float, batch: int) -> ProductCount:
    return ProductCount(flops, max(1.0, flops / 2 / max(1, batch)) ** (1 / 3))


COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(("linear", "mm", "matmul", "bmm", "mv", "dot"), _count_matmul),
    # experts: each row is multiplied with one matrix
    **dict.fromkeys(("grouped_mm", "_grouped_mm", "grouped_product"), _count_matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _count_addmm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _count_convolution),
    "einsum": _count_einsum,
    "scaled_dot_product_attention": _count_attention,
}
VIEW_KINDS = frozenset(
    (
        *("_reshape_alias", "_unsafe_view", "alias", "broadcast_to", "chunk", "constrain"),
        *("detach", "expand", "expand_as", "flatten", "moveaxis", "movedim", "narrow", "numpy_T"),
        *("permute", "reshape", "reshape_as", "select", "slice", "split", "split_with_sizes"),
        *("squeeze", "stop", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "view", "view_as"),
    )
)
"""Operators that read and write nothing."""


def count_products(
    operator: Operator, ins: Sequence[Shape], outs: Sequence[Shape]
) -> ProductCount | None:
    """Return the work of an operator on tensors of these shapes; None if it multiplies nothing."""
    counter = COUNTERS.get(operator.kind)
    if counter is None:
        return None
    return counter(operator, ins, outs)


def count_flops(graph: OperatorGraph, operator: Operator) -> float:
    """
    Return the FLOPs of an operator of any kind, forward.

    Products are counted as for prices, other operators by torch's registry
    (`torch.utils.flop_counter.register_flop_formula` adds a formula). What neither knows has one
    per element that it makes, and a view has none.
    """
    ins, outs = (
        [graph.shape_of(index) for index in indices]
        for indices in (operator.inputs, operator.outputs)
    )
    product = count_products(operator, ins, outs)
    if product is not None:
        return product.flops
    if operator.kind in VIEW_KINDS or _is_view(operator.target):
        return 0.0
    return _count_registered(graph, operator) or float(sum(math.prod(shape) for shape in outs))


def _is_view(target: Callable[..., object]) -> bool:
    """Return whether an ATen operator returns views of its inputs, and writes nothing."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [returned.alias_info for returned in target._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _count_registered(graph: OperatorGraph, operator: Operator) -> float:
    """Return the FLOPs that torch's registry counts, also inside of composed operators; else 0."""
    target = operator.target
    if not isinstance(target, torch._ops.OpOverload):
        return 0.0

    def make_blank(index: int) -> torch.Tensor:
        tensor = graph.tensors[index]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def take(reference: TensorRef) -> torch.Tensor:
        return make_blank(reference.index)

    args, kwargs = replace_refs(operator.args, take), replace_refs(operator.kwargs, take)
    formula = flop_registry.get(target.overloadpacket)
    if formula is not None:
        made = [make_blank(index) for index in operator.outputs]
        return float(formula(*args, **kwargs, out_val=made if operator.returns_list else made[0]))
    if not target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return 0.0
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):  # it needs values, or tensors of another device
        return 0.0
    return float(counter.get_total_flops())
