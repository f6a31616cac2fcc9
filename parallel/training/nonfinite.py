"""
A loss that is not finite is reported once, with the step and the first module that produced it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.parallel.training.driver import MicroBatch
from pdrun.parallel.training.state import RunState


def report_nonfinite(
    state: RunState,
    make_slices: Callable[[], Sequence[MicroBatch]],
    sums: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """
    Report the first loss of a run that is not finite, before the weights change.

    The forwards are computed again with hooks, on every rank. Accelerators are not asked: reading
    a value would wait for them in each step.

    Args:
        make_slices: returns this rank's micro-batches of the step.
        sums: (sum, count) of this rank's micro-batches.
        numbers: the global (sum, count), the same on every rank.
    """
    if numbers.device.type != "cpu" or state.has_reported_nonfinite:
        return
    total, count = numbers.tolist()
    if math.isfinite(total) and math.isfinite(count):
        return
    state.has_reported_nonfinite = True
    buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
    search = _FirstNonfinite(state.model)
    try:
        with state.rng.isolate_generators(state.device):
            state.driver.evaluate_microbatches(state, make_slices())
    finally:
        search.remove_hooks()
        for buffer, value in buffers:
            buffer.copy_(value)
    where = search.describe()
    if not where and not bool(torch.isfinite(sums).all()):
        where = "every module's output is finite: the loss function produced it"
    if where:
        loss = total / count if count else math.nan
        text = f"the loss of step {state.steps} is {loss:g}: on rank {state.context.rank} {where}"
        print(f"pdrun: {text}", file=sys.stderr, flush=True)


class _FirstNonfinite:
    """Hooks that note the first module whose output is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self._found: tuple[str, bool] | None = None
        self._handles = [
            module.register_forward_hook(self._make_hook(name or type(model).__name__))
            for name, module in model.named_modules()
        ]

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def describe(self) -> str:
        """Return which module it was; empty if there was none."""
        if self._found is None:
            return ""
        name, is_finite_before = self._found
        inputs = "finite" if is_finite_before else "not finite"
        return f"the first output that is not finite is that of {name}, whose inputs are {inputs}"

    def _make_hook(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if self._found is None and not _is_finite(output):
                self._found = name, _is_finite(args)

        return look


def _is_finite(values: Any) -> bool:
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.is_nested
    )
