"""
A run: the loop's side of `pdrun.parallelize`.

A step cuts its batch into micro-batches, has a driver go forward and backward through them, and
tells global numbers. What happens to weights and gradients is the engine's business, what is random
the dice's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint.export import export_weights, load_weights
from pdrun.parallel.checkpoint.save_load import (
    PendingSave,
    agree_on_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from pdrun.parallel.data.loader import Loader, Position
from pdrun.parallel.report.explain import RunPlan, build_plan, explain_run
from pdrun.parallel.report.memory import MemoryEstimate, estimate_memory
from pdrun.parallel.report.verify import VerifyReport, verify_run
from pdrun.parallel.training.metrics import Metrics
from pdrun.parallel.training.state import RunState
from pdrun.parallel.training.step import (
    evaluate_batch,
    full_gradients,
    probe_gradients,
    train_batch,
)
from pdrun.parallel.zero.full_tensors import weights_by_name


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

    def __init__(self, state: RunState) -> None:
        self.state = state
        """What the run consists of; internal."""
        self.model = state.model
        self.optimizer = state.optimizer
        self.scheduler = state.scheduler
        self.mesh = state.mesh
        self.axes = state.axes
        self.watchers: list[Callable[[Run], None]] = []
        """
        Called in each step when the gradients are reduced and clipped, before they are used.
        """
        self._saving: PendingSave | None = None

    @property
    def steps(self) -> int:
        """How many steps have been made."""
        return self.state.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.state.steps = value

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
        return train_batch(self.state, batch, self._call_watchers)

    def _call_watchers(self) -> None:
        for watcher in self.watchers:
            watcher(self)

    def evaluate(self, batch: Any) -> list[Any]:
        """
        Return the model's outputs on this rank's micro-batches of a global batch; every rank calls
        this.

        Nothing is trained. Dropout and the like are as ``run.model.train()`` or ``.eval()`` has
        said. A micro-batch without rows has None, and so have all on ranks that the last stage of a
        pipeline isn't on.
        """
        return evaluate_batch(self.state, batch)

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
        state = self.state
        ranks = state.row_axis.size, state.row_axis.index
        yield from state.feed.iter_epoch(
            source, training, state.seed, ranks, state.settings.accumulate, state.batch_slicing
        )

    @property
    def position(self) -> Position:
        """Where the run stands in its training data."""
        return self.state.feed.position

    @property
    def source(self) -> Loader | None:
        """The loader that `data` was last given for training."""
        return self.state.feed.source

    @property
    def seed(self) -> int:
        """The seed of all randomness of the run."""
        return self.state.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.state.seed = value

    # ---- words --------------------------------------------------------------

    @property
    def plan(self) -> RunPlan:
        """Where everything goes, as plain data: ``run.plan.save("plan.json")``."""
        return build_plan(self.state)

    def explain(self, batch: Any = None) -> str:
        """
        Return in words what the run does, and how much memory a step takes on this rank's device.

        Args:
            batch: one as `step` takes it; with it, activations are counted too, by running a
                micro-batch on fake
                tensors.
        """
        return explain_run(self.state, batch)

    def memory(self, batch: Any = None) -> MemoryEstimate:
        """Return the bytes that a step takes on this rank's device, by kind; see `explain`."""
        return estimate_memory(self.state, batch)

    # ---- proof --------------------------------------------------------------

    def verify(self, source: Iterable[Any] | None = None, *, steps: int = 3) -> VerifyReport:
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
        return verify_run(self.state, source, steps)

    def probe(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return (sum, count), norm and whole gradients of a global batch, and train nothing."""
        return probe_gradients(self.state, batch)

    # ---- checkpoints --------------------------------------------------------

    def save(
        self, folder: str | Path, *, keep: int | None = None, wait: bool = True
    ) -> PendingSave:
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
        self.state.guard.check_not_torn("pdrun.Run.save")
        self.settle()
        seconds = self.state.data_group.watchdog.seconds
        started = self._saving = save_checkpoint(self.state, Path(folder), keep, seconds)
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
        found = self._find_checkpoint(Path(folder))
        if found is None:
            raise ConfigError("holds no whole checkpoint", where=str(folder))
        load_checkpoint(self.state, found)
        self.state.guard.remember_state()

    def resume(self, folder: str | Path) -> bool:
        """
        Take up the newest whole checkpoint of a folder where there is one; return whether there
        was.
        """
        found = self._find_checkpoint(Path(folder))
        if found is not None:
            load_checkpoint(self.state, found)
            self.state.guard.remember_state()
        return found is not None

    def _find_checkpoint(self, folder: Path) -> Path | None:
        self.settle()
        return agree_on_checkpoint(self.state, folder)

    # ---- weights ------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor]:
        """
        Return whole gradients by name; only inside a function of ``watchers``, and on every rank.
        """
        return full_gradients(self.state)

    def full_weights(self) -> dict[str, torch.Tensor]:
        """
        Return the whole weights by name, in the optimizer's type, on every rank's device; every
        rank must call this.
        """
        return weights_by_name(self.state.engine)

    def export(self, path: str | Path) -> None:
        """
        Write whole weights and buffers as one safetensors file, a bundle at a time; every rank must
        call this.
        """
        export_weights(self.state, Path(path))

    def load_weights(self, path: str | Path) -> None:
        """
        Take the weights of a safetensors file; optimizer, step and data stay. Every rank must call
        this.

        Raises:
            ConfigError: it lacks a weight, or one has another shape.
        """
        load_weights(self.state, Path(path))
        self.state.guard.remember_state()
