"""
Gradients that a server has received: checked, kept until their step ends, and added in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pdrun.errors import UsageError
from pdrun.parallel.servers.tables.index import DistinctIds


@dataclass
class Contribution:
    """A gradient of one worker and micro-batch that waits for the end of its step."""

    part: int
    worker: int
    divisor: float
    place: int
    ids: torch.Tensor | None
    values: torch.Tensor


def check_gradient(name: str, values: torch.Tensor, divisor: float) -> None:
    """
    Refuse nan and infinity. A finite sum proves that all are finite; only another sum needs a look.

    Raises:
        UsageError: names the table.
    """
    if not 0 < divisor < float("inf"):
        raise UsageError(f"table {name}: gradients cannot be divided by {divisor:g}")
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise UsageError(
            f"table {name}: a gradient is nan or infinite; nothing was changed",
            hint="lower the learning rate, or look at the loss",
        )


def divide_gradient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place, with the bits of a division by a number of fp64."""
    if divisor == 1.0:
        return values
    return values.div_(torch.tensor(divisor, dtype=torch.float64))


def sum_rows(
    contributions: list[Contribution], distinct: DistinctIds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add gradients of rows one after the other; return distinct ids and their sums."""
    lists = [given.ids for given in contributions if given.ids is not None]
    if len(lists) == 1:
        return lists[0], contributions[0].values
    ids, places = distinct.merge(lists)
    first = contributions[0].values
    total = torch.empty(len(ids), first.shape[1])
    if places[0] is None:
        torch.add(first, 0.0, out=total[: len(first)])
        total[len(first) :].zero_()
    else:
        total.zero_()
    for given, place in zip(contributions, places, strict=True):
        if place is not None:
            # quicker than index_add_
            total.scatter_add_(0, place.unsqueeze(1).expand_as(given.values), given.values)
    return ids, total


def sum_pieces(contributions: list[Contribution]) -> Iterator[tuple[int, torch.Tensor]]:
    """Add gradients of pieces one after the other; yields (piece, sum)."""
    totals: dict[int, torch.Tensor] = {}
    for given in contributions:
        if given.place in totals:
            totals[given.place].add_(given.values)
        else:
            totals[given.place] = given.values
    yield from totals.items()
