"""
Rows of a table in the memory of a worker's device. Those that were used longest ago are dropped.

A row has the version of the table at which its server last said that it is current. A lookup sends
ids with versions, and gets only rows that have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdrun.parallel.servers.links.link import ServerLink
from pdrun.parallel.servers.settings import Mode
from pdrun.parallel.servers.tables.index import SlotLists
from pdrun.parallel.servers.tables.store import ChangedRows

UNKNOWN = -1
"""Version of a row that is not here."""
NEVER = -(1 << 40)


class RowCache:
    """
    The rows of one table.

    Args:
        limit: most rows.
        mode: decides how long a row is used without a question to its server.
    """

    def __init__(self, limit: int, dim: int, mode: Mode, device: torch.device) -> None:
        self._limit = limit
        self.dim = dim
        self.device = device
        # sync: nothing changes within a step; bounded:K: K steps; async: always ask
        self._life = {"sync": 1, "bounded": max(1, mode.bound), "async": 0}[mode.name]
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._index = SlotLists()
        self._count = 0
        self._ids = torch.empty(self._limit, dtype=torch.int64)
        self._versions = torch.empty(self._limit, dtype=torch.int64)
        self._checked = torch.empty(self._limit, dtype=torch.int64)
        self._used = torch.empty(self._limit, dtype=torch.int64)
        self._values = torch.empty(self._limit, self.dim, device=self.device)

    def find_versions(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the version of each row; `UNKNOWN` if it is not here."""
        slots = self._index.find_slots(ids)
        return torch.where(slots >= 0, self._versions[slots.clamp(min=0)], UNKNOWN)

    def find_stale(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        """Return a mask of the ids whose server must be asked in a step."""
        slots = self._index.find_slots(ids)
        checked = self._checked[slots.clamp(min=0)]
        return (slots < 0) | (step - checked >= self._life)

    def expire_rows(self, ids: torch.Tensor) -> None:
        """This worker has changed rows: their server must be asked."""
        slots = self._index.find_slots(ids)
        self._checked[slots[slots >= 0]] = NEVER

    def confirm_rows(
        self, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, version: int, step: int
    ) -> None:
        """
        Take a server's answer. Rows for which there is no room are dropped.

        Args:
            ids: unique ids that it was asked for.
            places: of the rows that have changed.
            rows: their values.
            version: of the table at that server.
        """
        slots = self._index.find_slots(ids)
        # a row that was dropped since the question is only known if the answer has it
        answered = torch.zeros(len(ids), dtype=torch.bool)
        answered[places] = True
        new = ((slots < 0) & answered).nonzero().squeeze(1)
        if len(new):
            self._used[slots[slots >= 0]] = step
            self._add_ids(ids[new])
            slots = self._index.find_slots(ids)
        there = slots[places] >= 0
        target = slots[places][there].to(self.device)
        self._values.index_copy_(0, target, rows[there].to(self.device))
        slots = slots[slots >= 0]
        self._versions[slots] = version
        self._checked[slots] = step
        self._used[slots] = step

    def take_rows(self, ids: torch.Tensor, step: int) -> torch.Tensor | None:
        """Return rows; None if one is not here."""
        slots = self._index.find_slots(ids)
        if len(slots) and int(slots.min()) < 0:
            return None
        self._used[slots] = step
        return self._values.index_select(0, slots.to(self.device))

    def _add_ids(self, ids: torch.Tensor) -> None:
        """Give ids a slot, if necessary in place of rows that were used longest ago."""
        if self._count + len(ids) > self._limit:
            self._drop_rows(max(0, self._limit - len(ids)))
            ids = ids[: self._limit - self._count]
        first = self._count
        self._count += len(ids)
        self._ids[first : self._count] = ids
        self._versions[first : self._count] = UNKNOWN
        self._index.add_ids(ids, first)

    def _drop_rows(self, left: int) -> None:
        order = self._used[: self._count].argsort(descending=True, stable=True)
        slots = order[:left].sort().values
        for tensor in (self._ids, self._versions, self._checked, self._used):
            tensor[: len(slots)] = tensor[slots]
        self._values[: len(slots)] = self._values[slots.to(self.device)]
        self._count = len(slots)
        self._index.replace_ids(self._ids[: self._count].clone())


class CacheQuestions:
    """The questions of caches that servers have not answered yet, in the order of the links."""

    def __init__(self, links: Sequence[ServerLink]) -> None:
        self._links = links
        self._caches: list[RowCache] = []
        self._open: list[tuple[RowCache, int, torch.Tensor]] = []
        self._returns = 0

    def add_cache(self, cache: RowCache) -> None:
        """Note a cache that must be cleared if a server goes back."""
        self._caches.append(cache)

    def ask(self, cache: RowCache, server: int, table: int, ids: torch.Tensor) -> None:
        """Ask a server which rows of unique ids have changed."""
        self._links[server].begin_changed(table, ids, cache.find_versions(ids), cache.dim)
        self._open.append((cache, server, ids))

    def take_answers(self, step: int) -> None:
        """Wait for all answers. Call it before any other request."""
        asked, self._open = self._open, []
        for cache, server, ids in asked:
            found = self._links[server].finish()
            assert isinstance(found, ChangedRows)
            cache.confirm_rows(ids, found.places, found.rows, found.version, step)
        returns = sum(link.returns for link in self._links)
        if returns != self._returns:
            # a lost server may have gone back to earlier values
            self._returns = returns
            self.clear_caches()

    def clear_caches(self) -> None:
        """Forget all rows."""
        for cache in self._caches:
            cache.clear()
