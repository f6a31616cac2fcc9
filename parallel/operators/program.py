"""
What one rank runs: the local graph, and the modules of it that redistribute tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from pdrun.parallel.comm import autograd as collectives
from pdrun.parallel.comm.communicator import Axis
from pdrun.parallel.operators import redistribute as convert
from pdrun.parallel.operators.plan import Plan
from pdrun.parallel.operators.redistribute import Move
from pdrun.parallel.operators.segments import tensor_at
from pdrun.parallel.tensor.vocab_cross_entropy import Words


class Program:
    """
    What one rank runs for one set of shapes.

    Attributes:
        names: of the weights and buffers that ``module`` takes, in order; then come the tensors of
            the call, then what
            the stage before has sent.
        module: the local graph. It returns the model's results, flat, or what the next stage is
            sent.
        words: of the results that stay cut along their last dim, by place: which part is here.
    """

    def __init__(
        self, plan: Plan, module: fx.GraphModule, names: list[str], words: dict[int, Words]
    ) -> None:
        self.plan = plan
        self.module = module
        self.names = names
        self.words = words

    def run(
        self, model: nn.Module, inputs: list[Any], taken: Sequence[torch.Tensor] = ()
    ) -> list[Any]:
        """
        Return what ``module`` returns.

        Args:
            model: has the weights, and the submodules that are called.
            inputs: the leaves of the call's arguments.
            taken: what the stage before has sent.
        """
        weights = [tensor_at(model, name) for name in self.names]
        results: list[Any] = self.module(model, *weights, *inputs, *taken)
        return results


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.size, None


class MoveModule(nn.Module):
    """One move of a tensor, between the operators of a local graph."""

    def __init__(self, move: Move, axis: Axis, total: int) -> None:
        super().__init__()
        self.move = move
        self.axis = axis
        self.total = total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the layout after the move."""
        move = self.move
        axis = self.axis
        if move.kind == convert.FAN_OUT:
            return collectives.fan_out(x, axis) if x.requires_grad else x
        if move.kind == convert.SHARE:
            return _Share.apply(x, axis.size)
        if move.kind == convert.ADD_UP:
            return collectives.add_up(x, axis)
        if move.kind == convert.GATHER:
            return collectives.gather(x, axis, move.dim, self.total)
        if move.kind == convert.COLLECT:
            return collectives.collect(x, axis, move.dim, self.total)
        if move.kind == convert.PART:
            return collectives.part(x, axis, move.dim)
        if move.kind == convert.SCATTER:
            return collectives.scatter(x, axis, move.dim)
        return collectives.swap(x, axis, move.dim, move.origin, self.total)

    @property
    def same(self) -> tuple[Any, ...]:
        """What is equal of two that do the same."""
        return self.move, id(self.axis), self.total

    def extra_repr(self) -> str:
        """Return the move as text."""
        return self.move.told()
