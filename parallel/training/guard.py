"""
Checks of what a run relies on and a program can change: its state before each step, and batch
normalisations that it calls as functions.

``torch.nn.functional.batch_norm(..., training=True)`` on the rows of a slice has statistics of that
slice, as a module has. A module is found at start (see `sync_batchnorm`), a call when it happens.
Calls whose dim 0 is not the rows are accepted: instance norms and standardised weights are computed
by reshaping to one row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm.watchdog import find_user_frame
from pdrun.parallel.model import param_hooks, sync_batchnorm
from pdrun.parallel.model.digest import CHUNK_ELEMENTS, digest_values
from pdrun.parallel.rng.step_rng import current_rng
from pdrun.parallel.zero.engine import Engine

RUN_STEP = "pdrun.Run.step"
_torchs_batch_norm = functional.batch_norm


class ConsistencyGuard:
    """
    Remembers a consistent state, and refuses a step if the state has changed.

    Args:
        model: what this rank computes with.
        ranks: ranks on the data axes, which see different rows.
    """

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, model: nn.Module, ranks: int
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._resting_norms = sync_batchnorm.find_inactive(model) if ranks > 1 else []
        """Batch normalisations that must not be put into training."""
        self._hooks = param_hooks.count_hooks(engine.weights)
        self._own_hooks = [after for _, after in self._hooks]
        self.torn_checkpoint = ""
        """A checkpoint that may have been loaded only in part."""
        self._states = 0
        """States remembered so far."""
        self._digests: list[int] = []
        """Of the weights that are copies, after some steps."""
        self.remember_state()

    def remember_state(self) -> None:
        """Remember the current weights and optimizer groups."""
        self.torn_checkpoint = ""
        self._versions = [weight.param._version for weight in self._engine.copied_weights]
        self._memory = [weight.param.data_ptr() for weight in self._engine.fixed_weights]
        self._groups = [len(group["params"]) for group in self._optimizer.param_groups]
        self._states += 1
        # a write through .data has no version; one that comes back is seen without a pass over the
        # weights in each step
        is_read = self._states & (self._states - 1) == 0
        self._digests = self._digest_copies() if is_read else []

    def _digest_copies(self) -> list[int]:
        """Return a digest of the first elements of each weight that is a copy."""
        firsts = (weight.param.detach().flatten() for weight in self._engine.copied_weights)
        return digest_values([flat[:CHUNK_ELEMENTS] for flat in firsts if not flat.is_meta])

    def check_unchanged(self) -> None:
        """
        Compare with the remembered state.

        Raises:
            UsageError: a change would be lost (weights that are copies, tensors that no gradient
                reaches), or would make each rank compute by its own rows.
        """
        self.check_not_torn(RUN_STEP)
        sync_batchnorm.check_inactive(self._resting_norms)
        found = param_hooks.count_hooks(self._engine.weights)
        if found != self._hooks:
            param_hooks.check_hooks(self._engine.weights, self._own_hooks, RUN_STEP)
            self._hooks = found
        self._engine.take_in_replaced()
        copies = self._engine.copied_weights
        found_digests = self._digest_copies() if self._digests else []
        written = [
            weight.name
            for weight, old, new in zip(copies, self._digests, found_digests, strict=False)
            if old != new
        ]
        for weight, version in zip(copies, self._versions, strict=True):
            if weight.param._version != version or weight.name in written:
                what = f"{weight.name} was changed in place: the optimizer trains another tensor, "
                what += "which would overwrite it"
                raise UsageError(
                    what, where=RUN_STEP, hint="use run.load_weights(FILE) or run.load(FOLDER)"
                )
        self.check_memory()
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._groups and self._engine.is_retargeted:
            what = f"the optimizer has {sum(sizes)} tensors in {len(sizes)} groups, it had "
            what += f"{sum(self._groups)} in {len(self._groups)} when parallelize was called"
            raise UsageError(
                what, where=RUN_STEP, hint="build all groups in optimizer= of parallelize"
            )

    def check_memory(self) -> None:
        """
        Refuse weights whose memory was replaced, also by a forward: the optimizer has the old one.
        """
        for weight, memory in zip(self._engine.fixed_weights, self._memory, strict=True):
            if weight.param.data_ptr() != memory:
                what = f"{weight.name} was given other memory (param.data = ...): the optimizer "
                what += "trains what it had before"
                hint = "use run.load_weights(FILE), or train in fp32 below level 3"
                raise UsageError(what, where=RUN_STEP, hint=hint)

    def check_not_torn(self, where: str) -> None:
        """
        Refuse to continue with weights that are partly those of a checkpoint that could not be
        read.
        """
        if self.torn_checkpoint:
            what = f"{self.torn_checkpoint} was loaded in part; the rest could not be read"
            raise UsageError(
                what, where=where, hint="use run.load with another checkpoint, or make a new run"
            )


@contextmanager
def refuse_loose_batch_norms() -> Iterator[None]:
    """
    Inside, a call that takes statistics of the rows of one rank is refused.

    Raises:
        UsageError: names the line.
    """
    before = functional.batch_norm
    functional.batch_norm = _checked_batch_norm
    try:
        yield
    finally:
        functional.batch_norm = before


def _checked_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if training and not torch.compiler.is_compiling():
        _check_call(input)
    return _torchs_batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )


def _check_call(input: torch.Tensor) -> None:
    rng = current_rng()
    rows = 0 if rng is None else rng.row_count
    if rows == 0 or input.shape[0] == 1 or input.shape[0] % rows:
        return
    frame = find_user_frame(sys._getframe())
    place = "the model"
    if frame is not None:
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    raise UsageError(
        f"{place} calls torch.nn.functional.batch_norm in training, with the statistics of the rows"
        " of one rank",
        where="sync_batchnorm",
        hint="use a torch.nn.BatchNorm module and sync_batchnorm=True, or"
        ' sync_batchnorm="local" for what DDP computes',
    )
