"""
Products: a dim of the result is sharded with the dim of the factor that it is from. A contracted
dim that is sharded leaves partial sums.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.nn import functional

from pdrun.parallel.operators.rules.labels import (
    Labels,
    broadcast_labels,
    partial_sum_splits,
    splits_by_labels,
)
from pdrun.parallel.operators.rules.rule import (
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)


@register_rule("mm", "bmm", "matmul", "mv", "dot")
def split_matmul(view: OperatorView) -> list[OpSplit]:
    """[..., I, K] x [..., K, J]: split any dim, K for partial sums; vectors have no I or no J."""
    a, b = view.in_shapes
    (out,) = view.out_shapes
    tail = (["i"] if len(a) > 1 else []) + (["j"] if len(b) > 1 else [])
    lead: list[Hashable] = list(range(len(out) - len(tail)))
    batch = out[: len(lead)]
    first = broadcast_labels(a[:-2], batch, lead) + (["i", "k"] if len(a) > 1 else ["k"])
    second = broadcast_labels(b[:-2], batch, lead) + (["k", "j"] if len(b) > 1 else ["k"])
    return splits_by_labels(
        view, [first, second], [lead + tail], summed=["k"]
    ) + partial_sum_splits(view, [0], [1])


def _call_biased(context: LocalContext) -> LocalCall:
    """
    Add the bias on the first rank only if results are partial sums.

    The other ranks use it with factor 0, so that it has a gradient everywhere.
    """
    is_linear = context.operator.kind == "linear"
    if not context.is_partial_sum() or len(context.in_shapes) < 3:
        target = local_linear if is_linear else context.operator.target
        return target, context.operator.args, context.operator.kwargs
    args = (*context.operator.args[:3], float(context.is_first_term()))
    return (local_partial_linear if is_linear else local_partial_addmm), args, {}


def local_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return what ``torch.nn.functional.linear`` returns. The name is looked up at each call: a
    pipeline can replace the function to defer the product for the weight.
    """
    return functional.linear(x, weight, bias)


def local_partial_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return `torch.nn.functional.linear` with a factor for the bias."""
    return functional.linear(x, weight, bias * factor)


def local_partial_addmm(
    bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return `torch.addmm` with a factor for the added matrix."""
    return torch.addmm(bias * factor, x, weight)


@register_rule("linear", local_call=_call_biased)
def split_linear(view: OperatorView) -> list[OpSplit]:
    """x [..., K], weight [J, K], bias [J]: split any dim, K for partial sums."""
    lead: list[Hashable] = list(range(len(view.in_shapes[0]) - 1))
    ins: list[Labels] = [[*lead, "k"], ["j", "k"], ["j"]]
    splits = splits_by_labels(view, ins[: len(view.in_shapes)], [[*lead, "j"]], summed=["k"])
    return splits + ([] if len(view.in_shapes) > 2 else partial_sum_splits(view, [0], [1]))


@register_rule("addmm", local_call=_call_biased)
def split_addmm(view: OperatorView) -> list[OpSplit]:
    """added [I, J] (broadcast), x [I, K], weight [K, J]: split any dim, K for partial sums."""
    added = broadcast_labels(view.in_shapes[0], view.out_shapes[0], ["i", "j"])
    if view.operator.kwargs:  # factors
        return []
    return splits_by_labels(view, [added, ["i", "k"], ["k", "j"]], [["i", "j"]], summed=["k"])


def local_partial_baddbmm(
    added: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    factor: float,
    beta: float,
    alpha: float,
) -> torch.Tensor:
    """Return `torch.baddbmm` with a factor for the added matrices."""
    return torch.baddbmm(added * factor, x, y, beta=beta, alpha=alpha)


def _call_baddbmm(context: LocalContext) -> LocalCall:
    operator = context.operator
    if not context.is_partial_sum():
        return operator.target, operator.args, operator.kwargs
    factors = (operator.kwargs.get("beta", 1), operator.kwargs.get("alpha", 1))
    return local_partial_baddbmm, (*operator.args, float(context.is_first_term()), *factors), {}


@register_rule("baddbmm", local_call=_call_baddbmm)
def split_baddbmm(view: OperatorView) -> list[OpSplit]:
    """added [N, I, J] (broadcast), [N, I, K] x [N, K, J]: split any dim, K for partial sums."""
    added = broadcast_labels(view.in_shapes[0], view.out_shapes[0], ["n", "i", "j"])
    return splits_by_labels(
        view, [added, ["n", "i", "k"], ["n", "k", "j"]], [["n", "i", "j"]], summed=["k"]
    )


@register_rule("_grouped_mm", "grouped_mm_fallback")
def split_grouped_product(view: OperatorView) -> list[OpSplit]:
    """Rows [S, K] sorted by group, weights [G, K, J]: split J, or K for partial sums."""
    if len(view.in_shapes) != 3 or [len(shape) for shape in view.in_shapes] != [2, 3, 1]:
        return []
    # torch's kernel requires rows that are aligned to 16 bytes
    unit = 8 if view.operator.kind == "_grouped_mm" else 1
    sizes = {"k": view.in_shapes[1][1], "j": view.in_shapes[1][2]}
    if any(size % unit for size in sizes.values()):
        return []
    return splits_by_labels(
        view,
        [[None, "k"], [None, "k", "j"], [None]],
        [[None, "j"]],
        must_divide={label: size // unit for label, size in sizes.items()},
        summed=["k"],
    )


@register_rule("einsum")
def split_einsum(view: OperatorView) -> list[OpSplit]:
    """
    Split any index of the equation; with an ellipsis or a repeated index everything stays
    replicated.
    """
    equation = str(view.get_arg(0, "equation")).replace(" ", "")
    if "." in equation:
        return []
    left, arrow, right = equation.partition("->")
    ins = left.split(",")
    if any(len(set(names)) < len(names) for names in ins):
        return []
    if not arrow:
        all_names = left.replace(",", "")
        right = "".join(sorted(name for name in set(all_names) if all_names.count(name) == 1))
    if any(
        shape[names.index(name)] == 1 != _largest_size(view, ins, name)
        for names, shape in zip(ins, view.in_shapes, strict=True)
        for name in names
    ):
        return []
    labels = [list(names) for names in ins]
    return splits_by_labels(
        view, labels, [list(right)], summed=set("".join(ins)) - set(right)
    ) + partial_sum_splits(view, *([position] for position in range(len(ins))))


def _largest_size(view: OperatorView, ins: list[str], name: str) -> int:
    return max(
        shape[names.index(name)]
        for names, shape in zip(ins, view.in_shapes, strict=True)
        if name in names
    )
