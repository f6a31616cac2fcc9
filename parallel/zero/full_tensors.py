"""
Full weights and gradients of an engine, and the ranges of them that this rank has.

A full tensor is assembled in two steps. Shards are gathered over the data axes into this rank's
shard of the model axes, one bucket at a time. Then the first rank that has each of those broadcasts
it over the model axes. Every rank iterates over the same weights in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shard_map import WeightInfo
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.zero.flat_layout import FlatLayout
from pdrun.parallel.zero.shards import ShardedBucket

if TYPE_CHECKING:
    from pdrun.parallel.zero.engine import Engine


@dataclass(frozen=True)
class LocalRange:
    """A range of a weight's local shard that this rank trains, or keeps if it is not trained."""

    name: str
    weight: Weight
    start: int
    stop: int
    part: torch.Tensor
    is_saved_here: bool
    """Whether this rank is the one of the replicas that saves it."""
    saves_scalars: bool
    """Whether this rank saves what exists once per weight, such as step counts."""

    @property
    def shard(self) -> Shard:
        """The shard of the model axes of which it is elements ``start`` to ``stop``."""
        return self.weight.shard


def local_ranges(engine: Engine) -> Iterator[LocalRange]:
    """Yield every range of a weight on this rank."""
    sharded_names = set()
    for bucket in engine.sharded_buckets:
        sharded_names |= {weight.name for weight in bucket.weights}
        owner = bucket.comm.rank % bucket.comm.shards  # the first replica
        for segment, part in zip(bucket.segments, bucket.parts, strict=True):
            yield _make_range(
                engine, bucket.weights[segment.slot], segment.start, segment.stop, part, owner
            )
    for weight in engine.weights:
        if weight.name not in sharded_names:
            part = engine.masters.get(weight.index, weight.param)
            yield _make_range(
                engine,
                weight,
                0,
                weight.numel,
                part,
                engine.data_group.rank if weight.unsynced else None,
            )


def _make_range(
    engine: Engine, weight: Weight, start: int, stop: int, part: torch.Tensor, owner: int | None
) -> LocalRange:
    """
    Return a range and the rank that saves it. Replicas are distributed over the ranks that have
    them.

    Args:
        owner: the only rank on the data axes that has it; None: all have the same.
    """
    holders = engine.holders
    group = engine.place.groups_of(weight.is_expert).whole
    alike = holders.replicas_of(weight.index)
    turn, place = divmod(weight.index, len(alike))
    data = turn % group.world if owner is None else owner
    mine = group.rank == data and holders.axis.index == alike[place]
    name = f"{weight.name}@{engine.data_group.rank}" if weight.unsynced else weight.name
    return LocalRange(
        name,
        weight,
        start,
        stop,
        part,
        mine,
        mine and start == 0 and holders.is_first_shard(weight.index),
    )


# ---- full tensors ------------------------------------------------------------


def iter_full_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield each weight's name and full value in the optimizer's type; every rank must read all of
    them.
    """
    buckets = [
        _GatheredBucket(bucket.weights, bucket.layout, _weight_gatherer(bucket))
        for bucket in engine.sharded_buckets
    ]
    sharded = {weight.index for bucket in buckets for weight in bucket.weights}
    device = engine.data_group.device
    rest = {
        weight.index: engine.masters.get(weight.index, weight.param)
        .detach()
        .to(engine.place.host.device if weight.is_on_host else device)
        for weight in engine.weights
        if weight.index not in sharded
    }
    parts = _LocalShards(buckets, rest)
    for entry in full_weight_order(engine):
        yield (
            entry.name,
            _assemble_weight(engine, entry, parts.take_shard(entry.index), entry.dtype),
        )


def weights_by_name(engine: Engine) -> dict[str, torch.Tensor]:
    """Return all full weights by name, in the order of the model; every rank must call this."""
    found = dict(iter_full_weights(engine))
    return {entry.name: found[entry.name] for entry in engine.catalogue.weights}


def full_weight_order(engine: Engine) -> list[WeightInfo]:
    """Return the weights of the full model in the order of `iter_full_weights`."""
    entries = engine.catalogue.weights
    if engine.place.holders.world > 1:
        return entries[::-1]  # as buckets are filled
    sharded = [weight.index for part in engine.sharded_buckets for weight in part.weights]
    return [entries[index] for index in sharded] + [
        entry for entry in entries if entry.index not in set(sharded)
    ]


def iter_full_gradients(engine: Engine) -> Iterator[tuple[str, torch.Tensor | None]]:
    """
    Yield each trained weight's name and full gradient, between `finish_gradients` and the
    optimizer's step; every rank must read all of them.
    """
    buckets = [
        _GatheredBucket(b.weights, b.layout, _gradient_gatherer(engine, index))
        for index, b in enumerate(engine.gradient_buckets)
    ]
    rest = {}
    for weight in engine.unsynced_weights:
        grad = engine.masters.get(weight.index, weight.param).grad
        if grad is not None:
            rest[weight.index] = grad.to(engine.data_group.device)
    parts = _LocalShards(buckets, rest)
    entries = engine.catalogue.weights
    if engine.place.holders.world == 1:
        mine = [weight for bucket in buckets for weight in bucket.weights] + engine.unsynced_weights
        entries = [entries[weight.index] for weight in mine]
    else:
        entries = entries[::-1]
    for entry in entries:
        if entry.unsynced:
            if entry.index in rest:
                yield entry.name, rest[entry.index]
        elif entry.is_trained:
            part = parts.take_shard(entry.index)
            dtype = engine.settings.precision.sum_dtype(entry.dtype)
            grad = None
            if engine.used_weights[entry.index]:
                grad = _assemble_weight(engine, entry, part, dtype)
            yield entry.name, grad


def weight_storages(engine: Engine) -> set[int]:
    """Return the identities of the storages of the model's weights."""
    cuts = {bucket.full.untyped_storage()._cdata for bucket in engine.sharded_buckets}
    with torch._C.DisableTorchFunctionSubclass():  # no value of a released weight is read
        return cuts | {weight.param.untyped_storage()._cdata for weight in engine.weights}


# ---- assembly ----------------------------------------------------------------


@dataclass(eq=False)
class _GatheredBucket:
    """Weights of one flat buffer, and a function that gathers it."""

    weights: list[Weight]
    layout: FlatLayout
    gather: Callable[[], torch.Tensor]


def _weight_gatherer(bucket: ShardedBucket) -> Callable[[], torch.Tensor]:
    def gather() -> torch.Tensor:
        full = torch.empty(
            bucket.layout.numel, dtype=bucket.master.dtype, device=bucket.comm.device
        )
        bucket.comm.gather_shards(full, bucket.master.detach().to(full.device), bucket.label).wait()
        return full

    return gather


def _gradient_gatherer(engine: Engine, index: int) -> Callable[[], torch.Tensor]:
    def gather() -> torch.Tensor:
        part = engine.gradient_buckets[index]
        total = part.finish_total()
        if index not in engine.sharded_bucket_of:
            return total
        full = total.new_empty(part.layout.numel)
        part.comm.gather_shards(full, total, "the gradients").wait()
        return full

    return gather


class _LocalShards:
    """
    This rank's shards of the model axes; each is taken once. A bucket is in memory from the first
    one taken to the last.
    """

    def __init__(self, buckets: list[_GatheredBucket], rest: dict[int, torch.Tensor]) -> None:
        self._rest = rest
        self._where = {
            w.index: (bucket, slot) for bucket in buckets for slot, w in enumerate(bucket.weights)
        }
        self._left = {id(bucket): len(bucket.weights) for bucket in buckets}
        self._open: dict[int, torch.Tensor] = {}

    def take_shard(self, index: int) -> torch.Tensor | None:
        """Return the shard of a weight; None if this rank has none."""
        if index not in self._where:
            return self._rest.get(index)
        bucket, place = self._where[index]
        if id(bucket) not in self._open:
            self._open[id(bucket)] = bucket.gather()
        slot = bucket.layout.slots[place]
        found = self._open[id(bucket)][slot.start : slot.stop].view(slot.shape)
        self._left[id(bucket)] -= 1
        if not self._left[id(bucket)]:
            del self._open[id(bucket)]
        return found


def _assemble_weight(
    engine: Engine, entry: WeightInfo, part: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return a full weight from its shards on the model axes; ``part`` is this rank's."""
    holders = engine.holders
    comm = engine.place.holders
    sources = holders.source_shards(entry.index)
    if part is not None and len(sources) == 1 and holders.is_replicated(entry.index):
        return part
    received = []
    for place, box in sources:
        shape = tuple(sum(high - low for low, high in ranges) for ranges in box)
        if place == comm.rank:
            assert part is not None
            data = part.contiguous()
        else:
            data = torch.empty(shape, dtype=dtype, device=comm.device)
        received.append((box, comm.start_broadcast(data, place, f"a part of {entry.name}")))
    out = torch.empty(entry.shape, dtype=dtype, device=comm.device)
    for box, pending in received:
        Shard(entry.shape, L(*[None] * len(entry.shape)), box).put_into(pending.wait(), out)
    return out
