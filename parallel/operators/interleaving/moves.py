"""
Moves of one part, taken apart: started right after the part is made, awaited before it is used.

Backward it is the other way round: the wait starts the collective of the gradient, and the start
waits for it. What autograd computes in between are the operators of the other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pdrun.parallel.comm import autograd
from pdrun.parallel.comm.axis_transport import PendingTensor
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.operators.interleaving.paths import BACKWARD_KINDS, FORWARD_KINDS
from pdrun.parallel.operators.program import MoveModule
from pdrun.parallel.operators.redistribute import (
    ALL_GATHER,
    ALL_GATHER_SUM_GRAD,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SLICE,
    LayoutMove,
)


@dataclass
class MovedPart:
    """
    A part on its way.

    Attributes:
        pending: collectives that the wait of the forward pass has to wait for.
        rest: the moves after them.
        undo: the moves of the gradient, in the order of the moves.
        backward_pending: collectives that the start has to wait for in the backward pass.
        left: number of moves of the gradient after them.
        grad: the gradient on its way.
    """

    pending: list[PendingTensor] = field(default_factory=list)
    rest: Sequence[MoveModule] = ()
    undo: list[tuple[MoveModule, Callable[[torch.Tensor], torch.Tensor]]] = field(
        default_factory=list
    )
    backward_pending: list[PendingTensor] = field(default_factory=list)
    left: int = 0
    grad: torch.Tensor | None = None

    def move_forward(self, x: torch.Tensor, modules: Sequence[MoveModule]) -> torch.Tensor:
        """Carry out moves until a collective has started; the others are left over."""
        for at, module in enumerate(modules):
            with module.axis.state.deferring() as self.pending:
                x = self._move(module, x)
            if module.move.kind in FORWARD_KINDS:
                self.rest = modules[at + 1 :]
                break
        return x

    def finish_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Wait for the collective, and carry out the other moves."""
        for pending in self.pending:
            pending.wait()
        self.pending = []
        for module in self.rest:
            x = self._move(module, x)
        self.rest = ()
        return x

    def move_backward(self, grad: torch.Tensor) -> None:
        """Carry out moves of the gradient until a collective has started."""
        for at in reversed(range(len(self.undo))):
            module, undo = self.undo[at]
            with module.axis.state.deferring() as self.backward_pending:
                grad = undo(grad)
            self.left = at
            if module.move.kind in BACKWARD_KINDS:
                break
        self.grad = grad

    def finish_backward(self) -> torch.Tensor:
        """Wait for the collective of the gradient, and carry out the other moves."""
        grad, self.grad = self.grad, None
        assert grad is not None
        for pending in self.backward_pending:
            pending.wait()
        self.backward_pending = []
        for _, undo in reversed(self.undo[: self.left]):
            grad = undo(grad)
        return grad

    def _move(self, module: MoveModule, x: torch.Tensor) -> torch.Tensor:
        """Carry out a move without autograd, and note how its gradient moves."""
        function, args = split_move(module)
        context = SimpleNamespace()
        result: torch.Tensor = function.forward(context, x, *args)
        self.undo.append((module, lambda grad: function.backward(context, grad)[0]))
        return result


def split_move(module: MoveModule) -> tuple[Any, tuple[Any, ...]]:
    """Return the autograd function of a move, and its arguments after the tensor."""
    move, axis = module.move, module.axis
    if move.kind in (ALL_GATHER, ALL_GATHER_SUM_GRAD):
        return autograd.FUNCTIONS[move.kind], (axis, move.dim, module.total)
    if move.kind in (SLICE, REDUCE_SCATTER):
        return autograd.FUNCTIONS[move.kind], (axis, move.dim)
    if move.kind == ALL_TO_ALL:
        return autograd.FUNCTIONS[move.kind], (axis, move.dim, move.origin_dim, module.total)
    return autograd.FUNCTIONS[move.kind], (axis,)


class _StartMoves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: MovedPart, modules: Any) -> torch.Tensor:
        ctx.part = part
        moved = part.move_forward(x, modules)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.part.finish_backward(), None, None


class _WaitForMoves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: MovedPart) -> torch.Tensor:
        ctx.part = part
        ctx.shape = x.shape
        moved = part.finish_forward(x)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.part.move_backward(grad)
        # what autograd may read before the start has waited, and has the shape that it expects
        return grad.new_zeros(()).expand(ctx.shape), None


class StartMoves(nn.Module):
    """
    Starts the moves of a part.

    Args:
        moves: at most one of them sends forward, and at most one backward.
        axes: the ranks of each move.
        local_shapes: of this rank's part after each move.
    """

    def __init__(
        self,
        moves: Sequence[LayoutMove],
        axes: Sequence[AxisGroup],
        local_shapes: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.moves = nn.ModuleList(
            MoveModule(*each) for each in zip(moves, axes, local_shapes, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, MovedPart]:
        """Return what `WaitForMoves` takes; the moved part itself in compiled code."""
        modules: Any = self.moves
        if torch.compiler.is_compiling():  # whose passes move starts and waits apart
            for module in modules:
                x = module(x)
            return x
        active = [module for module in modules if module.axis.size > 1]
        part = MovedPart()
        return _StartMoves.apply(x, part, active), part

    @property
    def compute_key(self) -> tuple[Any, ...]:
        """Equal for two modules that compute the same."""
        modules: Any = self.moves
        return StartMoves, *(module.compute_key for module in modules)


class WaitForMoves(nn.Module):
    """Waits for what `StartMoves` has started."""

    def forward(self, started: torch.Tensor | tuple[torch.Tensor, MovedPart]) -> torch.Tensor:
        """Return the moved part."""
        if isinstance(started, torch.Tensor):
            return started
        found: torch.Tensor = _WaitForMoves.apply(*started)
        return found

    @property
    def compute_key(self) -> tuple[Any, ...]:
        """All waits compute the same."""
        return (WaitForMoves,)
