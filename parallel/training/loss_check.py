"""
The weight of a slice's mean loss, and checks that a loss keeps its contract.

The mean that a model of the transformers library returns is over labels, rows or patches. Its
weight is what it divides by (see `loss_graph`): slices with other numbers of labels then count as
in one process. Other means are means over rows. Where rows differ, that is wrong, and such a loss
is refused. A loss that returns (mean, count) in place of (sum, count) is noticed by computing it on
two parts of an output.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import PdrunError, UsageError
from pdrun.parallel.data.batch_slicing import BatchSlicing, count_rows, take_rows
from pdrun.parallel.data.batch_structure import plain_structure
from pdrun.parallel.data.seeded import SlicedBatch
from pdrun.parallel.training.loss_graph import LossTerm, read_terms

IGNORED_LABEL = -100
"""Label that torch's and transformers' losses leave out."""
MAX_CHECKS_ON_DEVICE = 8
TOLERANCE = 1e-4
"""Relative difference below which two losses are the same."""
NARROW_TOLERANCE = 0.05
"""The same for losses of 16 bits."""
SUM_HINT = "return (sum, count): the sum over all labels of a slice, and their number"


class OwnLoss:
    """
    The loss that a model of the transformers library returns beside its output.

    Args:
        name: of the model's class.
        compares_rows: whether the loss compares the rows of a batch with one another.
    """

    def __init__(self, name: str, compares_rows: bool) -> None:
        self._name = name
        self._compares_rows = compares_rows

    def count_elements(self, loss: torch.Tensor, is_split: bool) -> torch.Tensor | int | None:
        """
        Return the number of elements over which the loss is the mean; None if it cannot be read.

        Args:
            is_split: whether a step has several slices.

        Raises:
            UsageError: the losses of slices cannot be combined into the loss of the batch.
        """
        try:
            return self._count_terms(read_terms(loss))
        except UsageError:
            if is_split:
                raise
            return None

    def _count_terms(self, terms: Sequence[LossTerm]) -> torch.Tensor | int | None:
        if self._compares_rows:
            raise self._refuse("compares each row with all rows of a slice")
        means = [term for term in terms if term.count is not None]
        if means and len(means) < len(terms):
            other = next(term.operation for term in terms if term.count is None)
            raise self._refuse(f"is a mean and another term ({other}) that is no mean")
        if any(term.is_sum for term in terms):
            raise self._refuse("is a sum, and no mean")
        counts = [term.count for term in means if term.count is not None]
        if len(counts) > 1:
            numbers = sorted({float(count) for count in counts})
            if len(numbers) > 1:
                found = " and ".join(f"{number:g}" for number in numbers)
                raise self._refuse(f"adds means over different numbers of elements ({found})")
        return counts[0] if counts else None

    def _refuse(self, what: str) -> UsageError:
        return UsageError(
            f"the own loss of {self._name} {what}: losses of slices do not add up to that of the "
            "batch",
            where="pdrun.parallelize",
            hint="compute a loss from the model's output; " + SUM_HINT,
        )


def find_own_loss(model: nn.Module) -> OwnLoss | None:
    """Return what a model's own loss is; None unless it is a model of the transformers library."""
    base = getattr(model, "get_base_model", lambda: model)()
    if not hasattr(getattr(base, "config", None), "model_type"):
        return None
    # the library's name for a loss between the texts and the images of a batch; models of time
    # series have it too, where True says that a loss is wanted
    asked = inspect.signature(base.forward).parameters.get("return_loss")
    compares_rows = asked is not None and asked.default is not True
    return OwnLoss(type(base).__name__, compares_rows)


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
        Compare the labels per row of a batch, also of one that was collated slice by slice.

        Batches may differ: each step has its own weights. Tensors without an ignored label prove
        nothing: slices may be padded to different lengths.

        Raises:
            UsageError: they differ: the mean of a slice has no weight that suits all slices.
        """
        if not self._checks_left:
            return
        found: dict[str, list[torch.Tensor]] = defaultdict(list)
        for part in batch if isinstance(batch, SlicedBatch) else [batch]:
            for path, leaf in pytree.tree_flatten_with_path(plain_structure(part))[0]:
                if _can_have_labels(leaf):
                    found[pytree.keystr(path)].append(leaf)
        for name, tensors in found.items():
            if tensors[0].device.type != "cpu":  # reading a value waits for the device
                self._checks_left -= 1
            masks = [(tensor != IGNORED_LABEL).flatten(1) for tensor in tensors]
            counts = torch.cat([mask.sum(1) for mask in masks])
            low, high = int(counts.min()), int(counts.max())
            if low != high and not all(bool(mask.all()) for mask in masks):
                what = "loss returns a scalar, which counts as a mean over rows, but rows of "
                what += f"batch{name} have {low} and {high} entries that are not {IGNORED_LABEL}"
                raise UsageError(what, where="pdrun.parallelize", hint=SUM_HINT)

    def check_labels(self, mean: torch.Tensor) -> None:
        """
        Refuse a mean over labels in which some do not count, or have a weight of their class.

        Raises:
            UsageError: slices with as many rows would then divide by other numbers.
        """
        if not self._checks_left or not mean.requires_grad:
            return
        for term in read_terms(mean):
            if term.labels is None or term.count is None:
                continue
            if mean.device.type != "cpu":
                self._checks_left -= 1
            weight = float(term.count)
            if abs(weight - term.labels) > TOLERANCE * term.labels:
                raise UsageError(
                    f"loss returns a mean over {term.labels} labels whose weights add up to"
                    f" {weight:g} (weight= or ignore_index=), and counts as a mean over rows:"
                    " slices would divide by other numbers",
                    where="pdrun.parallelize",
                    hint='return (sum, count): reduction="sum", and the sum of the weights of all'
                    " labels that count, such as weight[labels].sum()",
                )


def _can_have_labels(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and not leaf.is_floating_point()
        and leaf.dim() > 1
        and leaf.shape[0] > 0
        and leaf.device.type != "meta"
    )


def check_loss_form(
    loss: Callable[[Any, Any], Any], output: Any, batch: Any, rows: int, result: Any
) -> str:
    """
    Compute a loss on two parts of an output and refuse a mean in place of a sum.

    An output that has no rows proves nothing. The loss may communicate: it is called twice on every
    rank, whatever its slice is.

    Args:
        result: of the loss on the full output.

    Returns:
        what is to be said about a loss that is not the sum of the losses of its rows; or nothing.

    Raises:
        UsageError: the loss returns (mean, count).
        PdrunError: a collective inside of the loss failed.
    """
    slicing = BatchSlicing()
    pieces = [(output, batch)] * 2
    sizes = rows // 2, rows - rows // 2
    parts = []
    whole = None
    try:
        if rows > 1 and _has_rows(output, rows) and count_rows(batch, slicing) == rows:
            whole = _as_numbers(result, rows)
            halves = (range(sizes[0]), range(sizes[0], rows))
            pieces = [(_take_output(output, h), take_rows(batch, h, slicing)) for h in halves]
    except UsageError:  # the batch has no rows that can be taken apart
        whole = None
    with torch.no_grad():
        for some_output, some_batch in pieces:
            parts.append(_call_on_part(loss, some_output, some_batch))
    if whole is not None:
        numbers = [_as_numbers(part, size) for part, size in zip(parts, sizes, strict=True)]
        pairs = [pair for pair in numbers if pair is not None]
        if len(pairs) == len(parts):
            return _judge_parts(result, whole, pairs, rows)
    return ""


def _call_on_part(loss: Callable[[Any, Any], Any], output: Any, batch: Any) -> Any:
    """Return a loss on a part of an output; None if it needs the output as it is."""
    try:
        return loss(output, batch)
    except (PdrunError, dist.DistError):
        raise
    except Exception:
        return None


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


def _judge_parts(
    result: Any, whole: tuple[float, float], parts: Sequence[tuple[float, float]], rows: int
) -> str:
    """
    Compare the loss of some rows with those of their halves; see `check_loss_form`.

    Args:
        result: of the loss; a mean if it is a tensor.
        whole, parts: (sum or mean, count).
    """
    first = result if isinstance(result, torch.Tensor) else result[0]
    if isinstance(result, torch.Tensor):
        total, sums = whole[0] * whole[1], [mean * count for mean, count in parts]
    else:
        _refuse_mean(whole, parts)
        total, sums = whole[0], [part[0] for part in parts]
    is_narrow = isinstance(first, torch.Tensor) and first.dtype.itemsize < 4
    limit = (NARROW_TOLERANCE if is_narrow else TOLERANCE) * max(map(abs, (total, *sums)))
    difference = abs(total - sum(sums))
    if difference <= limit or not math.isfinite(total):
        return ""
    return (
        f"the loss of {rows} rows is {total:.6g} as a sum, and those of their halves add up to"
        f" {sum(sums):.6g}: loss= compares rows, adds a term per call or draws random numbers."
        " Each slice is computed separately: unless loss= gathers the rows of all ranks, the result"
        " depends on the number of ranks and micro-batches"
    )


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
