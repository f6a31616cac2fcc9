"""
Recomputation of single operators of a local graph: their results are not kept for the backward
pass.

An operator that uses such a result saves a reference to it. The first reference that is read
computes the result again, for all of them and for the operator's own gradient. The inputs of the
operator are kept; if one of these is such a result, a reference to it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.parallel.operators.graph.graph import Operator

VIEW_KINDS = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "squeeze"),
        *("unsqueeze", "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "expand"),
        *("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "detach"),
        *("constrain", "stop", "view_as", "expand_as", "numpy_T"),
    }
)
"""Kinds whose result is a view: it takes no memory."""


def refuse_reason(operator: Operator) -> str:
    """Return why an operator cannot be recomputed; the empty string if it can."""
    if operator.kind in VIEW_KINDS:
        return "its result takes no memory"
    if any(word in operator.kind for word in ("dropout", "rand", "bernoulli")):
        return "it draws random numbers"
    if operator.kind == "scaled_dot_product_attention" and operator.get_arg(4, "dropout_p", 0.0):
        return "it draws random numbers"
    return ""


@dataclass
class _Entry:
    """A result that is not kept: its value, position, version, and type."""

    value: _RecomputedValue
    position: int
    version: int
    dtype: torch.dtype
    owner: weakref.ref[torch.Tensor]


@dataclass(frozen=True)
class _ResultView:
    """A tensor that is a result, or a view of one."""

    value: _RecomputedValue
    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        result = self.value.results()[self.position].detach()
        return result.as_strided(self.size, self.stride, self.offset)


class _ResultRegistry:
    """The results of one forward pass that are not kept, while they live."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def add(self, tensor: torch.Tensor, value: _RecomputedValue, position: int) -> None:
        """Register a result."""
        key = tensor.untyped_storage()._cdata
        owner = weakref.ref(tensor, lambda _: self._entries.pop(key, None))
        entry = _Entry(value, position, tensor._version, tensor.dtype, owner)
        self._entries[key] = entry

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _ResultView:
        """Return a reference if the tensor is a result that has not changed."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if (
            entry is None
            or entry.version != tensor._version
            or entry.dtype != tensor.dtype
            or entry.owner() is None
        ):
            return tensor
        size, stride = tuple(tensor.shape), tensor.stride()
        return _ResultView(entry.value, entry.position, size, stride, tensor.storage_offset())


def _unpack(saved: torch.Tensor | _ResultView) -> torch.Tensor:
    return saved.read() if isinstance(saved, _ResultView) else saved


_current = threading.local()
"""``registry`` is that of the forward pass that this thread computes."""


@contextmanager
def recompute_results() -> Iterator[None]:
    """Inside, results of `RecomputedCall` are not kept for the backward pass."""
    before = getattr(_current, "registry", None)
    registry = _current.registry = _ResultRegistry()
    hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
        registry.pack, _unpack
    )
    try:
        with hooks:
            yield
    finally:
        _current.registry = before


class _RecomputedValue:
    """
    The results of one call, which can be computed again.

    Args:
        run: returns the tensors of the call's results, from those of its arguments.
        tensors: of the arguments.
    """

    def __init__(
        self,
        run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        registry: _ResultRegistry,
    ) -> None:
        self._run = run
        self._saved = [registry.pack(tensor.detach()) for tensor in tensors]
        self._versions = [
            -1 if isinstance(tensor, nn.Parameter) else tensor._version for tensor in tensors
        ]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        device = tensors[0].device.type
        self._autocast = (
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )
        self._again: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def results(self) -> list[torch.Tensor]:
        """Return the results; they are kept until the gradient of the call."""
        return self._compute_again()[1]

    def _compute_again(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self._again is None:
            device, enabled, dtype = self._autocast
            for saved, version in zip(self._saved, self._versions, strict=True):
                if isinstance(saved, torch.Tensor) and version not in (-1, saved._version):
                    raise RuntimeError("the input of a recomputed operator was changed in place")
            tensors = [
                _unpack(saved).detach().requires_grad_(needs_grad)
                for saved, needs_grad in zip(self._saved, self._needs_grad, strict=True)
            ]
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                self._again = tensors, self._run(tensors)
        return self._again

    def differentiate(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the arguments, and forget the results."""
        tensors, results = self._compute_again()
        self._again = None
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
        )
        return [next(found) if tensor.requires_grad else None for tensor in tensors]


class _RecomputedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: _RecomputedValue, *tensors: torch.Tensor) -> Any:
        ctx.value = value
        ctx.set_materialize_grads(False)
        return tuple(value._run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, *ctx.value.differentiate(grads)


class RecomputedCall(nn.Module):
    """A call of an operator in a local graph whose results are computed again when needed."""

    def __init__(self, target: Callable[..., Any]) -> None:
        super().__init__()
        self.target = target

    @property
    def compute_key(self) -> tuple[Any, ...]:
        """Equal for two modules that compute the same."""
        return RecomputedCall, self.target

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the operator."""
        registry: _ResultRegistry | None = getattr(_current, "registry", None)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[at] for at in places]
        if registry is None or not (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        ):
            return self.target(*args, **kwargs)
        others = [None if at in places else leaf for at, leaf in enumerate(leaves)]
        results_structure: list[Any] = []

        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            filled = list(others)
            for at, tensor in zip(places, given, strict=True):
                filled[at] = tensor
            inner_args, inner_kwargs = pytree.tree_unflatten(filled, structure)
            results = self.target(*inner_args, **inner_kwargs)
            flat, found = pytree.tree_flatten(results)
            results_structure[:] = [found]
            return list(flat)

        value = _RecomputedValue(run, tensors, registry)
        results = _RecomputedFunction.apply(value, *tensors)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
        for position, result in enumerate(results):
            if result.untyped_storage()._cdata not in inputs:
                registry.add(result, value, position)
        return pytree.tree_unflatten(results, results_structure[0])
