"""
From ids to the slots of a table's rows.

A table with few ids has an array of slots. Any other one has two sorted lists: a long one, and a
short one of the newest ids, which is merged into it now and then.
"""

from __future__ import annotations

import torch

DIRECT_IDS = 1 << 24
"""Largest number of ids with an array: 64 MiB."""
RECENT_IDS = 1 << 16


class SlotArray:
    """
    Slots of the ids 0 to ``size - 1``.

    Args:
        slots: their memory, filled with -1.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slot of each id; -1: none."""
        return self._slots.index_select(0, ids)

    def add_ids(self, ids: torch.Tensor, first: int) -> None:
        """Give new ids the slots from ``first`` on."""
        self._slots[ids] = torch.arange(first, first + len(ids), dtype=torch.int32)

    def replace_ids(self, ids: torch.Tensor) -> None:
        """Forget all ids; these get the slots from 0 on."""
        self._slots.fill_(-1)
        self.add_ids(ids, 0)


class SlotLists:
    """Slots of any 64-bit ids."""

    def __init__(self) -> None:
        empty = torch.empty(0, dtype=torch.int64)
        self._lists = [(empty, empty), (empty, empty)]

    def find_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slot of each id; -1: none."""
        found = torch.full((len(ids),), -1)
        for known, slots in self._lists:
            if len(known):
                places = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
                hits = known.index_select(0, places) == ids
                found = torch.where(hits, slots.index_select(0, places), found)
        return found

    def add_ids(self, ids: torch.Tensor, first: int) -> None:
        """Give new ids the slots from ``first`` on."""
        fresh = (ids, torch.arange(first, first + len(ids)))
        self._lists[1] = _merge_lists(self._lists[1], fresh)
        if len(self._lists[1][0]) > max(RECENT_IDS, len(self._lists[0][0]) // 8):
            self._lists[0] = _merge_lists(*self._lists)
            self._lists[1] = (fresh[0][:0], fresh[1][:0])

    def replace_ids(self, ids: torch.Tensor) -> None:
        """Forget all ids; these get the slots from 0 on."""
        empty = ids[:0]
        if bool((ids[1:] > ids[:-1]).all()):
            known = (ids.clone(), torch.arange(len(ids)))
        else:
            known = tuple(ids.sort())
        self._lists = [known, (empty, empty)]


def _merge_lists(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = torch.cat([one[0], other[0]]).sort()
    return ids, torch.cat([one[1], other[1]]).index_select(0, order)
