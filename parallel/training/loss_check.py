"""
The weight of a slice's mean loss, and checks that a loss keeps its contract.

The mean of a model of the transformers library is over the labels that are not -100. Its weight is
their number: slices with other numbers of labels then count as in one process. Other means are
means over rows. Where rows differ, that is wrong, and such a loss is refused. A loss that returns
(mean, count) in place of (sum, count) is noticed by computing it on two parts of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_slicing import BatchSlicing, count_rows, take_rows
from pdrun.parallel.data.batch_structure import plain_structure

IGNORED_LABEL = -100
"""Label that torch's and transformers' losses leave out."""
SHIFTED_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes whose loss leaves out the first label of each row."""
TOKEN_HEADS = (*SHIFTED_HEADS, "ForMaskedLM", "ForTokenClassification", "ForPreTraining")
MAX_CHECKS_ON_DEVICE = 8
TOLERANCE = 1e-4
"""Relative difference below which two losses are the same."""
LabelCounter = Callable[[Any], "torch.Tensor | None"]


def find_label_counter(model: nn.Module) -> LabelCounter | None:
    """
    Return a function that counts the labels of a batch over which a model's own loss is the mean;
    None unless it is a model of the transformers library.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    config = getattr(base, "config", None)
    if not hasattr(config, "model_type"):
        return None
    name = type(base).__name__
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    first = 1 if name.endswith(SHIFTED_HEADS) and not is_encoder_decoder else 0
    has_tokens = name.endswith(TOKEN_HEADS)

    def count_labels(batch: Any) -> torch.Tensor | None:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.dim():
            return None
        if labels.dim() > 1 and not has_tokens:
            return None
        counted = labels[..., first:] if labels.dim() > 1 else labels
        return (counted != IGNORED_LABEL).sum()

    return count_labels


def is_own_loss(output: Any, result: torch.Tensor) -> bool:
    """Whether a loss is the one that the model has returned."""
    if isinstance(output, Mapping):
        return output.get("loss") is result
    if isinstance(output, (tuple, list)):
        return bool(output) and output[0] is result
    return getattr(output, "loss", None) is result


class MeanCheck:
    """Refuses a mean over rows if rows have different numbers of labels."""

    def __init__(self) -> None:
        self._checks_left = MAX_CHECKS_ON_DEVICE

    def check_rows(self, batch: Any) -> None:
        """
        Compare the labels per row of a batch. Batches may differ: each step has its own weights.

        Raises:
            UsageError: they differ: the mean of a slice has no weight that suits all slices.
        """
        if not self._checks_left:
            return
        leaves = pytree.tree_flatten_with_path(plain_structure(batch))[0]
        for path, leaf in leaves:
            if (
                not isinstance(leaf, torch.Tensor)
                or leaf.is_floating_point()
                or leaf.dim() < 2
                or not leaf.shape[0]
                or leaf.device.type == "meta"
            ):
                continue
            if leaf.device.type != "cpu":  # reading a value waits for the device
                self._checks_left -= 1
            found = (leaf != IGNORED_LABEL).flatten(1).sum(1)
            low, high = int(found.min()), int(found.max())
            if low != high:  # never so for a tensor without an ignored label
                what = "loss returns a scalar, which counts as a mean over rows, but rows of "
                what += f"batch{pytree.keystr(path)} have {low} and {high} entries that are not "
                what += f"{IGNORED_LABEL}"
                raise UsageError(what, where="pdrun.parallelize", hint=SUM_HINT)


SUM_HINT = "return (sum, count): the sum over all labels of a slice, and their number"


def check_loss_form(
    loss: Callable[[Any, Any], Any], output: Any, batch: Any, rows: int, result: Any
) -> bool:
    """
    Compute a loss on two parts of an output and refuse a mean in place of a sum.

    A loss that looks across rows, or an output that has no rows, proves nothing. Return whether the
    slice was fit for the check.

    Args:
        result: of the loss on the full output.

    Raises:
        UsageError: the loss returns (mean, count).
    """
    if rows < 2 or not _has_rows(output, rows):
        return False
    whole = _as_numbers(result, rows)
    slicing = BatchSlicing()
    parts: list[tuple[float, float] | None] = []
    try:
        if whole is None or count_rows(batch, slicing) != rows:
            return True
        with torch.no_grad():
            for part in (range(rows // 2), range(rows // 2, rows)):
                made = loss(_take_output(output, part), take_rows(batch, part, slicing))
                parts.append(_as_numbers(made, len(part)))
    except Exception:
        return True  # it needs the output as it is
    pairs = [part for part in parts if part is not None]
    if len(pairs) == len(parts):
        _refuse_mean(whole, pairs)
    return True


def _refuse_mean(whole: tuple[float, float], parts: Sequence[tuple[float, float]]) -> None:
    total, count = whole
    counts = sum(part[1] for part in parts)
    if _is_close(total, sum(part[0] for part in parts)):
        return
    weighted = sum(part[0] * part[1] for part in parts)
    if counts == count and _is_close(total * count, weighted):
        what = "loss returns (mean, count), and must return (sum, count): its first value is the "
        what += f"same for half of the rows ({total:.6g} of {count:g} and {parts[0][0]:.6g} of "
        what += f"{parts[0][1]:g})"
        hint = 'use reduction="sum", or return the mean alone if every row counts the same'
        raise UsageError(what, where="pdrun.parallelize", hint=hint)


def _is_close(first: float, second: float) -> bool:
    return abs(first - second) <= TOLERANCE * max(abs(first), abs(second))


def _as_numbers(result: Any, rows: int) -> tuple[float, float] | None:
    if isinstance(result, torch.Tensor):
        return (float(result.detach()), float(rows)) if result.numel() == 1 else None
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return float(torch.as_tensor(result[0]).detach()), float(torch.as_tensor(result[1]))
    return None


def _has_rows(output: Any, rows: int) -> bool:
    leaves = pytree.tree_leaves(output)
    return bool(leaves) and all(
        type(leaf) is torch.Tensor
        and leaf.dim() > 0
        and leaf.shape[0] == rows
        and leaf.device.type != "meta"
        for leaf in leaves
    )


def _take_output(output: Any, part: range) -> Any:
    return pytree.tree_map(lambda leaf: leaf[part.start : part.stop], output)
