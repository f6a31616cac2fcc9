"""
From ids to the slots of a table's rows, and to the places of distinct ids in a list.

A table with few ids has an array of slots. Any other one has two sorted lists: a long one, and a
short one of the newest ids, which is merged into it now and then. So it is with merged lists: an
array for few ids, and a sort for any.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class DistinctIds:
    """
    Finds the distinct ids of several lists.

    Args:
        size: number of ids, from 0; 0: any 64-bit id. The array is made when it is used first.
    """

    def __init__(self, size: int) -> None:
        self._size = size if size <= DIRECT_IDS else 0
        self._places = torch.empty(0, dtype=torch.int32)
        """By id; always a number that is not negative."""

    def merge(
        self, lists: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """
        Return the ids of all lists, in any order, and the places of each list's ids; None: they
        come first, as they are.

        Args:
            lists: each has distinct ids in the table's range.
        """
        if not self._size:
            ids, places = torch.unique(torch.cat(list(lists)), return_inverse=True)
            return ids, list(places.split([len(one) for one in lists]))
        ids = lists[0]
        self._set_places(ids, 0)
        found: list[torch.Tensor | None] = [None]
        for more in lists[1:]:
            if not len(ids):
                new = more
            else:
                # an id that is not among these has a place from an earlier call
                places = self._places.index_select(0, more).clamp_(max=len(ids) - 1)
                new = more[ids.index_select(0, places) != more]
            self._set_places(new, len(ids))
            ids = torch.cat([ids, new])
            found.append(self._places.index_select(0, more).long())
        return ids, found

    def _set_places(self, ids: torch.Tensor, first: int) -> None:
        if not len(self._places):
            self._places = torch.zeros(self._size, dtype=torch.int32)
        self._places.index_copy_(0, ids, torch.arange(first, first + len(ids), dtype=torch.int32))


def _merge_lists(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = torch.cat([one[0], other[0]]).sort()
    return ids, torch.cat([one[1], other[1]]).index_select(0, order)
