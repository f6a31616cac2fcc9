"""
The parts of a training run: model, optimizer, engine, settings, position in the data.

`parallelize` builds one `RunState`. `pdrun.Run` holds it; reports and checkpoints read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import Mesh
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.data.batch_slicing import BatchSlicing, to_device
from pdrun.parallel.data.feed import DataFeed
from pdrun.parallel.experts.balance import pass_state
from pdrun.parallel.experts.loads import ExpertBalancer
from pdrun.parallel.fp8.modules import Fp8Choice
from pdrun.parallel.model.released import find_user_line
from pdrun.parallel.model.sync_batchnorm import SyncedBatchNorm
from pdrun.parallel.rng.step_rng import NO_CONTEXT, StepRNG
from pdrun.parallel.startup.init import Context
from pdrun.parallel.training.attached import AttachedObjects
from pdrun.parallel.training.driver import Driver, MicroBatch, SimpleDriver
from pdrun.parallel.training.forward_buffers import ForwardBuffers, KeptStates
from pdrun.parallel.training.guard import (
    ConsistencyGuard,
    refuse_clipping,
    refuse_loose_batch_norms,
)
from pdrun.parallel.training.loss import Objective
from pdrun.parallel.training.rank_agreement import DataLink, RankAgreement
from pdrun.parallel.zero.engine import Engine
from pdrun.parallel.zero.offload import ActivationOffload, HostModules, Offload
from pdrun.parallel.zero.precision import LossScale
from pdrun.parallel.zero.settings import Settings


class SequenceSlicer(Protocol):
    """Gives each rank along cp its part of every sequence; see `pdrun.ContextParallel`."""

    def part(self, batch: Any, axes: MeshGroups) -> Any:
        """
        Return this rank's part along cp of every sequence of a micro-batch.

        Losses are summed over these parts.
        """
        ...

    def describe(self, axes: MeshGroups) -> str:
        """Return a line for `Run.explain`: how sequences are sliced."""
        ...

    def patched_attention(self, axes: MeshGroups) -> AbstractContextManager[None]:
        """Return the context manager of forwards and backwards on parts; it can be nested."""
        ...


class StepServers(Protocol):
    """The weights on parameter servers; see `pdrun.parallel.servers.served_model`."""

    part: int
    """Number of the micro-batch that computes; -1: it is not part of the step."""

    def begin_step(self) -> None:
        """Forget what an incomplete step has left."""
        ...

    def end_step(self, divisor: float) -> int:
        """Push the gradients, divided by the global count, and pull the new weights."""
        ...

    def dense_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the dense weights, by name."""
        ...

    def reload_weights(self) -> None:
        """Give the model the servers' values after these were loaded."""
        ...

    def save(self, folder: Path, later: Path) -> None:
        """Write the tables into a checkpoint's folder, renamed later; one rank calls this."""
        ...

    def load(self, folder: Path) -> None:
        """Read the tables of a checkpoint; one rank calls this."""
        ...

    def describe(self) -> str:
        """Return a line for `Run.explain`."""
        ...

    def check_equal_to_one_process(self) -> None:
        """
        Refuse a comparison with one process.

        Raises:
            UsageError: gradients are used in the order of their arrival.
        """
        ...


@dataclass(eq=False)
class RunState:
    """The parts of a run; one object for `Run`, reports, checkpoints and the driver."""

    context: Context
    mesh: Mesh
    engine: Engine
    optimizer: torch.optim.Optimizer
    objective: Objective
    rng: StepRNG
    batch_slicing: BatchSlicing
    """How the user's batches are sliced over dp."""
    scheduler: Any = None
    original_model: nn.Module | None = None
    """The full model on the meta device; None unless tensor axes or stages cut ``model``."""
    driver: Driver = field(default_factory=SimpleDriver)
    copies: int = 1
    """Micro-batches that are computed side by side."""
    sequence_slicer: SequenceSlicer | None = None
    agreement: RankAgreement | None = None
    """Compares the first batch with that of other ranks; None afterwards."""
    group_members: list[list[str]] = field(default_factory=list)
    """Names of the weights of each optimizer group, of the full model."""
    recompute: Any = None
    """The ``recompute=`` of `parallelize`."""
    recomputed_modules: list[str] = field(default_factory=list)
    """Names of the modules whose forward is recomputed in the backward."""
    compiled_modules: list[str] = field(default_factory=list)
    """Names of the modules that torch.compile compiles."""
    fp8: Fp8Choice = field(default_factory=Fp8Choice)
    """The linear modules that multiply in fp8."""
    offload: Offload = field(default_factory=Offload)
    activation_offload: ActivationOffload | None = None
    """Moves activations to the host; None if ``offload`` does not include them."""
    host_modules: HostModules | None = None
    """The modules that are computed on the host."""
    allows_local_norms: bool = False
    """Whether statistics of a batch may be those of the rows of one rank."""
    served: StepServers | None = None
    """The weights on parameter servers; None without any."""

    steps: int = field(default=0, init=False)
    """Steps made so far."""
    feed: DataFeed = field(init=False)
    """The batches that were handed out, and the position in the data."""
    persistent_buffers: set[str] = field(init=False)
    """Names of the buffers that are in the model's state dict."""
    buffers: ForwardBuffers = field(init=False)
    """Buffers that take rank 0's value when a forward changes them."""
    kept_states: KeptStates = field(init=False)
    """Looks for states that modules keep from one forward to the next."""
    loss_scale: LossScale | None = field(init=False)
    """The loss scale; None unless the model computes in fp16."""
    has_reported_nonfinite: bool = field(default=False, init=False)
    """Whether a loss that is not finite was reported."""
    attached: AttachedObjects = field(default_factory=AttachedObjects, init=False)
    """Objects of the program whose state is saved and loaded with the run."""
    guard: ConsistencyGuard = field(init=False)
    is_updating: bool = field(default=False, init=False)
    """Whether the run itself steps the optimizer."""
    experts: ExpertBalancer = field(init=False)
    """Counts and balances the experts of the model, if it has any."""

    def __post_init__(self) -> None:
        self.persistent_buffers = set(_persistent_buffers(self.model))
        self.buffers = ForwardBuffers(
            self.model, self.data_group, self.settings.accumulate, self.recomputed_modules
        )
        precision = self.settings.precision
        self.loss_scale = LossScale(precision.scale) if precision.compute == "fp16" else None
        self.experts = ExpertBalancer(self.model, self.engine.place)
        self.feed = DataFeed(DataLink(self.engine.place.job, self.agreement))
        self.guard = ConsistencyGuard(
            self.engine, self.optimizer, self.model, self.data_group.world
        )
        self.kept_states = KeptStates(
            self.model, self.data_group, self.settings.accumulate, self.recomputed_modules
        )
        refuse_foreign_steps(self)

    def step_optimizer(self) -> None:
        """Step the optimizer, then the scheduler."""
        self.is_updating = True
        try:
            with refuse_clipping() if self.engine.is_retargeted else NO_CONTEXT:
                self.optimizer.step()
        finally:
            self.is_updating = False
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def model(self) -> nn.Module:
        """What this rank runs."""
        return self.objective.model

    @property
    def settings(self) -> Settings:
        """The engine's settings."""
        return self.engine.settings

    @property
    def axes(self) -> MeshGroups:
        """This rank's position along each axis of the mesh."""
        return self.engine.place.axes

    @cached_property
    def row_axis(self) -> Any:
        """The axes dp and ep: their ranks compute different rows."""
        return self.axes[self.mesh.row_axes]

    @property
    def data_group(self) -> ShardedGroup:
        """The data axes, dp, ep and cp: gradients are summed over them."""
        return self.engine.data_group

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.engine.data_group.device

    @property
    def seed(self) -> int:
        """The seed of all random numbers of the run."""
        return self.rng.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.rng.seed = value

    # ---- what a driver uses; see `pdrun.parallel.training.driver.StepContext` ----

    def prepare_batch(self, batch: Any) -> Any:
        """See `StepContext.prepare_batch`."""
        part = (
            batch if self.sequence_slicer is None else self.sequence_slicer.part(batch, self.axes)
        )
        return to_device(part, self.device, self.settings.precision.input_dtype)

    def checked_norms(self) -> AbstractContextManager[None]:
        """Return the context manager of a step in which no statistics of one rank are computed."""
        if self.allows_local_norms or self.row_axis.size == 1:
            return NO_CONTEXT
        return refuse_loose_batch_norms()

    def forward_context(
        self, micro: MicroBatch, part: int = 0, calls: int = 0
    ) -> AbstractContextManager[None]:
        """See `StepContext.forward_context`; it is entered at once."""
        SyncedBatchNorm.row_weight = micro.weight
        pass_state.begin_pass(micro.weight, self.loss_scale.value if self.loss_scale else 1.0)
        if self.served is not None:
            self.served.part = micro.position if micro.weight else -1
        self.rng.begin_forward(
            self.steps, micro.slice_index, micro.rows, self.device, part=part, calls=calls
        )
        contexts = [self.compute_context()]
        if not self.kept_states.is_done and micro.weight and torch.is_grad_enabled():
            contexts.append(self.kept_states.watch_forward(len(micro.rows)))
        if self.settings.precision.autocast:
            contexts.append(self.settings.precision.autocast_context(self.device))
        if self.activation_offload is not None:
            contexts.append(self.activation_offload.saved_tensors_hooks())
        return contexts[0] if len(contexts) == 1 else join_contexts(contexts)

    def compute_context(self) -> AbstractContextManager[None]:
        """See `StepContext.compute_context`."""
        if self.sequence_slicer is None:
            return self.rng.patched_dropout()
        attention = self.sequence_slicer.patched_attention(self.axes)
        return join_contexts([self.rng.patched_dropout(), attention])

    def run_backward(
        self,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        """See `StepContext.run_backward`."""
        given = list(grads) if grads is not None else [None] * len(tensors)
        roots = list(tensors)
        if self.loss_scale is not None:
            for index, grad in enumerate(given):
                if grad is None:  # a loss
                    roots[index] = roots[index] * self.loss_scale.value
        pass_state.backwards += 1
        try:
            with self.compute_context():  # forwards may be recomputed
                torch.autograd.backward(roots, given, **options)
        finally:
            pass_state.backwards -= 1

    def compute_objective(
        self, model: nn.Module, part: Any, rows: range, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (sum, count) of a model on slice ``index``, which is these global rows."""
        pass_state.begin_pass()
        self.rng.begin_forward(self.steps, index, rows, self.device)
        with self.settings.precision.autocast_context(self.device), self.rng.patched_dropout():
            return self.objective(model, part, max(len(rows), 1))


@contextmanager
def join_contexts(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter several contexts, in order."""
    with ExitStack() as inside:
        for context in contexts:
            inside.enter_context(context)
        yield


def _persistent_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that are in a model's state dict."""
    for prefix, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name


def refuse_foreign_steps(state: RunState) -> None:
    """Refuse steps of the optimizer outside of `Run.step`: it has no gradients of all ranks."""
    mine = weakref.ref(state)

    def check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owner = mine()
        if owner is None or optimizer is not owner.optimizer:  # a copy on trial
            return
        if not owner.is_updating:
            raise UsageError(
                "the optimizer of a run is stepped outside of run.step, which sums gradients over"
                " micro-batches and ranks and steps it",
                where=find_user_line() or "pdrun.Run.optimizer",
                hint="call only run.step(batch): leave out backward(), optimizer.step(),"
                " zero_grad() and clip_grad_norm_ (clip= of pdrun.parallelize)",
            )

    state.optimizer.register_step_pre_hook(check_step)
