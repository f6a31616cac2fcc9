"""
A run: the loop's side of `pdrun.parallelize`.

A step cuts its batch into micro-batches, has a driver go forward and backward through them, and
tells global numbers. What happens to weights and gradients is the engine's business, what is random
the dice's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint import export as exporting
from pdrun.parallel.checkpoint import save_load as saving
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.save_load import Saving
from pdrun.parallel.comm.mesh import Mesh
from pdrun.parallel.data.batch_slicing import (
    Strategy,
    count_rows,
    cut_rows,
    cut_sizes,
    take,
    to_device,
)
from pdrun.parallel.data.feed import Feed
from pdrun.parallel.data.loader import Loader, Position
from pdrun.parallel.model import sync_batchnorm as norm_sync
from pdrun.parallel.model.shards import SequenceCutter
from pdrun.parallel.report.explain import Plan, explain, plan_of
from pdrun.parallel.report.memory import Estimate, estimate
from pdrun.parallel.report.verify import Report, verify
from pdrun.parallel.rng.step_rng import Dice
from pdrun.parallel.startup.init import Context
from pdrun.parallel.training.driver import Driver, MicroBatch, Plain
from pdrun.parallel.training.guard import Guard
from pdrun.parallel.training.loss import Objective
from pdrun.parallel.training.metrics import Metrics
from pdrun.parallel.training.rank_agreement import Agreement, of_batch
from pdrun.parallel.zero import full_tensors as wholes
from pdrun.parallel.zero.engine import Engine
from pdrun.parallel.zero.grad_norm import square_sum
from pdrun.parallel.zero.offload import Offload, Saver, to_files
from pdrun.parallel.zero.precision import LossScale

NOTHING = -1
ITSELF = -2
"""What rank 0 finds in a folder instead of the step of a checkpoint."""


class Run:
    """
    A training run on every device of a mesh; made by `pdrun.parallelize`.

    Attributes:
        model: the model, its parameters on this rank's device. Between steps they hold the weights
            up to level 2; at
            level 3
            they read as NaN except inside a forward pass: `full_weights` gathers them.
        optimizer: the optimizer; its groups hold what this rank trains. Schedulers of learning
            rates work on it as
            ever.
        mesh: the devices.
        axes: this rank's places along the axes of the mesh.
        steps: how many steps have been made.
    """

    def __init__(
        self,
        context: Context,
        mesh: Mesh,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        dice: Dice,
        strategy: Strategy,
        scheduler: Any = None,
    ) -> None:
        self.context = context
        self.mesh = mesh
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.model = objective.model
        self.original: nn.Module | None = None
        """
        The whole model without memory, where ``model`` is cut over tensor axes or into stages.
        """
        self.driver: Driver = Plain()
        self.copies = 1
        """How many micro-batches are computed at a time."""
        self.sequences: SequenceCutter | None = None
        """What gives this rank its part of each sequence."""
        self.steps = 0
        self.offload = Offload()
        self.saver: Saver | None = None
        """What keeps activations on the host, where that is asked for."""
        self.recompute: Any = None
        self.recomputed: list[str] = []
        """Names of the modules whose forward is computed again in the backward."""
        self.compiled: list[str] = []
        """Names of the modules that torch.compile makes kernels for."""
        self.engine = engine
        self.objective = objective
        self.dice = dice
        self.strategy = strategy
        self.axes = engine.place.axes
        self.rows = self.axes["dp"]
        """The axis along which ranks compute different rows."""
        self.settings = engine.settings
        self.persistent = {
            name for name in self.model.state_dict() if name in dict(self.model.named_buffers())
        }
        self._saving: Saving | None = None
        self.axis = engine.whole
        """The data axes: those over which gradients are added up."""
        self.device = engine.whole.device
        self.feed = Feed()
        """What `data` has yielded, and where it stands."""
        self.agreement: Agreement | None = None
        """What compares the first batch with other ranks' and is gone afterwards."""
        self.buffers = list(self._loose_buffers())
        fp16 = self.settings.precision.compute == "fp16"
        self.scale = LossScale(self.settings.precision.scale) if fp16 else None
        self.members: list[list[str]] = []
        """Names of the weights in each group of the optimizer, of the whole model."""
        self.guard = Guard(engine, optimizer, self.model, self.axis.world)
        self.watchers: list[Callable[[Run], None]] = []
        """
        Called in each step when the gradients are there: divided and clipped, but not used yet.
        """

    # ---- a step -------------------------------------------------------------

    def step(self, batch: Any) -> Metrics:
        """
        Train on a global batch: forward, backward, one step of the optimizer.

        Args:
            batch: what `data` yielded, which is this rank's part; any other batch is global and the
                same on every rank,
                unless ``dataset_strategy`` says otherwise.

        Raises:
            UsageError: the batch has no rows, other ranks have another first one, or the loss isn't
                what `parallelize`
                was promised.
            DeadlineExceeded: a rank did not take part in time; names all of them.
        """
        self.guard.check()
        self.feed.check(batch)
        self._compare(batch)
        self.steps += 1
        self.axis.watch.enter(f"step {self.steps}")
        versions = [buffer._version for buffer in self.buffers]
        with self.dice.apart(self.device):
            sums = self._passes(batch)
        metrics = self._end(sums, versions)
        self.feed.used()
        self.axis.watch.leave()
        self.guard.note()
        return metrics

    def _compare(self, batch: Any) -> None:
        """Hear of a first batch that ranks should share and do not."""
        agreement = self.agreement
        self.agreement = None
        if agreement is None or self.feed.shard(batch) is not None:
            return
        grid = self.mesh.grid
        rank = self.context.rank
        if self.strategy.local:
            alike = grid.group(tuple(name for name in grid.names if name != "dp"), rank)
            hint = "ranks that differ along other axes than dp take the same rows"
        else:
            alike = grid.group(grid.names, rank)
            hint = "a batch is the whole step's, the same on every rank, which takes its rows from it; "
            hint += 'dataset_strategy="data_parallel" if each has rows of its own; of run.data(pdrun.Loader(...)) give '
            hint += "step the very batch that came last"
        if len(alike) > 1:
            agreement.check(of_batch(batch), alike[0], "pdrun.Run.step", hint)

    def _passes(self, batch: Any) -> torch.Tensor:
        """
        Go forward and backward through this rank's micro-batches; return ``[accumulate, 2]``, sums
        and counts.
        """
        if not torch.is_grad_enabled():
            what = (
                "gradients are turned off: a step lies in torch.no_grad() or torch.inference_mode()"
            )
            raise UsageError(
                what, where="pdrun.Run.step", hint="leave it; run.evaluate(batch) goes forward only"
            )
        self.engine.begin_step()
        sums = self.driver.passes(self, self._cut(batch))
        if self.objective.plain and self.mesh.cp > 1:
            what = "the loss is a mean, of each rank's part of the sequences: means of parts do not add up"
            raise UsageError(
                what, where="pdrun.Run.step", hint="loss(output, batch) -> (sum, count)"
            )
        return sums

    @contextmanager
    def around(self, micro: MicroBatch, part: int = 0, calls: int = 0) -> Iterator[None]:
        """
        What the forward pass of a micro-batch runs in; for ``part`` and ``calls`` see `Dice.throw`.
        """
        norm_sync.SyncedBatchNorm.weight_of_rows = micro.weight
        with ExitStack() as inside:
            if self.saver is not None:
                inside.enter_context(self.saver.around())
            inside.enter_context(self._randomly(micro.index, micro.rows, part, calls))
            inside.enter_context(self.computing())
            yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """
        What forwards and backwards run in: functions of torch that drop, or attend over cut
        sequences, are ours.
        """
        with (
            self.dice.placed(),
            self.sequences.running(self.axes) if self.sequences is not None else nullcontext(),
        ):
            yield

    @contextmanager
    def _randomly(self, index: int, rows: range, part: int = 0, calls: int = 0) -> Iterator[None]:
        self.dice.throw(self.steps, index, rows, self.device, part=part, calls=calls)
        with self.settings.precision.context(self.device), self.dice.placed():
            yield

    def evaluate(self, batch: Any) -> list[Any]:
        """
        Return the model's outputs on this rank's micro-batches of a global batch; every rank calls
        this.

        Nothing is trained. Dropout and the like are as ``run.model.train()`` or ``.eval()`` has
        said. A micro-batch without rows has None, and so have all on ranks that the last stage of a
        pipeline isn't on.
        """
        self.engine.clear()
        with self.dice.apart(self.device):
            return self.driver.evaluate(self, self._cut(batch))

    def objective_of(
        self, model: nn.Module, part: Any, rows: range, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the (sum, count) that slice ``index``, which is these global rows, has on a model.
        """
        with self._randomly(index, rows):
            return self.objective(model, part, max(len(rows), 1))

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        """
        Go backward, as `torch.autograd.backward` does; losses, which come without a gradient, are
        scaled in fp16.

        Args:
            tensors: where to begin.
            grads: their gradients; None for losses.
            options: of `torch.autograd.backward`, as ``inputs`` or ``retain_graph``.
        """
        given = list(grads) if grads is not None else [None] * len(tensors)
        scale = self.scale.value if self.scale is not None else None
        roots = [
            x * scale if g is None and scale is not None else x
            for x, g in zip(tensors, given, strict=True)
        ]
        with self.computing():  # forwards may be recomputed
            torch.autograd.backward(roots, given, **options)

    def _end(self, sums: torch.Tensor, versions: list[int]) -> Metrics:
        """Reduce, clip, step and publish."""
        numbers, norm = self.engine.finish(sums, self.scale.value if self.scale else 1.0)
        skipped = self.scale is not None and norm is not None and not bool(torch.isfinite(norm))
        for watcher in self.watchers:
            watcher(self)
        if not skipped:
            self.optimizer.step()
            if self.offload.disk is not None:
                to_files(self.optimizer, Path(self.offload.disk) / f"rank-{self.context.rank}")
            if self.scheduler is not None:
                self.scheduler.step()
        if self.scale is not None:
            self.scale.update(not skipped)
        self.engine.step_done()
        for buffer, version in zip(self.buffers, versions, strict=True):
            if buffer._version != version:
                self.axis.from_first(buffer, "a buffer")
        return Metrics(self.steps, numbers, norm, skipped)

    def _cut(self, batch: Any) -> list[MicroBatch]:
        """
        Return this rank's micro-batches: its rows, which ranks that differ along dp only share with
        nobody.
        """
        world = self.rows.size
        rank = self.rows.index
        times = self.settings.accumulate
        shard = self.feed.shard(batch)
        if shard is not None:
            pieces = cut_rows(shard.rows, world, times)[rank]
            local = cut_sizes(shard.sizes)
            strategy = Strategy(dims=self.strategy.dims)
        elif self.strategy.local or self.strategy.whole:
            rows = count_rows(batch, self.strategy)
            local = cut_rows(rows, 1, times)[0]
            strategy = Strategy(dims=self.strategy.dims)
            offset = rank * rows if self.strategy.local else 0
            pieces = [range(piece.start + offset, piece.stop + offset) for piece in local]
        else:
            strategy = self.strategy
            local = pieces = cut_rows(count_rows(batch, strategy), world, times)[rank]
        if count_rows(batch, strategy) == 0:
            raise UsageError("the batch has no rows", where="pdrun.Run.step")
        found = []
        for place, (piece, where) in enumerate(zip(pieces, local, strict=True)):
            part = take(batch, where if len(where) else range(1), strategy)
            found.append(
                MicroBatch(part, piece, 1.0 if len(where) else 0.0, place * world + rank, place)
            )
        return found

    def here(self, batch: Any) -> Any:
        """
        Return a micro-batch's rows as the model gets them: on this rank's device, in the policy's
        type.
        """
        part = batch if self.sequences is None else self.sequences.part(batch, self.axes)
        return to_device(part, self.device, self.settings.precision.inputs)

    def _loose_buffers(self) -> Iterator[torch.Tensor]:
        for module in self.model.modules():
            if not isinstance(module, norm_sync.SyncedBatchNorm):
                yield from (
                    buffer for buffer in module.buffers(recurse=False) if buffer is not None
                )

    # ---- data ---------------------------------------------------------------

    def data(self, source: Iterable[Any], *, training: bool = True) -> Iterator[Any]:
        """
        Yield the batches of one epoch, from where the run stands to the epoch's end.

        Args:
            source: a `pdrun.Loader`; torch's DataLoader over a dataset with an index, whose
                ``batch_size`` counts the
                rows of
                a step over all ranks; or any iterable of batches. Of the first two each rank reads only its own rows.
            training: False is for evaluation: it begins with the first batch each time, in the
                order of epoch 0, and
                leaves the run's position and source alone, so that it may lie inside a loop over training data.

        Raises:
            UsageError: an epoch of another source is under way, or another loop has gone on with
                this one.
        """
        ranks = self.rows.size, self.rows.index
        yield from self.feed.data(
            source, training, self.seed, ranks, self.settings.accumulate, self.strategy
        )

    @property
    def position(self) -> Position:
        """Where the run stands in its training data."""
        return self.feed.position

    @property
    def source(self) -> Loader | None:
        """The loader that `data` was last given for training."""
        return self.feed.source

    @property
    def seed(self) -> int:
        """The seed of all randomness of the run."""
        return self.dice.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.dice.seed = value

    # ---- words --------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Where everything goes, as plain data: ``run.plan.save("plan.json")``."""
        return plan_of(self)

    def explain(self, batch: Any = None) -> str:
        """
        Return in words what the run does, and how much memory a step takes on this rank's device.

        Args:
            batch: one as `step` takes it; with it, activations are counted too, by running a
                micro-batch on fake
                tensors.
        """
        return explain(self, batch)

    def memory(self, batch: Any = None) -> Estimate:
        """Return the bytes that a step takes on this rank's device, by kind; see `explain`."""
        return estimate(self, batch)

    # ---- proof --------------------------------------------------------------

    def verify(self, source: Iterable[Any] | None = None, *, steps: int = 3) -> Report:
        """
        Compute some batches as the run does and as one process does, and compare losses, norms and
        every gradient.

        Nothing is trained: weights, optimizer and position stay. Every rank calls this, and
        computes whole batches on a whole copy of the model, which must fit its device.

        Args:
            source: global batches, or a Loader; default: the Loader that `data` was last given for
                training.
            steps: how many batches.

        Raises:
            ConfigError: the run does not compute what one process does.
        """
        return verify(self, source, steps)

    def probe(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return (sum, count), norm and whole gradients of a global batch, and train nothing."""
        sums = self._passes(batch)
        numbers, norm = self.engine.finish(sums, self.scale.value if self.scale else 1.0)
        grads = self.gradients()
        if norm is None:
            norm = square_sum(list(grads.values()), exact=True).sqrt()
        self.engine.step_done()
        return numbers, norm, grads

    # ---- checkpoints --------------------------------------------------------

    def save(self, folder: str | Path, *, keep: int | None = None, wait: bool = True) -> Saving:
        """
        Save everything that the run needs to go on, as ``folder/step-N``; every rank calls this.

        Args:
            keep: how many checkpoints to leave in the folder, this one included; None: all.
            wait: False returns once the tensors are copied; a thread writes them. The next save
                waits for it.

        Raises:
            ConfigError: a rank could not write.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}", where="pdrun.Run.save")
        self.guard.check_whole("pdrun.Run.save")
        self.settle()
        started = self._saving = saving.save(self, Path(folder), keep, self.axis.watch.seconds)
        if wait:
            self.settle()
        return started

    def settle(self) -> None:
        """Wait for a save that is on its way."""
        if self._saving is not None:
            started = self._saving
            self._saving = None
            started.wait()

    def load(self, folder: str | Path) -> None:
        """
        Take up a checkpoint, saved by any number of ranks at any level: one by its own folder, or
        the newest whole one.

        Raises:
            ConfigError: there is none, or it belongs to another model or optimizer.
        """
        found = self._agreed(Path(folder))
        if found is None:
            raise ConfigError("holds no whole checkpoint", where=str(folder))
        saving.load(self, found)
        self.guard.note()

    def resume(self, folder: str | Path) -> bool:
        """
        Take up the newest whole checkpoint of a folder where there is one; return whether there
        was.
        """
        found = self._agreed(Path(folder))
        if found is not None:
            saving.load(self, found)
            self.guard.note()
        return found is not None

    def _agreed(self, folder: Path) -> Path | None:
        """Return the checkpoint that rank 0 finds, on every rank."""
        self.settle()
        itself = (folder / "run.json").is_file()
        names = [path.name for path in storage.whole(folder)]
        mine = ITSELF if itself else int(names[-1].rpartition("-")[2]) if names else NOTHING
        step = torch.tensor([mine], device=self.device)
        self.engine.place.job.from_first(step, "which checkpoint to load")
        if int(step) == NOTHING:
            return None
        if int(step) == ITSELF:
            return folder
        name = f"{storage.PREFIX}{int(step):08d}"  # where a rank does not see it, `load` tells all
        return folder / (f".old-{name}" if f".old-{name}" in names else name)

    # ---- weights ------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor]:
        """
        Return whole gradients by name; only inside a function of ``watchers``, and on every rank.
        """
        return {
            name: grad.clone() for name, grad in wholes.gradients(self.engine) if grad is not None
        }

    def full_weights(self) -> dict[str, torch.Tensor]:
        """
        Return the whole weights by name, in the optimizer's type, on every rank's device; every
        rank must call this.
        """
        found = dict(wholes.full_weights(self.engine))
        return {entry.name: found[entry.name] for entry in self.engine.catalogue.entries}

    def export(self, path: str | Path) -> None:
        """
        Write whole weights and buffers as one safetensors file, a bundle at a time; every rank must
        call this.
        """
        exporting.export(self, Path(path))

    def load_weights(self, path: str | Path) -> None:
        """
        Take the weights of a safetensors file; optimizer, step and data stay. Every rank must call
        this.

        Raises:
            ConfigError: it lacks a weight, or one has another shape.
        """
        exporting.load_weights(self, Path(path))
        self.guard.note()
