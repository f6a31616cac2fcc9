"""
Copies of a model with fake tensors: shapes, types and the device of the run, without memory.

A model can compute differently by device, and ask for the device of its tensors. So it is exported
on the device on which it runs, not on torch's meta device.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pdrun.parallel.model.caches import turn_off_caches
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.graph.graph import OperatorGraph


class FakeModel:
    """
    A copy of a model for exports. Tied weights stay tied. Caches of keys and values are off.

    Args:
        model: is not changed; its weights can be on the meta device.
        device: of all weights and arguments.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._mode = FakeTensorMode()
        self._device = device
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            fake: torch.Tensor = self._make_fake(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            memo[id(tensor)] = fake
        self.model: nn.Module = copy.deepcopy(model, memo)
        turn_off_caches(self.model)

    def export(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        training: frozenset[str] | None = None,
        fold: bool = True,
    ) -> OperatorGraph:
        """
        Return the graph of a call; see `export_graph`.

        Args:
            args, kwargs: with tensors of any device.
            training: names of the modules in training mode; None: as the model was.
        """
        if training is not None:
            for name, module in self.model.named_modules():
                module.training = name in training
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._make_fake, (args, kwargs or {}))
        return export_graph(self.model, args, kwargs, fold)

    def _make_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode:
            if tensor.layout != torch.strided:
                return torch.empty_like(tensor, device=self._device)
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )
        return fake.requires_grad_(tensor.requires_grad)


def find_device(model: nn.Module, args: Any) -> torch.device:
    """
    Return the device on which a model would run: that of its arguments or weights. If all are on
    the meta device, the accelerator, or the CPU.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for tensor in (*model.parameters(), *leaves, *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")
