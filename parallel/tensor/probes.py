"""
Subclasses of `nn.Linear` and `nn.Embedding` that override forward: which of them a shard can call.

A small copy with other weights is called to find out, so that no weight of the model is read:
it can be on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from pdrun.parallel.tensor.style import check_forward, style_error

_PROBE_IN = 6
_PROBE_OUT = 4
_PROBE_ROWS = 3


def check_linear_forward(name: str, module: nn.Linear) -> None:
    """
    Raise UsageError if a subclass of `nn.Linear` computes anything but its product.

    A forward such as ``x @ self.weight.T + self.bias`` is accepted.
    """
    if type(module).forward is nn.Linear.forward:
        return
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_PROBE_OUT, _PROBE_IN, generator=generator)
    bias = None
    if module.bias is not None:
        bias = torch.randn(_PROBE_OUT, generator=generator)
    small = _copy_with(module, {"weight": weight, "bias": bias})
    small.in_features, small.out_features = _PROBE_IN, _PROBE_OUT
    x = torch.randn(2, _PROBE_ROWS, _PROBE_IN, generator=generator)
    want = functional.linear(x, weight, bias)
    if not _gives(lambda: small(x), want):
        raise style_error(
            name,
            f"{type(module).__name__} overrides forward, and its result is not the product with its"
            " weight",
            "leave it out of the globs: a module without a style is replicated",
        )


def check_embedding_forward(name: str, module: nn.Embedding) -> None:
    """
    Raise UsageError if a subclass of `nn.Embedding` does more than look up each id alone.

    An embedding that scales its rows is accepted.
    """
    if type(module).forward is nn.Embedding.forward:
        return
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * _PROBE_OUT, _PROBE_IN, generator=generator)
    full = _copy_with(module, {"weight": weight})
    half = _copy_with(module, {"weight": weight[_PROBE_OUT:]})
    for small, size in ((full, 2 * _PROBE_OUT), (half, _PROBE_OUT)):
        small.num_embeddings, small.embedding_dim, small.padding_idx = size, _PROBE_IN, None
    ids = torch.tensor([[2, 0, 3], [1, 1, 0]])
    try:
        want = full(ids + _PROBE_OUT)
    except Exception:
        want = None
    is_lookup = isinstance(want, torch.Tensor) and want.shape == (2, 3, _PROBE_IN)
    if is_lookup:
        assert want is not None  # a part of the ids has the rows of that part
        is_lookup = _gives(lambda: half(ids), want) and _gives(
            lambda: half(ids[:1, :2]), want[:1, :2]
        )
    if not is_lookup:
        raise style_error(
            name,
            f"{type(module).__name__} overrides forward, and its result is not a row of its weight"
            " for each id",
            "leave it out of the globs: a module without a style is replicated",
        )


def check_embedding(name: str, module: nn.Embedding) -> None:
    """Raise UsageError if an embedding cannot compute with a shard of its weight."""
    check_forward(name, module)
    check_embedding_forward(name, module)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise style_error(
                name,
                f"an embedding with {option} cannot be sharded over the vocabulary",
                "use replicate()",
            )


def _copy_with(module: nn.Module, weights: dict[str, torch.Tensor | None]) -> nn.Module:
    """Return a copy of a module with other weights; its buffers and attributes are the same."""
    small = copy.copy(module)
    small.__dict__["_parameters"] = {
        key: None if value is None else nn.Parameter(value, requires_grad=False)
        for key, value in weights.items()
    }
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        small.__dict__[hooks] = type(getattr(module, hooks))()
    buffers = {}
    for key, value in module._buffers.items():
        buffers[key] = value
        if value is not None and value.is_floating_point():
            # one on the meta device has no values: ones will do
            known = torch.ones_like(value, device="cpu") if value.is_meta else value
            buffers[key] = known.to("cpu", torch.float32)
    small.__dict__["_buffers"] = buffers
    return small


def _gives(compute: Callable[[], object], want: torch.Tensor | None) -> bool:
    """Return whether a computation succeeds and has the wanted result."""
    if want is None:
        return False
    try:
        with torch.no_grad():
            found = compute()
    except Exception:
        return False
    return (
        isinstance(found, torch.Tensor)
        and found.shape == want.shape
        and torch.allclose(found, want, rtol=1e-5, atol=1e-6)
    )
