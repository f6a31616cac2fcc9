"""
The groups of one rank: the data axes with and without shards, the model axes, and the job.

Along the *data axes*, dp and cp, ranks compute other parts of the loss with the same weights. Along
the *model axes*, pp and the tensor axes, ranks have other parts of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import DATA_AXES, STAGE_AXIS, Mesh
from pdrun.parallel.comm.sharded import ShardedGroup


@dataclass(frozen=True)
class RankGroups:
    """
    The groups that the engine uses.

    Attributes:
        data: the data axes without shards.
        sharded_data: the data axes with the shards of the optimizer level.
        weight_gathers: like ``sharded_data``, for weights.
        model: pp and the tensor axes.
        job: all ranks.
        loss_ranks: ranks of the job that know the loss, in the order of the slices: those of the
            last stage that are first along the tensor axes.
    """

    mesh: Mesh
    axes: MeshGroups
    data: ShardedGroup
    sharded_data: ShardedGroup
    weight_gathers: ShardedGroup
    model: ShardedGroup
    job: ShardedGroup
    loss_ranks: list[int]
    _sums: dict[str, ShardedGroup] = field(default_factory=dict)
    _shared: dict[tuple[int, ...], ShardedGroup] = field(default_factory=dict)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Names of the model axes, outer to inner."""
        return (STAGE_AXIS, *self.mesh.tensor_axes)

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
    data = axes[DATA_AXES]
    job = axes[grid.names]
    whole = ShardedGroup(data)
    cut = whole if shards == 1 else ShardedGroup(data, shards)
    apart = level == 3 and shards > 1 and axes.device.type == "cpu"
    gathers = ShardedGroup(data, shards, own=True) if apart else cut
    last = grid.rank_at({STAGE_AXIS: mesh.pp - 1})
    return RankGroups(
        mesh,
        axes,
        whole,
        cut,
        gathers,
        model=ShardedGroup(axes[(STAGE_AXIS, *mesh.tensor_axes)]),
        job=whole if data.size == job.size else ShardedGroup(job),
        loss_ranks=list(grid.group_ranks(DATA_AXES, last)),
    )
