"""What one rank runs: the local graph, and its modules that redistribute tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from pdrun.parallel.comm.autograd import (
    all_gather,
    all_gather_sum_grad,
    all_reduce,
    all_to_all,
    copy_to_axis,
    reduce_scatter,
    slice_to_shard,
)
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.redistribute import (
    ALL_GATHER,
    ALL_GATHER_SUM_GRAD,
    ALL_REDUCE,
    ALL_TO_ALL,
    COPY_TO_AXIS,
    REDUCE_SCATTER,
    RESHAPE,
    SCALE_GRAD,
    SLICE,
    LayoutMove,
)
from pdrun.parallel.operators.segments import get_tensor
from pdrun.parallel.tensor.vocab_cross_entropy import VocabShard


class LocalProgram:
    """
    What one rank runs for one set of shapes.

    Attributes:
        weight_names: of the weights and buffers that ``module`` takes, in order. They are followed
            by the tensors of the call, then what the stage before has sent.
        module: the local graph. It returns the model's results, flat, or what the next stage is
            sent.
        vocab_shards: of the results that stay sharded on their last dim, by position.
    """

    def __init__(
        self,
        plan: OperatorPlan,
        module: fx.GraphModule,
        names: list[str],
        words: dict[int, VocabShard],
    ) -> None:
        self.plan = plan
        self.module = module
        self.weight_names = names
        self.vocab_shards = words

    def run(
        self, model: nn.Module, inputs: list[Any], received: Sequence[torch.Tensor] = ()
    ) -> list[Any]:
        """
        Return what ``module`` returns.

        Args:
            model: has the weights, and the submodules that are called.
            inputs: the leaves of the call's arguments.
            received: what the stage before has sent.
        """
        weights = [get_tensor(model, name) for name in self.weight_names]
        results: list[Any] = self.module(model, *weights, *inputs, *received)
        return results


class _ScaleGradient(torch.autograd.Function):
    """The identity; backward it divides the gradient by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.size, None


class MoveModule(nn.Module):
    """
    One redistribution of a tensor, between the operators of a local graph.

    Args:
        axis: the ranks with which it is done.
        local_shape: of this rank's shard after it.
    """

    def __init__(self, move: LayoutMove, axis: AxisGroup, local_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.move = move
        self.axis = axis
        self.local_shape = local_shape
        self.total = 0
        if move.kind in (ALL_GATHER, ALL_GATHER_SUM_GRAD):
            self.total = local_shape[move.dim]
        elif move.kind == ALL_TO_ALL:
            self.total = local_shape[move.origin_dim]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the layout after the move."""
        move = self.move
        axis = self.axis
        if move.kind == COPY_TO_AXIS:
            if not x.requires_grad:
                return x
            return copy_to_axis(x, axis)
        if move.kind == RESHAPE:
            return x.reshape(self.local_shape)
        if move.kind == SCALE_GRAD:
            return _ScaleGradient.apply(x, axis.size)
        if move.kind == ALL_REDUCE:
            return all_reduce(x, axis)
        if move.kind == ALL_GATHER:
            return all_gather(x, axis, move.dim, self.total)
        if move.kind == ALL_GATHER_SUM_GRAD:
            return all_gather_sum_grad(x, axis, move.dim, self.total)
        if move.kind == SLICE:
            return slice_to_shard(x, axis, move.dim)
        if move.kind == REDUCE_SCATTER:
            return reduce_scatter(x, axis, move.dim)
        return all_to_all(x, axis, move.dim, move.origin_dim, self.total)

    @property
    def compute_key(self) -> tuple[Any, ...]:
        """Equal for two modules that compute the same."""
        return self.move, id(self.axis), self.local_shape

    def extra_repr(self) -> str:
        """Return the move as text."""
        return self.move.describe()
