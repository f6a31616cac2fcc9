"""
Partitions a full model into what one rank runs: sequences, operators, stages, in this order.

The full model is kept without memory: proofs need it, and weights are filled from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import EXPERT_AXIS
from pdrun.parallel.comm.rank_groups import RankGroups
from pdrun.parallel.fp8.modules import Fp8Choice, choose_modules, find_linears, use_fp8
from pdrun.parallel.fp8.options import Fp8
from pdrun.parallel.interfaces import (
    CallCutter,
    Cutter,
    PipelineCutter,
    SequenceCutter,
    StagedCutter,
    StageSplitter,
)
from pdrun.parallel.model.copies import on_meta
from pdrun.parallel.model.find_units import find_units
from pdrun.parallel.model.shard_map import ShardMap, WeightCatalogue, exchange_shards
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.model.weights import API_NAME, Weight, is_on_experts_axis
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.training.driver import Driver, SimpleDriver
from pdrun.parallel.training.loss import ForwardFunction


@dataclass(frozen=True)
class PartitionSpec:
    """What partitions a model; see `parallelize`."""

    strategy: Cutter | None = None
    pipeline: PipelineCutter | None = None
    context: SequenceCutter | None = None
    sample: Any = None
    forward: ForwardFunction | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the model stays unchanged."""
        return self.strategy is None and self.pipeline is None and self.context is None


@dataclass(frozen=True)
class PartitionedModel:
    """What this rank runs, and what is known of the full model."""

    model: nn.Module
    weights: list[Weight]
    driver: Driver
    holders: ShardMap
    catalogue: WeightCatalogue
    original: nn.Module | None
    """The full model without memory; None if nothing was partitioned."""

    def local_units(self, globs: Sequence[str] | None) -> list[str]:
        """
        Return the names of the modules on this rank whose weights are gathered together.

        Raises:
            UsageError: globs that match nothing in the full model, or a module on several stages.
        """
        names = find_units(self.original or self.model, globs)
        self.driver.check_units(names)
        mine = dict(self.model.named_modules())
        return [
            name for name in names if name in mine and any(True for _ in mine[name].parameters())
        ]


def apply_partitioning(
    model: nn.Module, weights: list[Weight], place: RankGroups, spec: PartitionSpec
) -> PartitionedModel:
    """
    Partition a model that is equal on every rank.

    Args:
        weights: its weights (`collect`).

    Raises:
        UsageError: the partitioned model does not match the given one.
    """
    catalogue = WeightCatalogue(model, weights)
    original = None if spec.is_empty else on_meta(model)
    driver: Driver = SimpleDriver()
    if spec.context is not None:
        model = _require_module(spec.context.apply(model, place.axes, spec.sample), "context")
    if spec.strategy is not None:
        model = _require_module(_apply_strategy(spec.strategy, model, place, spec), "strategy")
    if place.mesh.ep > 1 and not any(is_on_experts_axis(shard_of(p)) for p in model.parameters()):
        what = f"{place.mesh}: no experts are cut over {EXPERT_AXIS}"
        hint = f'give a module with experts the style pdrun.experts("{EXPERT_AXIS}"), or use dp'
        raise UsageError(what, where=API_NAME, hint=hint)
    if spec.pipeline is not None:
        model, driver = spec.pipeline.apply(model, place.axes, spec.sample)
    if original is not None:
        weights = catalogue.collect_weights(model)
    sums = {weight.index: _partial_axes(weight, place) for weight in weights}
    holders = exchange_shards(place.axes[place.holder_axes], place.mesh.pp, weights, place.mesh.ep)
    holders.check_shards(catalogue)
    shared = {holders.stages_of(entry.index) for entry in catalogue.weights if not entry.unsynced}
    place.make_shared_groups(stages for stages in shared if len(stages) > 1)
    for weight in weights:
        weight.chunk, weight.chunks = driver.chunk_of(weight.name), driver.chunks_using(weight.name)
        weight.counts_in_norm = holders.replicas_of(weight.index)[0] == holders.axis.index
        if not weight.unsynced:
            stages = holders.stages_of(weight.index)
            weight.stages = stages if len(stages) > 1 else ()
            weight.sum_axes = tuple(
                axis for axis in place.mesh.tensor_axes if axis in sums[weight.index]
            )
    return PartitionedModel(model, weights, driver, holders, catalogue, original)


def multiply_in_fp8(made: PartitionedModel, place: RankGroups, options: Fp8 | None) -> Fp8Choice:
    """
    Have linear modules of this rank multiply in fp8; return which ones do on any rank.

    Raises:
        UsageError: no module can, or what partitions the model does not support it.
    """
    if options is None:
        return Fp8Choice()
    refused = (
        (find_engine(made.model) is not None, "strategy=pdrun.Operators", "use pdrun.Strategy"),
        (
            made.driver.splits_backward,
            "a schedule that defers gradients of weights",
            'use schedule="1f1b"',
        ),
    )
    for is_given, name, hint in refused:
        if is_given:
            what = f"precision='fp8' is not supported with {name}"
            raise UsageError(what, where=API_NAME, hint=f'{hint}, or precision="bf16"')
    full = made.original or made.model
    found = choose_modules(made.model, full, options)
    use_fp8(made.model, found.chosen, found.scales)
    axis = place.axes[place.holder_axes]
    if made.original is None or axis.size == 1:
        return found
    names = [*find_linears(full)]
    mine = torch.tensor([name in found.chosen for name in names], device=axis.device).int()
    anywhere = axis.all_reduce(mine, "max").tolist()
    return replace(found, everywhere=tuple(itertools.compress(names, anywhere)))


def _apply_strategy(
    strategy: Cutter, model: nn.Module, place: RankGroups, cuts: PartitionSpec
) -> nn.Module:
    if cuts.forward is not None and isinstance(strategy, CallCutter):
        strategy = strategy.with_forward(cuts.forward)
    if isinstance(strategy, StagedCutter) and isinstance(cuts.pipeline, StageSplitter):
        split = cuts.pipeline.split(model, place.axes, cuts.sample)
        return strategy.apply_in_stages(model, place.axes, cuts.sample, split)
    return strategy.apply(model, place.axes, cuts.sample)


def _require_module(made: Any, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        what = f"{name}.apply must return a torch.nn.Module, got {type(made).__name__}"
        raise UsageError(what, where=API_NAME)
    return made


def _partial_axes(weight: Weight, place: RankGroups) -> set[str]:
    """
    Return the tensor axes over which a weight's gradient is a partial sum, without axes of one
    device.
    """
    known = (*place.mesh.tensor_axes, EXPERT_AXIS)
    foreign = [axis for axis in weight.shard.layout.axes if axis not in known]
    if foreign:
        what = f"{weight.name} is sharded over {foreign[0]}, which is not a tensor axis"
        raise UsageError(what, where=API_NAME, hint="optimizer_level=3 shards over the data axes")
    for axis in weight.shard.sum_axes:
        if axis not in place.mesh.tensor_axes or axis in weight.shard.layout.axes:
            what = f"the gradient of {weight.name} cannot be summed over {axis}"
            hint = "sum axes are tensor axes over which the shard is replicated"
            raise UsageError(what, where=API_NAME, hint=hint)
    return {axis for axis in weight.shard.sum_axes if place.mesh.degree(axis) > 1}
