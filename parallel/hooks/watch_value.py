"""
Decisions by a value that the loop computes, such as a validation loss: stop early, keep the best.

Every rank must pass the same value, so that all decide alike; `run.evaluate` returns such values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.run import Run
from pdrun.parallel.torch_compat import widest_float

MODES = ("min", "max")


class BestValue:
    """
    The best value so far; saved and loaded with the run.

    Args:
        run: the run; every rank makes the same calls.
        mode: "min" or "max": which values are better.
        min_delta: by how much a value must be better.
        name: under which the state is saved; another one for each object of a run.

    Attributes:
        best: the best value; None before the first.
        best_step: the run's steps at that time.
    """

    def __init__(
        self, run: Run, *, mode: str = "min", min_delta: float = 0.0, name: str = "best_value"
    ) -> None:
        where = f"pdrun.{type(self).__name__}"
        if mode not in MODES:
            raise UsageError(f'mode must be "min" or "max", got {mode!r}', where=where)
        if not isinstance(min_delta, (int, float)) or not min_delta >= 0:
            raise UsageError(f"min_delta must be at least 0, got {min_delta!r}", where=where)
        self.run = run
        self.mode = mode
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_step = 0
        self._where = where
        run.attach(name, self)

    def is_better(self, value: float) -> bool:
        """Return whether a value is better than all before; not a number never is."""
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def record(self, value: Any) -> bool:
        """
        Note a value, and return whether it is the best.

        Raises:
            UsageError: it is not a number, or another one on another rank.
        """
        number = self._read_number(value)
        found = self.is_better(number)
        if found:
            self.best, self.best_step = number, self.run.steps
        return found

    def _read_number(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise UsageError(
                f"the value must be a number, got {kind}",
                where=self._where,
                hint="result.loss or a metric of run.evaluate",
            ) from None
        state = self.run.state
        job = state.engine.place.job
        mine = torch.tensor([number], dtype=widest_float(state.device), device=state.device)
        found = job.exchange_numbers(mine, [False], "the value of an early stop or checkpoint")
        numbers = found.wait()[0].reshape(-1).tolist()
        for rank, other in enumerate(numbers):
            if other != numbers[0] and not (math.isnan(other) and math.isnan(numbers[0])):
                raise UsageError(
                    f"the value differs between ranks: {numbers[0]:g} on rank 0, {other:g} on "
                    f"rank {rank}",
                    where=self._where,
                    hint="use run.evaluate(loader), whose results are those of all ranks",
                )
        return number

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves."""
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.best, self.best_step = state["best"], state["best_step"]


class EarlyStop(BestValue):
    """
    Says when a value has not become better for a while.

        stop = pdrun.EarlyStop(run, patience=3)
        for epoch in range(100):
            ...
            if stop.update(run.evaluate(validation).loss):
                break

    Args:
        patience: updates without a better value after which to stop.
    """

    def __init__(
        self,
        run: Run,
        patience: int = 3,
        *,
        mode: str = "min",
        min_delta: float = 0.0,
        name: str = "early_stop",
    ) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise UsageError(
                f"patience must be at least 1, got {patience!r}", where="pdrun.EarlyStop"
            )
        self.patience = patience
        self.waited = 0
        super().__init__(run, mode=mode, min_delta=min_delta, name=name)

    def update(self, value: Any) -> bool:
        """Note a value, and return whether to stop: the same on every rank."""
        self.waited = 0 if self.record(value) else self.waited + 1
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves."""
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        super().load_state_dict(state)
        self.waited = state["waited"]


class BestCheckpoint(BestValue):
    """
    Saves the run whenever a value is the best so far.

        best = pdrun.BestCheckpoint(run, "best")
        ...
        best.update(run.evaluate(validation)["accuracy"])

    Args:
        folder: of its checkpoints only; ``run.load(folder)`` loads the best one.
        keep: number of the best checkpoints to keep.
    """

    def __init__(
        self,
        run: Run,
        folder: str | Path,
        *,
        mode: str = "min",
        min_delta: float = 0.0,
        keep: int = 1,
        name: str = "best_checkpoint",
    ) -> None:
        self.folder = Path(folder)
        self.keep = keep
        super().__init__(run, mode=mode, min_delta=min_delta, name=name)

    def update(self, value: Any) -> bool:
        """Note a value, and return whether it was the best and the run was saved."""
        found = self.record(value)
        if found:
            self.run.save(self.folder, keep=self.keep)
        return found
