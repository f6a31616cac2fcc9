"""
What a run relies on between its steps, and a program may change behind its back: looked at before
each step.
"""

from __future__ import annotations

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.model import param_hooks, sync_batchnorm
from pdrun.parallel.zero.engine import Engine

RUN_STEP = "pdrun.Run.step"


class ConsistencyGuard:
    """
    Remembers what is in order, and refuses a step where it no longer is.

    Args:
        model: what this rank computes with.
        ranks: on the data axes: those that see other rows.
    """

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, model: nn.Module, ranks: int
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._resting_norms = sync_batchnorm.find_inactive(model) if ranks > 1 else []
        """Batch normalisations that may not be put into training."""
        self._hooks = param_hooks.count_hooks(engine.weights)
        self._own_hooks = [after for _, after in self._hooks]
        self.torn_checkpoint = ""
        """The checkpoint of which only a part may have been taken up."""
        self.remember_state()

    def remember_state(self) -> None:
        """Remember weights and groups as they are now."""
        self.torn_checkpoint = ""
        self._versions = [weight.param._version for weight in self._engine.copied_weights]
        self._groups = [len(group["params"]) for group in self._optimizer.param_groups]

    def check_unchanged(self) -> None:
        """
        Look whether all is as it was noted.

        Raises:
            UsageError: a change that would be lost (weights that are copies, tensors that no
                gradient reaches), or that
                would make each rank compute by its own rows.
        """
        self.check_not_torn(RUN_STEP)
        sync_batchnorm.check_inactive(self._resting_norms)
        found = param_hooks.count_hooks(self._engine.weights)
        if found != self._hooks:
            param_hooks.check_hooks(self._engine.weights, self._own_hooks, RUN_STEP)
            self._hooks = found
        for weight, version in zip(self._engine.copied_weights, self._versions, strict=True):
            if weight.param._version != version:
                what = f"{weight.name} was changed in place; it is a copy of what the optimizer trains, and would be "
                what += "overwritten"
                raise UsageError(
                    what, where=RUN_STEP, hint="run.load_weights(FILE), or run.load(FOLDER)"
                )
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._groups and self._engine.is_retargeted:
            what = f"the optimizer has {sum(sizes)} tensors in {len(sizes)} groups, {sum(self._groups)} in "
            what += f"{len(self._groups)} when the run was made"
            raise UsageError(
                what, where=RUN_STEP, hint="form all groups in optimizer= of parallelize"
            )

    def check_not_torn(self, where: str) -> None:
        """
        Refuse to go on with weights of which some are a checkpoint's that could not be read to its
        end.
        """
        if self.torn_checkpoint:
            what = f"a part of {self.torn_checkpoint} has been taken up, the rest of which could not be read"
            raise UsageError(
                what, where=where, hint="run.load another checkpoint, or make a new run"
            )
