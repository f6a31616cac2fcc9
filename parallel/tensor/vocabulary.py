"""Embeddings and heads sharded over the vocabulary. Shards can differ by one token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from pdrun.parallel.comm.autograd import all_gather, all_reduce
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.layouts.layout import shard_range
from pdrun.parallel.model.shards import Shard, shard_of
from pdrun.parallel.tensor import linear
from pdrun.parallel.tensor.fused_loss.causal_models import leave_sharded_head
from pdrun.parallel.tensor.probes import check_embedding
from pdrun.parallel.tensor.style import (
    AxisNames,
    GridPosition,
    ModuleContext,
    ModuleStyle,
    SharedInput,
    format_axes,
    reduce_scatter_parts,
    style_error,
    swap_class,
)
from pdrun.parallel.tensor.vocab_cross_entropy import VocabShard, mark_sharded_logits


class VocabularyParallelEmbedding:
    """An embedding that looks up this rank's tokens. The sum over the ranks is the full result."""

    _context: ModuleContext
    _vocab_shard: VocabShard
    _padding: int | None
    _has_own_forward: bool
    """Whether the class looks up rows in its own forward, such as one that scales them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ``[..., width]`` of ids ``[...]``."""
        vocab_shard = self._vocab_shard
        local_ids, is_foreign = vocab_shard.to_local_ids(ids)
        weight = self.weight  # type: ignore[attr-defined]
        if self._has_own_forward:
            embedded = super().forward(local_ids)  # type: ignore[misc]
        else:
            embedded = functional.embedding(local_ids, weight, self._padding)
        if is_foreign is not None:
            embedded = embedded.masked_fill(is_foreign.unsqueeze(-1), 0)
        return self._context.leave(embedded)


class VocabularyParallelHead(linear.ColumnParallel):
    """
    A head that computes this rank's logits of ``[..., width]``; they can be gathered to ``[...,
    vocabulary]``.
    """


@dataclass(frozen=True)
class VocabStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.styles.vocab`."""

    axis: AxisNames
    gather: bool = True
    sequence: int | None = None

    def __str__(self) -> str:
        text = f"vocabulary over {format_axes(self.axis)}"
        if not self.gather:
            text += ", logits stay sharded"
        return text

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Shard weight and bias over the vocabulary."""
        if isinstance(module, nn.Embedding):
            check_embedding(name, module)
        elif linear.out_dim(name, module):
            raise style_error(name, f"a {type(module).__name__} is neither an embedding nor a head")
        params = module.named_parameters(recurse=False)
        return {
            key: position.shard_weight(name, tuple(param.shape), 0, self.axis)
            for key, param in params
        }

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Look up or compute this rank's part of the vocabulary."""
        total = shard_of(module.weight).shape[0]
        vocab_shard = VocabShard(axis, total, *shard_range(total, axis.size, axis.index))
        if isinstance(module, nn.Embedding):
            leave: Callable[[torch.Tensor], torch.Tensor] = functools.partial(all_reduce, axis=axis)
            if self.sequence is not None:
                leave = functools.partial(
                    reduce_scatter_parts, axis=axis, dim=self.sequence, name=name
                )
            module._vocab_shard = vocab_shard
            padding = module.padding_idx
            has_padding = padding is not None and vocab_shard.low <= padding < vocab_shard.high
            module._padding = None
            if has_padding:
                module._padding = padding - vocab_shard.low
            module._has_own_forward = type(module).forward is not nn.Embedding.forward
            if module._has_own_forward:
                module.padding_idx = module._padding  # its forward reads this
            swap_class(
                module, VocabularyParallelEmbedding, ModuleContext(axis, shared_input, leave)
            )
            return
        module._vocab_shard = vocab_shard
        size = total
        if self.gather:
            leave = functools.partial(all_gather, axis=axis, dim=-1, total=total)
        else:
            leave = functools.partial(mark_sharded_logits, vocab_shard=vocab_shard)
            size = module.out_features = vocab_shard.high - vocab_shard.low
        leave = functools.partial(leave_sharded_head, shard=vocab_shard, leave=leave, size=size)
        swap_class(module, VocabularyParallelHead, ModuleContext(axis, shared_input, leave))
