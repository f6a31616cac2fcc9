"""
Copies between devices of one host, on simulated devices: what streams do is executed in random
orders, as far as waits allow. A copy that is too early, a buffer that is overwritten too early, and
a deadlock show as wrong numbers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdrun.parallel.comm.p2p import exchanges, messages

pytestmark = pytest.mark.torch


class Event:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


class Stream:
    """A queue of (may it run, what it does)."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()

    def add(self, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, run))

    def record_event(self) -> Event:
        event = Event()
        self.add(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.add(lambda: None, lambda: event.is_done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Devices:
    """Memory and counters of some devices that reach each other."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = torch.zeros(count, count, nbytes, dtype=torch.uint8)
        self.counters: dict[tuple[int, int], int] = {}
        self.each = [Device(self, index, count) for index in range(count)]

    def run(self, seed: int) -> None:
        """Execute everything in a random order that the waits allow."""
        draw = random.Random(seed)
        streams = [stream for device in self.each for stream in device.streams]
        while any(stream.queue for stream in streams):
            ready = [stream for stream in streams if stream.queue and stream.queue[0][0]()]
            assert ready, "all streams wait"
            draw.choice(ready).queue.popleft()[1]()


class Device:
    """Stands for `P2PCopier`."""

    def __init__(self, devices: Devices, index: int, size: int) -> None:
        self.devices = devices
        self.nbytes = devices.nbytes
        self.axis = SimpleNamespace(index=index, size=size)
        self.others = [i % size for i in range(index + 1, index + size)]
        self.streams = self.compute, self.send_stream, self.receive_stream = [
            Stream() for _ in range(3)
        ]
        self.current = self.compute
        self.exchange_count = 0

    def slot_of(
        self, receiver: int, sender: int, like: torch.Tensor, skip_bytes: int = 0
    ) -> torch.Tensor:
        size = like.numel() * like.element_size()
        assert skip_bytes + size <= self.nbytes
        memory = self.devices.memory[receiver, sender, skip_bytes : skip_bytes + size]
        return memory.view(like.dtype).view(like.shape)

    def set_counter(self, stream: Stream, receiver: int, counter: int, number: int) -> None:
        stream.add(lambda: self.devices.counters.__setitem__((receiver, counter), number))

    def await_counter(self, stream: Stream, counter: int, number: int) -> None:
        key = self.axis.index, counter
        stream.add(lambda: None, lambda: self.devices.counters.get(key, 0) >= number)

    def copy_shard(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        stream.add(lambda: target.copy_(source))

    def add_shards(self, stream: Stream, out: Any, one: Any, other: Any) -> None:
        stream.add(lambda: torch.add(one, other, out=out))

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def ready_counter(self, sender: int) -> int:
        return sender

    def done_counter(self, receiver: int) -> int:
        return self.axis.size + receiver


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_flat_exchanges_in_flight_together(size: int, seed: int) -> None:
    """
    Gathers and sums of sizes that do not fit into a piece are started before the first is awaited,
    and each buffer is overwritten right after its wait.
    """
    devices = Devices(size, nbytes=7 * 8)
    found: list[list[torch.Tensor]] = []
    wanted = []
    lengths = [5, 20, 7]
    for length in lengths:
        every = [drawn(size * length, seed=10 * length + i) for i in range(size)]
        total = torch.stack(every).sum(0)
        wanted.append((torch.cat([each[:length] for each in every]), total))
    for device in devices.each:
        index = device.axis.index
        results: list[torch.Tensor] = []
        waits: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        copier: Any = device
        for length in lengths:
            flat = torch.full((size * length,), torch.nan, dtype=torch.float64)
            value = drawn(size * length, seed=10 * length + index)
            device.compute.add(lambda flat=flat, value=value: flat.copy_(value))
            full, own = torch.empty_like(flat), torch.empty(length, dtype=torch.float64)
            sent = torch.full_like(own, torch.nan)
            device.compute.add(
                lambda sent=sent, value=value, length=length: sent.copy_(value[:length])
            )
            both = flat.clone()
            device.compute.add(lambda both=both, value=value: both.copy_(value))
            waits.append((exchanges.start_flat_gather(copier, full, sent), full, sent))
            waits.append((exchanges.start_flat_sum(copier, own, flat), own, flat))
            waits.append((exchanges.start_flat_all_reduce(copier, both), both, both))
        for work, result, source in waits:
            work.wait()
            kept = torch.empty_like(result)
            device.compute.add(lambda kept=kept, result=result: kept.copy_(result))
            device.compute.add(lambda source=source: source.fill_(torch.nan))
            results.append(kept)
        found.append(results)
    devices.run(seed)
    for index, results in enumerate(found):
        for place, (gathered, total) in enumerate(wanted):
            torch.testing.assert_close(results[3 * place], gathered, rtol=0, atol=0)
            torch.testing.assert_close(results[3 * place + 1], total.chunk(size)[index])
            torch.testing.assert_close(results[3 * place + 2], total)


@pytest.mark.parametrize("seed", range(3))
def test_messages_in_both_directions(seed: int) -> None:
    """More messages than slots, of several types, awaited in another order than they are sent."""
    count = 3 * messages.SLOT_COUNT
    devices = Devices(2, nbytes=messages.SLOT_COUNT * messages.ALIGNMENT_BYTES)
    kinds = [torch.float64, torch.int32, torch.bool, torch.bfloat16]
    received: list[dict[int, torch.Tensor]] = [{}, {}]

    def content(sender: int, number: int) -> torch.Tensor:
        return (100 * drawn(8, 1 + number, seed=count * sender + number)).to(kinds[number % 4])

    for device in devices.each:
        copier: Any = device
        mailbox = messages.P2PMailbox(copier, messages.ALIGNMENT_BYTES)
        index = device.axis.index
        for low in range(0, count, 3):
            posted = []
            for number in range(low, low + 3):
                value = content(index, number)
                sent = torch.zeros_like(value)
                device.compute.add(lambda sent=sent, value=value: sent.copy_(value))
                work = mailbox.send(sent)
                tensor = torch.empty_like(content(1 - index, number))
                posted.append((number, tensor, mailbox.post_receive(tensor)))
            work.wait()
            assert not work.is_completed()
            for number, tensor, receive in reversed(posted):
                receive.wait()
                kept = received[index][number] = torch.empty_like(tensor)
                device.compute.add(lambda kept=kept, tensor=tensor: kept.copy_(tensor))
    devices.run(seed)
    for index in range(2):
        for number in range(count):
            assert received[index][number].equal(content(1 - index, number))


def test_which_messages_are_copied() -> None:
    """Both ends decide it by the size."""
    copier: Any = Devices(2, 8).each[0]
    mailbox = messages.P2PMailbox(copier, 2 * messages.MIN_MESSAGE_BYTES)
    sizes = (0, messages.MIN_MESSAGE_BYTES - 1, messages.MIN_MESSAGE_BYTES)
    sizes += (2 * messages.MIN_MESSAGE_BYTES, 2 * messages.MIN_MESSAGE_BYTES + 1)
    taken = [mailbox.takes(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    assert taken == [False, False, True, True, False]
