"""
The weights of a model in buckets: which ones are sharded, trained, gathered and summed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from pdrun.parallel.comm.rank_groups import DataGroups, RankGroups
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.model.weights import Weight, assign_units, make_buckets
from pdrun.parallel.zero.gatherer import UnitGatherer
from pdrun.parallel.zero.gradients import BufferPool, GradientBucket, ReductionPolicy
from pdrun.parallel.zero.optimizer import TrainedPart
from pdrun.parallel.zero.settings import Settings
from pdrun.parallel.zero.shards import ShardedBucket


class WeightBuckets:
    """
    The buckets of this rank's weights; the base of `Engine`, which runs a step with them.

    Args:
        model: what this rank runs.
        weights: its weights, with their shards.
        place: this rank's groups.
        units: names of the modules whose weights are gathered together (level 3).
        fill: gives weights without memory their first values.
        on_skipped: called in a backward pass with a unit that this rank did not run.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: list[Weight],
        place: RankGroups,
        settings: Settings,
        units: Sequence[str],
        fill: Callable[[Sequence[Weight]], None],
        on_skipped: Callable[[int], None],
    ) -> None:
        self._fill = fill
        self.weights = weights
        self.place = place
        self.settings = settings
        self.data_group = place.data
        self._policy = ReductionPolicy(
            settings.level,
            settings.exact,
            settings.accumulate,
            settings.wire_dtype,
            settings.keep_for_step,
        )
        self.pool = BufferPool()
        self.gradient_buckets: list[GradientBucket] = []
        self.sharded_buckets: list[ShardedBucket] = []
        self.sharded_bucket_of: dict[int, ShardedBucket] = {}
        """By index of a gradient bucket."""
        self.masters: dict[int, nn.Parameter] = {}
        """Wider copies of weights that are not sharded, by index of the weight."""
        self.gatherer: UnitGatherer | None = None
        self._units = list(units)
        self._build_buckets(model, on_skipped)

    def _build_buckets(self, model: nn.Module, on_skipped: Callable[[int], None]) -> None:
        settings = self.settings
        synced = [weight for weight in self.weights if not weight.unsynced]
        sharded = [
            weight
            for weight in synced
            if settings.level
            and weight.nbytes >= settings.threshold
            and not (weight.needs_full or weight.opts_out or weight.is_on_host)
            and not (weight.is_expert and self.place.groups_of(True).sharded.shards == 1)
        ]
        if settings.level < 3:
            sharded = [weight for weight in sharded if weight.is_trained]
        else:
            assign_units(model, self.weights, self._units)
        unsharded = [weight for weight in synced if weight not in set(sharded)]
        by_unit: dict[str, list[ShardedBucket]] = {name: [] for name in ["", *self._units]}
        for name in reversed(["", *self._units]):  # in the order of their gradients
            in_unit = [weight for weight in sharded if weight.unit == name]
            for group in make_buckets([w for w in in_unit if w.is_trained], settings.fusion):
                by_unit[name].append(self._add_sharded_bucket(group, name, trained=True))
            for group in make_buckets([w for w in in_unit if not w.is_trained], settings.fusion):
                by_unit[name].append(self._add_sharded_bucket(group, name, trained=False))
        for group in make_buckets([w for w in unsharded if w.is_trained], settings.fusion):
            whole = self.place.host if group[0].is_on_host else self._groups_of(group).whole
            self._add_gradient_bucket(group, whole)
        for weight in self.weights:
            if weight not in set(sharded):
                self._cast_weight(weight)
        if settings.level == 3:
            self._units = [name for name in self._units if by_unit[name]]
            self.gatherer = UnitGatherer(
                model,
                by_unit,
                self._units,
                self.place.dense.gathers,
                settings.keep_for_step,
                on_skipped,
            )

    def _add_gradient_bucket(self, group: Sequence[Weight], comm: ShardedGroup) -> None:
        label = f"the sum of gradients {len(self.gradient_buckets)} "
        label += f"({group[0].name} and {len(group) - 1} more)"
        dtype = self.settings.precision.sum_dtype(group[0].dtype)
        across = self.place.sum_groups(group[0].sum_axes, group[0].stages)
        self.gradient_buckets.append(
            GradientBucket(group, comm, self._policy, self.pool, dtype, label, across)
        )

    def _add_sharded_bucket(
        self, group: Sequence[Weight], unit: str, *, trained: bool
    ) -> ShardedBucket:
        own = group[0].dtype
        compute = self.settings.precision.weight_dtype(own, group[0].keep_dtype)
        self._fill(group)
        made = ShardedBucket(
            group,
            self._groups_of(group).gathers,
            compute_dtype=compute,
            master_dtype=own,
            frees_full=self.settings.level == 3,
            master_device=self.settings.master_device or self.data_group.device,
            label=f"the weights of {unit or group[0].name}",
        )
        self.sharded_buckets.append(made)
        if trained:
            self.sharded_bucket_of[len(self.gradient_buckets)] = made
            self._add_gradient_bucket(group, self._groups_of(group).sharded)
        return made

    def _groups_of(self, group: Sequence[Weight]) -> DataGroups:
        return self.place.groups_of(group[0].is_expert)

    def _cast_weight(self, weight: Weight) -> None:
        """Give the model a copy of an unsharded weight in the type of the policy."""
        self._fill([weight])
        compute = self.settings.precision.weight_dtype(weight.dtype, weight.keep_dtype)
        here = self.place.host.device if weight.is_on_host else self.data_group.device
        home = self.settings.master_device or here
        if compute != weight.dtype or (weight.is_trained and home != here):
            wide = weight.param.detach()
            if weight.is_trained:
                self.masters[weight.index] = nn.Parameter(wide.to(home, copy=True))
            weight.param.data = wide.to(compute, copy=True)

    def _trained_params(self, index: int) -> list[nn.Parameter]:
        """Return what the optimizer trains of a bucket, in the order of its segments."""
        if index in self.sharded_bucket_of:
            return self.sharded_bucket_of[index].parts
        part = self.gradient_buckets[index]
        mine = [part.weights[segment.slot] for segment in part.segments]
        return [self.masters.get(weight.index, weight.param) for weight in mine]

    def _unit_indices(self) -> list[int]:
        """Return the index of the unit of each gradient bucket; -1 for none."""
        places = {name: place for place, name in enumerate(self._units)}
        found = []
        for index, part in enumerate(self.gradient_buckets):
            found.append(
                places.get(part.weights[0].unit, -1) if index in self.sharded_bucket_of else -1
            )
        return found

    def trained_parts(self, param: nn.Parameter) -> list[TrainedPart]:
        """Return what this rank trains of a parameter of the model."""
        for bucket in self.sharded_buckets:
            for slot, weight in enumerate(bucket.weights):
                if weight.param is param:
                    found = zip(bucket.segments, bucket.parts, strict=True)
                    return [(part, segment) for segment, part in found if segment.slot == slot]
        weight = next(weight for weight in self.weights if weight.param is param)
        return [(self.masters.get(weight.index, param), None)]
