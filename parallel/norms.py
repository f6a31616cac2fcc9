"""The global norm of the gradients, each weight once, and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 65536
"""Elements that are widened at once; they stay in a core's cache."""


def square_sum(tensors: Sequence[torch.Tensor], exact: bool) -> torch.Tensor:
    """
    Return the sum of the squares of all elements, in fp64 (fp32 on devices that lack it).

    Args:
        exact: widen every element first: the sum is then the same to about 1e-15 however the tensors are cut, and so
            the
            norm in fp32 has the same bits. Otherwise norms of tensors are taken in their own type, which is faster.
    """
    first = tensors[0]
    wide = wide_type(first.device)
    if exact:
        total = torch.zeros((), dtype=wide, device=first.device)
        for tensor in tensors:
            for piece in tensor.reshape(-1).split(PIECE):
                widened = piece.to(wide)
                total += torch.dot(widened, widened)
        return total
    norms = torch._foreach_norm(list(tensors), 2)
    return torch.stack([norm.to(wide) for norm in norms]).square().sum()


def wide_type(device: torch.device) -> torch.dtype:
    """Return the widest floating point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return what gradients of this norm are multiplied with, at most 1 (as `torch.nn.utils.clip_grad_norm_`)."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
