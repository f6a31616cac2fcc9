"""
Memory that workers of a server's host can map: the server makes it, and its size is fixed.

A file of this kind cannot be truncated, so no access to a mapping of it can fail, whatever another
process does. Tables are sealed against writing, too: only the server's own mapping can write.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

PAGE_BYTES = 4096
MAX_SHARED_BYTES = 1 << 40
RESERVED_BYTES = 1 << 20
"""Pages are taken in units of this size."""
# Linux's numbers: other systems have no names for them, and no memory to share
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _FUTURE_WRITE = 0x0001, 0x0002, 0x0004, 0x0010
_ADD_SEALS, _GET_SEALS = 1033, 1034
_FIXED_SIZE = _SEAL_SHRINK | _SEAL_GROW


class SharedMemory:
    """
    New memory of zeros; pages that are never touched cost nothing.

    Args:
        writable: whether other processes may write to it.

    Raises:
        OSError: the system cannot do it.
    """

    def __init__(self, size: int, *, writable: bool = False) -> None:
        self.fd = os.memfd_create("pdrun-tables", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._size = size
        self._reserved = 0
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        seals = _FIXED_SIZE | (0 if writable else _FUTURE_WRITE)
        fcntl.fcntl(self.fd, _ADD_SEALS, seals | _SEAL_SEAL)

    def __del__(self) -> None:
        # tensors keep the mapping, which does not need the descriptor
        fd = self.__dict__.get("fd", -1)
        if fd >= 0:
            os.close(fd)

    def view_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, first: int = 0
    ) -> torch.Tensor:
        """Return a tensor in this memory, from a byte on."""
        return view_buffer(self._map, shape, dtype, first)

    def reserve(self, size: int) -> None:
        """
        Take pages for the first bytes now, so that no later access needs any.

        Raises:
            MemoryError: there are not enough.
        """
        if size <= self._reserved:
            return
        size = min(self._size, -(-size // RESERVED_BYTES) * RESERVED_BYTES)
        try:
            os.posix_fallocate(self.fd, self._reserved, size - self._reserved)
        except OSError as error:
            raise MemoryError(f"no memory for a table: {error.strerror}") from None
        self._reserved = size


def view_buffer(
    buffer: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype, first: int
) -> torch.Tensor:
    """Return a tensor in a mapping, from a byte on; it keeps the mapping."""
    count = 1
    for size in shape:
        count *= size
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=first).view(shape)


def make_shared(size: int, *, writable: bool = False) -> SharedMemory | None:
    """Return memory to share; None if this system has none, or no more descriptors."""
    if not hasattr(os, "memfd_create") or not 0 < size <= MAX_SHARED_BYTES:
        return None
    try:
        return SharedMemory(size, writable=writable)
    except (OSError, ValueError):
        return None


def map_shared(fd: int, size: int = 0, *, writable: bool = False) -> mmap.mmap | None:
    """
    Map what another process has made, and close the descriptor.

    Args:
        size: its least size.

    Returns:
        None if it is smaller, or could become so: an access beyond its end would end this process.
    """
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
        has = os.fstat(fd).st_size
        if seals & _FIXED_SIZE != _FIXED_SIZE or has < size:
            return None
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, has, access=access)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


@dataclass(frozen=True)
class RowLayout:
    """
    Where a table of rows has what in shared memory: a page with a counter, slots, and values.

    The counter is odd while the server changes the table, and before it has its first values.
    """

    size: int
    """Number of ids."""
    dim: int

    @property
    def first_value(self) -> int:
        """Return the first byte of the values."""
        return -(-(PAGE_BYTES + 4 * self.size) // PAGE_BYTES) * PAGE_BYTES

    @property
    def bytes(self) -> int:
        """Return the size of all."""
        return self.first_value + 4 * self.size * self.dim

    def counter(self, buffer: mmap.mmap) -> memoryview:
        """Return the counter, as one number."""
        return memoryview(buffer)[:8].cast("q")

    def slots(self, buffer: mmap.mmap) -> torch.Tensor:
        """Return the slot of each id; -1: none."""
        return view_buffer(buffer, (self.size,), torch.int32, PAGE_BYTES)

    def values(self, buffer: mmap.mmap) -> torch.Tensor:
        """Return the rows by slot."""
        return view_buffer(buffer, (self.size, self.dim), torch.float32, self.first_value)


class SharedRows:
    """A server's slots and values of a table of rows that workers read directly."""

    def __init__(self, memory: SharedMemory, layout: RowLayout) -> None:
        self.memory = memory
        buffer = memory._map
        self._layout = layout
        self._counter = layout.counter(buffer)
        self._is_hidden = True
        self._counter[0] = 1
        self.slots = layout.slots(buffer)
        self.slots.fill_(-1)
        self.values = layout.values(buffer)

    def reserve_rows(self, rows: int) -> None:
        """Take pages for so many rows; see `SharedMemory.reserve`."""
        self.memory.reserve(self._layout.first_value + 4 * rows * self._layout.dim)

    def __enter__(self) -> None:
        """Begin a change: a worker that reads meanwhile asks the server instead."""
        self._counter[0] |= 1

    def __exit__(self, *_: object) -> None:
        """End a change."""
        if not self._is_hidden:
            self._counter[0] += 1

    def hide(self) -> None:
        """Let no worker read until `publish`."""
        self._is_hidden = True
        self._counter[0] |= 1

    def publish(self) -> None:
        """Let workers read from now on."""
        if self._is_hidden:
            self._is_hidden = False
            self._counter[0] += 1


def share_rows(size: int, dim: int) -> SharedRows | None:
    """Return shared memory for rows; None where workers must ask the server for them."""
    # the order in which another processor sees writes is that of the program on x86 only
    if os.uname().machine not in ("x86_64", "AMD64"):
        return None
    layout = RowLayout(size, dim)
    memory = make_shared(layout.bytes)
    return SharedRows(memory, layout) if memory is not None else None
