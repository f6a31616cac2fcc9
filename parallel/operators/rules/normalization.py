"""Normalisation and softmax: the normalised dims stay replicated."""

from __future__ import annotations

from pdrun.parallel.operators.rules.labels import (
    Labels,
    labels_except,
    normalize_dims,
    splits_by_labels,
)
from pdrun.parallel.operators.rules.rule import OperatorView, OpSplit, register_rule


@register_rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def split_layer_norm(view: OperatorView) -> list[OpSplit]:
    """Split the dims before the normalised ones."""
    shape = view.in_shapes[0]
    lead = len(shape) - len(view.get_arg(1, "normalized_shape"))
    first = [*range(lead), *[None] * (len(shape) - lead)]
    outs = [[*range(lead), *[None] * (len(out) - lead)] for out in view.out_shapes]
    return splits_by_labels(
        view, [first, *[[None] * len(in_shape) for in_shape in view.in_shapes[1:]]], outs
    )


SOFTMAX_KINDS = ("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")


@register_rule(*SOFTMAX_KINDS)
def split_softmax(view: OperatorView) -> list[OpSplit]:
    """Split all dims but one."""
    shape = view.in_shapes[0]
    (softmax_dim,) = normalize_dims(view.get_arg(1, "dim"), len(shape))
    labels = labels_except(len(shape), softmax_dim)
    return splits_by_labels(view, [labels], [labels])


@register_rule("group_norm")
def split_group_norm(view: OperatorView) -> list[OpSplit]:
    """x [N, C, ...]: split N."""
    shape = view.in_shapes[0]
    first: Labels = ["n", *[None] * (len(shape) - 1)]
    return splits_by_labels(view, [first, *[[None]] * (len(view.in_shapes) - 1)], [first])


@register_rule("batch_norm", "_native_batch_norm_legit_no_training")
def split_batch_norm(view: OperatorView) -> list[OpSplit]:
    """x [N, C, ...] with given statistics: split any dim; every other input is [C]."""
    if view.operator.kind == "batch_norm" and view.get_arg(5, "training", False):
        return []
    first = list(range(len(view.in_shapes[0])))
    outs: list[Labels] = [first, *[[None] * len(out) for out in view.out_shapes[1:]]]
    return splits_by_labels(view, [first, *[[1]] * (len(view.in_shapes) - 1)], outs)
