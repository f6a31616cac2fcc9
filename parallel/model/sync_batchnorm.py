"""
Batch normalisation over the full micro-batch of all ranks.

Statistics of a batch are a sum over its rows. Ranks that normalise by their own rows compute
another model than one process. Either the sums are taken over all ranks, or pdrun refuses, unless
``sync_batchnorm="local"`` asks for what DDP computes. Works on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks of the data axes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return _batch_axis().all_reduce(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _batch_axis().all_reduce(grads[0])


class SyncedBatchNorm(_BatchNorm):
    """
    `torch.nn.BatchNorm*d` with the statistics of all rows; parameters and buffers keep their names.

    ``row_weight`` is 0 while a rank computes a row that is not part of the batch.
    """

    row_weight = 1.0

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dims, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``[rows, channels, ...]`` by channel."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        is_tracked = self.training and self.track_running_stats
        share = self.momentum
        if is_tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        return normalize_over_ranks(
            input,
            self.running_mean if is_tracked else None,
            self.running_var if is_tracked else None,
            self.weight,
            self.bias,
            share or 0.0,
            self.eps,
        )


class SyncedFunctionalBatchNorm(SyncedBatchNorm):
    """
    A user's subclass of torch's class: its own forward runs, and the batch normalisation that it
    calls has the statistics of all rows. Combined with that subclass in `_synced_class`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the subclass."""
        if not self.training and self.running_mean is not None:
            return super(SyncedBatchNorm, self).forward(*args, **kwargs)
        calls = 0

        def batch_norm(
            input: torch.Tensor,
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            momentum: float = 0.1,
            eps: float = 1e-5,
        ) -> torch.Tensor:
            nonlocal calls
            if not training:
                return original(input, running_mean, running_var, weight, bias, False, eps=eps)
            calls += 1
            return normalize_over_ranks(
                input, running_mean, running_var, weight, bias, momentum, eps
            )

        original = functional.batch_norm
        torchs_forward = nn.SyncBatchNorm.forward
        functional.batch_norm = batch_norm
        nn.SyncBatchNorm.forward = _BatchNorm.forward
        try:
            result = super(SyncedBatchNorm, self).forward(*args, **kwargs)
        finally:
            functional.batch_norm = original
            nn.SyncBatchNorm.forward = torchs_forward
        if not calls:
            raise UsageError(
                f"{type(self).__name__} can't be synchronised: its forward computes statistics"
                " without torch.nn.functional.batch_norm",
                where="sync_batchnorm",
                hint='sync_batchnorm="local" uses the statistics of each rank',
            )
        return result


def normalize_over_ranks(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """
    Return what torch's batch normalisation returns in training for the rows of all ranks.

    Raises:
        UsageError: the rows of all ranks have one value per channel.
    """
    dims = [0, *range(2, input.dim())]
    shape = (1, -1, *[1] * (input.dim() - 2))
    row_weight = SyncedBatchNorm.row_weight
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    # as torch does: sums on CPUs in fp64
    sum_dtype = torch.float64 if wide.device.type == "cpu" else wide.dtype
    rows = wide.new_full((1,), input.numel() / input.shape[1] * row_weight, dtype=sum_dtype)
    _meet_ranks()
    sums = _sum_over_ranks(torch.cat([wide.sum(dims, dtype=sum_dtype) * row_weight, rows]))
    count = float(sums[-1].detach())
    if count <= 1:
        raise UsageError(
            "a batch normalisation in training needs more than 1 value per channel, got"
            f" {count:g} in the rows of all ranks",
            where="sync_batchnorm",
            hint="larger batches, or .eval() on it",
        )
    mean = (sums[:-1] / sums[-1]).to(wide.dtype)
    centred = wide - mean.view(shape)
    squares = (centred * centred).sum(dims, dtype=sum_dtype) * row_weight
    var = (_sum_over_ranks(squares) / sums[-1]).to(wide.dtype)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = var * count / (count - 1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(input.dtype)


_is_local_only = False
_axis: AxisGroup | None = None


def set_batch_axis(axis: AxisGroup) -> None:
    """Take statistics over the rows of all ranks along some axes, from now on in this process."""
    global _axis
    _axis = axis


def _batch_axis() -> AxisGroup:
    assert _axis is not None
    return _axis


@contextmanager
def local_statistics() -> Iterator[None]:
    """Inside, a rank has all rows itself."""
    global _is_local_only
    row_weight = SyncedBatchNorm.row_weight
    _is_local_only, SyncedBatchNorm.row_weight = True, 1.0
    try:
        yield
    finally:
        _is_local_only, SyncedBatchNorm.row_weight = False, row_weight


def _sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    if _is_local_only or _axis is None or _axis.size == 1:
        return value
    return _SumOverRanks.apply(value)


def _meet_ranks() -> None:
    """
    Outside of a step wait for the other ranks: a script can call a model on some ranks only, and
    collectives would pair with others.
    """
    if torch.compiler.is_compiling() or _is_local_only or _axis is None or _axis.size == 1:
        return
    if _axis.state.watchdog.is_in_phase:
        return
    _axis.state.watchdog.meet(
        "batch norm", _axis.ranks, "the model is called with synchronised batch normalisations"
    )


def sync_batchnorms(model: nn.Module) -> int:
    """Turn the batch normalisations of a model into synchronised ones; return their number."""
    count = 0
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncedBatchNorm):
            module.__class__ = _synced_class(type(module))
            count += 1
    return count


_synced_classes: dict[type[_BatchNorm], type[SyncedBatchNorm]] = {}
"""Synchronised classes by the classes of users."""


def _synced_class(kind: type[_BatchNorm]) -> type[SyncedBatchNorm]:
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return SyncedBatchNorm
    if kind not in _synced_classes:
        bases = (SyncedFunctionalBatchNorm, kind)
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _synced_classes[kind] = type(kind.__name__, bases, names)
    return _synced_classes[kind]


def keep_local(model: nn.Module) -> list[str]:
    """
    Let the normalisations of a model use the rows of one rank each, as DDP does. Running statistics
    are rank 0's.

    Returns:
        Their names.
    """
    names = []
    for name, module in model.named_modules():
        is_tracked = isinstance(module, _NormBase) and module.track_running_stats
        if isinstance(module, _BatchNorm) or is_tracked:
            module._pdrun_local_rows = True
            names.append(name)
    return names


def running_stat_params(model: nn.Module) -> set[int]:
    """
    Return the ids of the parameters of modules that normalise with running statistics.

    These modules stay in their type. torch needs weights of the same type, or of the input's type
    if the statistics have it too.
    """
    return {
        id(param)
        for module in model.modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
        for param in module.parameters(recurse=False)
    }


def find_unsynced(model: nn.Module) -> list[str]:
    """Return the names of the modules that normalise by the statistics of their own rows."""
    return [
        name
        for name, module in model.named_modules()
        if (_is_local(module) and (module.training or not module.track_running_stats))
        or (
            isinstance(module, nn.modules.instancenorm._InstanceNorm)
            and module.track_running_stats
            and not is_kept_local(module)
        )
    ]


def find_inactive(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that would normalise by their own rows in training mode."""
    return [(name, module) for name, module in model.named_modules() if _is_local(module)]


def check_inactive(modules: list[tuple[str, nn.Module]]) -> None:
    """
    Refuse modules of `find_inactive` that are in training mode now.

    Raises:
        UsageError: names the module.
    """
    for name, module in modules:
        if module.training:
            raise UsageError(
                f"{name} was put into training mode after parallelize, and would normalise by the"
                " rows of one rank",
                where="pdrun.Run.step",
                hint="sync_batchnorm=True, or .eval() on it after each model.train()",
            )


def _is_local(module: nn.Module) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, (SyncedBatchNorm, nn.SyncBatchNorm))
        and not is_kept_local(module)
    )


def is_kept_local(module: nn.Module) -> bool:
    """Return whether `keep_local` was called for a module."""
    return getattr(module, "_pdrun_local_rows", False)
