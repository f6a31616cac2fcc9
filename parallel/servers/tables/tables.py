"""
The tables of a server: values and optimizer state, a row or a piece with its state.

Nothing here is thread-safe; `pdrun.parallel.servers.tables.store` has the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from pdrun.errors import UsageError
from pdrun.parallel.rng.hashing import hash_int32, mix_bits
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.sharding import name_seed, piece_bounds, piece_owner
from pdrun.parallel.servers.tables.index import (
    DIRECT_IDS,
    DistinctIds,
    SlotArray,
    SlotLists,
)
from pdrun.parallel.servers.tables.memory import SharedMemory, SharedRows, make_shared, share_rows
from pdrun.parallel.servers.tables.optimizers import apply_update, count_states, first_state

FIRST_ROWS = 1024
BLOCK_ELEMENTS = 1 << 16
"""Elements of rows that are updated at a time."""
MIN_SHARED_ELEMENTS = 1 << 14
"""A dense weight below this size is not shared: it is quickly sent."""
EVICTED_SHARE = 8
"""Divisor: a full table drops this share of its rows, those updated longest ago."""


def first_rows(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """Return the first values of rows: a hash of seed, table, id and column."""
    key = mix_bits(spec.seed, name_seed(spec.name))
    low = ids.to(torch.int32)
    high = (ids >> 32).to(torch.int32)
    rows = low ^ (high * -1640531527)  # 0x9e3779b9; 0 for small ids
    places = torch.arange(spec.dim, dtype=torch.int32)
    return hash_int32(key, rows, places).to(torch.float32).mul_(spec.scale * 2.0**-31)


def gather_rows(
    spec: TableSpec, ids: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return the rows of ids in these slots; one without a slot (-1) has its first value."""
    if not len(ids) or int(slots.min()) >= 0:
        return values.index_select(0, slots)
    missing = (slots < 0).nonzero().squeeze(1)
    if len(missing) == len(ids):
        return first_rows(spec, ids)
    found = values.index_select(0, slots.clamp(min=0))
    return found.index_copy_(0, missing, first_rows(spec, ids.index_select(0, missing)))


class RowTable:
    """
    The rows of an embedding table on one server.

    Args:
        servers: number of servers, which share the table's limit of rows.
        shared: memory for slots and values that workers can read; None: of this process.
    """

    def __init__(self, spec: TableSpec, servers: int, shared: SharedRows | None = None) -> None:
        self.spec = spec
        self.shared = shared
        self._servers = servers
        self._limit = -(-spec.keep // servers)
        is_small = has_slot_array(spec)
        self._checks_reads = not is_small and spec.size > 0
        """Whether reads check ids; an array of slots refuses ids that it does not have."""
        self._index: SlotArray | SlotLists = SlotLists()
        if is_small:
            slots = torch.empty(spec.size, dtype=torch.int32) if shared is None else shared.slots
            self._index = SlotArray(slots.fill_(-1))
        self.distinct = DistinctIds(spec.size)
        self._waiting: SlotLists | None = SlotLists() if spec.admit > 1 else None
        """Ids that are not admitted yet."""
        self._seen = torch.zeros(0, dtype=torch.int32)
        self._waiting_count = 0
        self.count = 0
        """Rows in use."""
        self._ids = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0, spec.dim) if shared is None else shared.values
        self._states = [torch.empty(0, spec.dim) for _ in range(count_states(spec.optimizer))]
        self._changed_at = torch.empty(0, dtype=torch.int64)
        """Version at which each row was changed last."""
        self._notes_changes = self._limit > 0
        """Whether that is known: only an eviction and the caches of workers need it."""
        self.step = 0
        """Updates so far."""
        self.version = 0
        """Changes so far; unlike the number of updates it never goes back."""
        self._oldest = 0
        """Before this version all rows may have been others."""

    def check_ids(self, ids: torch.Tensor, *, sorted_ids: bool) -> None:
        """
        Refuse ids that the table does not have.

        Raises:
            UsageError: an id is out of range, or ids of a push are not sorted or not unique.
        """
        size = self.spec.size
        if size and len(ids):
            low, high = ids.aminmax()
            if int(low) < 0 or int(high) >= size:
                bad = ((ids < 0) | (ids >= size)).nonzero()[0, 0]
                what = f"table {self.spec.name} has the ids 0 to {size - 1}, got {int(ids[bad])}"
                raise UsageError(what, where=f"element {int(bad)} of the ids")
        if sorted_ids and len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
            raise UsageError(
                f"ids pushed to table {self.spec.name} must be sorted and unique",
                hint="torch.unique sorts them; add the gradients of an id",
            )

    def read_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids; one that is not stored has its first value."""
        if self._checks_reads:
            self.check_ids(ids, sorted_ids=False)
        return gather_rows(self.spec, ids, self._index.find_slots(ids), self._values)

    def read_changed(
        self, ids: torch.Tensor, since: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of ids whose rows have changed since these versions, and the rows."""
        if not self._notes_changes:
            self._notes_changes, self._oldest = True, self.version
        slots = self._index.find_slots(ids).long()
        # after an eviction a row has its first value again
        changed = torch.full((len(ids),), bool(self._limit))
        stored = slots >= 0
        changed[stored] = self._changed_at[slots[stored]] > since[stored]
        # a version of another process of this server is above all of this one
        changed |= (since < self._oldest) | (since > self.version)
        places = changed.nonzero().squeeze(1)
        return places, self.read_rows(ids.index_select(0, places))

    def clear(self) -> None:
        """Forget all rows; the versions go on. Workers ask until `publish`."""
        version = self.version + 1
        if self.shared is not None:
            self.shared.hide()
        self.__init__(self.spec, self._servers, self.shared)  # type: ignore[misc]
        self.version = self._oldest = version

    def publish(self) -> None:
        """The table has its first values: let workers read it."""
        if self.shared is not None:
            self.shared.publish()

    def change_values(self) -> AbstractContextManager[None]:
        """Return a context manager for a change, during which workers ask the server."""
        return nullcontext() if self.shared is None else self.shared

    def update_rows(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        """Update the rows of distinct ids; the gradients may be changed."""
        self.step += 1
        self.version += 1
        slots = self._index.find_slots(ids)
        if len(ids) and int(slots.min()) < 0:
            ids, grads, slots = self._store_missing(ids, grads, slots)
        if len(ids):
            with self.change_values():
                self._update_slots(slots.long(), grads)

    def _update_slots(self, slots: torch.Tensor, grads: torch.Tensor) -> None:
        # a block is read, updated and written while it is in the processor's cache
        block = max(1, BLOCK_ELEMENTS // (16 * self.spec.dim)) * 16
        for first in range(0, len(slots), block):
            places = slots[first : first + block]
            weight = self._values.index_select(0, places)
            states = [state.index_select(0, places) for state in self._states]
            part = grads[first : first + block]
            apply_update(self.spec.optimizer, weight, part, states, self.step)
            self._values.index_copy_(0, places, weight)
            for state, new in zip(self._states, states, strict=True):
                state.index_copy_(0, places, new)
        if self._notes_changes:
            self._changed_at.index_fill_(0, slots, self.version)
        if self._limit and self.count > self._limit:
            self._evict_rows()

    def assign_rows(
        self, ids: torch.Tensor, values: torch.Tensor, states: Sequence[torch.Tensor] = ()
    ) -> None:
        """Store rows with these values, and states if given."""
        self.version += 1
        missing = ids[self._index.find_slots(ids) < 0]
        with self.change_values():
            if len(missing):
                self._append_rows(missing, has_values=True)
            slots = self._index.find_slots(ids).long()
            self._values.index_copy_(0, slots, values)
        self._changed_at.index_fill_(0, slots, self.version)
        for state, new in zip(self._states, states, strict=False):
            state.index_copy_(0, slots, new)

    def restore_rows(
        self, ids: torch.Tensor, values: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        """
        Take over what `export_rows` has returned; the table is empty, and keeps the tensors. They
        are not shared, since that would need a second copy of all.
        """
        self.shared = None
        self._ids, self._values, self._states = ids, values, list(states)
        self.count = len(ids)
        self._changed_at = torch.zeros(len(ids), dtype=torch.int64)
        self._index.replace_ids(ids)

    def export_rows(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return ids in ascending order, with values and states."""
        ids, order = self._ids[: self.count].sort()
        states = [state.index_select(0, order) for state in self._states]
        return ids, self._values.index_select(0, order), states

    def _store_missing(
        self, ids: torch.Tensor, grads: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store the rows that are admitted; return what can be updated."""
        missing = slots < 0
        new = ids[missing]
        if self._waiting is not None:
            new = self._admit_ids(new)
        if len(new):
            self._append_rows(new)
        slots = self._index.find_slots(ids)
        there = slots >= 0
        if self._waiting is not None and not bool(there.all()):
            return ids[there], grads[there], slots[there]
        return ids, grads, slots

    def _admit_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Count ids that are not stored; return those that have been seen often enough."""
        assert self._waiting is not None
        places = self._waiting.find_slots(ids)
        fresh = ids[places < 0]
        if len(fresh):
            self._waiting.add_ids(fresh, self._waiting_count)
            self._waiting_count += len(fresh)
            self._seen = _grow(self._seen, self._waiting_count, 0)
            places = self._waiting.find_slots(ids)
        self._seen[places] += 1
        return ids[self._seen[places] >= self.spec.admit]

    def _append_rows(self, ids: torch.Tensor, *, has_values: bool = False) -> None:
        """
        Store new rows with their first values; state that was never used is at its start.

        Args:
            has_values: the caller writes other values now.
        """
        first = self.count
        if self.shared is not None:
            self.shared.reserve_rows(first + len(ids))
        self.count += len(ids)
        self._ids = _grow(self._ids, self.count, 0)
        self._values = _grow(self._values, self.count, 0.0)
        self._states = [
            _grow(state, self.count, first_state(self.spec.optimizer, index))
            for index, state in enumerate(self._states)
        ]
        self._ids[first : self.count] = ids
        if not has_values:
            self._values[first : self.count] = first_rows(self.spec, ids)
        for index, state in enumerate(self._states):
            state[first : self.count] = first_state(self.spec.optimizer, index)
        self._changed_at = _grow(self._changed_at, self.count, 0)
        self._changed_at[first : self.count] = self.version
        self._index.add_ids(ids, first)

    def _evict_rows(self) -> None:
        """Keep the rows that were updated last."""
        left = self._limit - self._limit // EVICTED_SHARE
        order = self._changed_at[: self.count].argsort(descending=True, stable=True)
        slots = order[:left].sort().values
        for tensor in (self._ids, self._values, self._changed_at, *self._states):
            tensor[:left] = tensor.index_select(0, slots)
        self.count = left
        self._index.replace_ids(self._ids[:left])


def make_row_table(spec: TableSpec, servers: int, *, shares: bool) -> RowTable:
    """Return an empty table; ``shares``: workers of this host may read it directly."""
    if not shares or not has_slot_array(spec):
        return RowTable(spec, servers)
    table = RowTable(spec, servers, share_rows(spec.size, spec.dim))
    if not spec.is_assigned:
        table.publish()
    return table


def has_slot_array(spec: TableSpec) -> bool:
    """Return whether a table of rows has an array of slots."""
    return 0 < spec.size <= DIRECT_IDS


class DenseTable:
    """
    The pieces of a dense weight on one server.

    Args:
        shares: workers of this host may read it directly.
    """

    def __init__(self, spec: TableSpec, pieces: Sequence[int], *, shares: bool = False) -> None:
        self.spec = spec
        bounds = [piece_bounds(piece, spec.size) for piece in pieces]
        total = sum(last - first for first, last in bounds)
        self.shared: SharedMemory | None = None
        """All pieces, one after the other."""
        if shares and total >= MIN_SHARED_ELEMENTS:
            self.shared = make_shared(4 * total)
        if self.shared is None:
            memory = torch.zeros(total)
        else:
            self.shared.reserve(4 * total)
            memory = self.shared.view_tensor((total,))
        parts = memory.split([last - first for first, last in bounds])
        self._values: dict[int, torch.Tensor] = {}
        self._states: dict[int, list[torch.Tensor]] = {}
        self._steps: dict[int, int] = {}
        for piece, values in zip(pieces, parts, strict=True):
            self._values[piece] = values
            self._states[piece] = [
                torch.full((len(values),), first_state(spec.optimizer, index))
                for index in range(count_states(spec.optimizer))
            ]
            self._steps[piece] = 0

    def check_piece(self, piece: int, elements: int | None = None) -> None:
        """
        Refuse a piece that this server does not have, or one of another length.

        Raises:
            UsageError: names the table.
        """
        mine = self._values.get(piece)
        if mine is None or elements not in (None, len(mine)):
            raise UsageError(f"table {self.spec.name} has no piece {piece} of {elements} elements")

    def list_pieces(self, first: int, count: int) -> list[tuple[int, int]]:
        """
        Return (piece, elements) of some of this server's pieces, in its order.

        Raises:
            UsageError: it does not have so many.
        """
        self.check_piece(first)
        found = [piece for piece in self._values if piece >= first][:count]
        if len(found) < count:
            raise UsageError(f"table {self.spec.name} has no {count} pieces from {first} on")
        return [(piece, len(self._values[piece])) for piece in found]

    def read_piece(self, piece: int) -> torch.Tensor:
        """Return the values of a piece, not a copy."""
        return self._values[piece]

    def update_piece(self, piece: int, grad: torch.Tensor) -> None:
        """Update a piece; the gradient may be changed."""
        self._steps[piece] += 1
        apply_update(
            self.spec.optimizer,
            self._values[piece],
            grad,
            self._states[piece],
            self._steps[piece],
        )

    def assign_piece(
        self,
        piece: int,
        values: torch.Tensor,
        states: Sequence[torch.Tensor] = (),
        step: int | None = None,
    ) -> None:
        """Replace the values of a piece, and states and the number of updates if given."""
        self._values[piece].copy_(values)
        for state, new in zip(self._states[piece], states, strict=False):
            state.copy_(new)
        if step is not None:
            self._steps[piece] = step

    def export_pieces(self) -> list[tuple[int, torch.Tensor, list[torch.Tensor], int]]:
        """Return each piece: number, values, states, updates."""
        return [
            (piece, values, self._states[piece], self._steps[piece])
            for piece, values in self._values.items()
        ]


def pieces_of_server(spec: TableSpec, pieces: int, server: int, servers: int) -> list[int]:
    """Return the pieces of a dense weight that a server has."""
    return [piece for piece in range(pieces) if piece_owner(piece, spec.name, servers) == server]


def _grow(tensor: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    """Return a tensor with room for ``rows``; at least half of it is used."""
    if len(tensor) >= rows:
        return tensor
    room = max(FIRST_ROWS, rows, len(tensor) * 2)
    bigger = torch.full((room, *tensor.shape[1:]), fill, dtype=tensor.dtype)
    bigger[: len(tensor)] = tensor
    return bigger
