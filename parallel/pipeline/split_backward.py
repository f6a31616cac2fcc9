"""
Backward in two parts, for zero-bubble schedules: first for the input, which another stage waits
for, later for the weights.

Most work of a backward is matrix products. While a stage splits its backward,
``torch.nn.functional.linear`` (which ``nn.Linear`` calls) defers the product for its weight and
records its inputs; `DeferredWeightGrad.compute_grads` computes it. The gradients of other weights
(norms, biases, embeddings, convolutions) are computed in the first part and kept until the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

DeferredProduct = tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]
"""A weight, the input of its linear layer, and the gradient of the output."""
_torch_linear = functional.linear
_pending_products: list[list[DeferredProduct]] = []
"""
Where deferred products are recorded, the innermost last; empty: they are computed immediately.
"""


class DeferredWeightGrad:
    """
    The deferred part of a backward.

    Args:
        grads: gradients that are computed.
        products: products that are not.
    """

    def __init__(
        self, grads: dict[torch.nn.Parameter, torch.Tensor], products: list[DeferredProduct]
    ) -> None:
        self.grads = grads
        self.products = products

    def compute_grads(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return the gradient of each weight."""
        for weight, x, grad in self.products:
            made = (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(weight.dtype)
            self.grads[weight] = self.grads[weight] + made if weight in self.grads else made
        self.products.clear()
        return self.grads


@contextmanager
def splitting_backward(wanted: bool = True) -> Iterator[None]:
    """Inside, linear layers can defer the gradients of their weights, if ``wanted``."""
    functional.linear = _split_linear if wanted else _torch_linear  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.linear = _torch_linear


def backward_input(
    tensors: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.nn.Parameter],
    split: bool,
) -> tuple[list[torch.Tensor | None], DeferredWeightGrad]:
    """
    Compute the gradients of some inputs.

    Args:
        split: whether the forward ran in `splitting_backward`; without it nothing is deferred.

    Returns:
        the gradients of the inputs, and the deferred work for the weights. No ``.grad`` is changed.
    """
    products: list[DeferredProduct] = []
    _pending_products.append(products)
    try:
        with splitting_backward(split):  # forwards may be computed again
            found = torch.autograd.grad(tensors, [*inputs, *weights], grads, allow_unused=True)
    finally:
        _pending_products.pop()
    known = {
        weight: grad
        for weight, grad in zip(weights, found[len(inputs) :], strict=True)
        if grad is not None
    }
    return list(found[: len(inputs)]), DeferredWeightGrad(known, products)


def _split_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    ours = (
        isinstance(weight, torch.nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()
    )
    if not ours or x.dim() < 2 or type(x) is not torch.Tensor:
        return _torch_linear(x, weight, bias)
    return _SplitLinear.apply(x, weight, bias)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.bias = bias is not None
        return _torch_linear(
            x, weight, bias
        ).data  # no view of a product: it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        to_weight = None
        if _pending_products:
            _pending_products[-1].append((ctx.weight, x.detach(), grad))
        elif ctx.needs_input_grad[1]:
            to_weight = (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(weight.dtype)
        to_bias = grad.flatten(0, -2).sum(0) if ctx.bias and ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias
