"""Floating point operations of each unit of a model on a batch, counted on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.balance import API_NAME
from pdrun.parallel.training.loss import call_model

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The attention kernel of the CPU, for which torch counts no operations."""


def _count_attention(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


class _ModelCaller(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return call_model(self.model, batch)


def count_flops(model: nn.Module, names: Sequence[str], sample: Any) -> dict[str, float]:
    """
    Return the operations of each named module in one forward pass.

    Args:
        sample: a batch, as the model takes it (see `call_model`); its size is a factor only.

    Raises:
        UsageError: there is no batch, or the model cannot run on fake tensors.
    """
    if sample is None:
        what = 'balance="flops" needs a batch'
        raise UsageError(
            what, where=API_NAME, hint='sample=batch of parallelize, or balance="parameters"'
        )
    caller = _ModelCaller(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def blank(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )

        state = {
            name: blank(x) for name, x in [*caller.named_parameters(), *caller.named_buffers()]
        }
        batch = pytree.tree_map(
            lambda leaf: fake.from_tensor(leaf.cpu()) if isinstance(leaf, torch.Tensor) else leaf,
            sample,
        )
        counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION: _count_attention})
        try:
            with counter, torch.no_grad():
                functional_call(caller, state, (batch,))
        except Exception as error:
            what = f"the model does not run on fake tensors: {type(error).__name__}: {error}"
            raise UsageError(
                what, where=API_NAME, hint='balance="parameters" or {glob: cost}'
            ) from error
    found = {
        key.removeprefix("_ModelCaller.model."): sum(by.values())
        for key, by in counter.get_flop_counts().items()
    }
    return {name: float(found.get(name, 0)) for name in names}
