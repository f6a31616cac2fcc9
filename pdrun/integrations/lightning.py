"""
A strategy of Lightning that trains with a run of pdrun.

    from pdrun.integrations.lightning import ParallelRunStrategy
    trainer = Trainer(strategy=ParallelRunStrategy(optimizer_level=2), max_epochs=3)
    trainer.fit(module, train_loader, validation_loader)

``training_step`` is called on each slice of a batch and returns a mean over its rows, or
(sum, count). Loggers, callbacks, ``configure_optimizers`` and schedulers are Lightning's. The
``batch_size`` of a loader counts the rows of a step over all ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from pdrun.errors import UsageError
from pdrun.parallel.data.torch_loaders import from_torch
from pdrun.parallel.model.sync_batchnorm import SyncedBatchNorm
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.startup.init import init
from pdrun.parallel.training.step import slice_batch

WHERE = "pdrun.integrations.lightning"
RUN_SUFFIX = ".run"
"""Ending of the folder with the run's checkpoint beside a file of Lightning."""
REFUSED = {
    "pipeline": "stages call parts of a module: use pdrun.parallelize and run.step",
    "context": "use pdrun.parallelize and run.step",
    "loss": "training_step returns the loss",
    "forward": "training_step calls the model",
    "clip": "Trainer(gradient_clip_val=...)",
    "clip_value": 'Trainer(gradient_clip_val=..., gradient_clip_algorithm="value")',
    "scheduler": "configure_optimizers returns it",
}


class ParallelRunStrategy(Strategy):
    """
    Trains on every rank of the job that pdrun has started.

    Args:
        options: of `pdrun.parallelize`, such as ``optimizer_level``, ``accumulate``, ``precision``.

    Attributes:
        run: the run; None before ``fit``.
    """

    strategy_name = "pdrun"

    def __init__(self, **options: Any) -> None:
        for name in REFUSED.keys() & options.keys():
            raise UsageError(f"{name} is not an option here", where=WHERE, hint=REFUSED[name])
        super().__init__(checkpoint_io=TorchCheckpointIO())
        self._options = options
        self._context = init()
        self.run: Run | None = None
        self._step_index = 0
        self._resume_folder: Path | None = None

    # ---- what Lightning asks ------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return torch.device(self._context.device)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._context.is_main

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self._context.rank

    @property
    def local_rank(self) -> int:
        """This rank's index on its node."""
        return self._context.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._context.world_size

    @property
    def is_distributed(self) -> bool:
        """Whether logged values are synchronised, if ``sync_dist`` asks for it."""
        return self.world_size > 1

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.model.to(self.root_device)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's object on every rank."""
        if self.world_size == 1:
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src=src)
        return found[0]

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked."""
        if self.world_size == 1:
            return tensor
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor.contiguous())
        return torch.stack(found)

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any
    ) -> Any:
        """Return the sum or the mean of the ranks' values."""
        if self.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op).lower().rpartition(".")[2]
        kinds = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if name not in ("mean", "avg", "sum", *kinds):
            raise UsageError(f"reduce_op {reduce_op} is not supported", where=WHERE)
        total = tensor.clone()
        dist.all_reduce(total, op=kinds.get(name, dist.ReduceOp.SUM))
        return total / self.world_size if name in ("mean", "avg") else total

    # ---- the run ------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Build the run of the module and its optimizer."""
        super().setup(trainer)
        self._check_trainer(trainer)
        # the run shards the rows of a loader
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != "fit":
            return
        if len(self.optimizers) != 1 or not self.lightning_module.automatic_optimization:
            raise UsageError(
                "configure_optimizers must return one optimizer, with automatic optimization",
                where=WHERE,
                hint="several optimizers: pdrun.parallelize(optimizer=lambda params: [...])",
            )
        clip = trainer.gradient_clip_val
        kind = "clip_value" if str(trainer.gradient_clip_algorithm).endswith("value") else "clip"
        self.run = parallelize(
            self.lightning_module,
            self.optimizers[0],
            _read_loss,
            forward=self._call_training_step,
            **({kind: clip} if clip else {}),
            **self._options,
        )

    def _check_trainer(self, trainer: Any) -> None:
        """Refuse options of the Trainer that a run would ignore."""
        if trainer.accumulate_grad_batches != 1:
            raise UsageError(
                "accumulate_grad_batches is not supported",
                where=WHERE,
                hint="ParallelRunStrategy(accumulate=...), and batch_size= of all micro-batches",
            )
        if type(self.precision_plugin) is not Precision:
            raise UsageError(
                f"precision={trainer.precision} is not supported",
                where=WHERE,
                hint='ParallelRunStrategy(precision="bf16")',
            )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader that yields batches of the run."""
        return _RunLoader(self, dataloader)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Return the batch as it is: its slices are moved by the run."""
        return batch if self.run is not None else super().batch_to_device(batch, device)

    def _call_training_step(self, module: Any, batch: Any) -> Any:
        with _muted(module, SyncedBatchNorm.row_weight == 0):
            return module.training_step(batch, self._step_index)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch; return its loss."""
        if self.run is None:
            return super().training_step(*args, **kwargs)
        batch, self._step_index = args[0], args[1] if len(args) > 1 else 0
        metrics = self.run.step(batch)
        return torch.tensor(metrics.loss, device=self.root_device, requires_grad=True)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: the step of the run went backward."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which steps the run."""
        return closure()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate this rank's rows of a batch."""
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test this rank's rows of a batch."""
        return self._evaluate("test_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a step of the module on this rank's slices; other rows log nothing."""
        module = self.lightning_module
        step = getattr(module, name)
        if self.run is None:
            return step(*args, **kwargs)
        state = self.run.state
        state.engine.release_weights()
        found = None
        with torch.no_grad(), state.rng.isolate_generators(state.device):
            for micro in slice_batch(state, args[0]):
                with state.engine.forward(micro=micro.position), state.forward_context(micro):
                    with _muted(module, not micro.weight):
                        found = step(state.prepare_batch(micro.batch), *args[1:], **kwargs)
            state.engine.end_evaluation()
        return found

    # ---- checkpoints --------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights and buffers; every rank calls this."""
        if self.run is None:
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]
        state = self.run.state
        found = {name: value.cpu() for name, value in self.run.full_weights().items()}
        for name, buffer in state.model.named_buffers():
            if name in state.persistent_buffers:
                found[name] = buffer.cpu()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the run's checkpoint beside the file has it."""
        return {} if self.run is not None else optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save Lightning's file on rank 0, and the run's checkpoint beside it on all ranks."""
        filepath = self.broadcast(str(filepath))  # rank 0 sees which names are taken
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
        if self.run is not None:
            self.run.save(f"{filepath}{RUN_SUFFIX}", keep=1)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's file and the run's checkpoint beside it."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)
            shutil.rmtree(f"{filepath}{RUN_SUFFIX}", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load Lightning's file; the run's checkpoint follows when training starts."""
        folder = Path(f"{checkpoint_path}{RUN_SUFFIX}")
        self._resume_folder = folder if folder.is_dir() else None
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizer: the run does."""
        return False

    def on_train_start(self) -> None:
        """Load the run's checkpoint of a resumed fit."""
        if self.run is not None and self._resume_folder is not None:
            self.run.load(self._resume_folder)
            self._resume_folder = None

    def teardown(self) -> None:
        """Leave the module as it is: its weights may be shards."""


def _read_loss(output: Any, batch: Any) -> Any:
    """Return the loss that a training_step has returned."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    if found is None:
        raise UsageError(
            "training_step returned no loss",
            where=WHERE,
            hint='return the mean loss of the batch, or {"loss": ...}',
        )
    return found


class _muted:
    """Inside, `self.log` of a module does nothing, if wanted."""

    def __init__(self, module: Any, is_muted: bool) -> None:
        self._module = module
        self._is_muted = is_muted

    def __enter__(self) -> None:
        if self._is_muted:
            self._module.log = self._module.log_dict = lambda *args, **kwargs: None

    def __exit__(self, *_: Any) -> None:
        if self._is_muted:
            del self._module.log, self._module.log_dict


class _RunLoader:
    """A loader whose batches the run reads: each rank has its own rows."""

    def __init__(self, strategy: ParallelRunStrategy, source: Any) -> None:
        self._strategy = strategy
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        run = self._strategy.run
        if run is None:
            return iter(self.source)
        return run.data(self.source, training=self._strategy.lightning_module.trainer.training)

    def __len__(self) -> int:
        made = from_torch(self.source) if isinstance(self.source, DataLoader) else None
        return len(self.source if made is None else made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)
