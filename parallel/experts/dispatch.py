"""
Tokens to experts and back.

    tokens --take--> rows, sorted by expert --experts--> rows --combine--> tokens

With experts on several ranks the rows travel between: every rank sends each other one the rows of
its experts, as many as there are.

    rows by expert --all-to-all--> by (source, expert) --reorder--> by (expert, source)

The rows of an expert are then in the order of the ranks, and within a rank in the order of its
tokens: the order in which one process has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from pdrun.parallel.comm.autograd import all_gather, slice_to_shard
from pdrun.parallel.comm.axis_transport import keeps_result
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.experts.grouped import ExpertRows
from pdrun.parallel.experts.routing import count_rows
from pdrun.parallel.experts.rows import combine_rows, reorder_rows, sort_rows, take_rows
from pdrun.parallel.torch_compat import untraced

ExpertFunction = Callable[[torch.Tensor, ExpertRows], torch.Tensor]
"""Computes rows that are sorted by expert."""


ROWS_NAME = "all_to_all_rows"
"""The collective's name in counts."""


@dataclass(frozen=True)
class ExpertGroups:
    """
    The ranks that share a layer's experts.

    Attributes:
        experts: along which ranks have other experts.
        tokens: the tensor axes among them: their ranks have the same tokens, and each takes a part.
    """

    experts: AxisGroup
    tokens: AxisGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroups:
        return self


def compute_experts(
    tokens: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: ExpertFunction,
    may_drop: bool,
) -> torch.Tensor:
    """
    Return the weighted sum of each token's experts, all of which this process has.

    Args:
        tokens: ``[tokens, dim]``.
        index: ``[tokens, top_k]``; ``experts`` where a token is dropped.
        weights: ``[tokens, top_k]``.
        may_drop: whether tokens can be dropped.
    """
    order, places = sort_rows(index, experts)
    counts = count_rows(index, experts)[:experts]
    sizes = None
    if may_drop:
        sizes = counts.tolist()
        order = order[: sum(sizes)]
    rows = take_rows(tokens, order, places, index.shape[1])
    return combine_rows(compute(rows, ExpertRows(counts, sizes)), weights, order, places)


def exchange_experts(
    tokens: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: ExpertFunction,
    groups: ExpertGroups,
    meanwhile: Callable[[], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Return the weighted sum of each token's experts, which the ranks of an axis share.

    Compiled code is interrupted where counts and rows travel, and nowhere else: sizes are known
    when it runs.

    Args:
        tokens, index, weights: see `compute_experts`.
        experts: of all ranks together.
        compute: computes the rows of this rank's experts.
        meanwhile: called while the numbers of rows travel; its result is returned, too.
    """
    total = len(tokens)
    if groups.tokens.size > 1:
        tokens, index, weights = (
            slice_to_shard(x, groups.tokens, 0) for x in (tokens, index, weights)
        )
    order, places = sort_rows(index, experts)
    counts = count_rows(index, experts)[:experts]
    exchange = _start_exchange(groups.experts, counts)
    other = None if meanwhile is None else meanwhile()
    order = _finish_exchange(exchange, order)
    rows = take_rows(tokens, order, places, index.shape[1])
    rows, arrival = _send_to_experts(rows, exchange)
    if groups.experts.size > 1:
        rows = reorder_rows(rows, arrival.by_expert, arrival.inverse)
    rows = compute(rows, arrival.expert_rows)
    if groups.experts.size > 1:
        rows = reorder_rows(rows, arrival.inverse, arrival.by_expert)
    rows = _send_back(rows, exchange)
    out = combine_rows(rows, weights, order, places)
    if groups.tokens.size > 1:
        out = all_gather(out, groups.tokens, 0, total)
    return out, other


@untraced
def _start_exchange(axis: AxisGroup, counts: torch.Tensor) -> _CountExchange:
    return _CountExchange(axis, counts)


@untraced
def _finish_exchange(exchange: _CountExchange, order: torch.Tensor) -> torch.Tensor:
    """Wait for the numbers; return the order without dropped rows."""
    exchange.finish()
    return order[: sum(exchange.sent)]


@untraced
def _send_to_experts(
    rows: torch.Tensor, exchange: _CountExchange
) -> tuple[torch.Tensor, ArrivedRows]:
    """Return the rows of this rank's experts, by (source, expert), and how to order them."""
    rows = _AllToAllRows.apply(rows, exchange.axis, exchange.sent, exchange.received)
    by_expert, inverse = exchange.reorder(len(rows))
    return rows, ArrivedRows(by_expert, inverse, exchange.expert_rows())


@untraced
def _send_back(rows: torch.Tensor, exchange: _CountExchange) -> torch.Tensor:
    """Return the rows to the ranks of their tokens."""
    return cast(
        "torch.Tensor",
        _AllToAllRows.apply(rows, exchange.axis, exchange.received, exchange.sent),
    )


@dataclass(frozen=True)
class ArrivedRows:
    """
    Rows that came from all ranks.

    Attributes:
        by_expert: their order by (expert, source).
        inverse: the inverse of that order.
        expert_rows: the numbers of rows.
    """

    by_expert: torch.Tensor
    inverse: torch.Tensor
    expert_rows: ExpertRows


class _CountExchange:
    """Tells every rank how many rows of each of its experts come from each rank."""

    def __init__(self, axis: AxisGroup, counts: torch.Tensor) -> None:
        self.axis = axis
        by_rank = counts.view(axis.size, -1)
        received = torch.empty_like(by_rank)
        start = functools.partial(
            dist.all_to_all_single, received, by_rank, group=axis.group, async_op=True
        )
        if axis.size > 1:
            axis.run_collective("all_to_all", by_rank, start)
        else:
            received.copy_(by_rank)
        self._received = received
        self._numbers = torch.stack([by_rank, received])
        self._event: Any = None
        if self._numbers.is_cuda:
            # the host waits for this copy, not for what is computed meanwhile
            host = torch.empty(self._numbers.shape, dtype=torch.int64, pin_memory=True)
            self._numbers = host.copy_(self._numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self.sent: list[int] = []
        self.received: list[int] = []
        self._sizes: list[int] = []

    def finish(self) -> None:
        """Wait for the numbers."""
        if self._event is not None:
            self._event.synchronize()
        sent, received = self._numbers
        self.sent = sent.sum(1).tolist()
        self.received = received.sum(1).tolist()
        self._sizes = received.sum(0).tolist()

    def expert_rows(self) -> ExpertRows:
        """Return the rows of this rank's experts."""
        return ExpertRows(self._received.sum(0), self._sizes)

    def reorder(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order from (source, expert) to (expert, source), and its inverse."""
        numbers = self._received
        turned = numbers.T.reshape(-1)
        # the rows of a source and expert stay together: each block moves by some places
        starts = (numbers.reshape(-1).cumsum(0) - numbers.reshape(-1)).view_as(numbers)
        ends = (turned.cumsum(0) - turned).view_as(numbers.T)
        places = torch.arange(rows, device=numbers.device)
        order = (starts.T - ends).reshape(-1).repeat_interleave(turned, output_size=rows)
        inverse = (ends.T - starts).reshape(-1)
        inverse = inverse.repeat_interleave(numbers.reshape(-1), output_size=rows)
        return places + order, places + inverse


@keeps_result
def send_rows(
    axis: AxisGroup, rows: torch.Tensor, sent: list[int], received: list[int]
) -> torch.Tensor:
    """
    Send each rank its rows; return the rows received, in the order of the ranks.

    Args:
        sent, received: rows for and from each rank.
    """
    if axis.size == 1:
        return rows
    rows = rows.detach().contiguous()
    out = rows.new_empty(sum(received), *rows.shape[1:])
    start = functools.partial(
        dist.all_to_all_single, out, rows, received, sent, group=axis.group, async_op=True
    )
    axis.run_collective(ROWS_NAME, rows, start)
    return out


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, axis: AxisGroup, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.route = axis, received, sent
        return cast("torch.Tensor", send_rows(axis, rows, sent, received))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        axis, sent, received = ctx.route
        return send_rows(axis, grad, sent, received), None, None, None
