"""
The contract of a loss: ``loss(output, batch) -> (sum, count)``.

The loss of a step is the sum of all sums divided by the sum of all counts, over micro-batches and
ranks of any size. Gradients are those of the sums, divided once by the global count. Means cannot
be combined that way: a scalar loss is taken for a mean over the rows of its slice, or, if a model
of the transformers library has computed it, over what it divides by (see `loss_check`).
"""

from __future__ import annotations

import inspect
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_structure import is_string_list, is_taken_as_samples
from pdrun.parallel.model.mixed_types import explained_types
from pdrun.parallel.torch_compat import widest_float
from pdrun.parallel.training.loss_check import MeanCheck, OwnLoss, check_loss_form, is_own_loss

LossFunction = Callable[[Any, Any], Any]
ForwardFunction = Callable[[nn.Module, Any], Any]
DetachedLoss: TypeAlias = torch.Tensor | tuple[float, float]
"""Sum and count: numbers on a CPU, ``[2]`` on an accelerator, which is not read in a step."""
PARALLELIZE = "pdrun.parallelize"
LOSS_CONTRACT = (
    "loss(output, batch) returns (sum, count), or a scalar that is the mean over the rows"
)


@dataclass
class Objective:
    """A model's loss on a batch, as (sum, count)."""

    model: nn.Module
    loss: LossFunction | None
    forward: ForwardFunction | None = None
    own_loss: OwnLoss | None = None
    """The loss that the model returns, if it is one of the transformers library."""
    is_split: bool = False
    """Whether a step has several slices, so that their weights matter."""
    checks_form: bool = False
    """Whether the loss is checked on the parts of an output, in the first step."""
    reads_graph: bool = field(default=False, init=False)
    """Whether an evaluation records the graph of a model's own loss, which has its count."""
    is_mean: bool = field(default=False, init=False)
    """Whether the loss turned out to be a mean."""
    step_batch: Any = field(default=None, init=False)
    """The batch of the current step: global, or this rank's part of a Loader's."""
    _is_in_step: bool = field(default=False, init=False)
    _has_checked_rows: bool = field(default=False, init=False)
    """Whether the rows of the current step's batch were compared."""
    _has_reported_parts: bool = field(default=False, init=False)
    """Whether it was said that the loss is not the sum of the losses of its rows."""
    _mean_check: MeanCheck = field(default_factory=MeanCheck, init=False)

    def begin_step(self, batch: Any) -> None:
        """Note the batch of a step."""
        self.step_batch, self._is_in_step, self._has_checked_rows = batch, True, False

    def end_step(self) -> None:
        """Note the end of a step, or that it failed."""
        if self._is_in_step:
            self.checks_form = False
        self.step_batch, self._is_in_step, self._has_checked_rows = None, False, False

    def __call__(
        self, model: nn.Module, batch: Any, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return (sum, count) of a slice, both scalars on the loss's device.

        Args:
            model: the model, or a copy of it.
            rows: rows of the slice.

        Raises:
            UsageError: the loss is neither a pair of scalars nor a scalar.
        """
        return self.compute_loss(self.compute_output(model, batch), batch, rows)

    def _check_form(self, output: Any, batch: Any, rows: int, result: Any) -> None:
        """Check in each slice of the first step that the loss is a sum."""
        if self.loss is None or not self.checks_form or not self._is_in_step:
            return
        if isinstance(result, torch.Tensor) and is_own_loss(output, result):
            return
        text = check_loss_form(self.loss, output, batch, rows, result)
        if text and self.is_split and not self._has_reported_parts:
            self._has_reported_parts = True
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"pdrun: {text}", file=sys.stderr, flush=True)

    def _weigh_mean(
        self, output: Any, batch: Any, rows: int, mean: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """
        Return (sum, count) for a mean: over the elements of the model's own loss, else over rows.
        """
        count = None
        if self.own_loss is not None and is_own_loss(output, mean):
            count = self.own_loss.count_elements(mean, self.is_split)
        if count is None:
            if self.is_split and not is_own_loss(output, mean):
                self._mean_check.check_labels(mean)
            if self.is_split and not self._has_checked_rows:
                self._mean_check.check_rows(batch if self.step_batch is None else self.step_batch)
                self._has_checked_rows = self._is_in_step
            return mean * rows, rows
        if not isinstance(count, torch.Tensor):
            return mean * count, count
        # without a label the mean is 0 / 0, and its gradient 0
        return torch.where(count > 0, mean * count, torch.zeros_like(mean)), count

    def compute_output(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output on a batch."""
        with explained_types(model):
            if self.forward:
                return self.forward(model, batch)
            return call_model(model, batch)

    def compute_loss(self, output: Any, batch: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum, count) of an output of the model; see `__call__`."""
        result = self.loss(output, batch) if self.loss else output
        self._check_form(output, batch, rows, result)
        if isinstance(result, torch.Tensor):
            result = self._weigh_mean(output, batch, rows, result)
            self.is_mean = True
        if self.loss is None and not isinstance(result, (tuple, list)):
            given = isinstance(getattr(result, "loss", None), torch.Tensor)
            hint = (
                "use loss=lambda out, batch: out.loss for the model's own loss"
                if given
                else LOSS_CONTRACT
            )
            what = f"loss= is missing and the model returned {type(result).__name__}"
            raise UsageError(what, where=PARALLELIZE, hint=hint)
        return _check_pair(result)


def detach_loss(total: torch.Tensor, count: torch.Tensor) -> DetachedLoss:
    """Return sum and count without a gradient, for `stack_losses`."""
    if total.device.type == "cpu":  # to read values costs less than operators that convert them
        return total.item(), count.item()
    wide = widest_float(total.device)
    return torch.stack([total.detach().to(wide), count.to(total.device, wide)])


def stack_losses(losses: Sequence[DetachedLoss]) -> torch.Tensor:
    """Return ``[len(losses), 2]`` in `widest_float`: sums and counts."""
    if isinstance(losses[0], torch.Tensor):
        return torch.stack(losses)
    values = array("d", chain.from_iterable(losses))
    return torch.frombuffer(values, dtype=torch.float64).view(-1, 2)


def check_requires_grad(total: torch.Tensor) -> None:
    """Refuse a loss without a gradient."""
    if not total.requires_grad:
        hint = "was it computed under torch.no_grad(), detached, or built from numbers?"
        raise UsageError(
            "the loss does not depend on a trained weight",
            where="pdrun.Run.step",
            hint=hint,
        )


def _check_pair(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UsageError(
            f"loss must return (sum, count), got {type(result).__name__}",
            where=PARALLELIZE,
            hint=LOSS_CONTRACT,
        )
    total, count = result
    if not isinstance(total, torch.Tensor):
        what = f"the loss's sum must be a tensor with a gradient, got {type(total).__name__}"
        raise UsageError(what, where=PARALLELIZE, hint="remove .item() or float() around it")
    if total.numel() != 1:
        raise UsageError(
            f"the loss's sum must be one value, got shape {tuple(total.shape)}",
            where=PARALLELIZE,
            hint=LOSS_CONTRACT,
        )
    if not isinstance(count, torch.Tensor):
        count = torch.scalar_tensor(float(count), device=total.device)
    if count.numel() != 1:
        raise UsageError(
            f"the loss's count must be one value, got shape {tuple(count.shape)}",
            where=PARALLELIZE,
            hint=LOSS_CONTRACT,
        )
    scalars = [each.reshape(()) if each.dim() else each for each in (total, count.detach())]
    return scalars[0], scalars[1]


def call_model(model: nn.Module, batch: Any) -> Any:
    """
    Call a model on a batch: on the first part of a tuple, the keys that ``forward`` names of a
    dict, or the batch itself.

    Raises:
        UsageError: no key of the dict is a parameter of ``forward``.
    """
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        takes_all = any(found.kind is found.VAR_KEYWORD for found in known.values())
        named = {key: value for key, value in batch.items() if takes_all or key in known}
        if not named:
            keys = ", ".join(map(str, batch))
            raise UsageError(
                f"the model's forward has none of the batch's keys ({keys})",
                where=PARALLELIZE,
                hint="pass forward=lambda model, batch: ...",
            )
        return model(**named)
    if isinstance(batch, PackedSequence) or is_taken_as_samples(batch):
        return model(batch)
    if isinstance(batch, (tuple, list)) and not is_string_list(batch):
        return model(batch[0])
    return model(batch)
