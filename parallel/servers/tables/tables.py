"""
The tables of a server: values and optimizer state, a row or a piece with its state.

Nothing here is thread-safe; `pdrun.parallel.servers.tables.store` has the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdrun.errors import UsageError
from pdrun.parallel.rng.hashing import hash_uniform31, mix_bits
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.sharding import name_seed, piece_bounds, piece_owner
from pdrun.parallel.servers.tables.index import DIRECT_IDS, SlotArray, SlotLists
from pdrun.parallel.servers.tables.optimizers import apply_update, count_states, first_state

FIRST_ROWS = 1024
BLOCK_ELEMENTS = 1 << 16
"""Elements of rows that are updated at a time."""
EVICTED_SHARE = 8
"""Divisor: a full table drops this share of its rows, those updated longest ago."""


def first_rows(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """Return the first values of rows: a hash of seed, table, id and column."""
    key = mix_bits(spec.seed, name_seed(spec.name))
    low = ids.to(torch.int32)
    high = (ids >> 32).to(torch.int32)
    rows = low ^ (high * -1640531527)  # 0x9e3779b9; 0 for small ids
    places = torch.arange(spec.dim, dtype=torch.int32)
    numbers = hash_uniform31(key, rows, places).to(torch.float32)
    return numbers.mul_(spec.scale * 2.0**-30).sub_(spec.scale)


class RowTable:
    """
    The rows of an embedding table on one server.

    Args:
        servers: number of servers, which share the table's limit of rows.
    """

    def __init__(self, spec: TableSpec, servers: int) -> None:
        self.spec = spec
        self._servers = servers
        self._limit = -(-spec.keep // servers)
        is_small = 0 < spec.size <= DIRECT_IDS
        self._checks_reads = not is_small and spec.size > 0
        """Whether reads check ids; an array of slots refuses ids that it does not have."""
        self._index: SlotArray | SlotLists = SlotArray(spec.size) if is_small else SlotLists()
        self._waiting: SlotLists | None = SlotLists() if spec.admit > 1 else None
        """Ids that are not admitted yet."""
        self._seen = torch.zeros(0, dtype=torch.int32)
        self._waiting_count = 0
        self.count = 0
        """Rows in use."""
        self._ids = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0, spec.dim)
        self._states = [torch.empty(0, spec.dim) for _ in range(count_states(spec.optimizer))]
        self._changed_at = torch.empty(0, dtype=torch.int64)
        """Version at which each row was changed last."""
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
        slots = self._index.find_slots(ids)
        if not len(ids) or int(slots.min()) >= 0:
            return self._values.index_select(0, slots)
        if not self.count:
            return first_rows(self.spec, ids)
        missing = (slots < 0).nonzero().squeeze(1)
        found = self._values.index_select(0, slots.clamp(min=0))
        return found.index_copy_(0, missing, first_rows(self.spec, ids.index_select(0, missing)))

    def read_changed(
        self, ids: torch.Tensor, since: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of ids whose rows have changed since these versions, and the rows."""
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
        """Forget all rows; the versions go on."""
        version = self.version + 1
        self.__init__(self.spec, self._servers)  # type: ignore[misc]
        self.version = self._oldest = version

    def update_rows(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        """Update the rows of sorted, unique ids; the gradients may be changed."""
        self.step += 1
        self.version += 1
        slots = self._index.find_slots(ids)
        if len(ids) and int(slots.min()) < 0:
            ids, grads, slots = self._store_missing(ids, grads, slots)
        if not len(ids):
            return
        slots = slots.long()
        # a block is read, updated and written while it is in the processor's cache
        block = max(1, BLOCK_ELEMENTS // (16 * self.spec.dim)) * 16
        for first in range(0, len(ids), block):
            places = slots[first : first + block]
            weight = self._values.index_select(0, places)
            states = [state.index_select(0, places) for state in self._states]
            part = grads[first : first + block]
            apply_update(self.spec.optimizer, weight, part, states, self.step)
            self._values.index_copy_(0, places, weight)
            for state, new in zip(self._states, states, strict=True):
                state.index_copy_(0, places, new)
        self._changed_at.index_fill_(0, slots, self.version)
        if self._limit and self.count > self._limit:
            self._evict_rows()

    def assign_rows(
        self, ids: torch.Tensor, values: torch.Tensor, states: Sequence[torch.Tensor] = ()
    ) -> None:
        """Store rows with these values, and states if given."""
        self.version += 1
        missing = ids[self._index.find_slots(ids) < 0]
        if len(missing):
            self._append_rows(missing)
        slots = self._index.find_slots(ids).long()
        self._values.index_copy_(0, slots, values)
        self._changed_at.index_fill_(0, slots, self.version)
        for state, new in zip(self._states, states, strict=False):
            state.index_copy_(0, slots, new)

    def restore_rows(
        self, ids: torch.Tensor, values: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        """Take over what `export_rows` has returned; the table is empty, and keeps the tensors."""
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

    def _append_rows(self, ids: torch.Tensor) -> None:
        """Store new rows with their first values; state that was never used is at its start."""
        first = self.count
        self.count += len(ids)
        self._ids = _grow(self._ids, self.count, 0)
        self._values = _grow(self._values, self.count, 0.0)
        self._states = [
            _grow(state, self.count, first_state(self.spec.optimizer, index))
            for index, state in enumerate(self._states)
        ]
        self._ids[first : self.count] = ids
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


class DenseTable:
    """The pieces of a dense weight on one server."""

    def __init__(self, spec: TableSpec, pieces: Sequence[int]) -> None:
        self.spec = spec
        self._values: dict[int, torch.Tensor] = {}
        self._states: dict[int, list[torch.Tensor]] = {}
        self._steps: dict[int, int] = {}
        for piece in pieces:
            first, last = piece_bounds(piece, spec.size)
            self._values[piece] = torch.zeros(last - first)
            self._states[piece] = [
                torch.full((last - first,), first_state(spec.optimizer, index))
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
