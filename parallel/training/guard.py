"""
Checks of what a run relies on and a program can change: its state before each step, and batch
normalisations that it calls as functions.

``torch.nn.functional.batch_norm(..., training=True)`` on the rows of a slice has statistics of that
slice, as a module has. A module is found at start (see `sync_batchnorm`), a call when it happens.
Calls whose dim 0 is not the rows are accepted: instance norms and standardised weights are computed
by reshaping to one row.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad

from pdrun.errors import UsageError
from pdrun.parallel.comm.watchdog import find_user_frame
from pdrun.parallel.model import param_hooks, sync_batchnorm
from pdrun.parallel.model.digest import SAMPLE_ELEMENTS, digest_values
from pdrun.parallel.rng.step_rng import current_rng
from pdrun.parallel.zero.engine import Engine

RUN_STEP = "pdrun.Run.step"
CLIP_FUNCTION = "_get_total_norm"
"""What torch's clip_grad_norm_ calls, however it was imported."""
_read_values = operator.methodcaller("values")
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
        self._model = model
        self._tables = _list_tables(model)
        self._entries = _list_entries(self._tables)
        self.torn_checkpoint = ""
        """A checkpoint that may have been loaded only in part."""
        self._has_changed_in_step = False
        """Whether a forward of the last step has changed weights."""
        self._states = 0
        """States remembered so far."""
        self._digests: list[int] = []
        """Of the first elements of each weight, after some steps."""
        self.remember_state()

    def remember_state(self) -> None:
        """Remember the current weights and optimizer groups."""
        self.torn_checkpoint = ""
        self._versions = self._read_versions()
        self._memory = [weight.param.data_ptr() for weight in self._engine.fixed_weights]
        self._groups = [len(group["params"]) for group in self._optimizer.param_groups]
        self._states += 1
        # a write through .data has no version; one that comes back is seen without a pass over the
        # weights in each step
        is_read = self._states & (self._states - 1) == 0
        self._digests = self._digest_weights() if is_read else []

    def _read_versions(self) -> list[int]:
        return [weight.param._version for weight in self._engine.resident_weights]

    def _digest_weights(self) -> list[int]:
        """Return a digest of the first elements of each weight."""
        firsts = (weight.param.detach().flatten() for weight in self._engine.resident_weights)
        return digest_values([flat[:SAMPLE_ELEMENTS] for flat in firsts])

    def check_unchanged(self) -> None:
        """
        Compare with the remembered state.

        Raises:
            UsageError: a change would be lost (weights that are copies, tensors that no gradient
                reaches), or would make each rank compute by its own rows.
        """
        self.check_not_torn(RUN_STEP)
        sync_batchnorm.check_inactive(self._resting_norms)
        self._check_modules()
        found = param_hooks.count_hooks(self._engine.weights)
        if found != self._hooks:
            param_hooks.check_hooks(self._engine.weights, self._own_hooks, RUN_STEP)
            self._hooks = found
        self._engine.take_in_replaced()
        changed = self._find_changes()
        self._engine.note_changes(bool(changed) or self._has_changed_in_step)
        self._has_changed_in_step = False
        self._refuse_lost_changes(changed)
        self.check_memory()
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._groups and self._engine.is_retargeted:
            what = f"the optimizer has {sum(sizes)} tensors in {len(sizes)} groups, it had "
            what += f"{sum(self._groups)} in {len(self._groups)} when parallelize was called"
            raise UsageError(
                what, where=RUN_STEP, hint="build all groups in optimizer= of parallelize"
            )

    def _check_modules(self) -> None:
        """Refuse parameters that the model got after `pdrun.parallelize`: no optimizer has them."""
        now = _list_entries(self._tables)
        if len(now) == len(self._entries) and not any(map(operator.is_not, now, self._entries)):
            return
        known = set(map(id, self._entries))
        for name, param in self._model.named_parameters():
            if id(param) not in known:
                raise UsageError(
                    f"{name} is not the parameter that the model had in parallelize: it was added"
                    " or replaced, and would not be trained",
                    where=RUN_STEP,
                    hint="change the model before pdrun.parallelize; load_state_dict without"
                    " assign=True keeps parameters",
                )
        self._tables = _list_tables(self._model)
        self._entries = _list_entries(self._tables)

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

    def check_forwards(self) -> None:
        """
        After the forwards of a step: refuse changes of weights that would be lost. Others are
        compared between the ranks in the next step.
        """
        self.check_memory()
        changed = self._find_changes()
        self._refuse_lost_changes(changed)
        self._has_changed_in_step = bool(changed)

    def _find_changes(self) -> set[str]:
        """Return the names of weights that are not as remembered."""
        weights = self._engine.resident_weights
        found = list(map(operator.ne, self._versions, self._read_versions()))
        if self._digests:
            written = map(operator.ne, self._digests, self._digest_weights())
            found = list(map(operator.or_, found, written))
        return {
            weight.name for weight, is_changed in zip(weights, found, strict=True) if is_changed
        }

    def _refuse_lost_changes(self, changed: set[str]) -> None:
        for weight in self._engine.copied_weights if changed else ():
            if weight.name in changed:
                what = f"{weight.name} was changed in place: the optimizer trains another tensor, "
                what += "which would overwrite it"
                raise UsageError(
                    what, where=RUN_STEP, hint="use run.load_weights(FILE) or run.load(FOLDER)"
                )

    def compare_ranks(self) -> None:
        """
        Refuse weights that differ between the ranks, if a program has changed some since the last
        step; every rank calls this, before the optimizer's step.
        """
        if not self._engine.has_changes:
            return
        self._engine.note_changes(False)
        group = self._engine.data_group
        weights = self._engine.resident_weights
        digests = digest_values([weight.param for weight in weights])
        content = torch.tensor(digests, dtype=torch.int64).view(torch.uint8)
        for rank, found in enumerate(group.gather_bytes(content, "weights that were changed")):
            for weight, mine, theirs in zip(
                weights, digests, found.view(torch.int64).tolist(), strict=True
            ):
                if mine != theirs:
                    raise UsageError(
                        f"{weight.name} has other values on rank {group.ranks[rank]}: it was"
                        " changed since the last step, and not equally on every rank",
                        where=RUN_STEP,
                        hint="change weights on every rank, to the same values (load the same"
                        " file), or before pdrun.parallelize, which takes those of rank 0; what a"
                        " forward computes from its rows belongs in a buffer",
                    )

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


def _list_tables(model: nn.Module) -> list[dict[str, Any]]:
    """Return where the parameters and modules of each module are kept."""
    tables: list[dict[str, Any]] = []
    for module in model.modules():
        tables += [module._parameters, module._modules]
    return tables


def _list_entries(tables: list[dict[str, Any]]) -> list[Any]:
    """Return what is in the tables of modules."""
    return list(chain.from_iterable(map(_read_values, tables)))


@contextmanager
def refuse_clipping() -> Iterator[None]:
    """
    Inside, torch's clip_grad_norm_ is refused: parameters of the model have no gradients, those of
    the optimizer have only this rank's.
    """
    before = getattr(clip_grad, CLIP_FUNCTION, None)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "torch's clip_grad_norm_ has only the gradients of this rank's shards",
            where=RUN_STEP,
            hint="use clip= of pdrun.parallelize, which has the norm of all gradients",
        )

    if before is None:
        yield
        return
    setattr(clip_grad, CLIP_FUNCTION, refuse)
    try:
        yield
    finally:
        setattr(clip_grad, CLIP_FUNCTION, before)


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
