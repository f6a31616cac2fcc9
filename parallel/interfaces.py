"""
Protocols of the arguments ``strategy=``, ``pipeline=`` and ``context=`` of `parallelize`.

`pdrun.Strategy` and `pdrun.Operators` are a `Cutter`, `pdrun.Pipeline` is a `PipelineCutter`,
`pdrun.ContextParallel` is a `SequenceCutter`. Any other object with these methods can be used too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from pdrun.parallel.training.state import SequenceSlicer

if TYPE_CHECKING:
    from pdrun.parallel.comm.groups import MeshGroups
    from pdrun.parallel.comm.mesh import Mesh
    from pdrun.parallel.context_parallel.context import ContextParallel
    from pdrun.parallel.pipeline.split import StageSplit
    from pdrun.parallel.training.driver import Driver
    from pdrun.parallel.training.loss import ForwardFunction


class Cutter(Protocol):
    """Shards a model over the tensor axes: ``parallelize(strategy=...)``."""

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any) -> nn.Module:
        """
        Return the model to run. Its parameters keep their names and have shards (`set_shard`) if
        they are sharded.

        Args:
            model: equal on all ranks; its weights may be on the meta device and are filled
                afterwards.
            axes: this rank's groups on the mesh. Tensor axes are all axes but pp, dp and cp.
            sample: the batch of ``parallelize(sample=...)``, or None.
        """
        ...


@runtime_checkable
class StagedCutter(Cutter, Protocol):
    """A `Cutter` that works across modules and must know the pipeline stage of each."""

    def apply_in_stages(
        self, model: nn.Module, axes: MeshGroups, sample: Any, split: StageSplit
    ) -> nn.Module:
        """
        Do what `Cutter.apply` does, for the full model. The pipeline takes its stage afterwards.

        Args:
            split: the stage of each module.
        """
        ...


@runtime_checkable
class CallCutter(Cutter, Protocol):
    """A `Cutter` that must know how the model is called on a batch."""

    def with_forward(self, forward: ForwardFunction) -> Cutter:
        """Return a cutter for a model that ``forward(model, batch)`` calls."""
        ...


@runtime_checkable
class MeshRefiner(Cutter, Protocol):
    """A `Cutter` whose layouts can need other axes than those of the user's mesh."""

    def refine_mesh(
        self, model: nn.Module, mesh: Mesh | None, world: int
    ) -> tuple[Mesh | None, Cutter]:
        """
        Return the mesh with the axes that the layouts need, and a cutter for it.

        Args:
            mesh: the user's; None: the user gave none, and the layouts may need none.
            world: ranks of the job.
        """
        ...


@runtime_checkable
class InputSharder(Cutter, Protocol):
    """A `Cutter` that can shard the tensors of a batch by layouts, over tensor axes."""

    def with_inputs(self, layouts: tuple[Any, ...]) -> Cutter:
        """Return a cutter for a batch whose tensors have these layouts, in order."""
        ...


class SequenceCutter(SequenceSlicer, Protocol):
    """Lets attention see full sequences if each rank has a part: ``parallelize(context=...)``."""

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any) -> nn.Module:
        """Return the model to run; see `Cutter.apply`."""
        ...


class PipelineCutter(Protocol):
    """Cuts a model into stages and runs their schedule: ``parallelize(pipeline=...)``."""

    @property
    def microbatches(self) -> int:
        """Micro-batches per step."""
        ...

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any) -> tuple[nn.Module, Driver]:
        """
        Return this rank's stage and the driver that runs it.

        Args:
            model: the full model; its weights are already sharded over the tensor axes.
            axes: ``axes["pp"].index`` is the stage.
            sample: a batch, or None if the user gave none.

        The stage's parameters have the names that they have in the full model. The engine finds a
        weight that several stages have (tied weights, under any of their names) and sums its
        gradients over those stages.
        """
        ...


@runtime_checkable
class StageSplitter(Protocol):
    """A pipeline that knows the stages before it cuts the model; a `StagedCutter` needs that."""

    def split(self, model: nn.Module, axes: MeshGroups, sample: Any) -> StageSplit:
        """Return the stage of each module of a full model."""
        ...


@runtime_checkable
class SequencePipeline(Protocol):
    """A pipeline that can slice sequences."""

    @property
    def microbatches(self) -> int:
        """Micro-batches per step."""
        ...

    @property
    def slice_count(self) -> int:
        """Parts of each sequence; 1: sequences are not sliced."""
        ...

    def with_sequences(self, context: ContextParallel) -> PipelineCutter:
        """Return the same with the context that slices sequences."""
        ...
