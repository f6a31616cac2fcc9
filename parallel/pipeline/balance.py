"""
Splitting a sequence of units with costs into consecutive parts, by number or by cost; the floating
point operations of each unit, counted on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pdrun.errors import UsageError
from pdrun.parallel.training.loss import call_model

API_NAME = "pdrun.Pipeline"
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The attention kernel of the CPU, for which torch counts no operations."""


def split_evenly(count: int, parts: int) -> list[range]:
    """
    Return ``parts`` consecutive ranges of 0..count-1; sizes differ by at most one, longer ones
    first.
    """
    _check_counts(count, parts)
    base, extra = divmod(count, parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [range(bounds[part], bounds[part + 1]) for part in range(parts)]


def split_by_cost(costs: Sequence[float], parts: int) -> list[range]:
    """
    Return ``parts`` consecutive, non-empty ranges with the smallest possible largest sum.

    Exact, by dynamic programming in O(parts * n**2): best(k, n) = min over i of max(best(k - 1, i),
    sum of i..n). Ties are broken by the least sum of squares, then by the longest first parts.
    """
    _check_counts(len(costs), parts)
    total = [0.0, *accumulate(costs)]
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(float("inf"), 0.0)] * len(costs)
    cuts: list[list[int]] = []
    for part in range(1, parts + 1):
        fresh = [(float("inf"), 0.0)] * (len(costs) + 1)
        chosen = [0] * (len(costs) + 1)
        for end in range(part, len(costs) + 1):
            for start in range(part - 1, end):
                mine = total[end] - total[start]
                value = (max(best[start][0], mine), best[start][1] + mine * mine)
                if value <= fresh[end]:
                    fresh[end], chosen[end] = value, start
        best = fresh
        cuts.append(chosen)
    found = list[range]()
    end = len(costs)
    for chosen in reversed(cuts):
        found.append(range(chosen[end], end))
        end = chosen[end]
    return found[::-1]


def _check_counts(count: int, parts: int) -> None:
    if count < parts:
        what = f"{count} layer{'s' * (count != 1)} cannot be split into {parts} stages"
        raise UsageError(
            what, where=API_NAME, hint="fewer stages (pp times chunks), or stages={glob: stage}"
        )


# ---- operations of a unit ----------------------------------------------------


def count_attention(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    """Return the operations of `CPU_ATTENTION`, forward."""
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
        counter = FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: count_attention})
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
