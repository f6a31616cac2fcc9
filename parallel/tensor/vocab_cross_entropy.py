"""
Cross entropy of logits that are sharded over the vocabulary.

Full logits would take rows times vocabulary on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup

CROSS_ENTROPY_API = "cross_entropy"


@dataclass(frozen=True, eq=False)
class VocabShard:
    """This rank's part of a vocabulary of ``total`` tokens: ``low`` up to ``high``."""

    axis: AxisGroup
    total: int
    low: int
    high: int

    def to_local_ids(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Return ids relative to this rank's first token, and which of them are on other ranks (these
        are 0 here).

        Ids that no rank has, below 0 or beyond the last token, stay invalid on the first or the
        last rank, so that a lookup fails as in one process.
        """
        if self.axis.size == 1:
            return ids, None
        if self.low > 0:
            is_foreign = ids < self.low
        else:
            is_foreign = torch.zeros_like(ids, dtype=torch.bool)
        if self.high < self.total:
            is_foreign = is_foreign | (ids >= self.high)
        return (ids - self.low).masked_fill(is_foreign, 0), is_foreign

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabShard:
        return self


_sharded_vocabularies: WeakSet[VocabShard] = WeakSet()
"""
Vocabularies whose logits stay sharded. They tell sharded logits without a mark from full ones.
"""


def mark_sharded_logits(logits: torch.Tensor, vocab_shard: VocabShard) -> torch.Tensor:
    """Mark logits with their part of the vocabulary."""
    _sharded_vocabularies.add(vocab_shard)
    logits._pdrun_vocab_shard = vocab_shard
    return logits


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """
    Return what `torch.nn.functional.cross_entropy` returns, for logits that are full or sharded.

    For logits in bf16 or fp16 the loss is computed and returned in fp32. A head with ``vocab(axis,
    gather=False)`` leaves its logits sharded. Pass its output, not a view of it.

    Args:
        logits: ``[..., vocabulary]``, as the model returns them.
        targets: ``[...]``, class indices.
        ignore_index: targets with this value do not count.
        label_smoothing: share of the target that is spread evenly over the full vocabulary.
        reduction: "mean" over the targets that count, "sum", or "none", which has the shape of
            ``targets``.

    Raises:
        UsageError: shapes do not fit, or the logits are sharded but have lost their mark.
    """
    if logits.shape[:-1] != targets.shape:
        what = f"logits are {list(logits.shape)}, targets {list(targets.shape)}"
        raise UsageError(
            what,
            where=CROSS_ENTROPY_API,
            hint="one target per row of logits; the vocabulary is the last dim",
        )
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(
            f"reduction must be mean, sum or none, got {reduction!r}", where=CROSS_ENTROPY_API
        )
    vocab_shard: VocabShard | None = getattr(logits, "_pdrun_vocab_shard", None)
    rows = logits.reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1)
    if vocab_shard is None or vocab_shard.axis.size == 1:
        if vocab_shard is None and any(
            vocabulary.axis.size > 1 and vocabulary.high - vocabulary.low == logits.shape[-1]
            for vocabulary in _sharded_vocabularies
        ):
            raise UsageError(
                f"logits of {logits.shape[-1]} classes can be full or one rank's shard: their mark"
                " is missing",
                where=CROSS_ENTROPY_API,
                hint="pass the output of the head, not reshaped and not converted",
            )
        if rows.dtype != torch.float64:
            rows = rows.float()  # a sum in bf16 or fp16 would lose most digits
        loss = functional.cross_entropy(
            rows,
            flat,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        if reduction == "none":
            return loss.view(targets.shape)
        return loss
    losses: torch.Tensor = _CrossEntropy.apply(
        rows, flat, vocab_shard, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (flat != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """
    Losses ``[rows]`` of this rank's logits ``[rows, local vocabulary]``, the same on all ranks.

    With smoothing s and a vocabulary of V the loss is log(sum(exp x)) - (1 - s) x[target] - s / V
    sum(x). There are two collectives: the largest logit, then the three sums together. bf16 and
    fp16 are computed in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocab_shard: VocabShard,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        axis = vocab_shard.axis
        x = logits if logits.dtype == torch.float64 else logits.float()
        x = x - axis.all_reduce(x.amax(-1), "max").unsqueeze(-1)
        exps = x.exp()
        is_counted = targets != ignore_index
        local_ids, is_foreign = vocab_shard.to_local_ids(
            targets.masked_fill(~is_counted, vocab_shard.low)
        )
        assert is_foreign is not None  # the axis has several ranks
        target_logits = x.gather(-1, local_ids.unsqueeze(-1)).squeeze(-1).masked_fill(is_foreign, 0)
        sums = [exps.sum(-1), target_logits]
        if smoothing:
            sums.append(x.sum(-1))
        total, target_logits, *rest = axis.all_reduce(torch.stack(sums)).unbind()
        losses = (
            total.log()
            - (1 - smoothing) * target_logits
            - sum(smoothing / vocab_shard.total * summed for summed in rest)
        )
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), local_ids, is_foreign, is_counted)
        ctx.smoothing = smoothing
        ctx.total = vocab_shard.total
        ctx.dtype = logits.dtype
        return losses.masked_fill_(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, local_ids, is_foreign, is_counted = ctx.saved_tensors
        grads = softmax - ctx.smoothing / ctx.total
        own = (~is_foreign).to(grads.dtype) * (ctx.smoothing - 1)
        grads.scatter_add_(-1, local_ids.unsqueeze(-1), own.unsqueeze(-1))
        grads *= (grad * is_counted).unsqueeze(-1)
        return grads.to(ctx.dtype), None, None, None, None
