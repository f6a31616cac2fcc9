"""
The cross entropy of a linear layer's output, without the full output.

Rows are computed in chunks. A chunk's logits give its losses and, unless losses of rows are asked
for, its gradients immediately: only sums remain. The backward pass multiplies them by the gradient
of the loss. Losses of rows (``reduction="none"``) and losses in fp16, whose gradients need the loss
scale, compute the chunks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.tensor.vocab_cross_entropy import VocabShard
from pdrun.parallel.torch_compat import add_product

API_NAME = "pdrun.linear_cross_entropy"
CHUNK_BYTES = 1 << 28
"""Bytes of a chunk's logits in fp32."""
ROW_STEP = 128
"""A chunk has a multiple of so many rows, as matrix products prefer, if it has more."""
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: nn.Module | torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """
    Return ``cross_entropy(linear(hidden, head), targets)``; the logits exist a chunk at a time.

    The loss is computed and returned in fp32 (fp64 of fp64).

    Args:
        hidden: ``[..., width]``.
        head: a linear layer, which can be sharded over the vocabulary (`pdrun.vocab`); or a weight
            ``[vocabulary, width]``.
        targets: ``[...]``, class indices.
        bias: of the head, if it is a weight.
        ignore_index: targets with this value do not count.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        reduction: "mean" over the targets that count, "sum", or "none", which has the shape of
            ``targets``.
        chunk_rows: rows of a chunk; default: as many as have 256 MiB of logits.

    Raises:
        UsageError: shapes do not fit, or the head is no linear layer.
    """
    if isinstance(head, torch.Tensor):
        weight, shard = head, None
    else:
        hidden, weight, bias, shard = _read_head(hidden, head, bias)
    _check_arguments(hidden, weight, targets, reduction, chunk_rows)
    return compute_loss(
        hidden, weight, bias, targets, shard, ignore_index, label_smoothing, reduction, chunk_rows
    )


def compute_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    shard: VocabShard | None,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Return the loss of valid arguments; ``weight`` is this rank's shard of the vocabulary."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = targets.reshape(-1)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        rows, weight = rows.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    work = _LossWork(
        None if shard is None or shard.axis.size == 1 else shard,
        weight.shape[0] if shard is None else shard.total,
        ignore_index,
        smoothing,
        chunk_rows or _default_rows(weight.shape[0]),
    )
    with torch.autocast(device, enabled=False):
        if reduction == "none":
            losses: torch.Tensor = _RowLosses.apply(rows, weight, bias, flat, work)
            return losses.view(targets.shape)
        if rows.dtype == torch.float16:
            losses = _RowLosses.apply(rows, weight, bias, flat, work)
            return losses.sum() if reduction == "sum" else losses.sum() / work.count_targets(flat)
        total: torch.Tensor = _SummedLoss.apply(rows, weight, bias, flat, work, reduction)
        return total


def _read_head(
    hidden: torch.Tensor, head: nn.Module, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, VocabShard | None]:
    """Return the input, weight, bias and shard of a linear layer."""
    weight = getattr(head, "weight", None)
    if not isinstance(head, nn.Linear) or not isinstance(weight, torch.Tensor) or bias is not None:
        what = f"head must be a linear layer or a weight, got {type(head).__name__}"
        if bias is not None:
            what = "bias= belongs to a head that is a weight; a layer has its own"
        raise UsageError(what, where=API_NAME, hint="pass model.head, or model.head.weight")
    shard: VocabShard | None = getattr(head, "_vocab_shard", None)
    context = getattr(head, "_context", None)
    if context is not None:
        if shard is None:
            what = "the head is sharded, and not over the vocabulary"
            raise UsageError(what, where=API_NAME, hint='use pdrun.vocab("tp") for it')
        hidden = context.enter(hidden)
    return hidden, weight, head.bias, shard


def _check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    reduction: str,
    chunk_rows: int | None,
) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        what = f"hidden is {list(hidden.shape)}, the head's weight {list(weight.shape)}"
        hint = "hidden is [..., width], the weight [vocabulary, width]"
        raise UsageError(what, where=API_NAME, hint=hint)
    if hidden.shape[:-1] != targets.shape:
        what = f"hidden is {list(hidden.shape)}, targets {list(targets.shape)}"
        raise UsageError(what, where=API_NAME, hint="one target for each row of hidden")
    if reduction not in REDUCTIONS:
        what = f"reduction must be mean, sum or none, got {reduction!r}"
        raise UsageError(what, where=API_NAME)
    if chunk_rows is not None and chunk_rows < 1:
        raise UsageError(f"chunk_rows must be at least 1, got {chunk_rows}", where=API_NAME)


def _default_rows(vocabulary: int) -> int:
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    return rows - rows % ROW_STEP if rows > ROW_STEP else rows


@dataclass(frozen=True)
class _LossWork:
    """How losses and gradients of a chunk are computed."""

    shard: VocabShard | None
    total: int
    """Size of the full vocabulary."""
    ignore_index: int
    smoothing: float
    chunk_rows: int

    def chunks(self, count: int) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        for low in range(0, count, self.chunk_rows):
            yield slice(low, min(low + self.chunk_rows, count))

    def count_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of targets that count."""
        return (targets != self.ignore_index).sum()

    def log_softmax(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> _ChunkResult:
        """Return logarithms of this rank's probabilities of a chunk, and the losses."""
        logits = functional.linear(rows, weight, bias)
        logs = functional.log_softmax(logits, -1, dtype=_loss_dtype(rows))
        is_counted = targets != self.ignore_index
        ids = targets.masked_fill(~is_counted, self.shard.low if self.shard else 0)
        foreign = None
        if self.shard is not None:
            ids, foreign = self.shard.to_local_ids(ids)
            logs += _shift_to_axis(logits, logs, self.shard.axis)
        picked = logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        if foreign is not None:
            picked = picked.masked_fill(foreign, 0)
        sums = [picked, logs.sum(-1)] if self.smoothing else [picked]
        if self.shard is not None:
            sums = list(self.shard.axis.all_reduce(torch.stack(sums)).unbind())
        losses = -(1 - self.smoothing) * sums[0]
        if self.smoothing:
            losses -= self.smoothing / self.total * sums[1]
        return _ChunkResult(losses.masked_fill(~is_counted, 0), logs, ids, foreign, is_counted)

    def logit_grads(self, result: _ChunkResult, kind: torch.dtype) -> torch.Tensor:
        """Return the gradients of a chunk's logits; those of ignored rows are not zero."""
        grads = result.logs.exp_()
        if self.smoothing:
            grads -= self.smoothing / self.total
        own = torch.full_like(grads[:, 0], self.smoothing - 1)
        if result.foreign is not None:
            own = own.masked_fill(result.foreign, 0)
        grads.scatter_add_(-1, result.ids.unsqueeze(-1), own.unsqueeze(-1))
        return grads.to(kind)


@dataclass
class _ChunkResult:
    losses: torch.Tensor
    """``[rows]``, zero where the target does not count."""
    logs: torch.Tensor
    ids: torch.Tensor
    """Targets relative to this rank's part of the vocabulary."""
    foreign: torch.Tensor | None
    """Which targets other ranks have."""
    is_counted: torch.Tensor


class _GradientSums:
    """The gradients of the input, the weight and the bias, filled chunk by chunk."""

    def __init__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Any
    ) -> None:
        wide = _loss_dtype(rows)
        self.to_rows = torch.zeros_like(rows) if needs[0] else None
        self.to_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.to_bias = None
        if bias is not None and needs[2]:
            self.to_bias = torch.zeros_like(bias, dtype=wide)

    def add_chunk(
        self,
        part: slice,
        rows: torch.Tensor,
        weight: torch.Tensor,
        grads: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        """
        Add a chunk.

        Args:
            grads: of the logits.
            factor: ``[rows]`` of the chunk; 0 where the target does not count.
        """
        scaled = factor.unsqueeze(-1).to(rows.dtype)
        if self.to_rows is not None:
            torch.mm(grads, weight, out=self.to_rows[part]).mul_(scaled)
        if self.to_weight is not None:
            add_product(self.to_weight, grads.t(), rows[part] * scaled)
        if self.to_bias is not None:
            self.to_bias += (grads.t() @ scaled).squeeze(-1)


class _SummedLoss(torch.autograd.Function):
    """The sum or the mean of the losses; gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        work: _LossWork,
        reduction: str,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=_loss_dtype(rows), device=rows.device)
        sums = _GradientSums(rows, weight, bias, ctx.needs_input_grad)
        for part in work.chunks(len(rows)):
            found = work.log_softmax(rows[part], weight, bias, targets[part])
            total += found.losses.sum()
            if any(ctx.needs_input_grad):
                grads = work.logit_grads(found, rows.dtype)
                sums.add_chunk(part, rows, weight, grads, found.is_counted)
            del found
        # read by pdrun.parallel.training.loss_graph
        ctx.loss_is_sum = reduction == "sum"
        ctx.loss_count = None if ctx.loss_is_sum else work.count_targets(targets)
        ctx.kinds = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(sums.to_rows, sums.to_weight, sums.to_bias, ctx.loss_count)
        return total if ctx.loss_is_sum else total / ctx.loss_count

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        to_rows, to_weight, to_bias, count = ctx.saved_tensors
        factor = grad if count is None else grad / count
        return (
            None if to_rows is None else to_rows * factor.to(to_rows.dtype),
            None if to_weight is None else (to_weight * factor).to(ctx.kinds[0]),
            None if to_bias is None else (to_bias * factor).to(ctx.kinds[1]),
            None,
            None,
            None,
        )


class _RowLosses(torch.autograd.Function):
    """The losses of rows; the backward pass computes the chunks again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        work: _LossWork,
    ) -> torch.Tensor:
        ctx.work = work
        ctx.save_for_backward(rows, weight, bias, targets)
        losses = torch.empty(len(rows), dtype=_loss_dtype(rows), device=rows.device)
        for part in work.chunks(len(rows)):
            losses[part] = work.log_softmax(rows[part], weight, bias, targets[part]).losses
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight, bias, targets = ctx.saved_tensors
        sums = _GradientSums(rows, weight, bias, ctx.needs_input_grad)
        wide = _loss_dtype(rows)
        for part in ctx.work.chunks(len(rows)):
            found = ctx.work.log_softmax(rows[part], weight, bias, targets[part])
            factor = (grad[part] * found.is_counted).to(wide)
            grads = ctx.work.logit_grads(found, wide).mul_(factor.unsqueeze(-1)).to(rows.dtype)
            sums.add_chunk(part, rows, weight, grads, found.is_counted)
        kind = weight.dtype
        return (
            sums.to_rows,
            None if sums.to_weight is None else sums.to_weight.to(kind),
            None if sums.to_bias is None or bias is None else sums.to_bias.to(bias.dtype),
            None,
            None,
        )


def _loss_dtype(rows: torch.Tensor) -> torch.dtype:
    """Return the type of losses: a sum in bf16 or fp16 would lose most digits."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _shift_to_axis(logits: torch.Tensor, logs: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """Return what turns logarithms of probabilities among this rank's logits to those of all."""
    own = logits[:, :1].to(logs.dtype) - logs[:, :1]  # the logarithm of the sum of exponentials
    largest = axis.all_reduce(own, "max")
    total = axis.all_reduce((own - largest).exp())
    return own - largest - total.log()
