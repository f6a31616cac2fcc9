"""
The memory for copies between the devices of one host.

A collective of NCCL is a kernel: it waits for processors and takes them from concurrent products.
Here the copy engine of a device writes shards into memory that the other devices provide. Each
device then adds the received shards, or copies them next to its own.

Counters in the receiver's memory show who may write and what has arrived. Streams write and await
them; neither the process nor a processor takes part. With k the number of an exchange along an
axis:

    sender      done[receiver] >= k - 1, copy, ready[sender] := k      on a stream for sent shards
    receiver    ready[sender] >= k, copy, done[receiver] := k          on a stream for received ones
                ready[sender] >= k, add, done[receiver] := k           on the stream of the sum

Memory: the shards that a device receives in the largest exchange, once, outside torch's allocator.
Flat buffers (gradients, weights at level 3) are exchanged in pieces of `PIECE_BYTES`.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdrun.parallel import torch_compat
from pdrun.parallel.comm.axis_members import AxisMembers
from pdrun.parallel.comm.p2p.cuda_driver import copy_rows, load_driver, wait_counter, write_counter

DISABLE_VARIABLE = "NCCL_P2P_DISABLE"
"""Environment variable by which users forbid access to the memory of other devices."""
MIN_SHARD_BYTES = 1 << 22
"""Smallest shard for which copies are faster than NCCL."""
PIECE_BYTES = 32 << 20
"""Memory of a device for shards of flat buffers; larger ones are exchanged in pieces."""
MAX_DEVICES = 8
"""Largest axis; more devices would use more memory than they save time."""
COUNTER_STRIDE_BYTES = 64
"""Distance of two counters: a cache line."""
ALIGNMENT_BYTES = 512
UNSUPPORTED_ERRORS = (RuntimeError, ImportError, AttributeError)
"""What torch raises if it has no such memory, or devices cannot reach each other."""


def open_copier(axis: AxisMembers, nbytes: int) -> P2PCopier | None:
    """
    Return memory for shards of a number of bytes; None if the devices of the axis cannot reach each
    other, or must not.

    All ranks of the axis must call it, and get the same answer.
    """
    if axis.device.type != "cuda" or not axis.is_sorted or axis.size > MAX_DEVICES:
        return None
    driver = load_driver()
    is_allowed = os.environ.get(DISABLE_VARIABLE, "0") == "0" and torch.version.hip is None
    is_near = _is_one_host(axis) and _can_reach_peers(axis)
    if not _all_agree(axis, driver is not None and is_allowed and is_near):
        return None
    memory = handle = None
    with suppress(*UNSUPPORTED_ERRORS):
        memory = torch_compat.symmetric_empty(_memory_bytes(axis, nbytes), axis.device)
    if not _all_agree(axis, memory is not None):
        return None
    with suppress(*UNSUPPORTED_ERRORS):
        handle = torch_compat.symmetric_handle(memory, axis.group)
    if not _all_agree(axis, handle is not None):
        return None
    assert memory is not None  # on every rank, or on none
    return P2PCopier(axis, nbytes, driver, memory, handle)


class P2PCopier:
    """
    Memory of the devices of an axis that all of them write into; see `open_copier`.

    Attributes:
        nbytes: largest size of a shard.
        others: indices of the other ranks, the next one first, so that not all write to the same.
        send_stream, receive_stream: streams for sent and received shards.
        exchange_count: number of the last exchange.
    """

    def __init__(
        self, axis: AxisMembers, nbytes: int, driver: Any, memory: torch.Tensor, handle: Any
    ) -> None:
        self.axis = axis
        self.nbytes = nbytes
        self._driver = driver
        self._memory = memory
        self._handle = handle
        self.others = [i % axis.size for i in range(axis.index + 1, axis.index + axis.size)]
        self.send_stream = torch.cuda.Stream(axis.device, priority=-1)
        self.receive_stream = torch.cuda.Stream(axis.device, priority=-1)
        self._stride = _aligned_bytes(nbytes)
        self._counters = self._stride * (axis.size - 1)
        """Offset of the counters, behind the slots."""
        self.exchange_count = 0
        memory[self._counters :].zero_()
        torch.cuda.synchronize(axis.device)
        dist.barrier(group=axis.group)

    def slot_of(
        self, receiver: int, sender: int, like: torch.Tensor, skip_bytes: int = 0
    ) -> torch.Tensor:
        """
        Return the memory of a receiver for a sender's shard, as a tensor like another.

        Args:
            skip_bytes: where in that memory it starts; a multiple of `ALIGNMENT_BYTES`.
        """
        slot = sender - (sender > receiver)
        offset = (slot * self._stride + skip_bytes) // like.element_size()
        found: torch.Tensor = self._handle.get_buffer(
            receiver, tuple(like.shape), like.dtype, offset
        )
        return found

    def set_counter(
        self, stream: torch.cuda.Stream, receiver: int, counter: int, number: int
    ) -> None:
        """Have a stream set a counter of another device to the number of an exchange."""
        write_counter(self._driver, stream, self._address_of(receiver, counter), number)

    def await_counter(self, stream: torch.cuda.Stream, counter: int, number: int) -> None:
        """Have a stream wait until a counter of this device reaches a number."""
        wait_counter(self._driver, stream, self._address_of(self.axis.index, counter), number)

    def copy_shard(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Have a copy engine copy ``[rows, ...]`` of any device; each row must be contiguous."""
        copy_rows(self._driver, stream, target, source)

    def add_shards(
        self, stream: torch.cuda.Stream, out: torch.Tensor, one: torch.Tensor, other: torch.Tensor
    ) -> None:
        """Have a stream add two tensors of this device, or of its memory."""
        with torch.cuda.stream(stream):
            torch.add(one, other, out=out)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream on which code computes."""
        return torch.cuda.current_stream(self.axis.device)

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Return a context manager in which a stream is the current one."""
        found: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return found

    def _address_of(self, index: int, counter: int) -> int:
        offset = (self._counters + counter * COUNTER_STRIDE_BYTES) // 4
        found = self._handle.get_buffer(index, (1,), torch.int32, offset)
        return int(found.data_ptr())

    def ready_counter(self, sender: int) -> int:
        """Return the counter of the exchanges in which this sender's shard has arrived."""
        return sender

    def done_counter(self, receiver: int) -> int:
        """Return the counter of the exchanges whose shards this receiver has used."""
        return self.axis.size + receiver


class LazyCopier:
    """
    The memory for copies of an axis, opened when it is first needed.

    All ranks of the axis must ask for the same sizes in the same order.
    """

    def __init__(self, axis: AxisMembers) -> None:
        self._axis = axis
        self._copier: P2PCopier | None = None
        self._can_copy = True
        """Whether the devices can write into each other's memory, as far as is known."""

    def find(self, nbytes: int) -> P2PCopier | None:
        """Return memory for shards of a number of bytes; None to use torch's collectives."""
        if not self._can_copy:
            return None
        if self._copier is None or self._copier.nbytes < nbytes:
            self._copier = open_copier(self._axis, nbytes)
            self._can_copy = self._copier is not None
        return self._copier


# ---- can the devices of an axis reach each other? ---------------------------


def _aligned_bytes(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _memory_bytes(axis: AxisMembers, nbytes: int) -> int:
    """Return the size of the slots and the counters of a device."""
    return _aligned_bytes(nbytes) * (axis.size - 1) + 2 * axis.size * COUNTER_STRIDE_BYTES


def _is_one_host(axis: AxisMembers) -> bool:
    """Whether all ranks run on one host, by name and boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot_id.read_text() if boot_id.exists() else ''}"
    own = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    lowest = torch.tensor([own, -own], device=axis.device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=axis.group)
    return bool(lowest.tolist() == [own, -own])


def _can_reach_peers(axis: AxisMembers) -> bool:
    """
    Whether CUDA allows this device to reach the others, as far as this process sees them.
    """
    device = axis.device
    own = torch.tensor([device.index or 0], device=device)
    every = own.new_empty(axis.size)
    torch_compat.all_gather_flat(every, own, axis.group).wait()
    numbers = every.tolist()
    if len(set(numbers)) < len(numbers) or max(numbers) >= torch.cuda.device_count():
        return True  # each process sees its own devices: torch's rendezvous will find out
    return all(
        torch.cuda.can_device_access_peer(device, other)
        for other in numbers
        if other != device.index
    )


def _all_agree(axis: AxisMembers, answer: bool) -> bool:
    """Whether the answer is true on all ranks."""
    found = torch.tensor(int(answer), device=axis.device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=axis.group)
    return bool(found.item())
