"""
Fused experts of models of transformers: one tensor has a weight of all experts.

Their modules are called with tokens, the experts of each token and the weights of these. Routing
stays the model's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from pdrun.parallel.experts.balance import LoadCounter
from pdrun.parallel.experts.dispatch import ExpertGroups, exchange_experts
from pdrun.parallel.experts.grouped import ExpertRows
from pdrun.parallel.model.shards import Shard, shard_of
from pdrun.parallel.tensor.style import AxisNames, GridPosition, style_error, swap_class
from pdrun.parallel.torch_compat import untraced

CALL_ARGUMENTS = 3
"""Tokens, experts of each token, weights of these."""


def is_fused(module: nn.Module) -> bool:
    """Return whether a module is fused experts: each of its weights has a row per expert."""
    count = getattr(module, "num_experts", None)
    weights = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not weights or _inner_weights(module):
        return False
    takes = [
        each
        for each in inspect.signature(type(module).forward).parameters.values()
        if each.name != "self"
    ]
    is_callable = len(takes) >= CALL_ARGUMENTS or any(
        each.kind is inspect.Parameter.VAR_POSITIONAL for each in takes
    )
    return is_callable and all(w.dim() >= 2 and shard_of(w).shape[0] == count for w in weights)


def _inner_weights(module: nn.Module) -> list[nn.Parameter]:
    return [param for child in module.children() for param in child.parameters()]


class FusedAdapter:
    """Cuts fused experts."""

    def count_experts(self, module: nn.Module) -> int:
        """See `ExpertAdapter`."""
        return int(module.num_experts)

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition, axis: AxisNames
    ) -> dict[str, Shard]:
        """See `ExpertAdapter`."""
        return {
            key: position.shard_weight(name, tuple(param.shape), 0, axis)
            for key, param in module.named_parameters(recurse=False)
        }

    def apply_to(self, name: str, module: nn.Module, groups: ExpertGroups) -> None:
        """See `ExpertAdapter`."""
        total = self.count_experts(module)
        module.expert_loads = LoadCounter(total)
        module.num_experts = total // groups.experts.size
        module._site_name = name
        swap_class(module, ParallelFusedExperts, groups)


class ParallelFusedExperts(nn.Module):
    """Fused experts that are on several ranks."""

    _context: ExpertGroups
    _site_name: str
    expert_loads: LoadCounter
    num_experts: int

    def forward(
        self, hidden_states: torch.Tensor, index: Any = None, weights: Any = None, **options: Any
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        for key in ("top_k_index", "router_indices", "selected_experts"):
            index = options.pop(key, index)
        for key in ("top_k_weights", "routing_weights"):
            weights = options.pop(key, weights)
        if options or index is None or weights is None:
            what = "it must be called with tokens, experts and weights"
            raise style_error(self._site_name, f"{what}, got {', '.join(options) or 'less'}")
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = index.reshape(len(tokens), -1)
        self.expert_loads.add(index, self.training)
        out, _ = exchange_experts(
            tokens,
            index,
            weights.reshape(index.shape),
            self.expert_loads.experts,
            self.compute_rows,
            self._context,
        )
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    @untraced  # loops of transformers over the experts that have rows
    def compute_rows(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Return the outputs of this rank's experts for rows that are sorted by expert."""
        if not len(x):
            # no rows, but gradients: other ranks wait for the collectives of the backward
            return x + sum(param.reshape(-1)[:1].sum() for param in self.parameters())
        ids = torch.arange(self.num_experts, device=x.device)
        ids = ids.repeat_interleave(rows.counts, output_size=len(x)).unsqueeze(1)
        ones = torch.ones(ids.shape, dtype=x.dtype, device=x.device)
        found: torch.Tensor = super().forward(x, ids, ones)
        return found
