"""
`ServedEmbedding`, and the lookup that replaces the forward of an embedding whose rows are served.

A lookup fetches the rows of the distinct ids of a batch. They are a leaf of autograd: its gradient
is what the step pushes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.servers.client import DEFAULT_SCALE, ServerClient
from pdrun.parallel.servers.tables.grouped_ids import GroupedIds, group_ids


class ServedEmbedding(nn.Module):
    """
    An embedding table on parameter servers, which no worker has as a whole.

    Pass it to `pdrun.parallelize` in a model, with ``servers=pdrun.Servers({NAME: pdrun.rows()})``.

    Args:
        name: of the table; modules with one name share its rows.
        dim: elements of a row.
        rows: number of ids, from 0; None: any 64-bit id.
        keep: most rows in memory, on all servers together; the rows that were updated longest ago
            are dropped. 0: no limit.
        admit: a row is stored when its id has had so many gradients; before that it has its first
            value.
        scale: first values are uniform in ``[-scale, scale]``, by seed, table and id.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        rows: int | None = None,
        keep: int = 0,
        admit: int = 1,
        scale: float = DEFAULT_SCALE,
    ) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.rows = rows
        self.keep = keep
        self.admit = admit
        self.scale = scale
        if rows is not None and (type(rows) is not int or rows < 1):
            what = f"rows must be None or at least 1, got {rows!r}"
            raise UsageError(what, where=f"pdrun.ServedEmbedding {name}")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, with one more dimension."""
        raise UsageError(
            "belongs to no run",
            where=f"pdrun.ServedEmbedding {self.name}",
            hint="pass the model to pdrun.parallelize with servers=pdrun.Servers({...})",
        )

    def prefetch(self, ids: torch.Tensor) -> None:
        """
        Ask the servers for rows that a later forward needs, and return at once.

        Needs ``pdrun.rows(..., cache=N)``. Call it for the ids of the next batch, between forward
        and backward of the present one: the servers answer meanwhile.
        """
        lookup = self.__dict__.get("forward")
        if not isinstance(lookup, LookupFunction):
            what = "belongs to no run"
            raise UsageError(what, where=f"pdrun.ServedEmbedding {self.name}")
        lookup.prefetch(ids)

    def extra_repr(self) -> str:
        """Return the settings, for print(model)."""
        return f"{self.name!r}, dim={self.dim}, rows={self.rows}"


@dataclass(frozen=True)
class RowLookup:
    """The rows that one forward has fetched."""

    table: str
    part: int
    """Number of the micro-batch."""
    ids: torch.Tensor
    """Sorted and unique, on the host."""
    rows: torch.Tensor
    """A leaf, whose gradient is to be pushed."""


class _LookUpRows(torch.autograd.Function):
    """
    `functional.embedding` with a quicker backward: a fifth of the CPU time, with the same bits.

    Arguments: rows, the groups of the ids, and the place without a gradient (-1: none).
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, groups: GroupedIds, padding: int) -> torch.Tensor:
        ctx.groups = groups
        ctx.padding = padding
        return functional.embedding(groups.places, rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = ctx.groups.sum_rows(grad.reshape(-1, grad.shape[-1]))
        if ctx.padding >= 0:
            total[ctx.padding] = 0.0
        return total, None, None


class LookupFunction:
    """
    The forward of an embedding whose rows are served.

    Args:
        record: gets every lookup that autograd sees: table, ids, distinct ids, their rows.
        padding: id whose row has no gradient, or None.
    """

    def __init__(
        self,
        client: ServerClient,
        table: str,
        dim: int,
        device: torch.device,
        record: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None],
        padding: int | None = None,
    ) -> None:
        self._client = client
        self._table = table
        self._dim = dim
        self._device = device
        self._record = record
        self._padding = padding

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids."""
        groups = group_ids(ids)
        host_ids = groups.distinct.to("cpu", torch.int64)
        try:
            rows = self._client.rows(self._table, host_ids).to(self._device)
        except UsageError as error:
            raise self._name_row(error, ids, host_ids) from None
        if not torch.is_grad_enabled():
            return functional.embedding(groups.places, rows)
        rows.requires_grad_()
        self._record(self._table, ids, host_ids, rows)
        place = -1
        if self._padding is not None:
            found = (host_ids == self._padding).nonzero()
            place = int(found[0, 0]) if len(found) else -1
        result: torch.Tensor = _LookUpRows.apply(rows, groups, place)
        return result

    def _name_row(self, error: UsageError, ids: torch.Tensor, distinct: torch.Tensor) -> UsageError:
        """Return the error with the row of the batch: the servers know distinct ids only."""
        kept = self._client.keep_known(self._table, distinct)
        bad = distinct[~torch.isin(distinct, kept)]
        if not len(bad) or not ids.dim():
            return error
        row = int(torch.isin(ids.to("cpu", torch.int64), bad).nonzero()[0, 0])
        return UsageError(error.what, where=f"row {row} of the ids", hint=error.hint)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Ask for the rows of ids; see `ServedEmbedding.prefetch`."""
        self._client.prefetch(self._table, ids.detach().reshape(-1).to("cpu", torch.int64))

    def __deepcopy__(self, memo: Any) -> LookupFunction:
        """A copy of the model, as `Run.verify` makes one, reads the same table."""
        return self
