"""
Causal models of the transformers library whose loss is computed without full logits.

Such a model calls its head and gives the logits to its ``loss_function``. After `fuse_head_loss`
the head of a model that is called with labels returns `DeferredLogits`. The loss takes the head's
input and weight from them. Any other use computes the logits: a model that changes them before the
loss computes what it did before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.tensor.fused_loss.linear_cross_entropy import compute_loss
from pdrun.parallel.tensor.vocab_cross_entropy import VocabShard

API_NAME = "pdrun.fuse_head_loss"
CAUSAL_LOSS = "ForCausalLMLoss"
"""The name of the library's loss of causal models."""


def fuse_head_loss(model: nn.Module) -> nn.Module:
    """
    Have a causal model of the transformers library compute head and loss in one function.

    The model is changed and returned. Call it before `parallelize`. ``model(ids, labels=ids).loss``
    has the value of before, to rounding; ``logits`` are computed if they are read.

    Raises:
        UsageError: the model has no linear head, or another loss than that of causal models.
    """
    head = _find_head(model)
    if not issubclass(type(head), DeferringHead):
        kind = type(head)
        head.__class__ = type(
            f"Deferring{kind.__name__}", (DeferringHead, kind), {"__module__": kind.__module__}
        )
        model.loss_function = causal_loss
        model.register_forward_pre_hook(_begin_call, with_kwargs=True, prepend=True)
        model.register_forward_hook(_end_call, always_call=True)
    return model


def _find_head(model: nn.Module) -> nn.Linear:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Linear):
        what = f"{type(model).__name__} has no linear head"
        hint = "it is for causal models of transformers; pdrun.linear_cross_entropy for your own"
        raise UsageError(what, where=API_NAME, hint=hint)
    loss = getattr(model, "loss_function", None)
    if loss is not causal_loss and getattr(loss, "__name__", "") != CAUSAL_LOSS:
        what = f"the loss of {type(model).__name__} is {getattr(loss, '__name__', loss)}"
        raise UsageError(what, where=API_NAME, hint=f"only {CAUSAL_LOSS} is known")
    return head


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return what the library's ``ForCausalLMLoss`` returns; see there."""
    if not isinstance(logits, DeferredLogits):
        from transformers.loss.loss_utils import ForCausalLMLoss

        plain: torch.Tensor = ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
        )
        return plain
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden, head = logits.hidden, logits.head
    loss = compute_loss(
        hidden,
        head.weight,
        head.bias,
        shift_labels.to(hidden.device).reshape(hidden.shape[:-1]),
        logits.shard,
        ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


class DeferringHead(nn.Linear):
    """A head that returns `DeferredLogits` while its model is called with labels."""

    _is_deferring = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits, or what computes them."""
        is_known = not hasattr(self, "_context") or hasattr(self, "_vocab_shard")
        if self._is_deferring and is_known and not torch.compiler.is_compiling():
            return DeferredLogits(input, self)
        return super().forward(input)


class DeferredLogits(torch.Tensor):
    """
    The output of a head, computed if it is used.

    Attributes:
        hidden: the head's input.
        head: the layer.
        shard: the part of the vocabulary that it has.
    """

    hidden: torch.Tensor
    head: nn.Linear
    shard: VocabShard | None
    _leave: Callable[[torch.Tensor], torch.Tensor] | None
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        head: nn.Linear,
        shard: VocabShard | None = None,
        leave: Callable[[torch.Tensor], torch.Tensor] | None = None,
        size: int | None = None,
    ) -> DeferredLogits:
        """
        Return logits of ``hidden``.

        Args:
            leave: applied to logits that are computed.
            size: the number of logits after that.
        """
        shape = (*hidden.shape[:-1], size or head.weight.shape[0])
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=hidden.dtype, device=hidden.device, requires_grad=False
        )
        made.hidden, made.head, made.shard = hidden, head, shard
        made._leave, made._computed = leave, None
        return made  # type: ignore[no-any-return]

    def compute(self) -> torch.Tensor:
        """Return the logits."""
        if self._computed is None:
            logits = functional.linear(self.hidden, self.head.weight, self.head.bias)
            self._computed = logits if self._leave is None else self._leave(logits)
        return self._computed

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits first, unless the function reads shape, type or device only."""
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits first; for code that avoids ``__torch_function__``."""
        args, kwargs = pytree.tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return function(*args, **kwargs)


def leave_sharded_head(
    logits: torch.Tensor,
    shard: VocabShard,
    leave: Callable[[torch.Tensor], torch.Tensor],
    size: int,
) -> torch.Tensor:
    """
    Return what a head that is sharded over the vocabulary returns.

    Args:
        leave: gathers or marks this rank's logits.
        size: the number of logits after that.
    """
    if isinstance(logits, DeferredLogits):
        return DeferredLogits(logits.hidden, logits.head, shard, leave, size)
    return leave(logits)


_METADATA: set[Callable[..., Any]] = {
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_cuda", "ndim")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}


def _begin_call(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Defer the logits of a call with labels."""
    given = dict(kwargs)
    if args:
        given |= inspect.signature(model.forward).bind_partial(*args).arguments
    model.get_output_embeddings()._is_deferring = given.get("labels") is not None


def _end_call(model: nn.Module, args: Any, output: Any) -> None:
    model.get_output_embeddings()._is_deferring = False
