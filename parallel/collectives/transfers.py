"""Tensors that are sent from one rank of a group to another; see the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pdrun.errors import UsageError
from pdrun.parallel.collectives.group import API_NAME, check_index, group
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.torch_compat import as_sendable


def shift(x: torch.Tensor, ranks: AxisGroup | None = None, by: int = 1) -> torch.Tensor:
    """Send ``x`` to the rank ``by`` places on in a ring; return the tensor received."""
    ranks = ranks or group()
    received: torch.Tensor = _ShiftAdjoint.apply(x, ranks, by)
    return received


def exchange(
    outgoing: Mapping[int, torch.Tensor],
    incoming: Mapping[int, torch.Tensor],
    ranks: AxisGroup | None = None,
) -> dict[int, torch.Tensor]:
    """
    Send tensors to some ranks and receive tensors from some: halos, graphs, uneven all-to-alls.

    Every received tensor must take part in the loss, or its sender waits for its gradient.

    Args:
        outgoing: what is sent, by index in the group.
        incoming: for each index from which a tensor is received, a tensor of its shape and type;
            the values do not matter.

    Returns:
        the received tensors by index.
    """
    ranks = ranks or group()
    for index in (*outgoing, *incoming):
        check_index(index, ranks, "exchange")
    targets, sources = tuple(outgoing), tuple(incoming)
    likes = tuple(like.detach() for like in incoming.values())
    received = _ExchangeAdjoint.apply(
        ranks, targets, sources, likes, _anchor(ranks), *outgoing.values()
    )
    return dict(zip(sources, received, strict=True))


def send(x: torch.Tensor, target: int, ranks: AxisGroup | None = None) -> torch.Tensor:
    """
    Send a tensor to the rank with index ``target``, which must `receive` it.

    Returns:
        a zero. Add it to this rank's loss: its gradient receives the gradient of ``x``.
    """
    ranks = ranks or group()
    check_index(target, ranks, "send")
    zero: torch.Tensor = _SendAdjoint.apply(x, ranks, target)
    return zero


def receive(like: torch.Tensor, source: int, ranks: AxisGroup | None = None) -> torch.Tensor:
    """
    Return the tensor that the rank with index ``source`` sends; its gradient is sent back.

    Args:
        like: a tensor of its shape and type; the values do not matter.
    """
    ranks = ranks or group()
    check_index(source, ranks, "receive")
    received: torch.Tensor = _ReceiveAdjoint.apply(like.detach(), ranks, source, _anchor(ranks))
    return received


# ---- inside -----------------------------------------------------------------


def _anchor(ranks: AxisGroup) -> torch.Tensor:
    """Return an input that has a gradient, so that a result that is received has one as well."""
    return torch.zeros((), device=ranks.device, requires_grad=torch.is_grad_enabled())


def _transfer(
    ranks: AxisGroup, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """
    Send and receive by index; what goes to this rank itself is copied.

    Raises:
        UsageError: this rank sends itself something that it does not receive, or the reverse.
    """
    if (ranks.index in outgoing) != (ranks.index in incoming):
        raise UsageError(
            f"rank {ranks.index} of the group must send and receive its own tensor, or neither",
            where=f"{API_NAME}.exchange",
        )
    received = {index: torch.empty_like(like).contiguous() for index, like in incoming.items()}
    sent = {index: as_sendable(x.detach().contiguous()) for index, x in outgoing.items()}
    operations = []
    for index, x in sent.items():
        if index == ranks.index:
            received[index].copy_(x)
        elif x.numel():
            operations.append(dist.P2POp(dist.isend, x, ranks.ranks[index], ranks.group))
    for index, x in received.items():
        if index != ranks.index and x.numel():
            place = as_sendable(x)
            operations.append(dist.P2POp(dist.irecv, place, ranks.ranks[index], ranks.group))
    nbytes = sum(x.nbytes for index, x in sent.items() if index != ranks.index)
    ranks.state.count_collective("exchange", ranks.names, nbytes)
    for work in dist.batch_isend_irecv(operations) if operations else []:
        ranks.state.watchdog.wait(work, f"an exchange {ranks.label}")
    return received


class _ShiftAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup, by: int) -> torch.Tensor:
        ctx.ranks, ctx.by = ranks, by
        return ranks.shift(x, by).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.ranks.shift(grad, -ctx.by), None, None


class _ExchangeAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ranks: AxisGroup,
        targets: tuple[int, ...],
        sources: tuple[int, ...],
        likes: tuple[torch.Tensor, ...],
        _anchor: torch.Tensor,
        *outgoing: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.targets, ctx.sources = ranks, targets, sources
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in outgoing]
        received = _transfer(
            ranks,
            dict(zip(targets, outgoing, strict=True)),
            dict(zip(sources, likes, strict=True)),
        )
        return tuple(received[index] for index in sources)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        likes = [torch.empty(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.shapes]
        back = _transfer(
            ctx.ranks,
            dict(zip(ctx.sources, grads, strict=True)),
            dict(zip(ctx.targets, likes, strict=True)),
        )
        return None, None, None, None, None, *(back[index] for index in ctx.targets)


class _SendAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: AxisGroup, target: int) -> torch.Tensor:
        ctx.ranks, ctx.target = ranks, target
        ctx.shape = (x.shape, x.dtype, x.device)
        _transfer(ranks, {target: x}, {})
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape, dtype, device = ctx.shape
        like = torch.empty(shape, dtype=dtype, device=device)
        return _transfer(ctx.ranks, {}, {ctx.target: like})[ctx.target], None, None


class _ReceiveAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, like: torch.Tensor, ranks: AxisGroup, source: int, _anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.ranks, ctx.source = ranks, source
        return _transfer(ranks, {}, {source: like})[source]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _transfer(ctx.ranks, {ctx.source: grad}, {})
        return None, None, None, None
