"""
What a scalar loss is a mean over, read from its graph of autograd.

The graph of a loss has the operations that made it, with their sizes and, for a mean over labels,
the number of labels that count. This holds for any model, whatever its class is called and however
it shifts or selects its labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LABEL_LOSSES = {"NllLoss", "NllLoss2D"}
"""Losses whose mean leaves out ignored labels, and weighs labels by their class."""
ELEMENT_LOSSES = {
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "HuberLoss",
    "MseLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
}
ROW_LOSSES = {"MultiMarginLoss", "MultilabelMarginLoss"}
MEAN, SUM = 1, 2
"""torch's numbers of a loss's reduction."""
LINEAR = {"Add", "Alias", "Clone", "Neg", "Squeeze", "Sub", "ToCopy", "Unsqueeze", "View"}
"""Operations that keep a scalar, or add scalars."""
JOINS = {"Cat", "Stack"}


@dataclass(frozen=True)
class LossTerm:
    """
    A summand of a scalar loss.

    Attributes:
        operation: that made it, by autograd's name.
        count: of the elements over which it is a mean; None if it is no mean that can be read.
        is_sum: whether it is a sum over elements.
        labels: of a mean over labels: how many there are, also those that do not count.
    """

    operation: str
    count: torch.Tensor | int | None = None
    is_sum: bool = False
    labels: int | None = None


def read_terms(loss: torch.Tensor) -> list[LossTerm]:
    """Return the summands of a scalar loss; none if it has no graph."""
    terms = []
    open_nodes = [(loss.grad_fn, False)]
    while open_nodes:
        node, is_divided = open_nodes.pop()
        if node is None:
            continue
        kind = node.name().partition("Backward")[0]
        inputs = [inner for inner, _ in node.next_functions if inner is not None]
        if kind in LINEAR or (kind in ("Mul", "Div") and len(inputs) == 1):
            open_nodes += [(inner, is_divided or kind == "Div") for inner in inputs]
        elif kind in ("Mean", "Sum") and _joins_scalars(node, kind):
            open_nodes += [(inner, is_divided) for inner, _ in inputs[0].next_functions]
        else:
            terms.append(_read_term(node, kind, is_divided))
    return terms


def _joins_scalars(node: Any, kind: str) -> bool:
    """Whether a mean or a sum is over scalars that were put into one tensor."""
    joined = node.next_functions[0][0]
    if joined is None or joined.name().partition("Backward")[0] not in JOINS:
        return False
    return _numel_of(node, kind) == len(joined.next_functions)


def _numel_of(node: Any, kind: str) -> int | None:
    if kind == "Mean":
        return getattr(node, "_saved_self_sym_numel", None)
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else torch.Size(sizes).numel()


def _read_term(node: Any, kind: str, is_divided: bool) -> LossTerm:
    if kind == "Mean":
        return LossTerm(kind, _numel_of(node, kind))
    if kind == "Sum":
        return LossTerm(kind, is_sum=not is_divided)
    if hasattr(node, "loss_count"):  # of pdrun.linear_cross_entropy
        return LossTerm(kind, node.loss_count, is_sum=node.loss_is_sum and not is_divided)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == SUM:
        return LossTerm(kind, is_sum=not is_divided)
    if reduction != MEAN:
        return LossTerm(kind)
    if kind in LABEL_LOSSES:
        return LossTerm(kind, node._saved_total_weight, labels=node._saved_target.numel())
    if kind in ELEMENT_LOSSES:
        return LossTerm(kind, node._saved_self.numel())
    if kind in ROW_LOSSES:
        return LossTerm(kind, node._saved_target.shape[0])
    return LossTerm(kind)
