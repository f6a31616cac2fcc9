"""What the data feed of a run asks of the other ranks: see `pdrun.parallel.data.feed.FeedLink`."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.training.rank_agreement import RankAgreement

ORDER_HINT = (
    "every rank needs the sampler of all rows, equally seeded: pdrun shards the rows itself; "
    'for rows of your own use dataset_strategy="data_parallel" and an iterable of batches'
)


class DataLink:
    """
    The ranks of a run.

    Args:
        job: all ranks.
        agreement: compares texts; None: nothing is compared.
    """

    def __init__(self, job: ShardedGroup, agreement: RankAgreement | None) -> None:
        self._job = job
        self._agreement = agreement

    def compare_order(self, batches: Any) -> None:
        """See `FeedLink.compare_order`."""
        if self._agreement is None or self._job.world == 1:
            return
        digest = hashlib.sha256(repr(batches).encode()).hexdigest()[:16]
        what = [("batches of the sampler", len(batches)), ("an order of indices", digest)]
        self._agreement.check_equal(what, 0, "pdrun.Run.data", ORDER_HINT)

    def largest(self, number: int) -> int:
        """See `FeedLink.largest`."""
        mine = torch.tensor([number], dtype=torch.int64, device=self._job.device)
        numbers, _ = self._job.exchange_numbers(mine, [False], "the next batch of run.data").wait()
        return int(numbers.max())

    def announce(self, text: str) -> None:
        """See `FeedLink.announce`."""
        if self._job.rank == 0:
            print(f"pdrun: {text}", file=sys.stderr, flush=True)
