"""
Batch normalisation over the full micro-batch of all ranks.

Statistics of a batch are a sum over its rows. Ranks that normalise by their own rows compute
another model than one process. Either the sums are taken over all ranks, or pdrun refuses. Works on
every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
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
        dims = [0, *range(2, input.dim())]
        shape = (1, -1, *[1] * (input.dim() - 2))
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        rows = wide.new_full((1,), input.numel() / input.shape[1] * self.row_weight)
        sums = torch.cat([wide.sum(dims) * self.row_weight, rows])
        sums = _sum_over_ranks(sums)
        mean = sums[:-1] / sums[-1]
        centred = wide - mean.view(shape)
        var = _sum_over_ranks((centred * centred).sum(dims) * self.row_weight) / sums[-1]
        if self.training and self.track_running_stats:
            self._track_statistics(mean.detach(), var.detach(), float(sums[-1].detach()))
        result = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track_statistics(self, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        share = (
            self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        )
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((var * count / max(count - 1, 1)).to(self.running_var.dtype), share)


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
    _is_local_only = True
    try:
        yield
    finally:
        _is_local_only = False


def _sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    if _is_local_only or _axis is None or _axis.size == 1:
        return value
    return _SumOverRanks.apply(value)


def sync_batchnorms(model: nn.Module) -> int:
    """Turn the batch normalisations of a model into synchronised ones; return their number."""
    count = 0
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncedBatchNorm):
            if not isinstance(module, nn.SyncBatchNorm):
                module.__class__ = _synced_class(type(module))
            else:
                module.__class__ = SyncedBatchNorm
            count += 1
    return count


def _synced_class(kind: type[_BatchNorm]) -> type[SyncedBatchNorm]:
    if kind not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        raise UsageError(f"{kind.__name__} can't be synchronised", where="sync_batchnorm")
    return SyncedBatchNorm


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
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
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
    return isinstance(module, _BatchNorm) and not isinstance(
        module, (SyncedBatchNorm, nn.SyncBatchNorm)
    )
