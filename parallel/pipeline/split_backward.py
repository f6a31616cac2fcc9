"""
Backward in two parts, for zero-bubble schedules: first for the input, which another stage waits
for, later for the weights.

Most work of a backward is matrix products. While a stage splits its backward,
``torch.nn.functional.linear`` (which ``nn.Linear`` calls) defers the product for its weight and
records its inputs; `DeferredWeightGrad.compute_grads` computes it. The gradients of other weights
(norms, biases, embeddings, convolutions) are computed in the first part and kept until the second.

In compiled modules the product is an operator, `weight_grad`, whose result is memory without a
value; the product is computed later. Its inputs must keep their values until then: such modules are
compiled without reuse of buffers (see `pdrun.parallel.compiler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.metadata import API_NAME

DeferredProduct = tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]
"""A weight, the input of its linear layer, and the gradient of the output."""
PendingProduct = tuple[torch.nn.Parameter | torch.Tensor, torch.Tensor, torch.Tensor]
"""The same; compiled code knows the memory for the gradient instead of the weight."""
AddProducts = Callable[[torch.nn.Parameter, Sequence[tuple[torch.Tensor, torch.Tensor]]], bool]
"""
Adds products (left, right) to the gradient of a weight, or returns False if it cannot.
"""
_torch_linear = functional.linear
_pending_products: list[list[PendingProduct]] = []
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

    def compute_grads(
        self, add_products: AddProducts = lambda weight, pairs: False
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return the gradient of each weight, except those whose products were added elsewhere."""
        pairs: dict[torch.nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for weight, x, grad in self.products:
            sides = grad.flatten(0, -2).t(), x.to(grad.dtype).flatten(0, -2)
            pairs.setdefault(weight, []).append(sides)
        self.products.clear()
        for weight, several in pairs.items():
            if weight not in self.grads and add_products(weight, several):
                continue
            for left, right in several:
                made = (left @ right).to(weight.dtype)
                self.grads[weight] = self.grads[weight] + made if weight in self.grads else made
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
    products: list[PendingProduct] = []
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
    deferred = _find_weights(products, known)
    return list(found[: len(inputs)]), DeferredWeightGrad(known, deferred)


def _find_weights(
    products: Sequence[PendingProduct], grads: dict[torch.nn.Parameter, torch.Tensor]
) -> list[DeferredProduct]:
    """
    Return products with their weights. Memory that products would fill is removed from ``grads``.

    Raises:
        UsageError: memory was read before it was filled.
    """
    by_memory = {grad.data_ptr(): weight for weight, grad in grads.items()}
    found = []
    for weight, x, grad in products:
        if not isinstance(weight, torch.nn.Parameter):
            memory = weight.data_ptr()
            if memory not in by_memory:
                shape = [grad.shape[-1], x.shape[-1]]
                raise UsageError(
                    f"a weight {shape} of a compiled module is used more than once in a"
                    " micro-batch, or its gradient is changed, and the schedule defers gradients"
                    " of weights",
                    where=API_NAME,
                    hint='use schedule="1f1b" or "interleaved", or leave the module out of'
                    " compile=",
                )
            weight = by_memory[memory]
            grads.pop(weight)
        found.append((weight, x, grad))
    return found


def _multiply(x: torch.Tensor, grad: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the gradient of a linear layer's weight."""
    return (grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)).to(kind)


def _weight_grad(x: torch.Tensor, grad: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    if not _pending_products:
        return _multiply(x, grad, kind)
    memory = _grad_memory(x, grad, kind)
    _pending_products[-1].append((memory, x, grad))
    return memory


def _grad_memory(x: torch.Tensor, grad: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.new_empty(grad.shape[-1], x.shape[-1], dtype=kind)


_LIBRARY = torch.library.Library("pdrun_pipeline", "DEF")
_LIBRARY.define("weight_grad(Tensor x, Tensor grad, ScalarType kind) -> Tensor")
_LIBRARY.impl("weight_grad", _weight_grad, "CompositeExplicitAutograd")
torch.library.register_fake("pdrun_pipeline::weight_grad", _grad_memory, lib=_LIBRARY)


def _split_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    ours = (
        isinstance(weight, torch.nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()
    )
    if not ours or x.dim() < 2 or type(x) is not torch.Tensor:
        return _torch_linear(x, weight, bias)
    if torch.compiler.is_compiling():
        return _CompiledSplitLinear.apply(x, weight, bias)
    return _SplitLinear.apply(x, weight, bias)


class _CompiledSplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _torch_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        to_weight = torch.ops.pdrun_pipeline.weight_grad(x, grad, weight.dtype)
        return to_x, to_weight, grad.flatten(0, -2).sum(0) if ctx.has_bias else None


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
