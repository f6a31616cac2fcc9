"""
What differs between torch 2.11 and 2.14, in one place.

2.13 renamed the collectives on single tensors and warns about the old names.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def all_gather_flat(full: Any, shard: Any, group: Any) -> Any:
    """Start gathering equal shards, in rank order, into ``full``; return torch's work handle."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(full, shard, group=group, async_op=True)


def reduce_scatter_flat(shard: Any, full: Any, group: Any) -> Any:
    """
    Start summing ``full`` over the ranks, each keeping its own equal part in ``shard``; return torch's work
    handle.
    """
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, full, group=group, async_op=True)


def new_group(ranks: list[int], seconds: float) -> Any:
    """
    Make a process group, which only its members do.

    Args:
        ranks: the members. Torch names the group by them and by how many groups each is in, which must be equally many.
        seconds: what its collectives may take.
    """
    return dist.new_group(ranks, timeout=timedelta(seconds=seconds), use_local_synchronization=True)


def set_timeout(seconds: float, group: Any = None) -> None:
    """Change how long collectives of a group may take before they fail."""
    call = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    call(timedelta(seconds=seconds), group)
