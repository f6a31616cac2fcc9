"""
Runs a schedule: the actions of this rank in their order.

The target of a micro-batch is part of its batch, on every rank, so it always meets its own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pdrun.errors import UsageError
from pdrun.parallel.pipeline import split_backward
from pdrun.parallel.pipeline.describe import describe_pipeline
from pdrun.parallel.pipeline.exchange import MicroBatchState, Received, StageExchange
from pdrun.parallel.pipeline.metadata import API_NAME, BoundaryRecord
from pdrun.parallel.pipeline.p2p import P2PLinks
from pdrun.parallel.pipeline.schedules.schedule import PipelineSchedule, StageAction
from pdrun.parallel.pipeline.sequence_slices import SequenceSlices
from pdrun.parallel.pipeline.skips import trace_forward
from pdrun.parallel.pipeline.stage import PipelineStages, StageForward
from pdrun.parallel.torch_compat import widest_float
from pdrun.parallel.training.loss import call_model, check_requires_grad

if TYPE_CHECKING:
    from pdrun.parallel.training.driver import KeepFunction, MicroBatch, StepContext


class PipelineRunner:
    """
    The driver of a pipeline: see `pdrun.parallel.training.driver.Driver`.

    Args:
        schedule: a valid one.
        stages: those of this rank.
        links: to the other ranks.
        dynamic: describe every micro-batch to the next stage, for data-dependent branches.
        full: a copy of the full model without memory, to find what passes over stages.
        slicer: slices sequences; None: each micro-batch is one piece.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: PipelineStages,
        links: P2PLinks,
        dynamic: bool = False,
        full: nn.Module | None = None,
        slicer: SequenceSlices | None = None,
    ) -> None:
        self.schedule = schedule
        self.stages = stages
        self.exchange = StageExchange(schedule, links, dynamic)
        self._actions = schedule.rows[links.axis.index]
        ends = {
            action.stage: place for place, action in enumerate(self._actions) if action.kind in "BW"
        }
        self._own_stages = sorted(ends, key=lambda stage: -ends[stage])
        """The stages of this rank, as chunks 0, 1, ...: chunk 0 is finished last."""
        self._chunk_by_weight = {
            weight: 0 if weight in stages.shared_weights else chunk
            for chunk, stage in enumerate(self._own_stages)
            for weight in stages.trained_weights[stage]
        }
        """The chunk of each weight; weights that stages share are in chunk 0 on every rank."""
        self._borrowed_grads: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients of weights in another chunk than the one that computed them."""
        self._last_backward = {
            action.stage: action for action in self._actions if action.kind in "BI"
        }
        """The last backward of each stage that needs weights."""
        self._live: dict[tuple[int, int], MicroBatchState] = {}
        self._batches: list[Any] = []
        self._untraced = full
        self._slicer = slicer

    @property
    def splits_backward(self) -> bool:
        """See `Driver.splits`."""
        return self.schedule.splits_backward

    def chunk_of(self, name: str) -> int:
        """Return the chunk of a weight on this rank; 0 for a weight that several stages use."""
        return self._chunk_by_weight.get(self.stages.own_weights[name], 0)

    def chunks_using(self, name: str) -> tuple[int, ...]:
        """Return the chunks that compute with a weight of this rank."""
        return tuple(
            sorted(self._own_stages.index(stage) for stage in self.stages.weight_stages[name])
        )

    def check_units(self, names: Sequence[str]) -> None:
        """Refuse modules with parts on several stages; see `Driver.check_units`."""
        for name in names:
            inside = [
                at
                for unit, at in self.stages.split.unit_stages.items()
                if f"{unit}.".startswith(f"{name}.")
            ]
            if len(set(inside)) > 1:
                what = f"the unit {name} is on the stages {min(inside)} to {max(inside)}"
                raise UsageError(
                    what, where=API_NAME, hint="set units= to modules that are on one stage each"
                )

    def describe(self) -> str:
        """Return the description of stages, shares and schedule."""
        return describe_pipeline(self.schedule, self.stages.split)

    # ---- a step -------------------------------------------------------------

    def run_microbatches(self, step: StepContext, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """
        Run forward and backward of all micro-batches.

        Returns:
            ``[microbatches, 2]``: sum and count of the loss of each, on the last rank; zeros on the
                others.
        """
        if len(micros) != self.schedule.microbatch_count:
            count = self.schedule.microbatch_count
            what = f"the schedule has {count} micro-batches, got {len(micros)}"
            raise UsageError(what, where=API_NAME)
        slices = self.schedule.slices
        sums = torch.zeros(len(micros), 2, dtype=widest_float(step.device), device=step.device)
        micros = self._begin_step(step, micros, self._slicer)
        done: dict[tuple[int, bool], int] = {}
        for place, action in enumerate(self._actions):
            for soon in self._actions[
                place : place + 2
            ]:  # the input of the next action is received during this one
                self.exchange.post_receives(soon, self._live, wait=soon is action)
            if action.kind == "F":
                loss = self._run_forward(step, action, micros[action.micro])
                if loss is not None:
                    sums[action.micro // slices] += torch.stack(loss).to(sums.dtype)
            else:
                ends = action.kind != "I"
                count = done[action.stage, ends] = done.get((action.stage, ends), 0) + 1
                self._run_backward(step, action, count == 1, count == len(micros))
        if self._slicer is not None:
            self._slicer.end_step(step.objective.is_mean)
        sums = self.exchange.send_losses(sums)
        self.exchange.links.wait_sends()
        return sums

    def evaluate_microbatches(
        self, step: StepContext, micros: Sequence[MicroBatch], keep: KeepFunction | None = None
    ) -> list[Any]:
        """Run forwards only, without gradients; see `Driver.evaluate_microbatches`."""
        found: list[Any] = [None] * len(micros)
        with torch.no_grad():
            micros = self._begin_step(step, micros)
            for stage in sorted(self._own_stages):
                for micro in micros:
                    action = StageAction(stage, "F", micro.position)
                    _, sent, tensors, output = self._run_stage(
                        step, action, micro, self.exchange.take_forward(action), keep=keep
                    )
                    if sent is not None:
                        self.exchange.send_output(action, sent, tensors)
                    elif micro.weight:
                        found[micro.position] = output
                step.engine.end_evaluation(self._own_stages.index(stage))
        self.exchange.links.wait_sends()
        return found

    def _begin_step(
        self,
        step: StepContext,
        micros: Sequence[MicroBatch],
        slicer: SequenceSlices | None = None,
    ) -> Sequence[MicroBatch]:
        """Return the pieces of a step: its micro-batches, or their slices."""
        self._live.clear()
        self._borrowed_grads.clear()
        self._batches = [step.prepare_batch(micro.batch) for micro in micros]
        if self._untraced is not None:
            self._trace_model(step, self._untraced.train(step.model.training))
            self._untraced = None
        if slicer is not None:
            micros, self._batches = slicer.begin_step(micros, self._batches)
        self.exchange.begin_step(self._batches, step.model.training)
        return micros

    def _trace_model(self, step: StepContext, full: nn.Module) -> None:
        """Find what passes over stages, in the first step."""
        with self.exchange.links.axes.dry_run():
            self.stages.trace = trace_forward(
                full,
                self.stages.split,
                step.objective.forward or call_model,
                self._batches[0],
                step.device,
            )

    # ---- forward ------------------------------------------------------------

    def _run_forward(
        self, step: StepContext, action: StageAction, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a forward; return the sum and count of the loss on the last stage."""
        (record, inputs), sent, tensors, output = self._run_stage(
            step, action, micro, self.exchange.take_received(action), judge=True
        )
        work = self._live[action.stage, action.micro] = MicroBatchState(record, inputs, sent)
        if sent is not None:
            self.exchange.send_output(action, sent, tensors)
            pairs = zip(sent.sent, tensors, strict=True)
            work.roots = [
                get_gradient_edge(x) for one, x in pairs if one.needs_grad
            ]  # the tensors themselves can be freed
            return None
        total, count = output
        check_requires_grad(total)
        if not micro.weight:
            total = total * 0.0
            count = count * 0.0
        work.roots = [total]
        return total.detach().to(widest_float(step.device)), count.to(widest_float(step.device))

    def _run_stage(
        self,
        step: StepContext,
        action: StageAction,
        micro: MicroBatch,
        came: Received,
        judge: bool = False,
        keep: KeepFunction | None = None,
    ) -> tuple[Received, BoundaryRecord | None, list[torch.Tensor], Any]:
        """
        Run a stage's part of the model; return what it sends, and on the last stage the output or
        its loss, or what is kept of it.
        """
        record, inputs = came
        batch = self._batches[micro.position]
        if record is not None:
            for one, tensor in zip(record.sent, inputs, strict=True):
                tensor.requires_grad_(one.needs_grad)
        chunk = self._own_stages.index(action.stage)
        place = action.micro % self.schedule.slices if judge else 0
        # each slice draws its own random numbers; dropout depends on positions only
        part = chunk + place * len(self._own_stages)
        calls = record.dropout_calls if record else 0
        # code before this stage's part of forward may have drawn random numbers for placeholders
        again = partial(
            step.rng.begin_forward,
            step.steps,
            micro.slice_index,
            micro.rows,
            step.device,
            part=part,
            calls=calls,
        )
        one_pass = StageForward(
            self.stages, action.stage, batch, record, inputs, again if record else lambda: None
        )
        last = action.stage == self.schedule.stage_count - 1
        weights = step.engine.forward(chunk, micro.position)
        split = self.schedule.splits_backward and torch.is_grad_enabled()
        sliced = self._slicer.computing(action) if self._slicer and judge else nullcontext()
        with (
            weights,
            sliced,
            step.forward_context(micro, part, calls),
            split_backward.splitting_backward(split),
        ):
            output = self.stages.run_forward(
                one_pass,
                lambda: step.objective.compute_output(step.model, batch),
                is_strict=not judge,
            )
            if last and judge:
                made, rows = output, max(len(micro.rows), 1)
                output = self.stages.compute_loss(
                    one_pass, lambda: step.objective.compute_loss(made, batch, rows)
                )
            elif last and keep is not None and micro.weight:
                output = keep(output, batch, micro)
        return (
            came,
            None if last else one_pass.make_record(step.rng.dropout_calls),
            one_pass.outputs,
            output,
        )

    # ---- backward -----------------------------------------------------------

    def _run_backward(
        self, step: StepContext, action: StageAction, first: bool, last: bool
    ) -> None:
        """
        Run a backward, or a part of it.

        ``first`` and ``last`` refer to the backwards that complete micro-batches of the stage.
        """
        work = self._live[action.stage, action.micro]
        chunk = self._own_stages.index(action.stage)
        if action.kind == "W":
            self._backward_weights(step, action, work, first, last)
            return
        roots = work.roots
        work.roots = []
        grads: list[torch.Tensor | None] = (
            [None] if work.sent_record is None else [*self.exchange.take_received(action)[1]]
        )
        sliced = nullcontext() if self._slicer is None else self._slicer.computing(action)
        if action.kind == "I" or any(
            self._chunk_by_weight[weight] != chunk
            for weight in self.stages.trained_weights[action.stage]
        ):
            with sliced:
                self._backward_input(step, action, work, roots, grads)
            self.exchange.send_gradients(action, work)
            if action.kind == "B":
                self._backward_weights(step, action, work, first, last)
            return
        with step.engine.backward(chunk, action.micro, action == self._last_backward[action.stage]):
            step.engine.begin_gradients(first=first, last=last, chunk=chunk)
            extra = self._pop_borrowed(chunk) if last else {}
            with sliced:
                keys, key_grads = self._later_gradients(action)
                if roots or extra or keys:
                    step.run_backward(
                        [*roots, *extra, *keys], [*grads, *extra.values(), *key_grads]
                    )
            self.exchange.send_gradients(action, work)
            step.engine.end_gradients()
        del self._live[action.stage, action.micro]

    def _backward_input(
        self,
        step: StepContext,
        action: StageAction,
        work: MicroBatchState,
        roots: list[Any],
        grads: list[torch.Tensor | None],
    ) -> None:
        """Run the backward for the input, and keep the remaining work for the weights."""
        if work.sent_record is None and step.loss_scale is not None:
            roots = [root * step.loss_scale.value for root in roots]
        keys, key_grads = self._later_gradients(action)
        roots, grads = [*roots, *keys], [*grads, *key_grads]
        inputs = [x for x in work.inputs if x.requires_grad]
        if self._slicer is not None:
            cache, index = self._slicer.cache_of(action)
            inputs += cache.earlier_leaves(index)
        weights = list(dict.fromkeys(self.stages.trained_weights[action.stage]))
        chunk = self._own_stages.index(action.stage)
        last = action == self._last_backward[action.stage]
        with step.engine.backward(chunk, action.micro, last, for_input=True):
            if not roots or not (inputs or weights):
                return
            with step.compute_context():  # forwards may be computed again
                found, work.deferred = split_backward.backward_input(
                    roots, grads, inputs, weights, self.schedule.splits_backward
                )
            for x, grad in zip(inputs, found, strict=True):
                # keys and values have gradients of several slices
                x.grad = grad if x.grad is None or grad is None else x.grad + grad

    def _later_gradients(self, action: StageAction) -> tuple[list[Any], list[torch.Tensor]]:
        """Return keys and values that later slices have used, and their gradients from there."""
        if self._slicer is None:
            return [], []
        cache, index = self._slicer.cache_of(action)
        return cache.roots(index)

    def _backward_weights(
        self, step: StepContext, action: StageAction, work: MicroBatchState, first: bool, last: bool
    ) -> None:
        """Complete a split backward."""
        chunk = self._own_stages.index(action.stage)
        step.engine.begin_gradients(first=first, last=last, chunk=chunk)

        def add_products(
            weight: nn.Parameter, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
        ) -> bool:
            """Add products where gradients are summed, unless another chunk does that."""
            return self._chunk_by_weight.get(weight) == chunk and step.engine.add_products(
                weight, pairs
            )

        grads = work.deferred.compute_grads(add_products) if work.deferred else {}
        for weight in [weight for weight in grads if self._chunk_by_weight[weight] != chunk]:
            _add_gradient(self._borrowed_grads, weight, grads.pop(weight))
        for weight, grad in (self._pop_borrowed(chunk) if last else {}).items():
            _add_gradient(grads, weight, grad)
        if grads:  # through autograd, so that hooks on the weights run
            torch.autograd.backward(list(grads), list(grads.values()))
        step.engine.end_gradients()
        del self._live[action.stage, action.micro]

    def _pop_borrowed(self, chunk: int) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that other chunks have computed for the weights of a chunk."""
        return {
            weight: self._borrowed_grads.pop(weight)
            for weight in list(self._borrowed_grads)
            if self._chunk_by_weight[weight] == chunk
        }


def _add_gradient(
    found: dict[nn.Parameter, torch.Tensor], weight: nn.Parameter, grad: torch.Tensor
) -> None:
    found[weight] = found[weight] + grad if weight in found else grad
