"""
The groups of one rank: the data axes with and without shards, the model axes, and the job.

Along the *data axes*, dp, ep and cp, ranks compute other parts of the loss with the same weights.
Along the *model axes*, pp and the tensor axes, ranks have other parts of the weights. Experts are
the exception: along ep, ranks have other experts, whose gradients are summed over dp and cp only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from pdrun.errors import ConfigError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import EXPERT_AXIS, STAGE_AXIS, Mesh
from pdrun.parallel.comm.sharded import ShardedGroup


@dataclass(frozen=True)
class DataGroups:
    """
    The groups over which one kind of weights is summed, sharded and counted.

    Attributes:
        whole: the axes along which ranks have the same weights and other data, without shards.
        sharded: these axes with the shards of the optimizer level.
        gathers: like ``sharded``, for weights.
        parts: the axes along which ranks have other parts of these weights.
    """

    whole: ShardedGroup
    sharded: ShardedGroup
    gathers: ShardedGroup
    parts: ShardedGroup


@dataclass(frozen=True)
class RankGroups:
    """
    The groups that the engine uses.

    Attributes:
        dense: the groups of all weights but experts that are cut over ep.
        experts: the groups of those; None if there is no axis ep.
        holders: pp, ep and the tensor axes.
        job: all ranks.
        loss_ranks: ranks of the job that know the loss, in the order of the slices: those of the
            last stage that are first along the tensor axes.
    """

    mesh: Mesh
    axes: MeshGroups
    dense: DataGroups
    experts: DataGroups | None
    holders: ShardedGroup
    job: ShardedGroup
    loss_ranks: list[int]
    _sums: dict[str, ShardedGroup] = field(default_factory=dict)
    _shared: dict[tuple[int, ...], ShardedGroup] = field(default_factory=dict)

    @cached_property
    def host(self) -> ShardedGroup:
        """
        The data axes without shards, for tensors on the host.

        Raises:
            ConfigError: the job's process group has no collectives for them.
        """
        is_away = self.job.world > 1 and self.axes.device.type != "cpu"
        if is_away and "gloo" not in str(dist.get_backend_config()):
            raise ConfigError(
                "modules on the host need a process group with gloo beside"
                f" {dist.get_backend_config()}",
                where="offload",
                hint='init_process_group("cpu:gloo,cuda:nccl"), or leave it to pdrun.init()',
            )
        return ShardedGroup(self.axes.on_device(torch.device("cpu"))[self.mesh.data_axes])

    @property
    def data(self) -> ShardedGroup:
        """The data axes without shards."""
        return self.dense.whole

    @property
    def holder_axes(self) -> tuple[str, ...]:
        """Names of the axes along which ranks can have other parts of weights, outer to inner."""
        return holder_axes(self.mesh)

    def groups_of(self, is_expert: bool) -> DataGroups:
        """Return the groups of experts that are cut over ep, or of other weights."""
        return self.experts if is_expert and self.experts is not None else self.dense

    @property
    def is_first_on_tensor(self) -> bool:
        """Whether this rank is the first along the tensor axes."""
        return all(self.axes.coordinate[name] == 0 for name in self.mesh.tensor_axes)

    def make_shared_groups(self, stages: Iterable[tuple[int, ...]]) -> None:
        """
        Create the groups of stages that share weights.

        All ranks must call it with the same stages; ranks outside a group take part in its
        creation.
        """
        for some in sorted(stages):
            axis = self.axes.make_subgroup(STAGE_AXIS, some)
            if axis is not None:
                self._shared[some] = ShardedGroup(axis)

    def sum_groups(self, sums: tuple[str, ...], stages: tuple[int, ...]) -> list[ShardedGroup]:
        """
        Return the groups over which gradients are summed in addition to the data axes.

        Args:
            sums: tensor axes.
            stages: stages that share the weight; empty if one stage has it.
        """
        for name in sums:
            self._sums.setdefault(name, ShardedGroup(self.axes[name]))
        return [*(self._sums[name] for name in sums), *([self._shared[stages]] if stages else [])]


def make_rank_groups(mesh: Mesh, axes: MeshGroups, shards: int, level: int) -> RankGroups:
    """
    Return this rank's groups.

    Args:
        shards: size of a shard group on the data axes.
        level: of the optimizer.
    """
    grid = mesh.grid
    for name in grid.names:
        axes[name]  # creates all groups now, in the same order on all ranks
    data = axes[mesh.data_axes]
    job = axes[grid.names]
    model = ShardedGroup(axes[(STAGE_AXIS, *mesh.tensor_axes)])
    dense = _make_data_groups(data, shards, level, model)
    experts = None
    holders = model
    if mesh.ep > 1:
        holders = ShardedGroup(axes[holder_axes(mesh)])
        same = axes[tuple(name for name in mesh.data_axes if name != EXPERT_AXIS)]
        # ranks that share shards of dense weights and have the same experts
        few = math.gcd(same.size, max(1, shards // mesh.ep))
        experts = _make_data_groups(same, few, level, holders)
    last = grid.rank_at({STAGE_AXIS: mesh.pp - 1})
    return RankGroups(
        mesh,
        axes,
        dense,
        experts,
        holders,
        job=dense.whole if data.size == job.size else ShardedGroup(job),
        loss_ranks=list(grid.group_ranks(mesh.data_axes, last)),
    )


def holder_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which ranks can have other parts of weights, outer to inner."""
    return (STAGE_AXIS, *([EXPERT_AXIS] if mesh.ep > 1 else []), *mesh.tensor_axes)


def _make_data_groups(data: AxisGroup, shards: int, level: int, parts: ShardedGroup) -> DataGroups:
    whole = ShardedGroup(data)
    cut = whole if shards == 1 else ShardedGroup(data, shards)
    apart = level == 3 and shards > 1 and data.device.type == "cpu"
    gathers = ShardedGroup(data, shards, own=True) if apart else cut
    return DataGroups(whole, cut, gathers, parts)
