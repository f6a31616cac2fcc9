"""
Attention of a block of queries to a block of keys, and how blocks are combined.

A forward returns the block's output and, per query, the logarithm of its sum of exponentials (lse).
Outputs of a query over several blocks of keys are combined with weights exp(lse - lse of all)
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al.,
FlashAttention, 2022). A backward takes the output and the lse over *all* keys and gives the
gradients of this block (FlashAttention, algorithm 4).

torch's fused kernels are used if they exist for the device and the types. Plain mathematics in fp32
or wider is used otherwise, and with a bias or dropout.

All tensors are [batch, heads, positions, size]; lse is [batch, heads, queries].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_aten = torch.ops.aten
FLASH_BACKEND = 1
EFFICIENT_BACKEND = 2
"""torch's numbers of its kernels (at::SDPBackend)."""
_LSE_ALIGNMENT = 32
"""The lse of the memory-efficient kernel is padded to a multiple of this many queries."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over blocks: fp64 for fp64, fp32 for other types."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class ScoreTerms:
    """
    Bias and dropout of a block.

    Attributes:
        bias: added to the scores, broadcast to [batch, heads, queries, keys]; -inf hides a key.
        dropout: factors of the weights, 0 or 1 / (1 - p); the same shape.
    """

    bias: torch.Tensor | None = None
    dropout: torch.Tensor | None = None


def attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, extra: ScoreTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return (output, lse) of a block. Keys and values can have fewer heads, each for a group of query
    heads.
    """
    k = repeat_heads(k, q.shape[1])
    v = repeat_heads(v, q.shape[1])
    kind = _choose_kernel(q, k, v, extra)
    if kind == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    if kind == "flash":
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1]
    if kind == "efficient":
        found = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return found[0], found[1][..., : q.shape[2]]
    return _plain_forward(q, k, v, causal, scale, extra)


@dataclass(frozen=True)
class AttentionResult:
    """The result of the forward over all keys: output, lse, and the gradient of the output."""

    grad: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def attend_block_backward(
    done: AttentionResult,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    extra: ScoreTerms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return this block's part of the gradients of q, k, v, and (with a bias) of the scores."""
    heads = k.shape[1]
    k = repeat_heads(k, q.shape[1])
    v = repeat_heads(v, q.shape[1])
    kind = _choose_kernel(q, k, v, extra)
    scores = None
    if kind == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            done.grad, q, k, v, done.out, done.lse, 0.0, causal, scale=scale
        )
    elif kind == "flash":
        dq, dk, dv = _flash_backward(done, q, k, v, causal, scale)
    elif kind == "efficient":
        dq, dk, dv = _efficient_backward(done, q, k, v, causal, scale)
    else:
        dq, dk, dv, scores = _plain_backward(done, q, k, v, causal, scale, extra)
    return dq, sum_repeated_heads(dk, heads), sum_repeated_heads(dv, heads), scores


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each head of keys or values for its group of query heads."""
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def sum_repeated_heads(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum the gradients of the repeated heads: the backward of `repeat_heads`."""
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, grad.shape[1] // heads)).sum(
        2, dtype=accumulate_dtype(grad.dtype)
    )


# ---- which kernel -----------------------------------------------------------


def _choose_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: ScoreTerms) -> str:
    """Return the kernel of a block: torch's own choice if that kernel returns its lse."""
    if extra.bias is not None or extra.dropout is not None or v.shape[-1] != q.shape[-1]:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return "plain"
    choice = int(torch._fused_sdp_choice(q, k, v))
    if q.dtype in (torch.float16, torch.bfloat16) and choice != EFFICIENT_BACKEND:
        # torch's third choice, cuDNN's, has the same limits
        return "flash" if choice else "plain"
    if choice == EFFICIENT_BACKEND:
        return "efficient"
    return "plain"


def _flash_backward(
    done: AttentionResult, q: Any, k: Any, v: Any, causal: bool, scale: float
) -> Any:
    none = torch.empty(0, dtype=torch.int32, device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, unused
    return _aten._scaled_dot_product_flash_attention_backward(
        done.grad,
        q,
        k,
        v,
        done.out,
        done.lse.contiguous(),
        none,
        none,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        state,
        state,
        scale=scale,
    )


def _efficient_backward(
    done: AttentionResult, q: Any, k: Any, v: Any, causal: bool, scale: float
) -> Any:
    lse = functional.pad(
        done.lse, (0, -done.lse.shape[-1] % _LSE_ALIGNMENT), value=float("inf")
    ).contiguous()
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    found = _aten._scaled_dot_product_efficient_attention_backward(
        done.grad,
        q,
        k,
        v,
        None,
        done.out,
        lse,
        state,
        state,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return found[:3]


# ---- plain mathematics ------------------------------------------------------


def _masked_scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, extra: ScoreTerms
) -> torch.Tensor:
    kind = accumulate_dtype(q.dtype)
    scores = q.to(kind) @ k.to(kind).mT * scale
    if extra.bias is not None:
        scores = scores + extra.bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _attention_weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - lse); 0 for a query that sees no key, whose lse is -inf."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()


def _plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, extra: ScoreTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _masked_scores(q, k, causal, scale, extra)
    lse = scores.logsumexp(-1)
    weights = _attention_weights(scores, lse)
    if extra.dropout is not None:
        weights = weights * extra.dropout
    return weights @ v.to(weights.dtype), lse


def _plain_backward(
    done: AttentionResult,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    extra: ScoreTerms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    kind = accumulate_dtype(q.dtype)
    weights = _attention_weights(_masked_scores(q, k, causal, scale, extra), done.lse)
    grad = done.grad.to(kind)
    delta = (grad * done.out.to(kind)).sum(-1, keepdim=True)
    kept = weights
    back = grad @ v.to(kind).mT
    if extra.dropout is not None:
        kept = weights * extra.dropout
        back = back * extra.dropout
    scores = weights * (back - delta)
    dq = scores @ k.to(kind) * scale
    dk = scores.mT @ q.to(kind) * scale
    return dq, dk, kept.mT @ grad, scores if extra.bias is not None else None
