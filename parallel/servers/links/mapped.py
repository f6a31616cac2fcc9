"""
A worker's view of memory that a server of its host shares: tables to read, and a mailbox to write.

A table of rows may change while a worker reads. Its counter is odd meanwhile, and another one after
it; then the worker asks the server, which has a lock.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence

import torch

from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers.frames import MAILBOX_SLOTS, SLOT_PIECES, FrameError
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.sharding import PIECE_ELEMENTS
from pdrun.parallel.servers.tables.memory import RowLayout, map_shared, view_buffer
from pdrun.parallel.servers.tables.tables import (
    MIN_SHARED_ELEMENTS,
    gather_rows,
    has_slot_array,
)

SLOT_ELEMENTS = SLOT_PIECES * PIECE_ELEMENTS
"""Of a slot of the mailbox, fp32."""
SLOT_BYTES = 4 * SLOT_ELEMENTS


class MappedRows:
    """A table of rows in a server's memory."""

    def __init__(self, spec: TableSpec, buffer: mmap.mmap) -> None:
        layout = RowLayout(spec.size, spec.dim)
        self._spec = spec
        self._counter = layout.counter(buffer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that tensors cannot be written to
            self._slots = layout.slots(buffer)
            self._values = layout.values(buffer)

    def read_rows(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Return the rows of ids; None if the server must be asked."""
        before = self._counter[0]
        if before & 1:
            return None
        try:
            slots = self._slots.index_select(0, ids)
            rows = gather_rows(self._spec, ids, slots, self._values)
        except (IndexError, RuntimeError):  # an id is out of range: the server says which
            return None
        return rows if self._counter[0] == before else None


class Mailbox:
    """Slots for gradients; each is free again when the server has replied."""

    def __init__(self, buffer: mmap.mmap) -> None:
        # the system's copy of bytes takes two thirds of the time of torch's
        self._bytes = memoryview(buffer)
        self._free = list(range(MAILBOX_SLOTS))

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def put_values(self, values: Sequence[torch.Tensor]) -> int:
        """Copy tensors to a free slot, one after the other, and return its number."""
        slot = self._free.pop()
        first = slot * SLOT_BYTES
        for tensor in values:
            data = byte_view(tensor)
            self._bytes[first : first + len(data)] = data
            first += len(data)
        return slot

    def free_slot(self, slot: int) -> None:
        """Note that the server has read a slot."""
        self._free.append(slot)


class MappedTables:
    """What one server shares with this worker, by the tables' numbers."""

    def __init__(self) -> None:
        self.rows: dict[int, MappedRows] = {}
        self.pieces: dict[int, torch.Tensor] = {}
        """Of a dense weight: all that the server has, one after the other."""
        self.mailbox: Mailbox | None = None

    def add_table(self, number: int, spec: TableSpec, fd: int) -> None:
        """
        Map a table whose descriptor has arrived, unless another process could shrink it.

        Raises:
            FrameError: tables of this kind are not shared.
        """
        if spec.kind == "rows":
            if not has_slot_array(spec):
                os.close(fd)
                raise FrameError(f"the server shares table {spec.name}, which has any ids")
            buffer = map_shared(fd, RowLayout(spec.size, spec.dim).bytes)
            if buffer is not None:
                self.rows[number] = MappedRows(spec, buffer)
            return
        buffer = map_shared(fd, 4 * MIN_SHARED_ELEMENTS)
        if buffer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                shape = (len(buffer) // 4,)
                self.pieces[number] = view_buffer(buffer, shape, torch.float32, 0)

    def add_mailbox(self, fd: int) -> None:
        """Map the mailbox."""
        buffer = map_shared(fd, 4 * MAILBOX_SLOTS * SLOT_ELEMENTS, writable=True)
        if buffer is not None:
            self.mailbox = Mailbox(buffer)

    def copy_pieces(self, number: int, outs: Sequence[torch.Tensor]) -> None:
        """Copy all pieces of a dense weight."""
        parts = self.pieces[number].split([len(out) for out in outs])
        for out, part in zip(outs, parts, strict=True):
            out.copy_(part)
