"""
Sequences that pass a pipeline in slices: attention over this slice and the earlier ones.

A slice's queries see the keys and values that earlier slices of the same micro-batch have left on
this stage (`SliceCache`). These are leaves: the backward of a later slice adds to their gradients,
and the backward of their own slice starts from those as well as from the stage's output. So
backwards run from the last slice to the first (Li et al., TeraPipe, 2021; Sun et al., Seq1F1B,
2024).

A forward that is recomputed in the backward must find its place: each attention draws a number from
torch's generator, which a checkpoint restores, as dropout does (`pdrun.parallel.rng.step_rng`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.context_parallel import block_attention
from pdrun.parallel.context_parallel.block_attention import AttentionResult, ScoreTerms
from pdrun.parallel.context_parallel.ring import RunningOutput, as_bias
from pdrun.parallel.context_parallel.ring_exchange import DropoutFactors
from pdrun.parallel.context_parallel.sequences import (
    API_NAME,
    AttentionFunction,
    ShardedSequences,
)
from pdrun.parallel.layouts.layout import shard_range
from pdrun.parallel.layouts.sequence_order import (
    CONTIGUOUS,
    Ranges,
    merge_ranges,
)

_HIDDEN_SHARE = 0.5
"""A bias below this share of its type's lowest value hides a key."""


@dataclass(frozen=True)
class _KeyValue:
    """Keys and values of one attention of one slice: in its graph, and as leaves for later ones."""

    edges: tuple[Any, ...]
    leaves: tuple[torch.Tensor, torch.Tensor]


@dataclass
class SliceCache:
    """
    What the attentions of a stage keep of a micro-batch, by slice.

    Attributes:
        length: positions of the sequences.
        tensors: by slice, tensors of the batch and their full sequences.
    """

    length: int
    tensors: list[list[tuple[torch.Tensor, torch.Tensor]]]
    slices: list[list[_KeyValue]] = field(default_factory=list)
    calls: list[dict[int, int]] = field(default_factory=list)
    """For each slice: the attention of each number that was drawn."""

    def roots(self, index: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Return where else the backward of a slice starts, and the gradients there."""
        found = [
            (edge, leaf.grad)
            for one in self.slices[index]
            for edge, leaf in zip(one.edges, one.leaves, strict=True)
            if edge is not None and leaf.grad is not None
        ]
        return [edge for edge, _ in found], [grad for _, grad in found]

    def earlier_leaves(self, index: int) -> list[torch.Tensor]:
        """Return the keys and values of earlier slices that need a gradient."""
        return [
            leaf
            for slice_ in self.slices[:index]
            for one in slice_
            for leaf in one.leaves
            if leaf.requires_grad
        ]


class SlicedSequences(ShardedSequences):
    """
    The sequences of a run that pass a pipeline in slices.

    Args:
        axes: this rank's groups.
        slices: of each sequence.
        elsewhere: compute other attention unchanged.
    """

    def __init__(self, axes: MeshGroups, slices: int, elsewhere: bool) -> None:
        super().__init__(axes, 1, CONTIGUOUS, elsewhere)
        self.part_count = slices
        self.part_index = 0
        self._cache: SliceCache | None = None
        self._is_backward = False
        self._taken: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        """Of the batch that is being sliced, by slice: its tensors and their full sequences."""
        self._sees_later: list[torch.Tensor] = []
        """Whether masks have shown later slices; read once per step."""

    @property
    def is_active(self) -> bool:
        """Whether what is computed now is a slice; evaluation computes full sequences."""
        return self._cache is not None

    @contextmanager
    def computing(self, cache: SliceCache, index: int, backward: bool = False) -> Iterator[None]:
        """Inside, slice ``index`` of the micro-batch of a cache is computed."""
        self.set_length(cache.length)
        self._cache, self.part_index, self._is_backward = cache, index, backward
        if not backward:
            del cache.slices[index:], cache.calls[index:]
            cache.slices.append([])
            cache.calls.append({})
        try:
            yield
        finally:
            self._cache = None

    def begin_step(self) -> None:
        """Forget the masks of the step before."""
        self._sees_later.clear()

    def begin_micro_batch(self) -> SliceCache:
        """Return an empty cache of the batch that was sliced last."""
        taken, self._taken = self._taken, []
        return SliceCache(self.length, taken)

    def check_masks(self) -> None:
        """
        Refuse the masks of a step that show later slices.

        Raises:
            UsageError: one does.
        """
        if self._sees_later and bool(torch.stack(self._sees_later).any()):
            what = "a mask shows keys of later slices: the model is not causal"
            raise UsageError(what, where=API_NAME, hint='schedule="1f1b", which slices nothing')

    def __str__(self) -> str:
        return f"each sequence passes the stages in {self.part_count} slices"

    # ---- positions ----------------------------------------------------------

    def _describe_parts(self) -> str:
        return f"{self.part_count} slices"

    def _positions_of(self, length: int, index: int) -> Ranges:
        return merge_ranges([shard_range(length, self.part_count, index)])

    def take_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this slice's positions of a tensor of the batch, and remember the tensor."""
        found = self.take_positions(x, dim)
        while len(self._taken) <= self.part_index:
            self._taken.append([])
        self._taken[self.part_index].append((found, x))
        return found

    def gather_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """
        Return all positions of position ids, or of a tensor of the batch in any type and view.

        Raises:
            UsageError: it is neither, so that the rest is not known.
        """
        here = self.position_ids(x.device)
        if not x.is_floating_point() and torch.equal(x, here.expand_as(x).to(x.dtype)):
            return torch.arange(self.length, device=x.device, dtype=x.dtype).expand(len(x), -1)
        found: list[torch.Tensor] = []
        assert self._cache is not None
        for part, full in self._cache.tensors[self.part_index]:
            if part.shape == x.shape and torch.equal(part.to(x), x.detach()):
                found.append(full.detach().to(x))
        if found and all(torch.equal(found[0], other) for other in found):
            return found[0]
        what = f"a mask of {list(x.shape)} is computed from a slice of the batch"
        hint = "give the model the mask of the batch, [rows, positions]"
        raise UsageError(what, where=API_NAME, hint=hint)

    # ---- attention ----------------------------------------------------------

    def attend_sequences(
        self,
        original: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Compute attention of this slice to itself and the earlier ones."""
        if query.dim() == 3:
            query, key, value = (x[None] for x in (query, key, value))
            return self.attend_sequences(
                original, query, key, value, attn_mask, dropout_p, is_causal, scale
            )[0]
        if query.dim() != 4 or query.shape[1] % key.shape[1]:
            what = f"attention of queries {list(query.shape)} over keys {list(key.shape)}"
            raise UsageError(what, where=API_NAME, hint="[batch, heads, positions, size]")
        if attn_mask is None and not is_causal:
            what = "attention without a causal mask sees later slices, which are not computed yet"
            raise UsageError(what, where=API_NAME, hint='schedule="1f1b", which slices nothing')
        mask = None if attn_mask is None else self._mask_rows(attn_mask)
        drop = self._make_dropout(query, dropout_p) if dropout_p else None
        device = query.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
            query, key, value = (x.to(kind) for x in (query, key, value))
        earlier = self._exchange_keys(key, value)
        plan = _SlicePlan(
            self.positions_by_rank[: self.part_index + 1],
            is_causal,
            query.shape[-1] ** -0.5 if scale is None else scale,
            drop,
        )
        with torch.autocast(device, enabled=False):
            bias = None if mask is None else as_bias(mask, query.dtype)
            flat = [x for pair in earlier for x in pair]
            found: torch.Tensor = _SliceAttention.apply(query, bias, plan, *flat, key, value)
        return found

    def _mask_rows(self, mask: torch.Tensor) -> torch.Tensor:
        """Return this slice's rows of a mask; whether they show later keys is read later."""
        rows = self.localize_mask(mask)
        if mask.requires_grad:
            what = "a mask or bias that is trained is not supported over slices"
            raise UsageError(what, where=API_NAME, hint='schedule="1f1b", which slices nothing')
        later = rows[..., self.own_positions[-1][1] :]
        if later.numel():
            shown = later
            if later.dtype != torch.bool:
                shown = later > _HIDDEN_SHARE * torch.finfo(later.dtype).min
            seen = shown.any()  # when it is recomputed, too, which repeats the same operators
            if not self._is_backward:
                self._sees_later.append(seen)
        return rows

    def _exchange_keys(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of earlier slices, and keep those of this one for later ones."""
        cache = self._cache
        assert cache is not None
        with unset_fake_temporarily():
            number = int(torch.randint(1 << 62, (), device="cpu"))
        known = cache.calls[self.part_index]
        call = known.get(number)
        if call is None and self._is_backward:
            what = "attention is computed in a backward without a forward like it"
            hint = "recompute= of parallelize, or torch's checkpoint with preserve_rng_state=True"
            raise UsageError(what, where=API_NAME, hint=hint)
        if call is None:
            call = known[number] = len(known)
            if self.part_index < self.part_count - 1:
                cache.slices[self.part_index].append(_keep_keys(key, value))
        earlier = cache.slices[: self.part_index]
        if any(len(held) <= call for held in earlier):
            what = f"slice {self.part_index} of a sequence calls attention more often than slice 0"
            raise UsageError(what, where=API_NAME, hint="decide by the batch's rows only")
        return [held[call].leaves for held in earlier]


def check_sliceable(model: nn.Module) -> None:
    """
    Refuse modules whose result at a position depends on all positions.

    Raises:
        UsageError: names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            what = f"{name or 'the model'} ({type(module).__name__}) has statistics of all"
            what += " positions, and a pipeline with slices computes some at a time"
            raise UsageError(what, where=API_NAME, hint='schedule="1f1b", which slices nothing')


def _keep_keys(key: torch.Tensor, value: torch.Tensor) -> _KeyValue:
    pair = key, value
    leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in pair)
    edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in pair)
    return _KeyValue(edges, (leaves[0], leaves[1]))


@dataclass(frozen=True)
class _SlicePlan:
    """One attention: the positions of the slices so far, the last of them computed now."""

    positions: tuple[Ranges, ...]
    causal: bool
    scale: float
    dropout: DropoutFactors | None

    def score_terms(self, source: int, bias: torch.Tensor | None) -> ScoreTerms:
        """Return bias and dropout of the keys of a slice."""
        if bias is not None:
            bias = torch.cat([bias[..., low:high] for low, high in self.positions[source]], -1)
        drop = self.dropout
        return ScoreTerms(
            bias, None if drop is None else drop(self.positions[-1], self.positions[source])
        )


class _SliceAttention(torch.autograd.Function):
    """Arguments after the plan: keys and values of each slice, the newest last."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        bias: torch.Tensor | None,
        plan: _SlicePlan,
        *pairs: torch.Tensor,
    ) -> torch.Tensor:
        kind = block_attention.accumulate_dtype(q.dtype)
        found = RunningOutput(
            q.new_zeros(*q.shape[:3], pairs[-1].shape[3], dtype=kind),
            q.new_full(q.shape[:3], float("-inf"), dtype=kind),
        )
        last = len(plan.positions) - 1
        for source in range(last + 1):
            out, lse = block_attention.attend_block(
                q,
                pairs[2 * source],
                pairs[2 * source + 1],
                plan.causal and source == last,
                plan.scale,
                plan.score_terms(source, bias),
            )
            found.add_block(0, q.shape[2], out, lse)
        out = found.out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, bias, out, found.lse, *pairs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, bias, out, lse, *pairs = ctx.saved_tensors
        plan = ctx.plan
        kind = block_attention.accumulate_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=kind, memory_format=torch.contiguous_format)
        done = AttentionResult(grad, out, lse)
        grads: list[torch.Tensor] = []
        last = len(plan.positions) - 1
        for source in range(last + 1):
            k, v = pairs[2 * source : 2 * source + 2]
            part, dk, dv, _ = block_attention.attend_block_backward(
                done,
                q,
                k,
                v,
                plan.causal and source == last,
                plan.scale,
                plan.score_terms(source, bias),
            )
            dq += part
            grads += [dk.to(k.dtype), dv.to(v.dtype)]
        return dq.to(q.dtype), None, None, *grads
