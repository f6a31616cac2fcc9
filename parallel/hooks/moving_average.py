"""
An exponential moving average of the weights, on every mesh and at every optimizer level.

Each rank averages what it trains: full weights, shards, or masters. The averages are part of the
optimizer's state: checkpoints have them, and any other mesh loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.run import Run

STATE_KEY = "moving_average"
"""Name of an average in the optimizer's state of a weight."""
WHERE = "pdrun.MovingAverage"


class MovingAverage:
    """
    Averages the weights after each step, as torch's AveragedModel with `get_ema_avg_fn` does.

        average = pdrun.MovingAverage(run, decay=0.999)
        ...
        with average.weights():
            result = run.evaluate(validation)
            run.export("average.safetensors")

    Args:
        run: the run; its checkpoints include the averages.
        decay: weight of the old average; or a function of the number of updates so far.
        every: steps between two updates.

    Attributes:
        updates: number of updates so far; the first one copies the weights.
    """

    def __init__(
        self,
        run: Run,
        decay: float | Callable[[int], float] = 0.999,
        *,
        every: int = 1,
        name: str = STATE_KEY,
    ) -> None:
        if not callable(decay) and not (isinstance(decay, (int, float)) and 0 <= decay <= 1):
            raise UsageError(f"decay must be between 0 and 1, got {decay!r}", where=WHERE)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"every must be at least 1, got {every!r}", where=WHERE)
        self.run = run
        self.decay = decay
        self.every = every
        self.updates = 0
        self._steps = 0
        self._loose: dict[torch.Tensor, torch.Tensor] = {}
        """Averages of tensors for which the optimizer has no state yet."""
        self._is_swapped = False
        run.optimizer.register_step_pre_hook(self._check_weights)
        run.optimizer.register_step_post_hook(self._update)
        run.attach(name, self)

    def _check_weights(self, *_: Any) -> None:
        if self._is_swapped:
            raise UsageError(
                "run.step inside of weights(): the weights are averages there",
                where=WHERE,
                hint="train outside of it",
            )

    def _parts(self) -> list[torch.Tensor]:
        """Return what this rank trains."""
        return [part for group in self.run.optimizer.param_groups for part in group["params"]]

    def _average_of(self, part: torch.Tensor) -> torch.Tensor | None:
        state = self.run.optimizer.state.get(part)
        found: torch.Tensor | None = None if state is None else state.get(STATE_KEY)
        return self._loose.get(part) if found is None else found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _update(self, *_: Any) -> None:
        """After a step: move the averages towards the weights."""
        self._steps += 1
        if self._steps % self.every:
            return
        decay = self.decay(self.updates) if callable(self.decay) else self.decay
        averages, values = [], []
        for part in self._parts():
            average = self._average_of(part)
            if average is None or self.updates == 0:
                average = part.detach().clone()
            else:
                averages.append(average)
                values.append(part.detach())
            if self.run.optimizer.state.get(part):  # an optimizer starts with an empty state
                self.run.optimizer.state[part][STATE_KEY] = average
                self._loose.pop(part, None)
            else:
                self._loose[part] = average
        if averages:
            torch._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1

    @contextmanager
    def weights(self) -> Iterator[None]:
        """
        Inside, the model has the averages; every rank enters it. Training is refused there.

        Raises:
            UsageError: there is no average yet, or it is entered twice.
        """
        if self._is_swapped or not self.updates:
            what = "is entered inside of itself" if self._is_swapped else "has no average yet"
            raise UsageError(f"weights() {what}", where=WHERE, hint="call run.step before")
        parts = self._parts()
        kept = [part.detach().clone() for part in parts]
        averages = [self._average_of(part) for part in parts]
        self._is_swapped = True
        try:
            self._set_weights(parts, averages)
            yield
        finally:
            self._set_weights(parts, kept)
            self._is_swapped = False

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _set_weights(self, parts: list[torch.Tensor], values: list[Any]) -> None:
        """Give the run other weights; without a value (never trained), the weight stays."""
        state = self.run.state
        state.engine.wait_idle()
        for part, value in zip(parts, values, strict=True):
            if value is not None:
                part.copy_(value)
        state.engine.publish_weights()
        state.guard.remember_state()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves in addition to the optimizer's state."""
        return {"updates": self.updates, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, whose averages the optimizer's state has."""
        self.updates, self._steps = state["updates"], state["steps"]
        # weights without a state in the checkpoint were never trained: their average is their value
        self._loose = {
            part: part.detach().clone()
            for part in self._parts()
            if self.updates and STATE_KEY not in self.run.optimizer.state.get(part, {})
        }
