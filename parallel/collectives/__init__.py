"""
Manual parallelism: collectives with gradients for programs that shard their tensors by hand.

    from pdrun.parallel import collectives
    ctx = pdrun.init()
    tp = collectives.group("tp", pdrun.mesh(dp=-1, tp=2))
    y = collectives.all_reduce(x @ weight_rows, tp)

Gradients are those of one process that computes the sum of all ranks' losses: the gradient of a
collective is its adjoint.

    collective          gradient
    all_reduce          all-reduce
    all_gather          reduce-scatter
    reduce_scatter      all-gather
    all_to_all          all-to-all, back
    broadcast           reduce to the source
    reduce              broadcast from the destination
    shift, exchange     the other way round
    send, receive       receive, send

A loss that every rank computes in full counts once per rank: divide it by the number of ranks, or
compute it on one rank. (`pdrun.parallelize` does that by itself.) All ranks of a group must make
the same calls in the same order, forward and backward.

May import: comm, startup and what is below them.
Start reading here: reductions.py.
"""

from pdrun.parallel.collectives.group import barrier, group
from pdrun.parallel.collectives.reductions import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
)
from pdrun.parallel.collectives.transfers import exchange, receive, send, shift

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exchange",
    "group",
    "receive",
    "reduce",
    "reduce_scatter",
    "send",
    "shift",
]
