"""
Convolutions and pooling: rows, channels out, channels in (terms of a sum), groups; space stays
whole.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from pdrun.parallel.operators.rules.labels import Labels, by_labels
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")


def _groups(view: View | Place) -> int:
    return int(
        view.arg(8, "groups", 1)
        if view.operator.kind == "convolution"
        else view.arg(6, "groups", 1)
    )


def _transposed(view: View) -> bool:
    return view.operator.kind == "convolution" and bool(view.arg(6, "transposed", False))


def _run(place: Place) -> Call:
    operator = place.operator
    args = list(operator.args)
    kwargs = dict(operator.kwargs)
    if _groups(place) > 1:
        parts = 1
        for axis, split in place.splits.items():
            parts *= place.size[axis] if split.ins[0] == 1 else 1
        where = 8 if operator.kind == "convolution" else 6
        if where < len(args):
            args[where] = args[where] // parts
        else:
            kwargs["groups"] = kwargs["groups"] // parts
    if not place.adds_up() or len(place.ins) < 3:
        return operator.target, tuple(args), kwargs
    return biased_once, (operator.target, float(place.is_first()), *args), kwargs


def biased_once(
    target: object,
    factor: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Return a convolution with a factor for its bias."""
    result: torch.Tensor = target(x, weight, bias * factor, *args, **kwargs)  # type: ignore[operator]
    return result


@rule(*CONVOLUTIONS, run=_run)
def convolution(view: View) -> list[Split]:
    """x [N, C, ...], weight [O, C / groups, ...], bias [O]."""
    space: list[Hashable | None] = [None] * (len(view.ins[1]) - 2)
    if _transposed(view) or len(view.ins[0]) != len(view.ins[1]):
        return []
    many = _groups(view)
    if many > 1:
        ins: list[Labels] = [["n", "c", *space], ["c", None, *space], ["c"]]
        return by_labels(view, ins[: len(view.ins)], [["n", "c", *space]], {"c": many})
    ins = [["n", "c", *space], ["o", "c", *space], ["o"]]
    return by_labels(view, ins[: len(view.ins)], [["n", "o", *space]], lost=["c"])


_SPACE = {"1d": 1, "2d": 2, "3d": 3}


@rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
)
def pooling(view: View) -> list[Split]:
    """x [N, C, ...]: cut N or C."""
    space = next(count for name, count in _SPACE.items() if name in view.operator.kind)
    labels = [*range(len(view.ins[0]) - space), *[None] * space]
    return by_labels(view, [labels], [labels] * len(view.outs))


@rule("upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle")
def resizing(view: View) -> list[Split]:
    """x [N, C, H, W]: cut N."""
    labels = ["n", *[None] * (len(view.ins[0]) - 1)]
    return by_labels(view, [labels], [labels])
