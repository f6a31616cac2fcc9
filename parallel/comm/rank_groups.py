"""
One rank's place on the mesh, as the engine needs it: the data axes in shards, the model axes, and
the whole job.

The *data axes*, dp and cp, are those along which ranks compute other parts of the loss with the same weights; along the
*model axes*, pp and the tensor axes, they hold other parts of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdrun.parallel.comm.groups import Axes
from pdrun.parallel.comm.mesh import DATA, STAGES, Mesh
from pdrun.parallel.comm.sharded import Comm


@dataclass(frozen=True)
class Place:
    """
    Where a rank is, and the collectives there.

    Attributes:
        whole: the data axes without shards.
        cut: the same with the shards of the optimizer level.
        gathers: as ``cut``, for weights.
        model: pp and the tensor axes.
        job: all ranks.
        tellers: the ranks of the job that know the loss, in the order of the slices: those of the
            last stage, and of
            all that compute alike along tensor axes the first.
    """

    mesh: Mesh
    axes: Axes
    whole: Comm
    cut: Comm
    gathers: Comm
    model: Comm
    job: Comm
    tellers: list[int]
    _sums: dict[str, Comm] = field(default_factory=dict)
    _shared: dict[tuple[int, ...], Comm] = field(default_factory=dict)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Names of the model axes, outer to inner."""
        return (STAGES, *self.mesh.tensor_axes)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first along the tensor axes."""
        return all(self.axes.coordinate[name] == 0 for name in self.mesh.tensor_axes)

    def share(self, stages: Iterable[tuple[int, ...]]) -> None:
        """
        Make the groups of stages that share weights; all ranks do, in one order, whether they are
        in them or not.
        """
        for some in sorted(stages):
            axis = self.axes.among(STAGES, some)
            if axis is not None:
                self._shared[some] = Comm(axis)

    def across(self, sums: tuple[str, ...], stages: tuple[int, ...]) -> list[Comm]:
        """
        Return over what gradients are added up besides: tensor axes, and the stages that share a
        weight.
        """
        for name in sums:
            self._sums.setdefault(name, Comm(self.axes[name]))
        return [*(self._sums[name] for name in sums), *([self._shared[stages]] if stages else [])]


def place_on(mesh: Mesh, axes: Axes, shards: int, level: int) -> Place:
    """
    Return this rank's place.

    Args:
        shards: size of a shard group on the data axes.
        level: of the optimizer.
    """
    grid = mesh.grid
    for name in grid.names:
        axes[name]  # all groups now, and in the same order everywhere
    data = axes[DATA]
    job = axes[grid.names]
    whole = Comm(data)
    cut = whole if shards == 1 else Comm(data, shards)
    apart = level == 3 and shards > 1 and axes.device.type == "cpu"
    gathers = Comm(data, shards, own=True) if apart else cut
    last = grid.rank_at({STAGES: mesh.pp - 1})
    return Place(
        mesh,
        axes,
        whole,
        cut,
        gathers,
        model=Comm(axes[(STAGES, *mesh.tensor_axes)]),
        job=whole if data.size == job.size else Comm(job),
        tellers=list(grid.group_ranks(DATA, last)),
    )
