"""
Collectives between the devices of one host: each device sends a shard to every other.

    P2PReduceScatter    the sum of shards, added by the stream that waits for it
    P2PAllGather        all shards side by side
    start_flat_sum      the same two for flat buffers of any size: in pieces, and on other streams
    start_flat_gather   than the one that waits
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from pdrun.parallel.comm.p2p.copier import P2PCopier


class P2PExchange(ABC):
    """
    Every device sends a shard to every other, and uses the shards that it receives.

    Args:
        copier: the memory; all of its devices must start the same exchanges in the same order.
        out: the result.
    """

    def __init__(self, copier: P2PCopier, out: torch.Tensor) -> None:
        copier.exchange_count = (copier.exchange_count + 1) % 2**32
        self._copier = copier
        self._out = out
        self._number = copier.exchange_count
        self._sources: list[torch.Tensor] = []
        """Tensors that other streams read until `wait`."""
        self._all_sent: torch.cuda.Event | None = None

    def send_shard(self, receiver: int, shard: torch.Tensor) -> None:
        """
        Send ``[rows, ...]`` that the current stream computes; each row must be contiguous.
        """
        copier = self._copier
        own = copier.axis.index
        stream = copier.send_stream
        target = copier.slot_of(receiver, own, shard)
        stream.wait_stream(copier.current_stream())
        copier.await_counter(stream, copier.done_counter(receiver), self._number - 1)
        copier.copy_shard(stream, target, shard)
        copier.set_counter(stream, receiver, copier.ready_counter(own), self._number)
        self._sources.append(shard)
        self._all_sent = stream.record_event()

    def wait(self) -> None:
        """Have the current stream wait for the result."""
        stream = self._copier.current_stream()
        self._receive_shards(stream)
        if self._all_sent is not None:  # from now on the sent shards may be overwritten
            stream.wait_event(self._all_sent)
        self._sources.clear()

    @abstractmethod
    def _receive_shards(self, stream: torch.cuda.Stream) -> None:
        """Complete the result on a stream."""


class P2PReduceScatter(P2PExchange):
    """
    The sum of the shards of this rank.

    Args:
        out: like a shard, ``[rows, ...]``.
        shard_for: returns the shard of an index. It is called for this rank last, and may compute
            the shard.
    """

    def __init__(
        self, copier: P2PCopier, out: torch.Tensor, shard_for: Callable[[int], torch.Tensor]
    ) -> None:
        super().__init__(copier, out)
        for receiver in copier.others:
            self.send_shard(receiver, shard_for(receiver))
        self._sources.append(shard_for(copier.axis.index))

    def _receive_shards(self, stream: torch.cuda.Stream) -> None:
        self._add_shards(stream, self._sources[-1])

    def _add_shards(self, stream: torch.cuda.Stream, total: torch.Tensor) -> None:
        """Have a stream add this rank's shard and those that it receives."""
        copier = self._copier
        own = copier.axis.index
        for sender in sorted(copier.others):
            copier.await_counter(stream, copier.ready_counter(sender), self._number)
            slot = copier.slot_of(own, sender, self._out)
            copier.add_shards(stream, self._out, total, slot)
            copier.set_counter(stream, sender, copier.done_counter(own), self._number)
            total = self._out


class EarlyReduceScatter(P2PReduceScatter):
    """
    The same, added on the copier's stream for received shards as soon as they arrive.

    No device waits for the code of another to ask for its sum: as many can be in progress as there
    are buckets.
    """

    def __init__(
        self, copier: P2PCopier, out: torch.Tensor, shard_for: Callable[[int], torch.Tensor]
    ) -> None:
        super().__init__(copier, out, shard_for)
        stream = copier.receive_stream
        stream.wait_stream(copier.current_stream())
        self._add_shards(stream, self._sources[-1])
        self._complete = stream.record_event()

    def _receive_shards(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._complete)


class P2PAllGather(P2PExchange):
    """
    All shards side by side.

    Args:
        out: ``[rows, ranks, ...]``.
        shard: of this rank, ``[rows, ...]``; can be its part of ``out``.
    """

    def __init__(self, copier: P2PCopier, out: torch.Tensor, shard: torch.Tensor) -> None:
        super().__init__(copier, out)
        own = copier.axis.index
        stream = copier.receive_stream
        stream.wait_stream(copier.current_stream())
        for receiver in copier.others:
            self.send_shard(receiver, shard)
        if out[:, own].data_ptr() != shard.data_ptr():
            copier.copy_shard(stream, out[:, own], shard)
        for sender in sorted(copier.others):
            copier.await_counter(stream, copier.ready_counter(sender), self._number)
            slot = copier.slot_of(own, sender, out[:, sender])
            copier.copy_shard(stream, out[:, sender], slot)
            copier.set_counter(stream, sender, copier.done_counter(own), self._number)
        self._complete = stream.record_event()

    def _receive_shards(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._complete)


class ExchangeList:
    """Exchanges of one copier that have been started; `wait` waits for all of them."""

    def __init__(self, exchanges: list[P2PExchange]) -> None:
        self._exchanges = exchanges

    def wait(self) -> None:
        """Have the current stream wait for the results."""
        for exchange in self._exchanges:
            exchange.wait()
        self._exchanges = []


def start_flat_gather(copier: P2PCopier, full: torch.Tensor, shard: torch.Tensor) -> ExchangeList:
    """Start to fill a flat buffer from equal shards; ``shard`` can be a part of ``full``."""
    out = full.view(1, copier.axis.size, -1)
    return ExchangeList(
        [
            P2PAllGather(copier, out[:, :, low:high], shard.view(1, -1)[:, low:high])
            for low, high in _pieces(copier, shard)
        ]
    )


def start_flat_sum(copier: P2PCopier, out: torch.Tensor, flat: torch.Tensor) -> ExchangeList:
    """Start to sum this rank's shard of a flat buffer; ``out`` can be a part of ``flat``."""
    shards = flat.view(copier.axis.size, 1, -1)
    started: list[P2PExchange] = []
    for low, high in _pieces(copier, out):
        pieces = shards[:, :, low:high]
        part = out.view(1, -1)[:, low:high]
        started.append(EarlyReduceScatter(copier, part, pieces.__getitem__))
    return ExchangeList(started)


def start_flat_all_reduce(copier: P2PCopier, flat: torch.Tensor) -> ExchangeList:
    """Start to sum a flat buffer in place; its elements must divide among the devices."""
    own = flat.view(copier.axis.size, -1)[copier.axis.index]
    copier.receive_stream.wait_stream(copier.current_stream())
    summed = start_flat_sum(copier, own, flat)
    with copier.on_stream(copier.receive_stream):  # where the sums are
        summed.wait()
        return start_flat_gather(copier, flat, own)


def _pieces(copier: P2PCopier, shard: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of the parts of a shard that fit into the copier's memory."""
    most = copier.nbytes // shard.element_size()
    for low in range(0, shard.numel(), most):
        yield low, min(low + most, shard.numel())
