"""The ids and values that a program gives a client: checked, on the host, ids sorted and unique."""

from __future__ import annotations

import torch

from pdrun.errors import UsageError
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.tables.grouped_ids import group_ids


def check_ids(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """
    Return ids as a flat tensor of int64 on the host.

    Raises:
        UsageError: they are not whole numbers, or out of range.
    """
    if isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.device.type == "cpu":
        if ids.dim() == 1 and ids.is_contiguous():
            return ids
        return ids.reshape(-1).contiguous()
    where = f"served table {spec.name}"
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError("ids must be a tensor of whole numbers", where=where)
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()


def check_gradients(spec: TableSpec, ids: torch.Tensor | None, grads: torch.Tensor) -> torch.Tensor:
    """
    Return gradients on the host, flat for a dense weight.

    Raises:
        UsageError: they have another shape than the ids and the table.
    """
    grads = move_to_host(grads)
    if ids is None:
        if grads.numel() != spec.size:
            what = f"the gradient has {grads.numel()} elements, the weight {spec.size}"
            raise UsageError(what, where=f"served weight {spec.name}")
        return grads.view(-1)
    if tuple(grads.shape) != (len(ids), spec.dim):
        what = f"gradients have the shape {tuple(grads.shape)}, not {(len(ids), spec.dim)}"
        raise UsageError(what, where=f"served table {spec.name}")
    return grads


def sum_repeated(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sorted, unique ids with the sums of their gradients."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids, grads
    groups = group_ids(ids)
    return groups.distinct, groups.sum_rows(grads)


def take_elements(tensor: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return the elements at some positions; None: all."""
    if positions is None or len(positions) == len(tensor):
        return tensor.contiguous()
    return tensor.index_select(0, positions)


def move_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of fp32 on the host."""
    return tensor.detach().to("cpu", torch.float32).contiguous()
