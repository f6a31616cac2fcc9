"""
torch's `nn.MultiheadAttention` by heads. It has q, k and v in one matrix and computes in one
function.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm.autograd import all_gather, all_reduce, copy_to_axis
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.rng.shard_region import shard_region
from pdrun.parallel.tensor.style import (
    STRATEGY_API,
    AxisNames,
    GridPosition,
    ModuleContext,
    style_error,
)


class MultiheadParallel:
    """
    `nn.MultiheadAttention` that computes this rank's heads. The output is the sum over the ranks.
    """

    _context: ModuleContext
    _head_range: tuple[int, int]
    """The first of this rank's heads, and the total number of heads."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `nn.MultiheadAttention` returns, with the same arguments."""
        if query.is_nested:
            hint = "nn.TransformerEncoder(..., enable_nested_tensor=False)"
            raise UsageError(
                "nested tensors are not supported with heads", where=STRATEGY_API, hint=hint
            )
        if is_causal and attn_mask is None:
            raise UsageError(
                "is_causal=True needs attn_mask, as in nn.MultiheadAttention", where=STRATEGY_API
            )
        axis = self._context.axis
        module = _as_multihead(self)
        copied = {id(x): copy_to_axis(x, axis) for x in (query, key, value)}
        inputs = [_rows_first(copied[id(x)], module.batch_first) for x in (query, key, value)]
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            for x, (weight, bias) in zip(inputs, _split_projections(module), strict=True)
        )
        mask = self._additive_mask(q, attn_mask, key_padding_mask)
        dropout_p = module.dropout if module.training else 0.0
        with shard_region(self._context.shard_ranges(query)):
            if need_weights:
                scores = q @ k.transpose(-2, -1) * module.head_dim**-0.5
                if mask is not None:
                    scores = scores + mask
                weights = functional.dropout(scores.softmax(-1), dropout_p, module.training)
                attended = weights @ v
            else:
                attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p)
        out = all_reduce(
            functional.linear(attended.transpose(1, 2).flatten(2), module.out_proj.weight), axis
        )
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias
        if query.dim() == 2:
            out = out.squeeze(0)
        elif not module.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        if average_attn_weights:
            weights = all_reduce(weights.sum(1), axis) / self._head_range[1]
        else:
            weights = all_gather(weights, axis, 1)
        if query.dim() == 2:
            weights = weights.squeeze(0)
        return out, weights

    def _additive_mask(
        self, q: torch.Tensor, attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """
        Return what is added to the scores ``[rows, heads, queries, keys]`` of this rank's heads.
        """
        low, heads = self._head_range
        mask = None
        if attn_mask is not None:
            mask = _to_additive(attn_mask, q.dtype)
            if mask.dim() == 3:
                mask = mask.unflatten(0, (-1, heads))[:, low : low + q.shape[1]]
        if key_padding_mask is not None:
            padding = _to_additive(key_padding_mask, q.dtype)
            padding = padding.view(-1, 1, 1, padding.shape[-1])
            if mask is not None:
                return mask + padding
            return padding
        return mask


def shard_multihead(
    name: str, module: nn.MultiheadAttention, axis: AxisNames, position: GridPosition
) -> dict[str, Shard]:
    """
    Return this rank's shard of each weight, including the output projection.

    Raises:
        UsageError: the module adds keys and values, or overrides forward.
    """
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise style_error(
            name,
            f"{type(module).__name__} overrides forward, which the sharded module would not call",
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise style_error(
            name,
            "an attention with add_bias_kv or add_zero_attn cannot be sharded",
            "use replicate()",
        )
    shards: dict[str, Shard] = {}
    for key, param in module.named_parameters():
        shape = tuple(param.shape)
        blocks = (module.embed_dim,) * 3 if key.startswith("in_proj") else ()
        if key == "out_proj.bias":
            shards[key] = position.keep_full(shape)
        elif key == "out_proj.weight":
            shards[key] = position.shard_weight(name, shape, 1, axis)
        else:
            shards[key] = position.shard_weight(name, shape, 0, axis, blocks)
    return shards


def _as_multihead(module: object) -> nn.MultiheadAttention:
    assert isinstance(module, nn.MultiheadAttention)  # `swap_class` made a subclass of its class
    return module


def _split_projections(
    module: nn.MultiheadAttention,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return weight and bias of q, k and v."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_bias is None:
        return [(weight, None) for weight in weights]
    return list(zip(weights, module.in_proj_bias.chunk(3), strict=True))


def _rows_first(x: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return ``[rows, length, width]``."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    if batch_first:
        return x
    return x.transpose(0, 1)


def _to_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as numbers to add; True means that a key is not seen."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        mask, float("-inf")
    )
