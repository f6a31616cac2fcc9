"""
`Run`: the result of `pdrun.parallelize`, which the training loop uses.

The methods here check their arguments and call the rooms that do the work, with the run's state
(`pdrun.parallel.training.state.RunState`).
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch

from pdrun import elastic
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.plan_file import StepPrediction
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.checkpoint.export import export_weights, load_weights
from pdrun.parallel.checkpoint.load import agree_on_checkpoint, load_checkpoint
from pdrun.parallel.checkpoint.save import PendingSave, save_checkpoint
from pdrun.parallel.data.loader import Loader, Position
from pdrun.parallel.evaluation.evaluate import MetricFunction, evaluate_source, is_source
from pdrun.parallel.report.explain import RunPlan, build_plan, explain_run
from pdrun.parallel.report.memory import MemoryEstimate, estimate_memory
from pdrun.parallel.report.utilization import StepUtilization, measure_utilization
from pdrun.parallel.report.verify import VerifyReport, verify_run
from pdrun.parallel.startup.init import Context
from pdrun.parallel.training.metrics import Metrics
from pdrun.parallel.training.state import RunState
from pdrun.parallel.training.step import (
    evaluate_batch,
    full_gradients,
    probe_gradients,
    train_batch,
)
from pdrun.parallel.zero.full_tensors import weights_by_name

TIMED_STEPS = 32
"""Steps whose median `Run.explain` prints."""


class Run:
    """
    A training run on every device of a mesh; made by `pdrun.parallelize`.

    Attributes:
        model: the model, its parameters on this rank's device. Between steps they are the weights
            up to level 2. At level 3 a read outside of a forward pass is refused:
            `gathered_weights` and `full_weights` gather them.
        optimizer: the optimizer; its groups contain what this rank trains. Learning rate schedulers
            can use it.
        mesh: the devices.
        axes: this rank's groups along the axes of the mesh.
        steps: steps made so far.
    """

    def __init__(self, state: RunState, *, clip_value: float | None = None) -> None:
        self.state = state
        """The parts of the run; internal."""
        self.model = state.model
        self.optimizer = state.optimizer
        self.scheduler = state.scheduler
        self.mesh = state.mesh
        self.axes = state.axes
        self.watchers: list[Callable[[Run], None]] = []
        """
        Called in each step when the gradients are reduced and clipped, before they are used.
        """
        if clip_value is not None:
            self.watchers.append(partial(_clip_elements, limit=clip_value))
        self.on_step: list[Callable[[Run, Metrics], None]] = []
        """Called after each step with its numbers."""
        self._saving: PendingSave | None = None
        self._report_at = 0.0
        """Monotonic time from which a step is reported to pdrun."""
        self._last_metrics: Metrics | None = None
        self.predicted: StepPrediction | None = None
        """What the search of the plan has predicted for a step; None without a search."""
        self.expert_axes: dict[str, str] = {}
        """See `RunPlan.experts`."""
        self.topology: Topology | None = None
        """The topology for which the plan was searched, if it was given."""
        self._utilization: StepUtilization | None = None
        """Made in the first step."""
        self._step_ended: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=TIMED_STEPS)

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: a run has this process's connections."""
        raise UsageError(
            "a run cannot be copied or pickled: it has connections of this process",
            where="pdrun.Run",
            hint="use run.save(FOLDER) and run.resume(FOLDER), or run.full_weights()",
        )

    @property
    def steps(self) -> int:
        """Steps made so far."""
        return self.state.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.state.steps = value

    @property
    def context(self) -> Context:
        """This worker's rank and device."""
        return self.state.context

    @property
    def recomputed(self) -> list[str]:
        """Names of the modules whose forward is computed again in the backward."""
        return self.state.recomputed_modules

    @property
    def compiled(self) -> list[str]:
        """Names of the modules that torch.compile compiles."""
        return self.state.compiled_modules

    # ---- a step -------------------------------------------------------------

    def step(self, batch: Any) -> Metrics:
        """
        Train on a global batch: forward, backward, one step of the optimizer.

        Args:
            batch: a batch of `data`, which is this rank's part; any other batch is global and the
                same on every rank, unless ``dataset_strategy`` says otherwise.

        Raises:
            UsageError: the batch has no rows, differs from other ranks' first batch, or the loss
                does not keep its contract.
            DeadlineExceeded: a rank did not take part in time; names all of them.
        """
        metrics = train_batch(self.state, batch, self._call_watchers)
        if self._utilization is None:
            self._utilization = measure_utilization(self.state, batch, self.topology)
        self._time_step(metrics)
        self._last_metrics = metrics
        if monotonic() >= self._report_at:
            self._report_step(metrics)
        for call in self.on_step:
            call(self, metrics)
        return metrics

    def _time_step(self, metrics: Metrics) -> None:
        """Note the seconds since the step before: a device runs behind, the ends keep its pace."""
        ended = perf_counter()
        if self._step_ended is not None:
            metrics.seconds = ended - self._step_ended
            self._step_seconds.append(metrics.seconds)
        self._step_ended = ended
        if self.predicted is not None:
            metrics.predicted_seconds = self.predicted.seconds

    def _report_step(self, metrics: Metrics) -> None:
        """Report a step to pdrun; the first time also make sure that the last one is reported."""
        if not self._report_at:
            atexit.register(_report_last_step, weakref.ref(self))
        self._report_at = elastic.sample_step(metrics.step, partial(self._read_numbers, metrics))

    def _read_numbers(self, metrics: Metrics) -> dict[str, float]:
        """Return the numbers of a step to report."""
        numbers = metrics.read_numbers()
        if self._utilization is not None and self._step_seconds:
            numbers |= self._utilization.read_share(median(self._step_seconds))
        return numbers

    def _call_watchers(self) -> None:
        for watcher in self.watchers:
            watcher(self)

    def evaluate(
        self,
        source: Any,
        *,
        metrics: Mapping[str, MetricFunction] | None = None,
        outputs: bool | Callable[[Any, Any], Any] = False,
        loss: bool = True,
    ) -> Any:
        """
        Evaluate the model on all rows of a source, each row once; every rank calls this.

        The model is in eval mode meanwhile: dropout is off. Nothing is trained, and the position
        in the training data does not move.

        Args:
            source: as for `data`. A batch that is not a loader or an iterator, without ``metrics``
                and ``outputs``, gives the model's outputs on this rank's micro-batches instead, in
                the mode that the model is in: None for micro-batches without rows, and on ranks
                without the last stage of a pipeline.
            metrics: functions of (output, batch) by name. Each returns what is summed over all
                rows, or (sum, count) for a mean.
            outputs: a function of (output, batch) that returns what is gathered, with one entry
                per row; True: the model's output. It must fit the memory of every host.
            loss: compute the run's loss.

        Returns:
            an `Evaluation`, the same on every rank; of a batch the list of outputs.

        Raises:
            UsageError: a metric or output has another form, or the source has no batch.
        """
        if metrics is None and outputs is False and not is_source(source):
            return evaluate_batch(self.state, source)
        return evaluate_source(self.state, source, metrics, outputs, loss)

    # ---- data ---------------------------------------------------------------

    def data(self, source: Iterable[Any], *, training: bool = True) -> Iterator[Any]:
        """
        Yield the batches of one epoch, from the run's position to the epoch's end.

        Args:
            source: a `pdrun.Loader`; torch's DataLoader over a dataset with an index, whose
                ``batch_size`` counts the rows of a step over all ranks; or any iterable of batches.
                Of the first two each rank reads only its own rows.
            training: False for evaluation: it starts with the first batch each time, in the order
                of epoch 0, and does not change the run's position and source. Such a loop can be
                inside a loop over training data.

        Raises:
            UsageError: an epoch of another source is in progress, or another loop has moved the
                position.
        """
        state = self.state
        ranks = state.row_axis.size, state.row_axis.index
        yield from state.feed.iter_epoch(
            source, training, state.seed, ranks, state.settings.accumulate, state.batch_slicing
        )

    @property
    def position(self) -> Position:
        """The run's position in its training data."""
        return self.state.feed.position

    @property
    def source(self) -> Loader | None:
        """The last loader of a training loop."""
        return self.state.feed.source

    @property
    def seed(self) -> int:
        """The seed of all random numbers of the run."""
        return self.state.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.state.seed = value

    # ---- reports ------------------------------------------------------------

    @property
    def plan(self) -> RunPlan:
        """The placement of everything, as plain data: ``run.plan.save("plan.json")``."""
        found = replace(build_plan(self.state), experts=self.expert_axes)
        if self.predicted is None:
            return found
        return replace(found, predicted=asdict(self.predicted))

    def explain(self, batch: Any = None) -> str:
        """
        Return a description of the run, and the memory of a step on this rank's device.

        Args:
            batch: as for `step`; with it, activations are counted too, by running a micro-batch on
                fake tensors.
        """
        text = explain_run(self.state, batch)
        if self.predicted is None:
            return text
        measured = median(self._step_seconds) if self._step_seconds else None
        return f"{text}\n{self.predicted.describe(measured)}"

    def memory(self, batch: Any = None) -> MemoryEstimate:
        """Return the bytes of a step on this rank's device, by kind; see `explain`."""
        return estimate_memory(self.state, batch)

    # ---- proof --------------------------------------------------------------

    def verify(self, source: Iterable[Any] | None = None, *, steps: int = 3) -> VerifyReport:
        """
        Compute some batches as the run does and as one process does; compare losses, norms and
        every gradient.

        Nothing is trained: weights, optimizer and position do not change. Every rank calls this.
        Each computes global batches on a full copy of the model, which must fit its device.

        Args:
            source: global batches, or a Loader; default: the last Loader of a training loop.
            steps: number of batches.

        Raises:
            ConfigError: the run does not compute what one process does.
        """
        return verify_run(self.state, source, steps)

    def probe(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return (sum, count), norm and full gradients of a global batch; nothing is trained."""
        return probe_gradients(self.state, batch)

    # ---- checkpoints --------------------------------------------------------

    def save(
        self, folder: str | Path, *, keep: int | None = None, wait: bool = True
    ) -> PendingSave:
        """
        Save the run as ``folder/step-N``; every rank calls this.

        Args:
            keep: number of checkpoints to keep in the folder, this one included; None: all.
            wait: False returns when the tensors are copied; a thread writes them. The next save
                waits for it.

        Raises:
            ConfigError: a rank could not write.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"keep must be at least 1, got {keep}", where="pdrun.Run.save")
        self.state.guard.check_not_torn("pdrun.Run.save")
        self.settle()
        seconds = self.state.data_group.watchdog.seconds
        started = self._saving = save_checkpoint(self.state, Path(folder), keep, seconds)
        if wait or self.state.served is not None:  # the servers' tables are of this step
            self.settle()
        return started

    def attach(self, name: str, target: Any) -> None:
        """
        Save and load the state of an object with the run: a scheduler that the loop calls, or any
        other object with ``state_dict`` and ``load_state_dict``.

        Its state, of plain values, is that of rank 0. If a checkpoint with this name was loaded
        before, the object gets that state at once.

        Raises:
            UsageError: the object lacks a method, or the name is taken.
        """
        self.state.attached.add(name, target)

    def settle(self) -> None:
        """Wait for a save in progress."""
        if self._saving is not None:
            started = self._saving
            self._saving = None
            started.wait()

    def load(self, folder: str | Path) -> None:
        """
        Load a checkpoint, saved by any number of ranks at any level.

        Args:
            folder: of one checkpoint, or of several: the newest complete one is loaded.

        Raises:
            ConfigError: the folder has no checkpoint, or it belongs to another model or optimizer.
        """
        found = self._find_checkpoint(Path(folder))
        if found is None:
            raise ConfigError("has no complete checkpoint", where=str(folder))
        load_checkpoint(self.state, found)
        self.state.guard.remember_state()

    def resume(self, folder: str | Path) -> bool:
        """Load the newest complete checkpoint of a folder, if it has one; return whether it has."""
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
        Return full gradients by name; only inside a function of ``watchers``, and on every rank.
        """
        return full_gradients(self.state)

    def full_weights(self) -> dict[str, torch.Tensor]:
        """
        Return the full weights by name, in the optimizer's type, on every rank's device; every rank
        must call this.
        """
        found = weights_by_name(self.state.engine)
        if self.state.served is not None:
            found |= self.state.served.dense_weights()
        return found

    def gathered_weights(self) -> AbstractContextManager[None]:
        """
        Return a context manager in which the model's parameters have their values; every rank must
        enter it.

        For code between steps that reads or changes parameters at level 3: ``state_dict()``,
        ``load_state_dict()``, ``save_pretrained``, calls of a submodule, a moving average. It needs
        the memory of the full weights. Every rank must make the same changes. Below level 3 it does
        nothing.

        Raises:
            UsageError: another rank does not enter it, or has changed a weight differently.
        """
        gatherer = self.state.engine.gatherer
        return nullcontext() if gatherer is None else gatherer.gathered()

    def export(self, path: str | Path) -> None:
        """
        Write full weights and buffers as one safetensors file, one bucket at a time; every rank
        must call this.
        """
        export_weights(self.state, Path(path))

    def load_weights(self, path: str | Path) -> None:
        """
        Load the weights of a safetensors file; optimizer, step and data do not change. Every rank
        must call this.

        Raises:
            ConfigError: it lacks a weight, or a weight has another shape.
        """
        load_weights(self.state, Path(path))
        self.state.guard.remember_state()


def _report_last_step(reference: weakref.ref[Run]) -> None:
    """Report the last step of a run when the process exits, without waiting for a device."""
    run = reference()
    metrics = run._last_metrics if run is not None else None
    if run is not None and metrics is not None and run.state.device.type == "cpu":
        elastic.sample_step(metrics.step, partial(run._read_numbers, metrics), is_last=True)


def _clip_elements(run: Run, limit: float) -> None:
    """Limit the elements of all gradients that this rank has."""
    for group in run.optimizer.param_groups:
        torch.nn.utils.clip_grad_value_(group["params"], limit)
