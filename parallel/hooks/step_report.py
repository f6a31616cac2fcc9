"""The numbers of each step, for TensorBoard or any function; on the main rank only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.run import Run
from pdrun.parallel.training.metrics import Metrics

WHERE = "pdrun.StepReport"
ReportFunction = Callable[[int, dict[str, float]], Any]


class StepReport:
    """
    Reports loss, count, gradient norm and learning rates of every tenth step.

        report = pdrun.StepReport(run, SummaryWriter("runs"))
        ...
        report.write({"validation/loss": run.evaluate(validation).loss})

    Args:
        run: the run.
        target: a SummaryWriter of TensorBoard (any object with ``add_scalar``), or a function of
            the step and a dict of numbers. It is called on rank 0.
        every: steps between two reports. Reading the numbers waits for the device.
    """

    def __init__(self, run: Run, target: Any, *, every: int = 10) -> None:
        if not callable(target) and not callable(getattr(target, "add_scalar", None)):
            raise UsageError(
                f"target must be a function or have add_scalar, got {type(target).__name__}",
                where=WHERE,
                hint="target=lambda step, values: print(step, values)",
            )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"every must be at least 1, got {every!r}", where=WHERE)
        self.run = run
        self.every = every
        self._target = target
        run.on_step.append(self._report)

    def _report(self, run: Run, metrics: Metrics) -> None:
        if metrics.step % self.every or not run.context.is_main:
            return
        values = {"loss": metrics.loss, "tokens": metrics.tokens}
        if metrics.grad_norm is not None:
            values["grad_norm"] = metrics.grad_norm
        for index, group in enumerate(run.optimizer.param_groups):
            values["lr" if index == 0 else f"lr/{index}"] = float(group["lr"])
        self._send(metrics.step, values)

    def write(self, values: dict[str, float]) -> None:
        """Report other numbers, such as results of an evaluation; every rank can call it."""
        if self.run.context.is_main:
            self._send(self.run.steps, {name: float(value) for name, value in values.items()})

    def _send(self, step: int, values: dict[str, float]) -> None:
        add_scalar = getattr(self._target, "add_scalar", None)
        if add_scalar is None:
            self._target(step, values)
            return
        for name, value in values.items():
            add_scalar(name, value, step)
