"""
Collectives of the devices of one host by copies into each other's memory, beside which the
processors go on computing.

A collective of NCCL is a kernel: beside a product it waits for processors and takes them from it.
Here a device's copy engines write what others need into places that these hold ready, and each
takes it from there: adds it up, or puts it beside its own.

Who may write, and what has come, are counters in the receivers' memory that the streams themselves
write and wait for: neither the process nor a processor takes part. With k the number of an exchange
along one axis:

    sender      done[receiver] >= k - 1, copy, ready[sender] := k      on a stream for what goes
    receiver    ready[sender] >= k, copy, done[receiver] := k          on a stream for what comes
                ready[sender] >= k, add, done[receiver] := k           on the stream that needs the sum

Memory: what this device gets in the largest exchange, once. It lies outside of torch's allocator.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from pdrun.parallel import torch_compat as compat

if TYPE_CHECKING:
    from pdrun.parallel.comm.communicator import Axis

SWITCH = "NCCL_P2P_DISABLE"
"""Environment variable by which users keep devices out of each other's memory."""
LEAST = 1 << 22
"""Bytes of a part that are worth it."""
MOST = 8
"""Devices of an axis; more would hold more memory than they save time."""
LINE = 64
"""Bytes between two counters."""
ALIGNED = 512
UNABLE = (RuntimeError, ImportError, AttributeError)
"""What torch raises where there is no such memory, or devices cannot reach each other."""


def open_peers(axis: Axis, nbytes: int) -> Peers | None:
    """
    Return memory for parts of so many bytes, or None where the axis's devices cannot reach each
    other, or must not.

    All ranks of the axis call it, and get the same answer.
    """
    device = axis.axes.device
    if device.type != "cuda" or not axis.sorted or axis.size > MOST:
        return None
    driver = _driver()
    wanted = driver is not None and os.environ.get(SWITCH, "0") == "0" and torch.version.hip is None
    near = _on_one_host(axis, device) and _may_reach(axis, device)
    if not _all(axis, device, wanted and near):
        return None
    held = handle = None
    with suppress(*UNABLE):
        held = compat.symmetric_empty(_size(axis, nbytes), device)
    if not _all(axis, device, held is not None):
        return None
    with suppress(*UNABLE):
        handle = compat.symmetric_handle(held, axis.group)
    if not _all(axis, device, handle is not None):
        return None
    assert held is not None  # on every rank, or on none
    return Peers(axis, nbytes, driver, held, handle)


UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the driver knows by the address where memory is."""
_SIDE = {
    "x": ctypes.c_size_t,
    "y": ctypes.c_size_t,
    "kind": ctypes.c_int,
    "host": ctypes.c_void_p,
    "device": ctypes.c_void_p,
    "array": ctypes.c_void_p,
    "pitch": ctypes.c_size_t,
}


class _Copy(ctypes.Structure):
    """CUDA's CUDA_MEMCPY2D: what is read, what is written, and how much of it."""

    _fields_: ClassVar[Any] = [
        *((f"{side}_{name}", kind) for side in ("from", "to") for name, kind in _SIDE.items()),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    ]


class Peers:
    """
    Memory of an axis's devices that all of them write into; see `open_peers`.

    Attributes:
        nbytes: what a part may have.
    """

    def __init__(
        self, axis: Axis, nbytes: int, driver: Any, held: torch.Tensor, handle: Any
    ) -> None:
        self.axis = axis
        self.nbytes = nbytes
        self._driver = driver
        self._held = held
        self._handle = handle
        self.others = [place % axis.size for place in range(axis.index + 1, axis.index + axis.size)]
        """Who is written to, the next one first, so that not all write to the same."""
        self.going, self.coming = (
            torch.cuda.Stream(axis.axes.device, priority=-1) for _ in range(2)
        )
        self._stride = -(-nbytes // ALIGNED) * ALIGNED
        self._counters = self._stride * (axis.size - 1)
        self.number = 0
        held[self._counters :].zero_()
        torch.cuda.synchronize(axis.axes.device)
        dist.barrier(group=axis.group)

    def slot(self, receiver: int, sender: int, like: torch.Tensor) -> torch.Tensor:
        """Return the place for what a sender writes to a receiver, as a tensor like another."""
        index = sender - (sender > receiver)
        offset = index * self._stride // like.element_size()
        found: torch.Tensor = self._handle.get_buffer(
            receiver, tuple(like.shape), like.dtype, offset
        )
        return found

    def tell(self, stream: torch.cuda.Stream, receiver: int, counter: int, number: int) -> None:
        """
        Set another device's counter to the number of an exchange, once the stream has come this
        far.
        """
        there = self._address(receiver, counter)
        self._check(self._driver.cuStreamWriteValue32_v2(stream.cuda_stream, there, number, 0))

    def until(self, stream: torch.cuda.Stream, counter: int, number: int) -> None:
        """Have the stream wait for this device's counter to reach a number."""
        mine = self._address(self.axis.index, counter)
        self._check(
            self._driver.cuStreamWaitValue32_v2(stream.cuda_stream, mine, number % 2**32, 0)
        )

    def copy(self, stream: torch.cuda.Stream, there: torch.Tensor, here: torch.Tensor) -> None:
        """
        Have a copy engine copy ``[rows, ...]`` of whichever device; on both sides each row is in
        one piece.
        """
        rows = len(here)
        width = here[0].numel() * here.element_size()
        from_pitch, to_pitch = (each.stride(0) * each.element_size() for each in (here, there))
        if rows == 1 or from_pitch == to_pitch == width:
            self._check(
                self._driver.cuMemcpyAsync(
                    there.data_ptr(), here.data_ptr(), rows * width, stream.cuda_stream
                )
            )
            return
        asked = _Copy(
            from_kind=UNIFIED,
            from_device=here.data_ptr(),
            from_pitch=from_pitch,
            to_kind=UNIFIED,
            to_device=there.data_ptr(),
            to_pitch=to_pitch,
            width=width,
            rows=rows,
        )
        self._check(self._driver.cuMemcpy2DAsync_v2(ctypes.byref(asked), stream.cuda_stream))

    def _address(self, place: int, counter: int) -> int:
        line = self._handle.get_buffer(
            place, (1,), torch.int32, (self._counters + counter * LINE) // 4
        )
        return int(line.data_ptr())

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA's driver: error {code} of an operation of a stream on memory")

    def ready(self, sender: int) -> int:
        """Return the counter of the exchanges in which this sender's part has come."""
        return sender

    def done(self, receiver: int) -> int:
        """Return the counter of the exchanges in which this receiver has taken what it got."""
        return self.axis.size + receiver


class Exchange(ABC):
    """
    Every device sends something to every other, and takes what these have sent.

    Args:
        peers: the memory; all of its devices begin the same exchanges in the same order.
        out: where the result comes.
    """

    def __init__(self, peers: Peers, out: torch.Tensor) -> None:
        peers.number = (peers.number + 1) % 2**32
        self._peers = peers
        self._out = out
        self._number = peers.number
        self._kept: list[torch.Tensor] = []
        """What is read by other streams until `wait`."""

    def give(self, place: int, part: torch.Tensor) -> None:
        """Send ``[rows, ...]`` that the current stream computes; each row is in one piece."""
        peers = self._peers
        stream = self._peers.going
        there = peers.slot(place, peers.axis.index, part)
        stream.wait_stream(torch.cuda.current_stream(part.device))
        peers.until(stream, peers.done(place), self._number - 1)
        peers.copy(stream, there, part)
        peers.tell(stream, place, peers.ready(peers.axis.index), self._number)
        self._kept.append(part)

    def wait(self) -> None:
        """Have the result, for what the current stream does from now on."""
        stream = torch.cuda.current_stream(self._out.device)
        self._take(stream)
        stream.wait_stream(self._peers.going)  # what was given may be overwritten from now on
        self._kept.clear()

    @abstractmethod
    def _take(self, stream: torch.cuda.Stream) -> None:
        """Put what has come where it belongs, on a stream."""


class Sum(Exchange):
    """
    The sum of the parts for this place; the parts for others are given as they come.

    Args:
        out: like a part, ``[rows, ...]``.
        part: returns the part for a place, and is asked for this device's last: it may compute it
            then.
    """

    def __init__(
        self, peers: Peers, out: torch.Tensor, part: Callable[[int], torch.Tensor]
    ) -> None:
        super().__init__(peers, out)
        for place in peers.others:
            self.give(place, part(place))
        self._kept.append(part(peers.axis.index))

    def _take(self, stream: torch.cuda.Stream) -> None:
        peers = self._peers
        own = self._kept[-1]
        for sender in sorted(peers.others):
            peers.until(stream, peers.ready(sender), self._number)
            own = torch.add(own, peers.slot(peers.axis.index, sender, self._out), out=self._out)
            peers.tell(stream, sender, peers.done(peers.axis.index), self._number)


class Gather(Exchange):
    """
    All parts side by side.

    Args:
        out: ``[rows, places, ...]``.
        part: this place's, ``[rows, ...]``.
    """

    def __init__(self, peers: Peers, out: torch.Tensor, part: torch.Tensor) -> None:
        super().__init__(peers, out)
        index = peers.axis.index
        stream = peers.coming
        stream.wait_stream(torch.cuda.current_stream(out.device))
        for place in peers.others:
            self.give(place, part)
        peers.copy(stream, out[:, index], part)
        for sender in sorted(peers.others):
            peers.until(stream, peers.ready(sender), self._number)
            peers.copy(stream, out[:, sender], peers.slot(index, sender, out[:, sender]))
            peers.tell(stream, sender, peers.done(index), self._number)
        self._come = stream.record_event()

    def _take(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._come)


def _size(axis: Axis, nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED * (axis.size - 1) + 2 * axis.size * LINE


def _driver() -> Any:
    """
    Return CUDA's driver, or None where it is not there, or has no operations of streams on memory.
    """
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            getattr(found, name).argtypes = [
                ctypes.c_void_p,
                ctypes.c_uint64,
                ctypes.c_uint32,
                ctypes.c_uint,
            ]
        found.cuMemcpyAsync.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        found.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return found


def _on_one_host(axis: Axis, device: torch.device) -> bool:
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    mine = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    low = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=axis.group)
    return bool(low.tolist() == [mine, -mine])


def _may_reach(axis: Axis, device: torch.device) -> bool:
    """
    Whether CUDA knows of no reason why a device could not reach the others; it knows those that the
    process sees.
    """
    mine = torch.tensor([device.index or 0], device=device)
    every = mine.new_empty(axis.size)
    compat.all_gather_flat(every, mine, axis.group).wait()
    numbers = every.tolist()
    if len(set(numbers)) < len(numbers) or max(numbers) >= torch.cuda.device_count():
        return True  # each process sees devices of its own: `rendezvous` will show
    return all(
        torch.cuda.can_device_access_peer(device, other)
        for other in numbers
        if other != device.index
    )


def _all(axis: Axis, device: torch.device, yes: bool) -> bool:
    """Whether all ranks say yes."""
    found = torch.tensor(int(yes), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=axis.group)
    return bool(found.item())
