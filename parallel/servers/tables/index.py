"""
From ids to the slots of a table's rows, and to the places of distinct ids in a list.

A table with few ids has an array of slots. Any other one has two sorted lists: a long one, and a
short one of the newest ids, which is merged into it now and then. So it is with distinct ids: an
array for few, and a sort for any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DIRECT_IDS = 1 << 24
"""Largest number of ids with an array: 64 MiB."""
RECENT_IDS = 1 << 16
MARKS_PER_ID = 128
"""An array of marks is quicker than a sort if it has at most so many for each id of a list."""


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
    Finds the distinct ids of lists.

    Args:
        size: number of ids, from 0; 0: any 64-bit id. Arrays are made when they are used first.
    """

    def __init__(self, size: int) -> None:
        self._size = size if size <= DIRECT_IDS else 0
        self._marks = torch.empty(0, dtype=torch.bool)
        self._places = torch.empty(0, dtype=torch.int32)
        """By id; always a number that is not negative."""

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct ids of a tensor, sorted, and the place of each of its elements."""
        is_plain = ids.dtype == torch.int64 and ids.device.type == "cpu"
        if not (is_plain and 0 < self._size <= MARKS_PER_ID * ids.numel()):
            return _sort_ids(ids)
        low, high = ids.aminmax()
        if int(low) < 0 or int(high) >= self._size:  # the server says which
            return _sort_ids(ids)
        if not len(self._marks):
            self._marks = torch.zeros(-(-self._size // 8) * 8, dtype=torch.bool)
        flat = ids.reshape(-1)
        self._marks.index_fill_(0, flat, True)
        words = self._marks.view(torch.int64)  # eight marks each
        used = words.nonzero().squeeze(1)
        marked = self._marks.view(-1, 8).index_select(0, used).view(-1).nonzero().squeeze(1)
        words.index_fill_(0, used, 0)
        distinct = used.index_select(0, marked >> 3).mul_(8).add_(marked & 7)
        self._set_places(distinct, 0)
        return distinct, self._places.index_select(0, flat).long().view(ids.shape)

    def merge(self, lists: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """
        Return the ids of all lists, in any order, and the places of each list's ids.

        Args:
            lists: each has distinct ids in the table's range. Those of the first one come first.
        """
        if not self._size:
            ids, places = torch.unique(torch.cat(list(lists)), return_inverse=True)
            return ids, list(places.split([len(one) for one in lists]))
        ids = lists[0]
        self._set_places(ids, 0)
        found = [torch.arange(len(ids))]
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


def _sort_ids(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    distinct, places = torch.unique(ids, return_inverse=True)
    return distinct, places
