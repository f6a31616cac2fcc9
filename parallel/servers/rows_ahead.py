"""
Rows of the next batch, fetched ahead without the program's doing.

Only the model knows which ids it looks up. So the first step finds out where they are in its batch:
a tensor of whole numbers, or a column of one. Later steps ask for the same places of the next
batch, after their last lookup, so that the servers answer during the backward. A wrong guess costs
a question: values always come from a lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from pdrun.parallel.servers.client import ServerClient

MAX_COLUMNS = 256
"""Of the last dimension of a tensor, that are compared with the ids of a lookup."""
ALL_COLUMNS = -1
_Place = tuple[str, int, int]
"""Table, number of a tensor of the batch, column."""


class BatchSource(Protocol):
    """What is known of the batches of a loop; see `pdrun.parallel.data.feed.DataFeed`."""

    reads_ahead: bool
    current: Any
    """The batch that was handed out last."""
    upcoming: Any
    """The one after it; None: not known."""


class RowsAhead:
    """
    Asks for the rows of the next batch.

    Args:
        feed: of the run; it reads a batch ahead from now on.
    """

    def __init__(self, client: ServerClient, feed: BatchSource) -> None:
        self._client = client
        self._feed = feed
        feed.reads_ahead = True
        self._places: dict[_Place, None] = {}
        self._expected = 0
        """Lookups of a step; 0 until one has ended."""
        self._seen = 0

    def note_lookup(self, table: str, ids: torch.Tensor) -> None:
        """A forward that is part of the step has looked up ids, in their own shape."""
        if self._feed.current is None:
            return
        self._seen += 1
        if not self._expected:
            self._find_place(table, ids)
        elif self._seen == self._expected and self._feed.upcoming is not None:
            self._ask_rows()

    def end_step(self) -> None:
        """The next lookup belongs to another step."""
        self._expected = self._expected or self._seen
        self._seen = 0

    def _find_place(self, table: str, ids: torch.Tensor) -> None:
        if not self._client.has_cache(table):
            return
        ids = ids.to("cpu", torch.int64)
        for number, leaf in enumerate(_whole_numbers(self._feed.current)):
            for column, candidate in _iter_columns(leaf):
                # a micro-batch has the first rows of the batch
                part = candidate[: len(ids)] if ids.dim() else candidate[:0]
                if part.shape == ids.shape and torch.equal(part.to("cpu", torch.int64), ids):
                    self._places[table, number, column] = None
                    return

    def _ask_rows(self) -> None:
        leaves = _whole_numbers(self._feed.upcoming)
        by_table: dict[str, list[torch.Tensor]] = {}
        for table, number, column in self._places:
            if number < len(leaves):
                leaf = leaves[number]
                if column == ALL_COLUMNS or (leaf.dim() > 1 and column < leaf.shape[-1]):
                    found = leaf if column == ALL_COLUMNS else leaf[..., column]
                    by_table.setdefault(table, []).append(found.reshape(-1).to("cpu", torch.int64))
        for table, parts in by_table.items():
            self._client.prefetch(table, self._client.keep_known(table, torch.cat(parts)))


def _whole_numbers(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch that can have ids."""
    return [
        leaf
        for leaf in pytree.tree_leaves(batch)
        if isinstance(leaf, torch.Tensor)
        and leaf.dim()
        and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    ]


def _iter_columns(leaf: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (column, values): all of a tensor, and then each column of its last dimension."""
    yield ALL_COLUMNS, leaf
    if leaf.dim() > 1 and leaf.shape[-1] <= MAX_COLUMNS:
        for column in range(leaf.shape[-1]):
            yield column, leaf[..., column]
