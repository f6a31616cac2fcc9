"""Normalisation and softmax: the dims that are normalised over stay whole."""

from __future__ import annotations

from pdrun.parallel.operators.rules.labels import Labels, by_labels, dims
from pdrun.parallel.operators.rules.rule import Split, View, rule


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(view: View) -> list[Split]:
    """Cut the dims in front of the normalised ones."""
    shape = view.ins[0]
    lead = len(shape) - len(view.arg(1, "normalized_shape"))
    first = [*range(lead), *[None] * (len(shape) - lead)]
    outs = [[*range(lead), *[None] * (len(out) - lead)] for out in view.outs]
    return by_labels(view, [first, *[[None] * len(some) for some in view.ins[1:]]], outs)


SOFTMAX = ("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")


@rule(*SOFTMAX)
def softmax(view: View) -> list[Split]:
    """Cut all dims but one."""
    shape = view.ins[0]
    (over,) = dims(view.arg(1, "dim"), len(shape))
    labels = [None if dim == over else dim for dim in range(len(shape))]
    return by_labels(view, [labels], [labels])


@rule("group_norm")
def group_norm(view: View) -> list[Split]:
    """x [N, C, ...]: cut N."""
    shape = view.ins[0]
    first: Labels = ["n", *[None] * (len(shape) - 1)]
    return by_labels(view, [first, *[[None]] * (len(view.ins) - 1)], [first])


@rule("batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(view: View) -> list[Split]:
    """x [N, C, ...] with statistics that are given: cut any dim; every other input is [C]."""
    if view.operator.kind == "batch_norm" and view.arg(5, "training", False):
        return []
    first = list(range(len(view.ins[0])))
    outs: list[Labels] = [first, *[[None] * len(out) for out in view.outs[1:]]]
    return by_labels(view, [first, *[[1]] * (len(view.ins) - 1)], outs)
