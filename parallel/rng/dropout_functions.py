"""
Replacements of the functions of ``torch.nn.functional`` that drop elements.

Each takes the elements to keep from a function (`KeepMask`) instead of torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class KeepMask(Protocol):
    """Returns which elements of a tensor stay."""

    def __call__(
        self, like: torch.Tensor, p: float, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Return a boolean tensor of ``shape`` (default: that of ``like``)."""
        ...


def _apply_mask(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    scale = keep.to(x.dtype).mul_(0.0 if p >= 1 else 1 / (1 - p))
    return x * scale


def _make_dropout(keep: KeepMask, original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p <= 1:
            return original(input, p, training, inplace)
        result = _apply_mask(input, keep(input, p), p)
        if inplace:
            return input.copy_(result)
        return result

    return dropout


def _make_channels(keep: KeepMask, original: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout of whole channels, ``[rows, channels, ...]``."""

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p <= 1 or input.dim() < 3:
            return original(input, p, training, inplace)
        mask = keep(input, p, (*input.shape[:2], *[1] * (input.dim() - 2)))
        result = _apply_mask(input, mask, p)
        if inplace:
            return input.copy_(result)
        return result

    return dropout


def _make_alpha(keep: KeepMask, original: Callable[..., Any]) -> Callable[..., Any]:
    """
    Alpha dropout (Klambauer et al., Self-Normalizing Neural Networks, 2017): keeps mean 0 and
    variance 1 after SELU.
    """

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p < 1:
            return original(input, p, training, inplace)
        low = -1.7580993408473766  # -scale * alpha of SELU
        a = (1 / ((1 - p) * (1 + p * low * low))) ** 0.5
        result = torch.where(keep(input, p), input, low) * a - a * p * low
        if inplace:
            return input.copy_(result)
        return result

    return dropout


def _make_attention(keep: KeepMask, original: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that drops is computed in the open; without dropout torch's own kernels do it."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p == 0:
            return original(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(times, -3)
            value = value.repeat_interleave(times, -3)
        scores = (
            query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        )
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                scores = scores + attn_mask
        weights = scores.softmax(-1)
        return _apply_mask(weights, keep(weights, dropout_p), dropout_p) @ value

    return attention


REPLACEMENTS: dict[str, Callable[[KeepMask, Callable[..., Any]], Callable[..., Any]]] = {
    "dropout": _make_dropout,
    "dropout1d": _make_channels,
    "dropout2d": _make_channels,
    "dropout3d": _make_channels,
    "alpha_dropout": _make_alpha,
    "scaled_dot_product_attention": _make_attention,
}
