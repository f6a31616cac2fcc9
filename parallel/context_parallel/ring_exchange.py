"""
The transfers of ring attention: keys and values, and one step behind them their gradients.

A rank sends a tensor as soon as it has it, and waits for one when it needs it: both transfers
overlap with computation. Two tensors are sent as one flat message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch

from pdrun.parallel.comm.axis_transport import PendingTensor
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.context_parallel.block_attention import ScoreTerms
from pdrun.parallel.layouts.sequence_order import (
    AttentionBlock,
    Ranges,
    count_positions,
    positions_within,
)

DropoutFactors = Callable[[Ranges, Ranges], torch.Tensor]
"""(positions of queries, positions of keys) -> factors of their weights, 0 or 1 / (1 - p)."""


@dataclass(frozen=True)
class RingPlan:
    """One attention over a ring: the positions of each rank, and how it is computed."""

    axis: AxisGroup
    positions: tuple[Ranges, ...]
    """Positions of each rank of the axis, by index."""
    causal: bool
    scale: float
    dropout: DropoutFactors | None = None

    @property
    def own_positions(self) -> Ranges:
        """This rank's positions."""
        return self.positions[self.axis.index]

    def source_of(self, step: int) -> int:
        """Return the rank index whose keys this rank has in a step."""
        return (self.axis.index - step) % self.axis.size

    def score_terms(
        self, block: AttentionBlock, source: int, bias: torch.Tensor | None
    ) -> ScoreTerms:
        """Return bias (of this rank's rows and all columns) and dropout of a block."""
        if bias is None and self.dropout is None:
            return ScoreTerms()
        q = positions_within(self.own_positions, *block.q)
        k = positions_within(self.positions[source], *block.k)
        if bias is not None:
            rows = bias if bias.shape[-2] == 1 else bias[..., block.q[0] : block.q[1], :]
            bias = torch.cat([rows[..., low:high] for low, high in k], -1)
        return ScoreTerms(bias, None if self.dropout is None else self.dropout(q, k))


@dataclass
class FlatPair:
    """Two tensors that are sent as one: keys and values, or their gradients."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    """Shapes for one position: [batch, heads, 1, size]."""

    def numel_of(self, positions: int) -> int:
        """Return the number of elements for a number of positions."""
        return (prod(self.first) + prod(self.second)) * positions

    def pack_tensors(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return both tensors as one flat tensor."""
        return torch.cat([first.reshape(-1), second.reshape(-1)])

    def unpack_views(self, flat: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of both tensors."""
        shapes = [(*shape[:2], positions, shape[3]) for shape in (self.first, self.second)]
        border = prod(shapes[0])
        return flat[:border].view(shapes[0]), flat[border:].view(shapes[1])


def flat_pair_of(k: torch.Tensor, v: torch.Tensor) -> FlatPair:
    """Return the pair of these keys and values."""
    return FlatPair((*k.shape[:2], 1, k.shape[3]), (*v.shape[:2], 1, v.shape[3]))


class KeyValueRing:
    """Moves keys and values around the ring; taking those of a step sends them on."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: RingPlan) -> None:
        self.plan = plan
        self.pair = flat_pair_of(k, v)
        self._next: PendingTensor | None = None
        self._here = (k, v)
        self._flat = self.pair.pack_tensors(k, v) if plan.axis.size > 1 else k

    def take_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a step, and send them on."""
        if self._next is not None:
            self._flat = self._next.wait()
            self._here = self.pair.unpack_views(
                self._flat, count_positions(self.plan.positions[self.plan.source_of(step)])
            )
            self._next = None
        if step < self.plan.axis.size - 1:
            coming = self.pair.numel_of(
                count_positions(self.plan.positions[self.plan.source_of(step + 1)])
            )
            self._next = self.plan.axis.start_shift(self._flat, shape=(coming,))
        return self._here


@dataclass
class GradientRing:
    """Moves gradients of keys and values behind the keys and values; this rank's own stay here."""

    plan: RingPlan
    pair: FlatPair
    own: torch.Tensor | None = None
    _travelling: torch.Tensor | None = None
    _pending: PendingTensor | None = field(default=None)

    def start_step(self, step: int) -> None:
        """
        Before the computation of a step: send on the gradients of the last step, and start to
        receive.
        """
        if step >= 2:
            assert self._travelling is not None
            self._pending = self._start_shift(
                count_positions(self.plan.positions[self.plan.source_of(step)])
            )

    def finish_step(self, step: int, grads: torch.Tensor) -> None:
        """After the computation of a step: add its gradients to the received ones."""
        if step == 0:
            self.own = grads
            return
        if self._pending is not None:
            grads += self._pending.wait()
        self._travelling = grads
        self._pending = None

    def collect_own(self) -> torch.Tensor:
        """Return all gradients of this rank's own keys and values."""
        assert self.own is not None
        if self._travelling is not None:
            self.own += self._start_shift(count_positions(self.plan.own_positions)).wait()
        return self.own

    def _start_shift(self, positions: int) -> PendingTensor:
        assert self._travelling is not None
        return self.plan.axis.start_shift(self._travelling, shape=(self.pair.numel_of(positions),))
