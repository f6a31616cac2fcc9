"""
The Trainer of transformers on a run of pdrun.

    from pdrun.integrations.transformers import ParallelTrainer
    trainer = ParallelTrainer(model, args, train_dataset=data, parallel={"optimizer_level": 2})
    trainer.train()

A subclass: arguments, optimizer, scheduler, callbacks and logs are those of the Trainer. Its loop,
evaluation and checkpoints are those of `pdrun.Run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from pdrun.errors import UsageError
from pdrun.parallel.data.loader import Loader
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.startup.init import init

WHERE = "pdrun.integrations.transformers.ParallelTrainer"
RUN_FOLDER = "run"
"""Folder of the run's checkpoint inside of a checkpoint of the Trainer."""
REFUSED = {
    "deepspeed": 'parallel={"optimizer_level": 3}',
    "fsdp": 'parallel={"optimizer_level": 3}',
    "torch_compile": 'parallel={"compile": True}',
    "group_by_length": "a batch sampler in parallelize's loop",
    "label_smoothing_factor": "a loss of your own with pdrun.parallelize",
    "load_best_model_at_end": "pdrun.BestCheckpoint",
    "neftune_noise_alpha": "noise in the model",
    "push_to_hub": "push after training",
}


class ParallelTrainer(transformers.Trainer):
    """
    A Trainer whose steps are those of a run.

    ``per_device_train_batch_size`` counts the rows of one rank of dp in one micro-batch, as it does
    in the Trainer.

    Args:
        parallel: options of `pdrun.parallelize`, such as ``optimizer_level``, ``mesh``,
            ``strategy``.

    Attributes:
        run: the run; None before `train`.
    """

    def __init__(
        self, *args: Any, parallel: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        init()
        super().__init__(*args, **kwargs)
        self.control: Any = self.control
        self.parallel = dict(parallel or {})
        self.run: Run | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Refuse what this loop would ignore."""
        for name, instead in REFUSED.items():
            if getattr(self.args, name, None):
                raise UsageError(f"{name} is not supported", where=WHERE, hint=f"use {instead}")
        own = {"accumulate": "gradient_accumulation_steps", "clip": "max_grad_norm"}
        for name, theirs in own.items():
            if name in self.parallel:
                raise UsageError(
                    f"parallel= has {name}", where=WHERE, hint=f"set TrainingArguments({theirs}=)"
                )
        for name in ("compute_loss", "training_step", "prediction_step"):
            if getattr(type(self), name) is not getattr(transformers.Trainer, name):
                what = f"{type(self).__name__} overrides {name}, which a run does not call"
                raise UsageError(what, where=WHERE, hint="use pdrun.parallelize(loss=...)")
        if self.compute_loss_func is not None:
            raise UsageError(
                "compute_loss_func is not supported", where=WHERE, hint="parallelize(loss=...)"
            )

    def _make_source(self, dataset: Any, rows: int, *, training: bool) -> Any:
        """Return a source of batches of that many rows over all ranks."""
        if dataset is None:
            which = "train" if training else "eval"
            raise UsageError(f"{which}_dataset is missing", where=WHERE)
        collate = self._get_collator_with_removed_columns(self.data_collator)
        workers = self.args.dataloader_num_workers
        drop = training and self.args.dataloader_drop_last
        if isinstance(dataset, IterableDataset):
            return DataLoader(
                dataset, rows, collate_fn=collate, num_workers=workers, drop_last=drop
            )
        return Loader(
            dataset, rows, shuffle=training, drop_last=drop, collate=collate, workers=workers
        )

    def _row_ranks(self) -> int:
        """Return the number of ranks that share the rows of a batch."""
        mesh = self.parallel.get("mesh")
        return int(init().world_size if mesh is None else mesh.row_parts)

    def _make_run(self, max_steps: int) -> Run:
        if self.run is not None:
            return self.run
        self.create_optimizer_and_scheduler(max_steps)
        args = self.args
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
        options = {"precision": precision, "seed": args.seed, **self.parallel}
        if args.gradient_checkpointing:
            options.setdefault("recompute", "full")
        self.run = parallelize(
            self.model,
            self.optimizer,
            lambda output, batch: output.loss,
            scheduler=self.lr_scheduler,
            accumulate=args.gradient_accumulation_steps,
            clip=args.max_grad_norm or None,
            norm=True,
            **options,
        )
        return self.run

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer.train` does; the steps are those of the run."""
        options = self.args
        rows = options.per_device_train_batch_size * options.gradient_accumulation_steps
        source = self._make_source(self.train_dataset, rows * self._row_ranks(), training=True)
        per_epoch = len(source) if isinstance(source, Loader) else None
        max_steps = options.max_steps
        if max_steps <= 0:
            if per_epoch is None:
                raise UsageError(
                    "a stream has no length", where=WHERE, hint="TrainingArguments(max_steps=...)"
                )
            max_steps = math.ceil(options.num_train_epochs * per_epoch)
        run = self._make_run(max_steps)
        if resume_from_checkpoint:
            self._resume(run, resume_from_checkpoint)
        self._begin_state(max_steps, per_epoch)
        self.control = self.callback_handler.on_train_begin(options, self.state, self.control)
        total, logged, losses = 0.0, run.steps, 0.0
        while run.steps < max_steps and not self.control.should_training_stop:
            epoch = run.position.epoch
            self.control = self.callback_handler.on_epoch_begin(options, self.state, self.control)
            for batch in run.data(source):
                self.control = self.callback_handler.on_step_begin(
                    options, self.state, self.control
                )
                metrics = run.step(batch)
                losses += metrics.loss
                total += metrics.loss
                self.state.global_step = run.steps
                done = run.position.batch if run.position.epoch == epoch else per_epoch or 1
                self.state.epoch = epoch + done / per_epoch if per_epoch else float(epoch)
                self.control = self.callback_handler.on_step_end(options, self.state, self.control)
                if self.control.should_log and run.steps > logged:
                    rate = run.optimizer.param_groups[0]["lr"]
                    mean = losses / (run.steps - logged)
                    logs = {"loss": mean, "grad_norm": metrics.grad_norm, "learning_rate": rate}
                    losses, logged = 0.0, run.steps
                    self.log(logs)
                self._evaluate_and_save(run)
                if run.steps >= max_steps or self.control.should_training_stop:
                    break
            self.control = self.callback_handler.on_epoch_end(options, self.state, self.control)
            self._evaluate_and_save(run)
        found = {"train_loss": total / max(run.steps, 1)}
        self.log(dict(found))
        self.control = self.callback_handler.on_train_end(options, self.state, self.control)
        return transformers.trainer_utils.TrainOutput(run.steps, found["train_loss"], found)

    def _begin_state(self, max_steps: int, per_epoch: int | None) -> None:
        state, options = self.state, self.args
        state.max_steps = max_steps
        state.num_train_epochs = math.ceil(max_steps / (per_epoch or max_steps))
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        state.train_batch_size = options.per_device_train_batch_size
        state.compute_steps(options, max_steps)
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler = self.lr_scheduler

    def _evaluate_and_save(self, run: Run) -> None:
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self.evaluate()
        if self.control.should_save:
            self.control.should_save = False
            folder = Path(self.args.output_dir) / f"checkpoint-{run.steps}"
            run.save(folder / RUN_FOLDER, keep=1)
            self.save_model(str(folder))
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _resume(self, run: Run, where: Any) -> None:
        """Load a checkpoint: a folder of the Trainer, or True for the newest one."""
        folder = where
        if where is True:
            folder = transformers.trainer_utils.get_last_checkpoint(self.args.output_dir)
            if folder is None:
                raise UsageError(
                    f"{self.args.output_dir} has no checkpoint", where=WHERE, hint="train() begins"
                )
        run.load(Path(folder) / RUN_FOLDER)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on all rows, each once; ``compute_metrics`` gets them in order on every rank."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            found: dict[str, float] = {}
            for name, part in data.items():
                found |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        rows = self.args.per_device_eval_batch_size * self._row_ranks()
        source = self._make_source(data, rows, training=False)
        run = self._make_run(max(self.args.max_steps, 1))
        wanted: Any = False
        if self.compute_metrics is not None:

            def wanted(output: Any, batch: Any) -> Any:
                return output.logits, batch["labels"]

        result = run.evaluate(source, metrics={}, outputs=wanted)
        logs = {f"{metric_key_prefix}_loss": result.loss}
        if self.compute_metrics is not None:
            logits, labels = (part.numpy() for part in result.outputs)
            more = self.compute_metrics(transformers.EvalPrediction(logits, labels))
            logs |= {f"{metric_key_prefix}_{name}": value for name, value in more.items()}
        self.log(dict(logs))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, dict(logs)
        )
        return logs

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full weights as transformers does; every rank calls this."""
        if self.run is None:
            super().save_model(output_dir, _internal_call)
            return
        full = {name: value.detach() for name, value in self.run.full_weights().items()}
        state = self.run.state
        for name, buffer in state.model.named_buffers():
            if name in state.persistent_buffers:
                full[name] = buffer
        if self.args.should_save:
            with torch.no_grad():
                self._save(output_dir or self.args.output_dir, state_dict=full)
